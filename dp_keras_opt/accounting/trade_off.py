"""Trade-off curves: how often a test can be right about who was in the data, at most.

Whoever tells two neighbouring data sets apart by what a training released is wrong in two ways. At
each false-positive rate α the true-positive rate is bounded by lines: where δ(ε) is the divergence
of the two outcomes, it is at most e^ε·α + δ(ε), for every real ε. The smallest of them is the best
test of Neyman and Pearson, as the ε grow dense.

References: Dong, Roth and Su, "Gaussian differential privacy", Journal of the Royal Statistical
Society B 84(1), 2022, arXiv:1905.02383, proposition 2.5 and section 2.4; Kairouz, Oh and Viswanath,
"The composition theorem for differential privacy", ICML 2015, arXiv:1311.0776.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from scipy import stats

#: So many lines are taken from a loss distribution.
_LINES = 2049
#: Beyond this, e^ε is not a number of float64.
_LARGEST = 700.0
#: What the rounding of Fourier transforms may have taken from a δ.
_ROUNDING = 1e-12
#: How closely a curve is held against a Gaussian's: the first intervals, and the error.
_INTERVALS, _TOLERANCE = 1024, 1e-5


class TradeOff(NamedTuple):
    """A bound on the true-positive rate: the least of lines over the false-positive rate.

    Attributes:
        slopes, intercepts: of the lines, each of which is the least somewhere; slopes ascend.
        advantage: a bound on the true-positive minus the false-positive rate, at every threshold.
    """

    slopes: np.ndarray
    intercepts: np.ndarray
    advantage: float

    def __call__(self, rates):
        """The bound at these false-positive rates, an array."""
        rates = np.asarray(rates, np.float64)
        crossings = -np.diff(self.intercepts) / np.diff(self.slopes)  # they descend
        least = np.searchsorted(-crossings, -rates)
        return np.minimum(1.0, self.slopes[least] * rates + self.intercepts[least])

    def most_with_ratio(self, ratio):
        """The largest τ ≤ T(τ·ratio): of each line, what solves τ = slope·τ·ratio + intercept."""
        rise = self.slopes * ratio
        limits = self.intercepts[rise < 1] / (1 - rise[rise < 1])
        return float(min(1.0, limits.min(initial=1.0)))

    def gaussian_mu(self, floor):
        """The least μ whose Gaussian curve is above this one, where both errors exceed floor."""
        quantiles = np.linspace(stats.norm.ppf(floor), stats.norm.isf(floor), _INTERVALS + 1)
        low, high, largest = quantiles[:-1], quantiles[1:], 0.0
        if self(floor) > 1 - floor:
            return math.inf
        while len(low):
            begin, end = self(stats.norm.cdf(low)), self(stats.norm.cdf(high))
            end = np.minimum(end, 1 - floor)  # beyond which nothing is said
            largest = max(largest, np.max(stats.norm.ppf(np.minimum(begin, end)) - low))
            # Within an interval the curve is below its value at the end.
            open_ = (begin < 1 - floor) & (stats.norm.ppf(end) - low > largest + _TOLERANCE)
            low, high = low[open_], high[open_]
            middle = (low + high) / 2
            low, high = np.concatenate([low, middle]), np.concatenate([middle, high])
        return float(largest + _TOLERANCE)


def _least_of(lines):
    """The `TradeOff` of lines, pairs (slope, intercept)."""
    lines = sorted(lines)
    advantage = min((intercept for slope, intercept in lines if slope == 1.0), default=1.0)
    kept: list[tuple[float, float]] = []
    for slope, intercept in lines:
        if kept and intercept >= kept[-1][1]:
            continue  # nowhere the least
        while len(kept) > 1 and _crossing(kept[-1], (slope, intercept)) >= _crossing(*kept[-2:]):
            kept.pop()
        kept.append((slope, intercept))
    slopes, intercepts = np.array(kept).T
    return TradeOff(slopes, intercepts, float(min(1.0, advantage)))


def _crossing(one, other):
    return (one[1] - other[1]) / (other[0] - one[0])


def of_losses(losses):
    """The curves of a `PrivacyLossDistribution` of dp_accounting: one for each direction.

    Its discretisation is pessimistic at every real ε, so these are bounds.
    """
    directions = (losses._pmf_remove, losses._pmf_add)
    return [_of_pmf(pmf) for pmf in {id(each): each for each in directions}.values()]


def _of_pmf(pmf):
    pmf = pmf.to_dense_pmf()
    ends = np.float64([pmf._lower_loss - 1, pmf._lower_loss + pmf.size]) * pmf._discretization
    low, high = np.clip(ends, -_LARGEST, _LARGEST)
    epsilons = np.union1d(np.linspace(min(low, -1e-3), max(high, 1e-3), _LINES), [0.0])
    deltas = np.asarray(pmf.get_delta_for_epsilon(epsilons))
    return _least_of(zip(np.exp(epsilons), np.clip(deltas, 0.0, 1.0) + _ROUNDING, strict=True))


def of_pairs(pairs: Iterable[tuple[float, float]]) -> TradeOff:
    """The curve that follows from (ε, δ) that all hold: the same in both directions."""
    lines = [(0.0, 1.0)]
    for epsilon, delta in pairs:
        if epsilon < _LARGEST:
            up, down = math.exp(epsilon), math.exp(-epsilon)
            both = (math.expm1(epsilon) + 2 * delta) / (up + 1)  # through where these two meet
            lines += [(up, delta), (1.0, both), (down, -math.expm1(-epsilon) + down * delta)]
    return _least_of(lines)
