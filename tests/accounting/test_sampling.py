import dataclasses
import json
import math
import pathlib
import re

import dp_accounting
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dp_keras_opt
from dp_keras_opt import accounting
from dp_keras_opt.accounting import Ledger, Sampling, sampling


@given(st.data())
def test_round_trip_and_epoch_length(data):
    n = data.draw(st.integers(1, 10**6))
    size = data.draw(st.integers(1, n))
    make = data.draw(
        st.sampled_from([Sampling.poisson, Sampling.without_replacement, Sampling.shuffled])
    )
    made = make(n, size, unit="rating")
    assert Sampling.from_config(json.loads(json.dumps(made.get_config()))) == made
    assert made.steps_per_epoch == math.ceil(n / size)
    assert made.sampling_probability == size / n


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


@pytest.mark.filterwarnings("ignore:Sampling:FutureWarning")
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


def test_the_kind_as_an_argument_is_deprecated():
    with pytest.warns(FutureWarning, match="Sampling.poisson"):
        old = Sampling("shuffled", 10, 5, "zero_out", "rating", True)
    assert old == Sampling.shuffled(10, 5, "zero_out", unit="rating", drop_remainder=True)
    named = {"num_examples": 10, "batch_size": 2, "adjacency": "zero_out", "groups": 3}
    with pytest.warns(FutureWarning):
        old = Sampling(kind="cyclic_poisson", **named)
    assert old == Sampling.cyclic_poisson(10, 2, 3, "zero_out")


@pytest.mark.parametrize(
    "one",
    [
        Sampling.poisson(10, 5, unit="user", examples_per_unit=3),
        Sampling.balls_in_bins(10, 4, "zero_out", unit="user", examples_per_unit=2),
        Sampling.without_replacement(10, 5, "zero_out"),
        Sampling.full(10),
        Sampling.shuffled(10, 4, drop_remainder=True),
        Sampling.shuffled_accounted_as_poisson(10, 4),
        Sampling.fixed_order(10, 4, unit="patient"),
        Sampling.cyclic_poisson(12, 2, 3),
    ],
    ids=lambda one: one.kind,
)
def test_each_kind_is_a_sampling(one):
    assert isinstance(one, Sampling) and type(one) is sampling.KINDS[one.kind]
    padded = dataclasses.replace(one, is_padded=True)
    assert padded == one and padded.is_padded and not one.is_padded
    again = Sampling.from_config(json.loads(json.dumps(padded.get_config())))
    assert again == one and hash(again) == hash(one) and not again.is_padded
    # As they were written before each kind had a class.
    old = {"examples_per_unit": None, "drop_remainder": False, "groups": 1} | one.get_config()
    assert Sampling.from_config(old) == one
    assert one != dataclasses.replace(one, unit="other")
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.unit = "other"
    with pytest.raises(ValueError, match="Only .* sampling has .*; received"):
        Sampling.from_config(old | {"groups": 2, "drop_remainder": True})


def test_without_an_adjacency_it_is_the_usual_one():
    config = {"kind": "shuffled", "num_examples": 10, "batch_size": 5}
    assert Sampling.from_config(config) == Sampling.shuffled(10, 5)
    assert Sampling.from_config(config | {"kind": "poisson"}) == Sampling.poisson(10, 5)


def test_small_integers_of_numpy_do_not_overflow():
    made = Sampling.cyclic_poisson(np.int64(1000), np.uint8(200), np.uint8(3))
    assert made.sampling_probability == 0.6 and type(made.batch_size) is int
    again = dataclasses.replace(made, batch_size=np.uint8(100))
    assert again.sampling_probability == 0.3
    json.dumps(again.get_config())


@pytest.fixture
def thinned(monkeypatch):
    """A kind of sampling of the test's own, known to the library while the test runs."""
    monkeypatch.setattr(sampling, "KINDS", dict(sampling.KINDS))

    @sampling.register
    @dataclasses.dataclass(frozen=True)
    class Thinned(Sampling):
        """A Poisson batch of which each unit is kept with probability `kept`."""

        kept: float = 1.0

        kind = "thinned"
        adjacencies = ("add_or_remove_one",)
        unpriced_by = {"pld": "nobody asked."}

        def sampled(self, event):
            probability = self.kept * self.sampling_probability
            return dp_accounting.PoissonSampledDpEvent(probability, event)

        def _in_words(self):
            return f"Thinned: {self.kept} of a Poisson batch."

    return Thinned(1000, 100, "add_or_remove_one", unit="rating", kept=0.5)


def test_a_new_kind_needs_nothing_but_its_class(thinned, make_optimizer, tmp_path):
    event = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(1.5))
    expected = dp_accounting.rdp.RdpAccountant().compose(event, 40).get_epsilon(1e-5)

    optimizer = make_optimizer(1.5, batch_size=100)
    assert accounting.epsilon(optimizer, thinned, 40, 1e-5) == pytest.approx(expected)
    with pytest.raises(ValueError, match="'pld' cannot price 'thinned' sampling: nobody asked"):
        accounting.epsilon(optimizer, thinned, 40, 1e-5, "pld")
    accounting.calibrate(optimizer, thinned, epochs=4, epsilon=expected, delta=1e-5)
    assert optimizer.noise_multiplier == pytest.approx(1.5, rel=1e-3)

    with_file = Ledger(tmp_path / "spent.jsonl")
    with_file.begin(make_optimizer(1.5, batch_size=100).releases, thinned)
    with_file.reserve(40)
    with_file.close()
    for ledger in (Ledger.from_json(with_file.to_json()), Ledger.read(tmp_path / "spent.jsonl")):
        assert [segment.sampling for segment in ledger.segments] == [thinned]
        assert ledger.epsilon(1e-5) == pytest.approx(expected)
        assert "Thinned: 0.5 of a Poisson batch." in " ".join(ledger.statement(1e-5).split())

    with pytest.raises(ValueError, match="another kind of sampling by the name 'thinned'"):
        sampling.register(type("Other", (Sampling,), {"kind": "thinned"}))


def test_a_ledger_of_a_kind_that_is_not_known_is_refused(thinned, make_optimizer, monkeypatch):
    text = Ledger.of(make_optimizer(1.5, batch_size=100), thinned, 5).to_json()
    monkeypatch.delitem(sampling.KINDS, "thinned")
    with pytest.raises(ValueError, match="kind must be one of.*'thinned'"):
        Ledger.from_json(text)


def test_only_the_classes_know_their_kind():
    package = pathlib.Path(dp_keras_opt.__file__).parent
    names = "|".join(sampling.KINDS)
    asks = re.compile(rf"sampling\.kind (==|!=|in)\b|(==|!=) ['\"]({names})['\"]")
    for path in package.rglob("*.py"):
        if path.name != "sampling.py":
            assert not asks.search(path.read_text(encoding="utf-8")), path
