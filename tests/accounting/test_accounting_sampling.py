import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_keras_opt.accounting import Sampling


@given(st.data())
def test_round_trip_and_epoch_length(data):
    n = data.draw(st.integers(1, 10**6))
    size = data.draw(st.integers(1, n))
    make = data.draw(
        st.sampled_from([Sampling.poisson, Sampling.without_replacement, Sampling.shuffled])
    )
    sampling = make(n, size, unit="rating")
    assert Sampling.from_config(json.loads(json.dumps(sampling.get_config()))) == sampling
    assert sampling.steps_per_epoch == math.ceil(n / size)
    assert sampling.sampling_probability == size / n


def test_dropped_remainder_shortens_the_epoch():
    assert Sampling.shuffled(10, 3).steps_per_epoch == 4
    assert Sampling.shuffled(10, 3, drop_remainder=True).steps_per_epoch == 3


def test_full_takes_everything():
    assert Sampling.full(7).batch_size == 7
    assert Sampling.full(7).steps_per_epoch == 1


@pytest.mark.parametrize("value", [True, 2.0, float("nan"), "64", None, 0, -1])
@pytest.mark.parametrize("name", ["num_examples", "batch_size"])
def test_refuses_what_is_not_a_count(name, value):
    arguments = {"num_examples": 100, "batch_size": 10, name: value}
    with pytest.raises(ValueError, match=f"{name} must be an integer.*received"):
        Sampling.poisson(**arguments)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Sampling.poisson(10, 11), "batch_size must be at most num_examples=10"),
        (lambda: Sampling("full", 10, 5, "replace_one"), "must equal num_examples=10"),
        (lambda: Sampling("bootstrap", 10, 5, "replace_one"), "kind must be one of"),
        (lambda: Sampling.poisson(10, 5, "hamming"), "adjacency='hamming'.*Use one of"),
        (lambda: Sampling.without_replacement(10, 5, "add_or_remove_one"), "displaces another"),
        (lambda: Sampling.shuffled(10, 5, "add_or_remove_one"), "shifts all later batches"),
        (lambda: Sampling.poisson(10, 5, unit=""), "unit must be"),
        (lambda: Sampling.poisson(10, 5, unit=3), "unit must be"),
        (lambda: Sampling.shuffled(10, 5, drop_remainder=1), "drop_remainder"),
        (lambda: Sampling("poisson", 10, 5, "zero_out", drop_remainder=True), "drop_remainder"),
    ],
)
def test_refuses_what_cannot_be_accounted(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_description_names_the_assumption():
    assert "independently with probability 64/25000" in Sampling.poisson(25_000, 64).describe()
    assert "exactly 64" in Sampling.without_replacement(25_000, 64).describe()
    assert "no amplification" in Sampling.full(10).describe()
    assert "at most once" in Sampling.shuffled(10, 5).describe()
    heuristic = Sampling.shuffled_accounted_as_poisson(10, 5)
    assert "HEURISTIC" in heuristic.describe()
    assert heuristic.is_heuristic and not Sampling.poisson(10, 5).is_heuristic
