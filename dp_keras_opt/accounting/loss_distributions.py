"""Privacy loss distributions of a whole ledger, composed by dp_accounting: the accountant "pld".

dp_accounting discretises the losses of a step pessimistically ("connect the dots") and composes
them. What is added here is the choice of the grid. Its interval is a power of two and a fixed share
of the standard deviation of the losses of one step, so that it widens the distribution by the same
small share however many steps there are. It depends on the kind of step and on nothing else: kinds
of different intervals are composed each for itself, then brought to the next coarser grid, where
what is larger stays larger. So ε does not fall when steps are added.

Reference: Doroshenko, Ghazi, Kamath, Kumar and Manurangsi, "Connect the dots: tighter discrete
approximations of privacy loss distributions", PoPETs 2022, arXiv:2207.04380.
"""

import collections
import functools
import math

import dp_accounting
import numpy as np
from dp_accounting.pld import common, pld_pmf
from dp_accounting.pld.privacy_loss_distribution import (
    PrivacyLossDistribution,
    from_privacy_parameters,
    identity,
)

from dp_keras_opt.accounting.random_allocation import (
    RandomAllocationAccountant,
    RandomAllocationDpEvent,
)
from dp_keras_opt.accounting.replace_one import ReplaceOneAccountant
from dp_keras_opt.accounting.sampled_gaussian import sampled_gaussian
from dp_keras_opt.noise.thresholded import FailureDpEvent

#: The interval is at most this share of the standard deviation of a step's losses, and more than
#: half of it, and within these ends; but for at most so many points to a step.
_RESOLUTION = 1 / 16
_FINEST, _COARSE = 2.0**-20, 2.0**-7
_MOST_POINTS = 2**17
#: With so little noise that it would be wider, or with more points in all, there is no bound here.
_WIDEST = 1.0
_MOST_POINTS_COMPOSED = 2**23
#: The interval of what has none of its own.
_USUAL = 2.0**-13
#: dp_accounting cuts off the tails of a step at some of these deviations.
_DEVIATIONS = 9.0
#: It cuts off as much of the tails of several, and adds it to the mass of infinite losses.
_CUT_OFF = 1e-15
#: It cannot compose what has next to no finite losses.
_LOST = 1 - 1e-9
#: At a smaller δ the rounding of dp_accounting's Fourier transforms would count.
_LEAST_DELTA = 1e-12


class LossDistributionAccountant(dp_accounting.PrivacyAccountant):
    """dp_accounting's PLD accountant, with a grid for each kind of step.

    Args:
        neighboring_relation: as of other accountants.
        is_replaced: whether what is sampled is an example that is replaced (`replace_one.py`).
    """

    def __init__(self, neighboring_relation, is_replaced=False):
        super().__init__(neighboring_relation)
        self._kind = ReplaceOneAccountant if is_replaced else RandomAllocationAccountant
        self._counts = collections.Counter()
        self._precision = 0.0  # of Gaussians without sampling: together they are one
        self._log_whole = 0.0  # ln of the probability that no `FailureDpEvent` fails
        self._checker = self._kind(neighboring_relation)

    def _maybe_compose(self, event, count, do_compose):
        if isinstance(event, dp_accounting.SelfComposedDpEvent):
            return self._maybe_compose(event.event, event.count * count, do_compose)
        if isinstance(event, dp_accounting.ComposedDpEvent):
            errors = (self._maybe_compose(part, count, do_compose) for part in event.events)
            return next((error for error in errors if error is not None), None)
        if isinstance(event, FailureDpEvent):
            self._log_whole += do_compose * count * math.log1p(-event.delta)
            return None
        if do_compose and count:
            if isinstance(event, dp_accounting.GaussianDpEvent) and event.noise_multiplier > 0:
                self._precision += count / event.noise_multiplier**2
            else:
                self._counts[event] += count
        return None if do_compose else self._checker._maybe_compose(event, count, False)

    def composed(self):
        """The `PrivacyLossDistribution` of all that was composed; None where there is none."""
        by_interval = collections.defaultdict(list)
        for event, count in self._events():
            interval = interval_for(event)
            losses = None
            if interval <= _WIDEST:
                losses = losses_of(self._kind, self.neighboring_relation, event, interval)
            losses = losses and _self_composed(losses, count)
            if losses is None:
                return None
            by_interval[interval].append(losses)
        total = identity(min(by_interval, default=_USUAL))
        for interval in sorted(by_interval):  # from fine to coarse
            total = coarsened(total, interval)
            if max(total._pmf_remove._infinity_mass, total._pmf_add._infinity_mass) > _LOST:
                return None
            for losses in by_interval[interval]:
                total = total.compose(losses)
        if self._log_whole:
            failure = common.DifferentialPrivacyParameters(0.0, -math.expm1(self._log_whole))
            width = total._pmf_remove._discretization
            total = total.compose(from_privacy_parameters(failure, width))
        return total

    def _events(self):
        """Each event, and how many times it took place."""
        yield from self._counts.items()
        if self._precision:
            yield dp_accounting.GaussianDpEvent(self._precision**-0.5), 1

    def get_epsilon(self, target_delta):
        if not any(self._events()) and not self._log_whole:
            return 0.0
        losses = self.composed() if target_delta >= _LEAST_DELTA else None
        return math.inf if losses is None else float(losses.get_epsilon_for_delta(target_delta))

    def get_delta(self, target_epsilon):
        losses = self.composed()
        return 1.0 if losses is None else float(losses.get_delta_for_epsilon(target_epsilon))


def _self_composed(losses, count):
    """A `PrivacyLossDistribution` composed with itself; None where that takes too much memory."""
    if count == 1:
        return losses
    for pmf in (losses._pmf_remove, losses._pmf_add):
        probabilities = pmf.to_dense_pmf()._probs
        if len(probabilities) * count > _MOST_POINTS_COMPOSED:
            low, high = common.compute_self_convolve_bounds(probabilities, count, _CUT_OFF)
            if high - low > _MOST_POINTS_COMPOSED:
                return None
    return losses.self_compose(count, _CUT_OFF)


@functools.lru_cache(maxsize=512)
def losses_of(kind, neighboring_relation, event, interval):
    """The `PrivacyLossDistribution` of an event, by this kind of accountant; None if it is lost."""
    probability, sigma = _sampled_gaussian(event)
    if 0 < probability < 1 and 0 < sigma < math.inf and kind is not ReplaceOneAccountant:
        return sampled_gaussian(sigma, probability, interval)
    accountant = kind(neighboring_relation, interval).compose(event)
    return None if accountant._contains_non_dp_event else accountant._pld


def coarsened(losses, interval):
    """A `PrivacyLossDistribution` on a coarser grid, from above, again by connecting the dots.

    Its δ(ε) is that of before at each point of the grid, so it keeps the order of two profiles. To
    round each loss up would not: ε could fall where a step is added.
    """

    def on_grid(pmf):
        pmf = pmf.to_dense_pmf()
        ends = np.float64([pmf._lower_loss, pmf._lower_loss + pmf.size - 1])
        low, high = ends * (pmf._discretization / interval)
        low, high = math.floor(low), math.ceil(high)
        with np.errstate(over="ignore", invalid="ignore"):  # exp(ε) of large ε
            deltas = pmf.get_delta_for_epsilon(interval * np.arange(low, high + 1))
        # δ falls: where it is not a number, that of the next smaller ε is a bound.
        known = np.fmin.accumulate(np.append(1.0, deltas))[1:]
        deltas = np.where(np.isnan(deltas), known, deltas)
        falling = np.maximum.accumulate(np.clip(deltas, 0.0, 1.0)[::-1])[::-1]  # but for rounding
        return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, low, high, falling)

    remove, add = losses._pmf_remove, losses._pmf_add
    once = on_grid(remove)
    return PrivacyLossDistribution(once, once if add is remove else on_grid(add))


def interval_for(event):
    """The interval of the grid of losses for one event, a power of two."""
    probability, sigma = _sampled_gaussian(event)
    if isinstance(event, RandomAllocationDpEvent):
        deviation, width = event.deviation, 0.0
    elif sigma > 0:
        deviation, width = _spread(probability, sigma)
    else:
        return _USUAL
    wanted = max(min(deviation * _RESOLUTION, _COARSE), width / _MOST_POINTS, _FINEST)
    return 2.0 ** math.floor(math.log2(wanted))


def _sampled_gaussian(event):
    """Sampling probability and noise multiplier of an event; (1.0, 0.0) if it is none such."""
    probability = 1.0
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        probability, event = event.sampling_probability, event.event
    if not isinstance(event, dp_accounting.GaussianDpEvent):
        return 1.0, 0.0
    return probability, event.noise_multiplier


def _spread(probability, sigma):
    """Standard deviation and width of ln(1 − q + q·exp((x − ½)/σ²)), x ~ N(0, σ²), nearly."""
    x = sigma * np.linspace(-_DEVIATIONS, _DEVIATIONS, 1001)
    x = np.append(x, 1 + _DEVIATIONS * sigma)
    exponents = (x - 0.5) / sigma**2
    if probability < 1:
        losses = np.logaddexp(math.log1p(-probability), math.log(probability) + exponents)
    else:
        losses = exponents
    weights = np.exp(-0.5 * (x / sigma) ** 2)
    mean = np.average(losses, weights=weights)
    deviation = math.sqrt(np.average((losses - mean) ** 2, weights=weights))
    return deviation, float(losses[-1] - losses[0])
