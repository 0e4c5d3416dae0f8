"""The least noise, and the largest batches, that meet a privacy budget."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from scipy import optimize

from dp_keras_opt.accounting.accountant import (
    check_delta,
    chosen,
    compose,
    make_accountant,
    quiet,
)
from dp_keras_opt.accounting.caps import warn_of_cap
from dp_keras_opt.accounting.events import MAX_DISTINCT
from dp_keras_opt.accounting.ledger import Ledger
from dp_keras_opt.accounting.plan import Plan
from dp_keras_opt.accounting.privacy_filters import PrivacyFilter
from dp_keras_opt.accounting.protocols import Optimizer, SampledBatches
from dp_keras_opt.accounting.repetitions import RandomRepetitions
from dp_keras_opt.accounting.sampling import Sampling, check_sampling, need_sampling
from dp_keras_opt.accounting.segment import Segment
from dp_keras_opt.checks import is_number, whole_number
from dp_keras_opt.deprecation import renamed_arguments, renamed_names
from dp_keras_opt.noise import schedules
from dp_keras_opt.types import Accountant

_LEAST, _MOST = 2.0**-10, 2.0**20  # noise multipliers outside are not searched
_TOLERANCE = 3e-5  # relative
_ROUNDING = 1e-3  # of a budget, what a calibration may leave of it: not worth another training
_ROUGHLY = 16  # distinct schedule factors in the first, quick search


@renamed_arguments(runs="num_trainings")
def calibrate(
    optimizer: Optimizer,
    sampling: Sampling | SampledBatches,
    steps: int | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    accountant: Accountant = "auto",
    *,
    epochs: int | None = None,
    spent: Ledger | None = None,
    num_trainings: int = 1,
    selection: RandomRepetitions | None = None,
) -> float:
    """Finds the smallest noise multiplier that meets the budget, and sets it.

        calibrate(optimizer, batches, epochs=5, epsilon=2.0, delta=1e-6)

    Args:
        optimizer: an optimizer of `dp_keras_opt.optimizers` that is not built yet. Sets its
            `noise_multiplier`, what it leaves open (batch size, steps of its noise), and `plan` to
            the `Plan`; a model that is trained past its steps without a budget warns.
        sampling: the `Sampling` of the batches, or the `data.Batches` that training will take.
        steps: number of training steps, at least 1; or
        epochs: number of passes over the data, of `steps_per_epoch` steps each: those of the
            batches, or of the sampling.
        epsilon: the budget at `delta`, positive and finite.
        delta: probability that the guarantee fails, in (0, 1); 0 with Laplace noise.
        accountant: "auto", "rdp", "pld" or "pure"; or a privacy filter, by which a budget is kept
            whatever results decide (`RenyiFilter`, `GaussianFilter`).
        spent: None, or a `Ledger` of what was spent before: the budget is for all of it together.
        num_trainings: how many such trainings on the same data the budget is for, all of them
            published.
        selection: None, or the `RandomRepetitions` of such trainings of which the best is
            published.

    Returns:
        The noise multiplier, a float. Guaranteed: `epsilon(optimizer, ...)` with these arguments
        is at most the budget; within 1e-4, relative, no smaller multiplier meets it. With `spent`,
        `num_trainings` or `selection`, the same of the epsilon of all steps together.

    Raises:
        ValueError: an argument is out of range or missing; the optimizer and the sampling disagree
            on the batch size; the noise covers fewer steps; the budget cannot be met, or is spent
            already.
    """
    batches, sampling = sampling, sampling_of(sampling)
    steps = number_of_steps(steps, epochs, batches)
    num_trainings = whole_number(num_trainings, "num_trainings", 1, "Give how many there are.")
    _check_budget(epsilon)
    optimizer.settle(sampling, steps)
    check_sampling(optimizer, sampling)
    past = [each for each in spent.of_data_set() if each.steps] if spent else []
    accountant = chosen(past, accountant)
    if not (accountant == "auto" or isinstance(accountant, PrivacyFilter)):
        make_accountant(accountant, sampling)  # refuses what cannot be priced, before the search
    private = [release for release in optimizer.releases_for(1.0) if not release.is_public]
    if any(release.multiplier == 0 for release in private):
        raise ValueError(
            f"epsilon={epsilon} cannot be met: the optimizer releases a statistic without noise, "
            "whatever its noise_multiplier. Choose another second_moment."
        )
    trainings = _Trainings(optimizer, sampling, steps, num_trainings, selection)
    dataclasses.replace(trainings.segment(1.0), steps=0).check_end(steps)
    check_delta(delta, [trainings.segment(1.0)], accountant)
    assert epsilon is not None and delta is not None  # they were checked; for the type checker
    if isinstance(accountant, PrivacyFilter):
        accountant.check([*past, trainings.segment(1.0)])
        accountant.limit(epsilon, delta)
    with quiet():
        multiplier = _least(trainings, past, epsilon, delta, accountant)
    warn_of_cap(trainings.segment(multiplier), delta, stacklevel=4)  # it is decorated
    optimizer.noise_multiplier = multiplier
    optimizer.plan = Plan(
        sampling, steps, float(epsilon), float(delta), accountant, num_trainings, multiplier
    )
    return multiplier


def planned_segment(
    optimizer: Optimizer,
    sampling: Sampling | SampledBatches,
    steps: int,
    epsilon: float,
    delta: float,
) -> Segment:
    """The `Segment` of a training, with the least noise by RDP where the optimizer has none.

    Args:
        optimizer, sampling, steps, epsilon, delta: as for `calibrate`; the optimizer is left as it
            is.

    Raises:
        ValueError: as `calibrate`.
    """
    copy: Any = type(optimizer).from_config(optimizer.get_config())  # type: ignore[attr-defined]
    if copy.noise_multiplier is None:
        calibrate(copy, sampling, steps, epsilon, delta, "rdp")
    return Ledger.of(copy, sampling_of(sampling), steps).segments[0]


def sampling_of(batches: Sampling | SampledBatches) -> Sampling:
    """The `Sampling` of batches, or the one that is given.

    Raises:
        ValueError: it is neither.
    """
    sampling: Any = getattr(batches, "sampling", batches)
    need_sampling(sampling)
    return sampling


def number_of_steps(steps: int | None, epochs: int | None, batches: Any, at_least: int = 1) -> int:
    """The number of steps, where one of the two is given; a pass is that of batches or sampling.

    Raises:
        ValueError: none or both are given, or the length of a pass is not known.
    """
    if (steps is None) == (epochs is None):
        raise ValueError("Give steps or epochs, and not both.")
    if epochs is None:
        return whole_number(steps, "steps", at_least, "Give the number of training steps.")
    epochs = whole_number(epochs, "epochs", at_least, "Give the number of passes over the data.")
    if batches.steps_per_epoch is None:
        raise ValueError(
            f"epochs={epochs} is no number of steps: these batches have no known length. Give "
            "steps."
        )
    return epochs * batches.steps_per_epoch


@dataclasses.dataclass(frozen=True)
class _Trainings:
    """What is to be priced, whose only unknown is the noise multiplier."""

    optimizer: Any
    sampling: Sampling
    steps: int
    count: int
    selection: RandomRepetitions | None

    @property
    def schedule(self):
        return schedules.get(self.optimizer.noise_schedule)

    def segment(self, multiplier):
        """One of the trainings."""
        return Segment(
            "planned",
            self.optimizer.releases_for(multiplier),
            self.schedule,
            self.sampling,
            steps=self.steps,
            selection=self.selection,
        )

    def epsilon(self, multiplier, delta, accountant, past=(), max_distinct=MAX_DISTINCT):
        """Of all of them and of the segments before."""
        segments = [*past, *[self.segment(multiplier)] * self.count]
        return compose(segments, delta, accountant, max_distinct)


def _least(trainings, past, epsilon, delta, accountant):
    """The least noise multiplier with which `past` and the trainings meet the budget."""

    def alone(trainings, name, max_distinct):
        return lambda multiplier: trainings.epsilon(multiplier, delta, name, (), max_distinct)

    before = compose(past, delta, accountant) if past else 0.0
    if past and before >= epsilon * (1 - _ROUNDING):
        raise ValueError(
            f"epsilon={epsilon} is spent already: earlier steps have had {before:.4g}. Raise the "
            "budget, or stop here."
        )
    # Many distinct factors are slow to price, and so is a cap: search near the answer of what is
    # quick.
    rough = "pure" if accountant == "pure" else "rdp"
    uncut = dataclasses.replace(trainings, sampling=trainings.sampling.uncut)
    multiplier = _search(alone(uncut, rough, 2), epsilon, 1.0, 1e-2)
    multiplier = _search(alone(uncut, accountant, _ROUGHLY), epsilon, multiplier, _TOLERANCE)
    if trainings.segment(1.0).changes or uncut != trainings:
        multiplier = _refined(alone(trainings, accountant, MAX_DISTINCT), epsilon, multiplier)

    def total(multiplier):
        return trainings.epsilon(multiplier, delta, accountant, past)

    if past:
        multiplier = _beside(before, total, multiplier, epsilon)
    while total(multiplier) > epsilon:
        multiplier *= 1 + _TOLERANCE
    return multiplier


def _search(spent, epsilon, start, tolerance):
    """The multiplier that meets the budget, by a function that gives what each spends."""

    @functools.cache
    def excess(log_multiplier):
        found = spent(math.exp(log_multiplier))
        return math.log(min(max(found, epsilon / 64), epsilon * 64) / epsilon)

    low, high = _bracket(excess, epsilon, math.log(start), spent)
    if low == high:
        return math.exp(high)
    return math.exp(optimize.brentq(excess, low, high, xtol=tolerance / 2))


def least_multiplier(spent: Callable[[float], float], epsilon: float) -> float:
    """The least noise multiplier with which `spent` of it is at most epsilon.

    Raises:
        ValueError: there is none, or hardly any noise is enough.
    """
    multiplier = _search(spent, epsilon, 1.0, _TOLERANCE)
    while spent(multiplier) > epsilon:
        multiplier *= 1 + _TOLERANCE
    return multiplier


def _refined(spent, epsilon, rough):
    """From a rough answer, in few evaluations."""

    def excess(log_multiplier):
        return math.log(spent(math.exp(log_multiplier)) / epsilon)

    start = math.log(rough)
    start_excess = excess(start)
    second = start + (start_excess or _TOLERANCE)  # as if epsilon were proportional to 1/σ
    found = optimize.root_scalar(excess, x0=start, x1=second, xtol=_TOLERANCE / 2)
    return math.exp(found.root)


def _beside(before, total, alone, epsilon):
    """The noise multiplier for a budget of which earlier steps have had their part.

    Args:
        before: their epsilon.
        total: function of a noise multiplier that gives the epsilon of all steps.
        alone: the multiplier that meets the budget without them, where the search begins.
        epsilon: the budget.
    """

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
    optimizer: Optimizer,
    sampling: Sampling,
    epsilon: float,
    delta: float,
    accountant: Accountant = "auto",
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
        accountant: "auto", "rdp", "pld" or "pure".
        steps: number of training steps, whatever the batch size; or
        epochs: number of passes over the data, of `sampling.steps_per_epoch` steps each.

    Returns:
        An integer. Guaranteed: training with it meets the budget. For a number of steps no larger
        one does. For epochs a much larger one may, since an epoch is rounded to whole steps.

    Raises:
        ValueError: an argument is out of range; not even batches of one meet the budget.
    """
    number_of_steps(steps, epochs, sampling)
    if sampling.takes_all:
        raise ValueError("Full batches have no size to choose. Use another kind of sampling.")
    if sampling.batch_sizes is not None:
        raise ValueError(
            "Expected batch sizes that change are not one size to choose: pass a sampling of one."
        )
    _check_budget(epsilon)

    @functools.cache
    def meets(size):
        sampled = dataclasses.replace(sampling, batch_size=size)
        resized = type(optimizer).from_config({**optimizer.get_config(), "batch_size": size})
        count = number_of_steps(steps, epochs, sampled)
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


def _bracket(excess, epsilon, start, spent):
    """Two logarithms of noise multipliers, of which only the larger meets the budget.

    As if epsilon were proportional to 1/σ, and not in leaps: far off, dp_accounting 0.4.3 fails.
    """
    low = high = start
    excess(start)  # errors of the arguments surface here

    def step(log_multiplier):
        return max(abs(excess(log_multiplier)), 1e-3) * 1.05

    try:
        while excess(high) > 0:
            low, high = high, high + step(high)
            if high > math.log(_MOST):
                most = math.exp(low)
                raise ValueError(
                    f"even noise_multiplier={most:.3g} has epsilon={spent(most):.3g} by this bound"
                )
    except ValueError as error:
        raise ValueError(
            f"epsilon={epsilon} cannot be met: {error}. Raise epsilon or delta, take fewer "
            "steps, or a smaller batch_size."
        ) from error
    while excess(low) < 0:
        low, high = low - step(low), low
        if low < math.log(_LEAST):
            raise ValueError(
                f"epsilon={epsilon} is met with hardly any noise (noise_multiplier="
                f"{math.exp(high):.3g}): such a guarantee means nothing. Choose a smaller epsilon."
            )
    return low, high


__getattr__ = renamed_names(__name__, {"Calibration": Plan})
