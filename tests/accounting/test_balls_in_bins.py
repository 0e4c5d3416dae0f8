"""Balls in bins in the ledger: an epoch that was begun counts whole, and is priced as one event."""

import dataclasses
import json
import math

import dp_accounting
import numpy as np
import pytest

import dp_keras_opt as dp
from dp_keras_opt.accounting import Ledger, Sampling, calibrate
from dp_keras_opt.accounting.budget import Budget
from dp_keras_opt.accounting.events import MAX_DISTINCT_IN_PASSES, passes, segment_event
from dp_keras_opt.accounting.random_allocation import RandomAllocationDpEvent
from dp_keras_opt.noise import Gaussian, Laplace
from dp_keras_opt.noise.mechanism import Release

N, B, T, DELTA = 50, 12, 5, 1e-4  # the last batch is no smaller than the others
SAMPLING = Sampling.balls_in_bins(N, B, "zero_out")
SIGMA = 1.5


def _sgd(noise_multiplier=SIGMA, **options):
    return dp.optimizers.DPSGD(
        0.1, clip_norm=1.0, noise_multiplier=noise_multiplier, batch_size=B, **options
    )


def _segment(steps, **options):
    ledger = Ledger.of(_sgd(**options), SAMPLING, 0)
    return dataclasses.replace(ledger.current, steps=steps)


def _epoch(*multipliers):
    return RandomAllocationDpEvent(multipliers, len(multipliers))


def _epochs(event, count):
    return dp_accounting.SelfComposedDpEvent(event, count)


# The sampling.


def test_what_it_is():
    assert SAMPLING.steps_per_epoch == SAMPLING.period == T
    assert SAMPLING.in_passes and SAMPLING.separation is None and not SAMPLING.is_heuristic
    assert Sampling.balls_in_bins(N, B).adjacency == "add_or_remove_one"
    assert Sampling.from_config(json.loads(json.dumps(SAMPLING.get_config()))) == SAMPLING
    words = SAMPLING.describe()
    assert (
        "independently of all others and uniformly" in words
        and "one of the epoch's 5 batches" in words
    )
    assert "An epoch that was begun is accounted as a whole" in words


def test_the_count_of_passes_is_no_part_of_it():
    counted = dataclasses.replace(SAMPLING, passes=dp.accounting.sampling.Passes())
    assert counted == SAMPLING and hash(counted) == hash(SAMPLING)
    assert counted.get_config() == SAMPLING.get_config()


def test_a_replaced_unit_is_refused_with_the_ways_out():
    with pytest.raises(ValueError, match=r"not proven.*'zero_out'.*Sampling\.shuffled"):
        Sampling.balls_in_bins(N, B, "replace_one")


def test_users():
    users = Sampling.balls_in_bins(N, B, unit="user", examples_per_unit=3)
    words = users.describe()
    assert "each user is put" in words and "at most 3 examples" in words
    event = _segment(1).event()
    of_users = dataclasses.replace(_segment(1), sampling=users).event()
    assert of_users == event  # clipped once, in one bin


# The events.


@pytest.mark.parametrize(("steps", "begun"), [(1, 1), (T, 1), (T + 1, 2), (10 * T, 10)])
def test_an_epoch_that_was_begun_counts_whole(steps, begun):
    assert _segment(steps).event() == _epochs(_epoch(*[SIGMA] * T), begun)


def test_no_step_costs_nothing():
    assert _segment(0).event() == dp_accounting.NoOpDpEvent()
    assert _segment(0, noise_schedule=[1.0] * T).event() == dp_accounting.NoOpDpEvent()


def test_an_epoch_has_the_noise_of_all_of_its_steps_also_of_those_to_come():
    alphas = [1.0, 0.5, 0.25, 0.75, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    first = _epoch(*(SIGMA * alpha for alpha in alphas[:T]))
    second = _epoch(*(SIGMA * alpha for alpha in alphas[T:]))
    one, two = (_segment(steps, noise_schedule=alphas).event() for steps in (2, T + 1))
    assert one == _epochs(first, 1)
    assert {(each.event, each.count) for each in two.events} == {(first, 1), (second, 1)}


def test_epochs_of_the_same_levels_in_any_order_are_one_event():
    alphas = [1.0, 0.5, 0.5, 1.0, 1.0] + [0.5, 1.0, 1.0, 0.5, 1.0]
    assert _segment(2 * T, noise_schedule=alphas).event() == _epochs(
        _epoch(*(SIGMA * alpha for alpha in alphas[:T])), 2
    )


def test_a_schedule_that_ends_within_an_epoch_goes_on_with_its_largest_factor():
    """The steps that cannot run count as if they did, which is more than they cost."""
    alphas = [1.0] * T + [0.5, 0.75]
    rest = [0.5, 0.75, 0.75, 0.75, 0.75]
    for steps in (T + 1, T + 2):
        found = _segment(steps, noise_schedule=alphas).event()
        assert {(each.event, each.count) for each in found.events} == {
            (_epoch(*[SIGMA] * T), 1),
            (_epoch(*(SIGMA * alpha for alpha in rest)), 1),
        }
    with pytest.raises(ValueError, match="ends after 7 steps"):
        _segment(T + 3, noise_schedule=alphas).event()


def test_a_segment_that_begins_within_a_schedule():
    alphas = [1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25]
    later = dataclasses.replace(_segment(1, noise_schedule=alphas), first_step=2)
    assert later.event() == _epochs(_epoch(*(SIGMA * alpha for alpha in alphas[2:])), 1)


def test_several_releases_of_a_batch_are_one_gaussian():
    releases = (Release(0, "mean", 2.0, Gaussian()), Release(1, "mean", 1.0, Gaussian()))
    found = segment_event(releases, SAMPLING, 1.0, 1)
    assert found == _epochs(_epoch(*[(1 / 4 + 1) ** -0.5] * T), 1)


def test_without_noise_there_is_no_privacy():
    for options in ({}, {"noise_schedule": [1.0] * T}):
        ledger = Ledger.of(_sgd(0.0, **options), SAMPLING, 1)
        assert ledger.epsilon(DELTA) == math.inf


# Schedules of many levels.


def _expanded(found):
    """The factors of all steps, sorted within each epoch; epochs sorted by their factors."""
    return sorted(
        tuple(np.repeat(*map(np.array, zip(*levels, strict=True))))
        for levels, count in found.items()
        for _ in range(count)
    )


SCHEDULES = {
    "decaying": np.linspace(1.0, 0.2, 700),
    "around 1": np.exp(np.random.default_rng(1).normal(size=700)),
    "two levels, mixed": np.where(np.random.default_rng(2).random(700) < 0.5, 0.5, 2.0),
    "wide": np.geomspace(1e-3, 1e3, 700),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_many_levels_are_rounded_down_to_few(name):
    alphas = SCHEDULES[name]
    found = passes(alphas, 7)
    assert sum(found.values()) == 100
    assert sum(map(len, found)) <= MAX_DISTINCT_IN_PASSES
    exact = _expanded(passes(alphas, 7, None))
    np.testing.assert_array_equal(exact, sorted(map(tuple, np.sort(alphas.reshape(100, 7)))))
    above = _expanded(passes(alphas, 7, optimistic=True))
    # Where each epoch has no more noise than before, so has each rank of all epochs.
    lower, true, upper = (np.sort(each, axis=0) for each in (_expanded(found), exact, above))
    assert np.all(lower <= true) and np.all(true <= upper)


def test_a_gentle_schedule_is_hardly_rounded():
    alphas = SCHEDULES["decaying"]
    found = np.sort(np.array(_expanded(passes(alphas[:210], 7))).ravel())
    true = np.sort(alphas[:210])
    assert np.all(found > 0.95 * true) and np.any(found < true)


@pytest.mark.parametrize("name", SCHEDULES)
def test_more_steps_never_raise_the_noise_of_earlier_ones(name):
    """So that ε does not fall as steps are added."""
    few, many = (
        np.sort(_expanded(passes(SCHEDULES[name][: 7 * epochs], 7)), axis=0) for epochs in (20, 100)
    )
    assert np.all(many[:20] <= few)


def test_a_ledger_says_that_it_rounded():
    alphas = list(SCHEDULES["decaying"])
    assert _segment(700, noise_schedule=alphas).is_rounded
    assert not _segment(T, noise_schedule=alphas).is_rounded
    ledger = Ledger.of(_sgd(20.0, noise_schedule=alphas), SAMPLING, 700)
    low, high = ledger.epsilon_bracket(DELTA, "rdp")
    assert low <= ledger.epsilon(DELTA, "rdp", exact=True) <= high and low < high


# What is refused.


@pytest.mark.parametrize(
    ("noise", "words"),
    [
        ("laplace", "Balls in bins are priced for Gaussian noise.*poisson_batches"),
        (dp.noise.BandedMatrix(10, 2), "fixed_order_epochs, or cyclic_poisson"),
    ],
)
def test_other_noise_is_refused_with_what_can_be_used(noise, words):
    optimizer = _sgd(noise=noise)
    with pytest.raises(ValueError, match=words):
        Ledger.of(optimizer, SAMPLING, 1)
    with pytest.raises(ValueError, match=words):
        calibrate(_sgd(None, noise=noise), SAMPLING, T, epsilon=1.0, delta=DELTA)
    ledger = Ledger()
    with pytest.raises(ValueError, match="priced for Gaussian noise"):
        ledger.begin(optimizer.releases, SAMPLING)


def test_laplace_noise_is_refused_also_where_the_event_is_made():
    releases = (Release(0, "mean", 1.0, Laplace()),)
    with pytest.raises(ValueError, match="received: LaplaceDpEvent"):
        segment_event(releases, SAMPLING, 1.0, 1)


def test_joint_moments_need_a_bound_on_the_batch():
    for bound in (None, 2 * B):
        joint = dp.optimizers.moments.Joint(1.0, bound, "zero_out")
        optimizer = dp.optimizers.DPAdam(
            clip_norm=1.0, noise_multiplier=1.0, batch_size=B, second_moment=joint
        )
        if bound is None:
            with pytest.raises(ValueError, match="max_batch_size"):
                Ledger.of(optimizer, SAMPLING, 1)
        else:
            assert Ledger.of(optimizer, SAMPLING, 1).steps == 1


# The ledger and its budget.


def test_a_pass_that_is_broken_off_ends_the_segment():
    ledger = Ledger()
    ledger.begin(_sgd().releases, SAMPLING)
    ledger.reserve(2 * T)
    ledger.settle(2 * T, T)
    assert ledger.current is not None
    ledger.reserve(T)
    ledger.settle(T, 2)
    assert ledger.current is None
    ledger.begin(_sgd().releases, SAMPLING)
    ledger.reserve(T)
    events = [segment.event() for segment in ledger.segments]
    assert events == [_epochs(_epoch(*[SIGMA] * T), count) for count in (2, 1)]


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_a_budget_stops_before_an_epoch_and_never_in_it(accountant):
    ledger = Ledger.of(_sgd(), SAMPLING, 0)
    spent = [
        Ledger.of(_sgd(), SAMPLING, epochs * T).epsilon(DELTA, accountant) for epochs in (3, 4)
    ]
    assert spent[0] < spent[1]
    budget = Budget(sum(spent) / 2, DELTA, accountant)
    assert budget.limit(ledger) == 3 * T
    ledger.reserve(3 * T - 1)
    assert budget.affords(ledger, 1) and not budget.affords(ledger, 2)


@pytest.mark.parametrize("noise_schedule", [None, [1.0, 0.9, 0.8, 0.7, 0.6] * 2])
def test_a_calibrated_run_fits_its_budget_to_its_last_step(noise_schedule):
    optimizer = _sgd(None, noise_schedule=noise_schedule)
    calibrate(optimizer, SAMPLING, epochs=2, epsilon=2.0, delta=DELTA, accountant="pld")
    ledger = Ledger.of(optimizer, SAMPLING, 2 * T)
    assert 1.99 < ledger.epsilon(DELTA, "pld") <= 2.0
    assert Budget(2.0, DELTA, "pld").limit(ledger) == 2 * T


def test_a_stop_within_an_epoch_costs_no_less_than_the_epoch(gaussians):
    ledger = Ledger()
    ledger.begin(gaussians(SIGMA), SAMPLING)
    ledger.plan(T)
    ledger.reserve(2)
    assert ledger.epsilon(DELTA) == ledger.epsilon_as_planned(DELTA)
    assert "Stopped early" not in ledger.statement(DELTA)


def test_the_statement():
    text = " ".join(Ledger.of(_sgd(), SAMPLING, 2 * T).statement(DELTA).split())
    for words in (
        "one example, whose clipped gradient is replaced by zero in one (zero_out)",
        "10 steps",
        "expected batch size B = 12, n = 50 examples",
        "Balls in bins: at the start of every epoch",
    ):
        assert words in text


def test_all_ledgers_of_it_compose_with_poisson():
    """Of one adjacency; the PLDs of both are of one kind."""
    ledger = Ledger.of(_sgd(), SAMPLING, T)
    ledger.begin(_sgd().releases, Sampling.poisson(N, B, "zero_out"))
    ledger.reserve(T)
    alone = [Ledger.of_segments([each]).epsilon(DELTA, "pld") for each in ledger.segments]
    assert max(alone) < ledger.epsilon(DELTA, "pld") < sum(alone)
