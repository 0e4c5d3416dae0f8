"""What the steps reveal of several units together.

References: of k units, by steps: Vadhan, "The complexity of differential privacy", 2017,
doi:10.1007/978-3-319-57048-8_7, lemma 2.2. Of k units that Poisson sampling draws, at once: Ganesh,
"Tight group-level DP guarantees for DP-SGD with sampling via mixture of Gaussians mechanisms",
2024, arXiv:2401.10294, by Choquette-Choo, Ganesh, Steinke and Thakurta, "Privacy amplification for
matrix mechanisms", ICLR 2024, arXiv:2310.15526, corollary 4.7.
"""

import math
from typing import NamedTuple

import dp_accounting
import numpy as np
from scipy import stats

from dp_keras_opt.accounting.accountant import epsilon_of
from dp_keras_opt.accounting.privacy_filters import is_lost, kept_filter

#: Of dp_accounting, which older versions lack.
_Mixture = getattr(dp_accounting.dp_event, "MixtureOfGaussiansDpEvent", None)

_INTERVAL = 1e-3  # of the losses, and
_CELLS = 2**18  # how many of them a release may have, before they are made wider
_DISTINCT = 16  # noise levels, of which each takes seconds; more are rounded down
_LEAST_LOG_DELTA = math.log(1e-200)
_TOLERANCE = 0.02  # in the logarithm of delta


class GroupEpsilon(NamedTuple):
    """A guarantee for several units together."""

    epsilon: float  # infinite where there is none
    is_joint: bool  # whether all of them take part in one data set and none in the other


def group_epsilon(segments, size, delta, accountant="auto"):
    """Epsilon for any `size` units together, at the same delta.

    Where units are drawn by Poisson sampling, or all releases count in full, and noise is Gaussian,
    the release on a group is priced as a whole, by privacy loss distributions: with all units or
    with none. As nothing smaller is true of it, the guarantee for one unit, taken `size` times at a
    smaller delta, is asked only elsewhere, and of the budget of a privacy filter that was kept.

    Args:
        segments: as for `accountant.epsilon_of`.
        size: k, the number of units.
        delta: probability that the guarantee fails, in (0, 1); 0 with Laplace noise.
        accountant: that of a single unit, where groups have none of their own.

    Returns:
        `GroupEpsilon`.
    """
    segments = [segment for segment in segments if segment.steps]
    if is_lost(segments):
        return GroupEpsilon(math.inf, is_joint=False)
    kept = kept_filter(segments)
    if kept is not None:
        return GroupEpsilon(_one_by_one(kept.epsilon_at, size, delta), is_joint=False)
    if delta > 0:
        try:
            whole = _whole_group(segments, size, delta)
        except _NotPriced:
            whole = math.inf
        if whole < math.inf:
            is_joint = any(segment.sampling.is_amplified for segment in segments)
            return GroupEpsilon(whole, is_joint)
    if accountant != "pld" and all(segment.is_pure for segment in segments):
        return GroupEpsilon(size * epsilon_of(segments, 0.0, accountant), is_joint=False)

    def of_one(delta):
        return epsilon_of(segments, delta, accountant)

    return GroupEpsilon(_one_by_one(of_one, size, delta), is_joint=False)


def group_privacy(epsilon, delta, size):
    """(epsilon, delta) for `size` units together, delta at most 1, from that for one unit.

    Reference: Vadhan, "The complexity of differential privacy", 2017,
    doi:10.1007/978-3-319-57048-8_7, lemma 2.2.
    """
    if math.isinf(epsilon):
        return math.inf, 1.0
    try:
        growth = math.expm1(size * epsilon) / math.expm1(epsilon) if epsilon else size
    except OverflowError:
        growth = math.inf
    return size * epsilon, min(delta * growth, 1.0)


def _one_by_one(of_one, size, delta):
    """`group_privacy` with the largest delta for one unit that keeps that of the group.

    Args:
        of_one: function of a delta that gives the epsilon of one unit.
        size, delta: of the group.
    """

    def of_group(log_delta):
        found = of_one(math.exp(log_delta))
        return group_privacy(found, math.exp(log_delta), size)

    # The first is too large, and each is followed by what would do if epsilon stayed as it is.
    high = math.log(delta)
    _, reached = of_group(high)
    low = high - max(math.log(reached / delta), math.log(size))
    while (best := of_group(low))[1] > delta:
        high, low = low, 2 * low - math.log(delta)
        if low < _LEAST_LOG_DELTA:
            return math.inf
    while high - low > _TOLERANCE:
        middle = (low + high) / 2
        found = of_group(middle)
        if found[1] <= delta:
            low, best = middle, found
        else:
            high = middle
    return best[0]


class _NotPriced(Exception):
    """A release on a group has no price of its own."""


def _whole_group(segments, size, delta):
    event = dp_accounting.ComposedDpEvent([_event(segment, size) for segment in segments])
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=_interval(event))
    return accountant.compose(event).get_epsilon(delta)


def _event(segment, size):
    """That of all steps on the group."""
    sampling = segment.sampling
    coins = sampling.is_poisson and sampling.groups == 1 and sampling.adjacency != "replace_one"
    if sampling.is_heuristic or (sampling.is_amplified and not (coins and _Mixture)):
        raise _NotPriced

    def on_group(event):
        if isinstance(event, dp_accounting.SelfComposedDpEvent):
            return dp_accounting.SelfComposedDpEvent(on_group(event.event), event.count)
        if isinstance(event, dp_accounting.ComposedDpEvent):
            return dp_accounting.ComposedDpEvent([on_group(each) for each in event.events])
        if isinstance(event, dp_accounting.NonPrivateDpEvent | dp_accounting.NoOpDpEvent):
            return event
        if isinstance(event, dp_accounting.GaussianDpEvent):  # k units move it by k times as much
            return dp_accounting.GaussianDpEvent(event.noise_multiplier / size)
        sampled = isinstance(event, dp_accounting.PoissonSampledDpEvent)
        if not (sampled and isinstance(event.event, dp_accounting.GaussianDpEvent)):
            raise _NotPriced
        drawn = np.arange(size + 1)
        chances = stats.binom.pmf(drawn, size, event.sampling_probability)
        return _Mixture(event.event.noise_multiplier, drawn.tolist(), chances.tolist())

    return on_group(segment.event(_DISTINCT))


def _interval(event):
    """Width of the cells of the losses, which are rounded up whatever it is."""

    def largest(event, count=1):
        """The largest loss of a release: dp_accounting cuts at 11 standard deviations."""
        if isinstance(event, dp_accounting.ComposedDpEvent):
            return max((largest(each, count) for each in event.events), default=0.0)
        if isinstance(event, dp_accounting.SelfComposedDpEvent):
            return largest(event.event, count * event.count)
        if isinstance(event, dp_accounting.GaussianDpEvent):  # these are composed to one
            distance = math.sqrt(count) / event.noise_multiplier
        elif _Mixture and isinstance(event, _Mixture):
            distance = max(event.sensitivities) / event.standard_deviation
        else:
            return 0.0
        return distance**2 / 2 + 11 * distance

    return max(_INTERVAL, largest(event) / _CELLS)
