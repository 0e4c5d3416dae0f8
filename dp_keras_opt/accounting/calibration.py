"""The least noise, and the largest batches, that meet a privacy budget."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import dp_accounting
from scipy import optimize

from dp_keras_opt.accounting.accountant import (
    check_delta,
    compose,
    make_accountant,
    name_for,
    quiet,
)
from dp_keras_opt.accounting.events import MAX_DISTINCT
from dp_keras_opt.accounting.ledger import Ledger
from dp_keras_opt.accounting.sampling import check_sampling
from dp_keras_opt.accounting.segment import Segment
from dp_keras_opt.checks import is_number, whole_number
from dp_keras_opt.noise import schedules
from dp_keras_opt.types import Accountant

if TYPE_CHECKING:
    from dp_keras_opt.accounting.repetitions import RandomRepetitions
    from dp_keras_opt.accounting.sampling import Sampling
    from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer

_LEAST, _MOST = 2.0**-10, 2.0**20  # noise multipliers outside are not searched
_TOLERANCE = 3e-5  # relative
_ROUGHLY = 16  # distinct schedule factors in the first, quick search


class Calibration(NamedTuple):
    """What the noise of an optimizer was calibrated for; see `calibrate`."""

    steps: int
    epsilon: float
    delta: float
    accountant: Accountant


def calibrate(
    optimizer: PrivateOptimizer,
    sampling: Sampling,
    steps: int,
    epsilon: float,
    delta: float,
    accountant: Accountant = "rdp",
    *,
    spent: Ledger | None = None,
    runs: int = 1,
    selection: RandomRepetitions | None = None,
) -> float:
    """Finds the smallest noise multiplier that meets the budget, and sets it.

    Args:
        optimizer: an optimizer of `dp_keras_opt.optimizers` that is not built yet. Sets its
            `noise_multiplier`, and `calibrated_for` to the sampling; a model that is trained past
            `steps` without a budget warns.
        sampling: the `Sampling` of the batches.
        steps: number of training steps, at least 1.
        epsilon: the budget at `delta`, positive and finite.
        delta: probability that the guarantee fails, in (0, 1); 0 with Laplace noise.
        accountant: "rdp", "pld" or "pure".
        spent: None, or a `Ledger` of what was spent before: the budget is for all of it together.
        runs: how many such trainings on the same data the budget is for, all of them published.
        selection: None, or the `RandomRepetitions` of such trainings of which the best is
            published.

    Returns:
        The noise multiplier, a float. Guaranteed: `epsilon(optimizer, ...)` with these arguments
        is at most the budget; within 1e-4, relative, no smaller multiplier meets it. With `spent`,
        `runs` or `selection`, the same of the epsilon of all steps together.

    Raises:
        ValueError: an argument is out of range; the optimizer and the sampling disagree on the
            batch size; the noise covers fewer steps; the budget cannot be met, or is spent already.
    """
    steps = whole_number(steps, "steps", 1, "Give the number of training steps.")
    runs = whole_number(runs, "runs", 1, "Give the number of trainings.")
    _check_budget(epsilon)
    check_sampling(optimizer, sampling)
    make_accountant(accountant, sampling)  # refuses what cannot be priced, before the search
    private = [release for release in optimizer.releases_for(1.0) if not release.is_public]
    if any(release.multiplier == 0 for release in private):
        raise ValueError(
            f"epsilon={epsilon} cannot be met: the optimizer releases a statistic without noise, "
            "whatever its noise_multiplier. Choose another second_moment."
        )
    schedule = schedules.get(optimizer.noise_schedule)

    def segment(multiplier):
        releases = optimizer.releases_for(multiplier)
        return Segment("planned", releases, schedule, sampling, steps=steps, selection=selection)

    dataclasses.replace(segment(1.0), steps=0).check_end(steps)
    past = [each for each in spent.segments if each.steps] if spent else []

    def total(multiplier, past=past):
        return compose([*past, *[segment(multiplier)] * runs], delta, accountant)

    check_delta(delta, [segment(1.0)], accountant)
    name = name_for(accountant, segment(1.0))

    def search(name, max_distinct, start, factor):
        def event(log_multiplier):
            once = segment(math.exp(log_multiplier)).event(max_distinct)
            return dp_accounting.SelfComposedDpEvent(once, runs)

        def fresh():
            return make_accountant(name, sampling)

        @functools.cache
        def meets(multiplier):
            composed = fresh().compose(event(math.log(multiplier)))
            return composed.get_epsilon(delta) <= epsilon

        low, high = _bracket(meets, epsilon, start, factor)
        found = dp_accounting.calibrate_dp_mechanism(
            fresh,
            event,
            epsilon,
            delta,
            dp_accounting.ExplicitBracketInterval(math.log(low), math.log(high)),
            tol=_TOLERANCE,
        )
        return math.exp(found)

    def refine(rough):
        """From a rough answer, in few evaluations: many distinct factors are slow to price."""

        def excess(log_multiplier):
            return math.log(total(math.exp(log_multiplier), past=()) / epsilon)

        start = math.log(rough)
        start_excess = excess(start)
        second = start + (start_excess or _TOLERANCE)  # as if epsilon were proportional to 1/σ
        found = optimize.root_scalar(excess, x0=start, x1=second, xtol=_TOLERANCE / 2)
        return math.exp(found.root)

    # PLD is slow to price too: search near the answer of another accountant.
    with quiet():
        rough = name_for("rdp", segment(1.0))
        multiplier = search(rough, _ROUGHLY, 1.0, 2.0)
        if not isinstance(schedule, schedules.Constant):
            multiplier = refine(multiplier)
        elif name != rough:
            # Sums of pure epsilons can be far from the other accountants' answer.
            multiplier = search(name, MAX_DISTINCT, multiplier, 2.0 if rough == "pure" else 1.1)
    if past:
        multiplier = _beside(compose(past, delta, accountant), total, multiplier, epsilon)
    while total(multiplier) > epsilon:
        multiplier *= 1 + _TOLERANCE
    optimizer.noise_multiplier = multiplier
    optimizer.calibrated_for = sampling
    optimizer.calibration = Calibration(steps, epsilon, delta, accountant)
    return multiplier


def _beside(before, total, alone, epsilon):
    """The noise multiplier for a budget of which earlier steps have had their part.

    Args:
        before: their epsilon.
        total: function of a noise multiplier that gives the epsilon of all steps.
        alone: the multiplier that meets the budget without them, where the search begins.
        epsilon: the budget.
    """
    if before >= epsilon:
        raise ValueError(
            f"epsilon={epsilon} is spent already: earlier steps have had {before:.4g}. Raise the "
            "budget, or stop here."
        )

    @functools.cache
    def excess(log_multiplier):
        return total(math.exp(log_multiplier)) - epsilon

    low = high = math.log(alone)
    while excess(high) > 0:
        low, high = high, high + math.log(2.0)
        if high > math.log(_MOST):
            raise ValueError(
                f"epsilon={epsilon} cannot be met: earlier steps have had {before:.4g} of it, and "
                "no noise is enough for the rest. Raise epsilon or delta, or take fewer steps."
            )
    if low == high:
        return alone
    return math.exp(optimize.brentq(excess, low, high, xtol=_TOLERANCE / 2))


def affordable_batch_size(
    optimizer: PrivateOptimizer,
    sampling: Sampling,
    epsilon: float,
    delta: float,
    accountant: Accountant = "rdp",
    *,
    steps: int | None = None,
    epochs: int | None = None,
) -> int:
    """The largest expected batch size whose training meets the budget, at the noise given.

    Noise and sum are both divided by the batch size, so that larger batches have less noise in
    the mean gradient; they also are amplified less.

    Args:
        optimizer: an optimizer of `dp_keras_opt.optimizers` with its noise multiplier; its
            `batch_size` does not matter, and nothing of it is changed.
        sampling: the `Sampling`, whose `batch_size` does not matter; not of full batches.
        epsilon: the budget at `delta`, positive and finite.
        delta: as in `epsilon`.
        accountant: "rdp", "pld" or "pure".
        steps: number of training steps, whatever the batch size; or
        epochs: number of passes over the data, of `sampling.steps_per_epoch` steps each.

    Returns:
        An integer. Guaranteed: training with it meets the budget. For a number of steps no larger
        one does. For epochs a much larger one may, since an epoch is rounded to whole steps.

    Raises:
        ValueError: an argument is out of range; not even batches of one meet the budget.
    """
    if (steps is None) == (epochs is None):
        raise ValueError("Give steps or epochs, and not both.")
    if epochs is None:
        length = whole_number(steps, "steps", 1, "Give the number of training steps.")
    else:
        length = whole_number(epochs, "epochs", 1, "Give the number of passes over the data.")
    if sampling.kind == "full":
        raise ValueError("Full batches have no size to choose. Use another kind of sampling.")
    _check_budget(epsilon)

    @functools.cache
    def meets(size):
        sampled = dataclasses.replace(sampling, batch_size=size)
        resized = type(optimizer).from_config({**optimizer.get_config(), "batch_size": size})
        count = length if epochs is None else length * sampled.steps_per_epoch
        return Ledger.of(resized, sampled, count).epsilon(delta, accountant) <= epsilon

    most = sampling.num_examples // sampling.groups
    if not meets(1):
        raise ValueError(
            f"epsilon={epsilon} cannot be met with this noise: batches of one exceed it already. "
            "Raise epsilon, delta or the noise multiplier, or take fewer steps."
        )
    size = _largest(meets, 1, most)
    while epochs and size < most:  # on to sizes that make an epoch a step shorter
        shorter = dataclasses.replace(sampling, batch_size=size).steps_per_epoch - sampling.groups
        start = math.ceil(sampling.num_examples / shorter) if shorter > 0 else most + 1
        if not size < start <= most or not meets(start):
            break
        size = _largest(meets, start, most)
    return size


def _largest(meets, low, high):
    """The last number before the first that does not meet the budget, where all before it do."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if meets(middle) else (low, middle - 1)
    return low


def _check_budget(epsilon):
    if not is_number(epsilon) or not 0 < epsilon < math.inf:
        raise ValueError(
            f"epsilon must be a positive finite number, e.g. 3.0; received {epsilon!r}."
        )


def _bracket(meets, epsilon, start, factor):
    """Two noise multipliers, of which only the larger meets the budget."""
    low = high = start
    meets(start)  # errors of the arguments surface here
    try:
        while not meets(high):
            low, high = high, high * factor
            if high > _MOST:
                raise ValueError(f"even noise_multiplier={low:.3g} is not enough")
    except ValueError as error:  # dp_accounting 0.4.3 breaks down at extreme noise
        raise ValueError(
            f"epsilon={epsilon} cannot be met: {error}. Raise epsilon or delta, take fewer "
            "steps, or a smaller batch_size."
        ) from error
    while meets(low):
        low, high = low / factor, low
        if low < _LEAST:
            raise ValueError(
                f"epsilon={epsilon} is met with hardly any noise (noise_multiplier={high:.3g}): "
                "such a guarantee means nothing. Choose a smaller epsilon."
            )
    return low, high
