"""The least noise that meets a privacy budget."""

from __future__ import annotations

import functools
import math
import numbers
from typing import TYPE_CHECKING

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
from dp_keras_opt.accounting.ledger import check_sampling
from dp_keras_opt.accounting.sampling import whole_number
from dp_keras_opt.accounting.segment import Segment
from dp_keras_opt.noise import schedules
from dp_keras_opt.types import Accountant

if TYPE_CHECKING:
    from dp_keras_opt.accounting.repetitions import RandomRepetitions
    from dp_keras_opt.accounting.sampling import Sampling
    from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer

_LEAST, _MOST = 2.0**-10, 2.0**20  # noise multipliers outside are not searched
_TOLERANCE = 3e-5  # relative
_ROUGHLY = 16  # distinct schedule factors in the first, quick search


def calibrate(
    optimizer: PrivateOptimizer,
    sampling: Sampling,
    steps: int,
    epsilon: float,
    delta: float,
    accountant: Accountant = "rdp",
    *,
    runs: int = 1,
    selection: RandomRepetitions | None = None,
) -> float:
    """Finds the smallest noise multiplier that meets the budget, and sets it.

    Args:
        optimizer: an optimizer of `dp_keras_opt.optimizers` that is not built yet. Sets its
            `noise_multiplier`, and `calibrated_for` to the sampling.
        sampling: the `Sampling` of the batches.
        steps: number of training steps, at least 1.
        epsilon: the budget at `delta`, positive and finite.
        delta: probability that the guarantee fails, in (0, 1); 0 with Laplace noise.
        accountant: "rdp", "pld" or "pure".
        runs: how many such trainings on the same data the budget is for, all of them published.
        selection: None, or the `RandomRepetitions` of such trainings of which the best is
            published.

    Returns:
        The noise multiplier, a float. Guaranteed: `epsilon(optimizer, ...)` with these arguments
        is at most the budget; within 1e-4, relative, no smaller multiplier meets it.

    Raises:
        ValueError: an argument is out of range; the optimizer and the sampling disagree on the
            batch size; the budget cannot be met.
    """
    steps = whole_number(steps, "steps", 1, "Give the number of training steps.")
    runs = whole_number(runs, "runs", 1, "Give the number of trainings.")
    if (
        isinstance(epsilon, bool)
        or not isinstance(epsilon, numbers.Real)
        or not 0 < epsilon < math.inf
    ):
        raise ValueError(
            f"epsilon must be a positive finite number, e.g. 3.0; received {epsilon!r}."
        )
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

    def spent(multiplier):
        return compose([segment(multiplier)] * runs, delta, accountant)

    check_delta(delta, [segment(1.0)], accountant)
    accountant = name_for(accountant, segment(1.0))

    def search(accountant, max_distinct, start, factor):
        def event(log_multiplier):
            once = segment(math.exp(log_multiplier)).event(max_distinct)
            return dp_accounting.SelfComposedDpEvent(once, runs)

        def fresh():
            return make_accountant(accountant, sampling)

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
            return math.log(spent(math.exp(log_multiplier)) / epsilon)

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
        elif accountant != rough:
            # Sums of pure epsilons can be far from the other accountants' answer.
            multiplier = search(
                accountant, MAX_DISTINCT, multiplier, 2.0 if rough == "pure" else 1.1
            )
    while spent(multiplier) > epsilon:
        multiplier *= 1 + _TOLERANCE
    optimizer.noise_multiplier = multiplier
    optimizer.calibrated_for = sampling
    return multiplier


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
