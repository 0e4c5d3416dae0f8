import concurrent.futures
import copy
import json
import math
import pickle
import sys

import dp_accounting
import pytest

from dp_keras_opt.accounting import Ledger, Sampling
from dp_keras_opt.accounting.segment import Segment
from dp_keras_opt.noise import schedules

DELTA = 1e-5
POISSON = Sampling.poisson(10_000, 64)


def test_reserve_and_settle(gaussians):
    ledger = Ledger()
    ledger.begin(gaussians(1.0), POISSON)
    ledger.reserve(10)
    assert ledger.steps == 10
    ledger.settle(10, 3)
    ledger.reserve(5)
    ledger.settle(5, 5)
    assert ledger.steps == 8
    assert len(ledger.segments) == 1


def test_planned_ledger(make_optimizer):
    optimizer = make_optimizer(1.0, noise_schedule=schedules.Fixed([1.0, 2.0]), clip_norm=0.5)
    ledger = Ledger.of(optimizer, POISSON, 2)
    (segment,) = ledger.segments
    assert (segment.steps, segment.clip_norm, segment.sampling) == (2, 0.5, POISSON)
    with pytest.raises(ValueError, match="not set"):
        Ledger.of(make_optimizer(), POISSON, 2)


def test_begin_replaces_an_empty_segment(gaussians, make_ledger):
    ledger = make_ledger(POISSON, 4)
    ledger.begin(gaussians(2.0), POISSON)
    ledger.begin(gaussians(3.0), POISSON)
    assert [segment.releases[0].multiplier for segment in ledger.segments] == [1.0, 3.0]
    assert len({segment.run for segment in ledger.segments}) == 2


def test_composes_different_noise_and_sampling(gaussians, make_ledger):
    ledger = make_ledger(POISSON, 100)
    ledger.begin(gaussians(4.0), Sampling.full(5000))
    ledger.reserve(3)
    gaussian = dp_accounting.GaussianDpEvent
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.0064, gaussian(1.0)), 100)
    accountant.compose(gaussian(4.0), 3)
    assert ledger.epsilon(DELTA, "rdp") == pytest.approx(accountant.get_epsilon(DELTA))


def test_subsets_beside_poisson_are_added_at_half_of_delta(gaussians, make_ledger):
    poisson = Sampling.poisson(10_000, 64, "replace_one")
    subsets = Sampling.without_replacement(10_000, 64)
    parts = [make_ledger(sampling, 10, 3.0) for sampling in (poisson, subsets)]
    expected = sum(part.epsilon(DELTA / 2) for part in parts)
    parts[0].merge(parts[1])
    assert parts[0].epsilon(DELTA) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (Sampling.poisson(10_000, 64, "zero_out"), "'add_or_remove_one' and 'zero_out'"),
        (Sampling.poisson(10_000, 64, unit="user"), "'example' and 'user'"),
    ],
)
def test_refuses_to_compose_different_guarantees(gaussians, make_ledger, other, match):
    ledger = make_ledger(POISSON, 1)
    ledger.begin(gaussians(1.0), other)
    ledger.epsilon(DELTA)  # nothing of it has run
    ledger.reserve(1)
    with pytest.raises(ValueError, match=match):
        ledger.epsilon(DELTA)


def test_refuses_misuse(gaussians):
    ledger = Ledger()
    for call in (lambda: ledger.reserve(1), lambda: ledger.affordable_steps(1.0, DELTA)):
        with pytest.raises(ValueError, match="call begin"):
            call()
    with pytest.raises(ValueError, match="sampling must be a"):
        ledger.begin(gaussians(1.0), None)
    with pytest.raises(ValueError, match="releases is empty"):
        ledger.begin((), POISSON)
    with pytest.raises(ValueError, match="first_step must be"):
        ledger.begin(gaussians(1.0), POISSON, first_step=-1)
    ledger.begin(gaussians(1.0), POISSON, schedules.Fixed([1.0] * 5), first_step=2)
    with pytest.raises(ValueError, match="steps=4 would pass the end.*5 steps.*3 are left"):
        ledger.reserve(4)
    ledger.reserve(3)
    with pytest.raises(ValueError, match="executed=4 exceeds reserved=3"):
        ledger.settle(3, 4)
    with pytest.raises(ValueError, match="reserved=4 exceeds the 3 steps"):
        ledger.settle(4, 0)
    with pytest.raises(ValueError, match="executed must be"):
        ledger.settle(3, True)
    ledger.settle(3, 3)
    with pytest.raises(ValueError, match="exceeds the 0 steps"):
        ledger.settle(3, 0)
    assert ledger.steps == 3


def test_shuffled_segments_round_up_to_epochs(make_ledger):
    shuffled = Sampling.shuffled(1000, 100)  # 10 steps an epoch
    one_epoch = make_ledger(shuffled, 10, 5.0).epsilon(DELTA)
    assert make_ledger(shuffled, 3, 5.0).epsilon(DELTA) == one_epoch
    two_epochs = make_ledger(shuffled, 20, 5.0).epsilon(DELTA)
    halves = make_ledger(shuffled, 5, 5.0)
    halves.merge(make_ledger(shuffled, 5, 5.0))
    assert halves.epsilon(DELTA) == pytest.approx(two_epochs)


def test_broken_off_shuffled_epoch_counts_as_one(gaussians, make_ledger):
    shuffled = Sampling.shuffled(1000, 100)
    ledger = Ledger()
    for _ in range(3):  # three runs broken off after 3 of 10 steps may each have met an example
        ledger.begin(gaussians(5.0), shuffled)
        ledger.reserve(10)
        ledger.settle(10, 3)
        assert ledger.current is None
    assert ledger.steps == 9
    assert ledger.epsilon(DELTA) == make_ledger(shuffled, 30, 5.0).epsilon(DELTA)
    ledger = make_ledger(shuffled, 10, 5.0)
    ledger.reserve(1)
    ledger.settle(1, 0)  # the pass ended where it should
    assert len(ledger.segments) == 1


@pytest.mark.parametrize(
    ("sampling", "schedule", "accountant", "multiplier"),
    [
        (POISSON, None, "rdp", 1.0),
        (Sampling.full(500), None, "pld", 8.0),
        (Sampling.shuffled(500, 64), None, "rdp", 8.0),
        (Sampling.full(500), [4.0, 3.0, 2.5, 2.0] * 25, "rdp", 3.0),
    ],
)
def test_affordable_steps_is_exact(gaussians, make_ledger, sampling, schedule, accountant,
                                   multiplier):  # fmt: skip
    ledger = make_ledger(sampling, 2, multiplier, schedule=schedule)
    budget = 2 * ledger.epsilon(DELTA, accountant)
    affordable = ledger.affordable_steps(budget, DELTA, accountant)
    assert 0 < affordable < 2**40
    ledger.reserve(affordable)
    assert ledger.epsilon(DELTA, accountant) <= budget
    assert ledger.affordable_steps(budget, DELTA, accountant) == 0
    ledger.reserve(1)
    assert ledger.epsilon(DELTA, accountant) > budget


def test_affordable_steps_counts_the_past(gaussians, make_ledger):
    fresh = make_ledger(POISSON, 0)
    used = make_ledger(POISSON, 400)
    used.begin(gaussians(1.0), POISSON)
    assert fresh.affordable_steps(2.0, DELTA) - used.affordable_steps(2.0, DELTA) == 400


def test_affordable_steps_is_capped(gaussians, make_ledger):
    assert make_ledger(POISSON, 2, schedule=[1.0] * 5).affordable_steps(50.0, DELTA) == 3
    assert make_ledger(POISSON, 5, schedule=[1.0] * 5).affordable_steps(50.0, DELTA) == 0
    assert make_ledger(POISSON, 0).affordable_steps(math.inf, DELTA) == 2**40
    assert make_ledger(Sampling.full(5), 0, 1e9).affordable_steps(50.0, DELTA) == 2**40
    assert make_ledger(POISSON, 0, 0.0).affordable_steps(50.0, DELTA) == 0
    assert make_ledger(POISSON, 100).affordable_steps(0, DELTA) == 0
    for budget in (-1, float("nan"), "1", True):
        with pytest.raises(ValueError, match="epsilon must be a number >= 0"):
            make_ledger(POISSON, 0).affordable_steps(budget, DELTA)


def test_a_loaded_copy_is_not_counted_twice(make_ledger):
    ledger = make_ledger(POISSON, 50)
    checkpoint = ledger.to_json()
    ledger.reserve(30)
    for first, second in (
        (Ledger.from_json(checkpoint), ledger),
        (Ledger.from_json(ledger.to_json()), Ledger.from_json(checkpoint)),
    ):
        first.merge(second)
        assert first.steps == 80
        assert len(first.segments) == 1


def test_a_foreign_history_is_added(make_ledger):
    ledger, other = make_ledger(POISSON, 50), make_ledger(POISSON, 20)
    ledger.merge(other)
    ledger.merge(other)
    assert ledger.steps == 70
    assert ledger.epsilon(DELTA) == pytest.approx(make_ledger(POISSON, 70).epsilon(DELTA))


def test_two_resumed_runs_are_told_apart(gaussians, make_ledger):
    checkpoint = make_ledger(POISSON, 50).to_json()
    runs = [Ledger.from_json(checkpoint) for _ in range(2)]
    for run in runs:
        with pytest.raises(ValueError, match="call begin"):
            run.reserve(1)
        run.begin(gaussians(1.0), POISSON, first_step=50)
        run.reserve(10)
    runs[0].merge(runs[1])
    assert runs[0].steps == 50 + 10 + 10


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_copy_that_trains_on_is_another_run(gaussians, make_ledger, duplicate):
    ledger = make_ledger(POISSON, 50)
    twin = duplicate(ledger)
    ledger.reserve(5)
    twin.begin(gaussians(1.0), POISSON)
    twin.reserve(5)
    assert (ledger.steps, twin.steps) == (55, 55)
    ledger.merge(twin)
    assert ledger.steps == 60


def test_merge_closes_the_current_segment(make_ledger):
    ledger = make_ledger(POISSON, 5)
    ledger.merge(Ledger())
    assert ledger.steps == 5
    with pytest.raises(ValueError, match="call begin"):
        ledger.reserve(1)


def test_merge_refuses(gaussians, make_ledger):
    ledger = make_ledger(POISSON, 5)
    content = json.loads(ledger.to_json())
    content["segments"][0]["releases"][0]["multiplier"] = 100.0
    with pytest.raises(ValueError, match="was altered"):
        ledger.merge(Ledger.from_json(json.dumps(content)))
    with pytest.raises(ValueError, match="other must be a Ledger"):
        ledger.merge(content)


def test_json_round_trip(gaussians, make_ledger):
    ledger = make_ledger(
        Sampling.poisson(10_000, 64, unit="rating"), 3, schedule=[1.0, 2.0, 0.1], clip_norm=2
    )
    ledger.begin(gaussians(1.0, 2.0), Sampling.poisson(500, 5, unit="rating"), first_step=7)
    ledger.reserve(4)
    loaded = Ledger.from_json(ledger.to_json())
    assert loaded.to_json() == ledger.to_json()
    assert loaded.epsilon(DELTA) == ledger.epsilon(DELTA)
    assert loaded.segments[1].releases == ledger.segments[1].releases
    assert loaded.segments[0].sampling == ledger.segments[0].sampling


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(format=99),
        lambda content: content.pop("format"),
        lambda content: content["segments"][0].update(steps=-5),
        lambda content: content["segments"][0].update(surprise=1),
        lambda content: content["segments"][0].pop("releases"),
        lambda content: content["segments"][0]["sampling"].update(kind="bootstrap"),
    ],
)
def test_refuses_text_that_is_not_a_ledger(make_ledger, change):
    content = json.loads(make_ledger(POISSON, 5).to_json())
    change(content)
    with pytest.raises(ValueError, match="text is not a ledger"):
        Ledger.from_json(json.dumps(content))
    for text in ("", "[]", "{}", None):
        with pytest.raises(ValueError, match="text is not a ledger"):
            Ledger.from_json(text)


def test_releases_of_several_threads_are_all_counted(gaussians):
    """Each read what was there, and wrote it back with its own: others' were lost."""
    ledger, count, interval = Ledger(), 400, sys.getswitchinterval()
    ledger.begin(gaussians(1.0), POISSON)

    def release(number):
        ledger.enter(Segment(f"{number}", gaussians(1.0), schedules.Constant(), POISSON, steps=1))
        ledger.reserve(1)

    sys.setswitchinterval(1e-5)  # threads take turns in the middle of what each does
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(release, range(count)))
    finally:
        sys.setswitchinterval(interval)
    assert len(ledger.segments) == count + 1
    assert ledger.steps == 2 * count


def test_nobody_settles_or_plans_the_steps_of_another_run(gaussians):
    """As two `fit`s in threads: B's step was given back as that of A, which found no data."""
    ledger = Ledger()
    ledger.begin(gaussians(10.0), POISSON, run="A")
    ledger.reserve(1, "A")
    ledger.begin(gaussians(0.5), POISSON, run="B")
    ledger.reserve(1, "B")
    ledger.settle(1, 0, "A")
    assert [(segment.run, segment.steps) for segment in ledger.segments] == [("A", 1), ("B", 1)]
    with pytest.raises(RuntimeError, match="Another model began a run"):
        ledger.plan(7, "A")
    ledger.close()
    ledger.settle(1, 0, "B")
    assert ledger.steps == 2


def test_a_run_that_is_resumed_is_never_missing(gaussians):
    """A reader in another thread may look at any time."""

    class Watched(list):
        def remove(self, segment):
            seen.append(ledger.steps)
            super().remove(segment)
            seen.append(ledger.steps)

    ledger, seen = Ledger(), []
    ledger.begin(gaussians(1.0), POISSON, run="A")
    ledger.reserve(5)
    ledger.close()
    ledger._closed = Watched(ledger._closed)
    ledger.resume("A", 5)
    assert seen == [10, 5]


def test_no_run_goes_on_past_a_file_that_was_given_up(gaussians, tmp_path):
    ledger = Ledger(tmp_path / "spent.jsonl")
    ledger.begin(gaussians(1.0), POISSON, run="A")
    ledger.reserve(4)
    ledger.unlock()
    with pytest.raises(RuntimeError, match="given up its file"):
        ledger.resume("A", 4)


def test_copies_of_a_ledger_are_whole(gaussians):
    ledger = Ledger()
    ledger.begin(gaussians(1.0), POISSON)
    ledger.reserve(5)
    for copied in (copy.deepcopy(ledger), pickle.loads(pickle.dumps(ledger))):
        assert copied.steps == 5 and copied.current is None and copied.path is None
        copied.begin(gaussians(1.0), POISSON)
        copied.reserve(1)
        assert (copied.steps, ledger.steps) == (6, 5)
