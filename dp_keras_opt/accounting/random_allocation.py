"""The privacy loss of an epoch in which every unit falls into one of t bins at random.

Bin j is batch j ("balls in bins", "random allocation"). With noise of multiplier σ_i at step i an
epoch is dominated, for adaptive steps too, by a mixture of t Gaussians against one:

    P = (1/t) Σ_i N(e_i, diag σ²)  against  Q = N(0, diag σ²),   P/Q = S/t,   S = Σ_i L_i.

Under Q the L_i are independent lognormals of mean 1. Both hockey sticks,

    δ_remove(ε) = E (S/t − e^ε)₊  and  δ_add(ε) = E (1 − e^ε·S/t)₊,

are convex in S for every real ε. So S may be replaced by what is larger in the convex order, as by
giving the mass of a point to the two grid points beside it, mass and mean kept: no hockey stick
falls, and sums of independent variables keep that order. All here are such splits, onto the points
0 and exp(i·h), and sums of positive terms, so that rounding is relative to each of them.

References: Chua, Ghazi, Harrison, Leeman, Kamath, Kumar, Manurangsi, Sinha and Zhang,
"Balls-and-bins sampling for DP-SGD", AISTATS 2025, arXiv:2412.16802 (the pair of distributions);
Feldman and Shenfeld, "Privacy amplification by random allocation", 2025, arXiv:2502.08202, and
"Efficient privacy loss accounting for subsampling and random allocation", 2026,
arXiv:2602.17284 (the pair for adaptive steps, and its distribution by convolution).
"""

import collections
import dataclasses
import functools
import math

import attr
import dp_accounting
import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import special

from dp_keras_opt.checks import is_number, whole_number

#: Mass that may be moved to infinity (or to S = 0) at a time: some 20 times in an epoch. Over
#: 1,000 epochs that stays below δ/1000 for δ ≥ 1e-12; for a smaller δ it can only raise ε.
_TAIL = 1e-20
_TAIL_IN_DEVIATIONS = -special.ndtri(_TAIL)
#: Grid steps are powers of two: at most this one, and at most this share of the deviation of ln S,
#: which all splits together then widen by less than 0.2%; but for at most so many cells, beyond
#: which the bound is looser instead.
_COARSEST = 2.0**-7
_RESOLUTION = 1 / 32
_MAX_CELLS = 8192
#: With less noise ε is in the hundreds: exp(ε) and the grid of losses get out of hand.
_LEAST_NOISE = 0.1
#: More noise than this is taken to be this: an epoch has ε of some 1e-5 at most.
_MOST_NOISE = 1e6
#: More distinct noise levels than this are rounded down by rank, to so many blocks of equal length.
_MAX_DISTINCT = 8
_BLOCKS = 256


def _counted(multipliers):
    """σ_i, or (σ, count), as sorted pairs of distinct σ and their counts."""
    counts = collections.Counter()
    for each in multipliers:
        sigma, count = each if isinstance(each, tuple | list) else (each, 1)
        if not (is_number(sigma) and sigma >= 0):
            raise ValueError(f"noise_multipliers must be numbers >= 0; received {sigma!r}.")
        counts[float(sigma)] += whole_number(count, "a count of noise_multipliers")
    return tuple(sorted(counts.items()))


@attr.s(frozen=True, slots=True, auto_attribs=True)
class RandomAllocationDpEvent(dp_accounting.DpEvent):
    """One epoch: each unit is in one of its steps, drawn uniformly and independently of all others.

    A begun epoch counts whole: what is not run of it is given all the same.

    Attributes:
        noise_multipliers: sorted pairs (σ, count), noise multipliers of Gaussian noise and how many
            steps have them. May be given as one σ for each step, too. Fixed beforehand.
        bins: the number of steps t.

    Raises:
        ValueError: a multiplier is negative or no number, or there are not as many as bins.
    """

    noise_multipliers: tuple[tuple[float, int], ...] = attr.ib(converter=_counted)
    bins: int

    def __attrs_post_init__(self):
        whole_number(self.bins, "bins")
        found = sum(count for _, count in self.noise_multipliers)
        if found != self.bins:
            raise ValueError(
                f"noise_multipliers has {found} steps, but bins={self.bins}: an epoch has one "
                "step for each bin."
            )

    @property
    def least_noise(self) -> float:
        """The smallest noise multiplier of the epoch."""
        return self.noise_multipliers[0][0]

    @property
    def deviation(self) -> float:
        """The standard deviation of its loss, nearly: that of ln S, were S lognormal."""
        least = max(self.least_noise, _LEAST_NOISE)
        terms = (count * math.expm1(max(s, least) ** -2) for s, count in self.noise_multipliers)
        return math.sqrt(math.log1p(sum(terms) / self.bins**2))

    @property
    def unamplified(self) -> dp_accounting.GaussianDpEvent:
        """One release that reveals no less: with every unit in the step with the least noise."""
        return dp_accounting.GaussianDpEvent(self.least_noise)


class RandomAllocationAccountant(dp_accounting.pld.PLDAccountant):
    """PLD that takes `RandomAllocationDpEvent`, too, for `add_or_remove_one` and `zero_out`.

    Guarantee: ε and δ are upper bounds. Where a step of several has σ < 0.1, ε is infinite.
    """

    def _maybe_compose(self, event, count, do_compose):
        if not isinstance(event, RandomAllocationDpEvent):
            return super()._maybe_compose(event, count, do_compose)
        if self.neighboring_relation == dp_accounting.NeighboringRelation.REPLACE_ONE:
            return self.CompositionErrorDetails(event, _NOT_REPLACED)
        if event.least_noise == math.inf:
            return None
        if event.bins == 1:
            return super()._maybe_compose(event.unamplified, count, do_compose)
        if event.least_noise < _LEAST_NOISE:
            return super()._maybe_compose(dp_accounting.NonPrivateDpEvent(), count, do_compose)
        if do_compose:
            epoch = epoch_losses(event.noise_multipliers, self._value_discretization_interval)
            self._pld = self._pld.compose(epoch if count == 1 else epoch.self_compose(count))
        return None


class UnamplifiedRdpAccountant(dp_accounting.rdp.RdpAccountant):
    """RDP that prices a `RandomAllocationDpEvent` as one release with the least of its noise.

    Guarantee: an upper bound, since the mixture is no worse than its worst component. It has a
    finite ε at every δ.
    """

    def _maybe_compose(self, event, count, do_compose):
        if isinstance(event, RandomAllocationDpEvent):
            if self._neighboring_relation == dp_accounting.NeighboringRelation.REPLACE_ONE:
                return self.CompositionErrorDetails(event, _NOT_REPLACED)
            event = event.unamplified
        if do_compose and _is_sampled_gaussian(event):
            in_doubles = _in_doubles(event)
            self._rdp += count * _rdp_of(
                in_doubles, self._neighboring_relation, tuple(self._orders)
            )
            return None
        return super()._maybe_compose(event, count, do_compose)


def _is_sampled_gaussian(event):
    sampled = dp_accounting.PoissonSampledDpEvent, dp_accounting.SampledWithoutReplacementDpEvent
    return isinstance(event, sampled) and isinstance(event.event, dp_accounting.GaussianDpEvent)


def _in_doubles(event):
    """`event` with numbers of Python: of NumPy's equal ones of 32 bits divergences differ."""
    gaussian = attr.evolve(event.event, noise_multiplier=float(event.event.noise_multiplier))
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        probability = float(event.sampling_probability)
        return attr.evolve(event, sampling_probability=probability, event=gaussian)
    return attr.evolve(event, event=gaussian)


@functools.lru_cache(maxsize=512)
def _rdp_of(event, neighboring_relation, orders):
    """The Rényi divergences of one step, which take dp_accounting tens of milliseconds.

    A budget's search, a report and a calibration ask for those of the same step again and again.
    """
    accountant = dp_accounting.rdp.RdpAccountant(orders, neighboring_relation).compose(event)
    accountant._rdp.setflags(write=False)  # it is cached
    return accountant._rdp


_NOT_REPLACED = (
    "The pair of distributions is proved for an example that is added, removed or zeroed, and not "
    "for one that is replaced."
)


@functools.lru_cache(maxsize=64)
def epoch_losses(noise_multipliers, interval):
    """The privacy loss distribution of one epoch, from above.

    The last split is onto S/t = exp(k·interval), at which the losses are the multiples of the
    interval: what "connect the dots" does to a continuous distribution (Doroshenko et al.,
    arXiv:2207.04380), here without differences of hockey sticks.

    Args:
        noise_multipliers: sorted pairs (σ, count), with 0.1 <= σ.
        interval: of the losses.

    Returns:
        A `PrivacyLossDistribution`, for an example removed and for one added.
    """
    bins = sum(count for _, count in noise_multipliers)
    total = _sum(noise_multipliers)
    first, masses = _split(total.log_values - math.log(bins), total.masses, interval)
    losses = interval * (first + np.arange(len(masses)))
    return PrivacyLossDistribution(
        _pmf(first, masses * np.exp(losses), total.lost / bins, interval),
        _pmf(1 - first - len(masses), masses[::-1], total.zero, interval),
    )


def _pmf(first, masses, at_infinity, interval):
    """A pessimistic distribution of losses, its lower tail rounded up."""
    cut = int(np.searchsorted(np.cumsum(masses), _TAIL))
    kept = masses[cut:].copy()
    kept[0] += masses[:cut].sum()
    kept.setflags(write=False)  # it is cached
    return pld_pmf.DensePLDPmf(interval, first + cut, kept, at_infinity, True)


@dataclasses.dataclass(frozen=True)
class _Sum:
    """A sum of likelihood ratios under Q, on the grid {0} ∪ {exp(i·h)}.

    Attributes:
        first: i of the first point.
        masses: those of the points.
        fineness: f, where h = 2^−f.
        zero: the mass at 0.
        lost: by how much the mean is below that of the sum, because its upper tail was cut off.
        terms, variance: number of terms and variance of the sum before all splits.
    """

    first: int
    masses: np.ndarray
    fineness: int
    zero: float
    lost: float
    terms: int
    variance: float

    @property
    def log_values(self):
        return (self.first + np.arange(len(self.masses))) * 2.0**-self.fineness

    def on(self, fineness):
        """The same distribution on a finer grid, or split onto a coarser one."""
        if fineness <= self.fineness:
            first, masses = _split(self.log_values, self.masses, 2.0**-fineness)
            return dataclasses.replace(self, first=first, masses=masses, fineness=fineness)
        stride = 2 ** (fineness - self.fineness)
        masses = np.zeros((len(self.masses) - 1) * stride + 1)
        masses[::stride] = self.masses
        return dataclasses.replace(
            self, first=self.first * stride, masses=masses, fineness=fineness
        )

    def trimmed(self):
        """Without tails that hardly count: the upper one cut off, the lower one split to 0."""
        values = np.exp(self.log_values)
        means = self.masses * values
        above = np.cumsum(means[::-1])[::-1]
        last = int(np.count_nonzero(above > _TAIL * self.terms)) - 1
        low = int(np.searchsorted(np.cumsum(self.masses), _TAIL))
        kept = self.masses[low : last + 1].copy()
        # What lies above the last point is lowered to it: an added example's loss only grows.
        kept[-1] += self.masses[last + 1 :].sum()
        lost = self.lost + means[last + 1 :].sum()
        upper = means[:low].sum() / values[low]
        kept[0] += upper
        zero = self.zero + max(self.masses[:low].sum() - upper, 0.0)
        return dataclasses.replace(self, first=self.first + low, masses=kept, zero=zero, lost=lost)


def _fineness(terms, variance, width):
    """f of the grid for a sum whose logarithm covers this width."""
    step = min(_RESOLUTION * math.sqrt(math.log1p(variance / terms**2)), _COARSEST)
    return math.ceil(-math.log2(max(step, width / _MAX_CELLS)))


def _likelihood_ratio(sigma):
    """L = exp(x/σ − 1/(2σ²)), x ~ N(0, 1): the masses of cells under Q, their means under P."""
    sigma = min(sigma, _MOST_NOISE)
    middle, tail = 0.5 / sigma**2, _TAIL_IN_DEVIATIONS / sigma
    variance = math.expm1(sigma**-2)
    fineness = _fineness(1, variance, 2 * (middle + tail))
    step = 2.0**-fineness
    last = math.ceil((middle + tail) / step)
    edges = np.arange(-last, last + 1)
    under_q, under_p = ((edges * step + sign * middle) * sigma for sign in (1, -1))
    masses = _between(under_q[:-1], under_q[1:])
    means = _between(under_p[:-1], under_p[1:])
    split = np.zeros(len(edges))
    upper = _upper_share(masses, means * np.exp(-step * edges[:-1]), step)
    split[:-1] += masses - upper
    split[1:] += upper
    lowest = special.ndtr(under_q[0])
    upper = min(special.ndtr(under_p[0]) * math.exp(step * last), lowest)
    split[0] += upper
    split[-1] += special.ndtr(-under_q[-1])
    lost = special.ndtr(-under_p[-1])
    return _Sum(-last, split, fineness, lowest - upper, lost, 1, variance)


def _between(lower, upper):
    """Φ(upper) − Φ(lower), from the nearer tail.

    Raises:
        ArithmeticError: it is negative.
    """
    right = lower > 0
    masses = special.ndtr(np.where(right, -lower, upper)) - special.ndtr(
        np.where(right, -upper, lower)
    )
    if not np.all(masses >= 0):
        raise ArithmeticError("The mass of a cell came out negative: the bound would not hold.")
    return masses


def _upper_share(masses, means, step):
    """What the upper end of a cell gets of its mass; means are in units of the lower end."""
    return np.clip((means - masses) / math.expm1(step), 0.0, masses)


def _split(log_values, masses, step):
    """Splits masses at exp(log_values) onto exp(i·step): the first i, and the masses."""
    places = log_values / step
    cells = np.floor(places).astype(int)
    upper = _upper_share(masses, masses * np.exp(step * (places - cells)), step)
    first = int(cells[0])
    split = np.bincount(cells - first, masses - upper, int(cells[-1]) - first + 2)
    split += np.bincount(cells - first + 1, upper, len(split))
    return first, split


def _ends(x, y):
    """ln of the least and of the largest sum that is not 0."""
    return (np.logaddexp(x.log_values[end], y.log_values[end]) for end in (0, -1))


def _plus(x, y):
    """The sum of two independent ones, on a grid as fine as it needs."""
    terms, variance = x.terms + y.terms, x.variance + y.variance
    bottom, top = _ends(x, y)
    wanted = _fineness(terms, variance, top - bottom)
    fineness = min(wanted, max(x.fineness, y.fineness))
    x, y = (each if each.fineness == fineness else each.on(fineness) for each in (x, y))
    bottom, top = _ends(x, y)
    step, stride, out_step = 2.0**-fineness, 2 ** (wanted - fineness), 2.0**-wanted
    first = math.floor(bottom / out_step) - 1  # one more at each end, against rounding
    out = np.zeros(math.ceil(top / out_step) - first + 3)
    zero = x.zero * y.zero
    for one, other in ((x, y), (y, x)):  # where the other is 0; below the first point, split to 0
        masses = other.zero * one.masses
        below = min(max(-(-first // stride) - one.first, 0), len(masses))
        upper = masses[:below] @ np.exp(one.log_values[:below] - first * out_step)
        out[0] += upper
        zero += masses[:below].sum() - upper
        start = (one.first + below) * stride - first
        out[start : start + (len(masses) - below) * stride : stride] += masses[below:]
    _add_ordered(out, first, x, y, 0, step, stride)
    _add_ordered(out, first, y, x, 1, step, stride)
    return _Sum(first, out, wanted, zero, x.lost + y.lost, terms, variance).trimmed()


def _add_ordered(out, first, big, small, least, step, stride):
    """Adds to `out` the pairs in which big's index exceeds small's by at least `least`.

    exp(i·h) + exp((i−d)·h) = exp(i·h)·(1 + exp(−d·h)): how far it lies above i, and so its split,
    depends on d alone. From some d on it lies in the cell above i, and sums over d do.

    Args:
        out: masses at exp(k·h/stride), from k = first.
        first: see there.
        big, small: `_Sum`, on grids of one step h.
        least: least d, 0 or 1.
        step: h.
        stride: by how much finer the grid of `out` is.
    """
    out_step = step / stride
    end = big.first + len(big.masses)
    least = max(least, big.first - small.first - len(small.masses) + 1)
    near = max(math.ceil(-math.log(math.expm1(out_step)) / step), least)
    distances = np.arange(least, min(near, end - small.first))
    places = np.log1p(np.exp(-step * distances)) / out_step
    cells = np.floor(places).astype(int)
    shares = np.clip(np.expm1(out_step * (places - cells)) / math.expm1(out_step), 0.0, 1.0)
    for d, cell, share in zip(distances, cells, shares, strict=True):
        low = max(big.first, small.first + d)
        high = min(end, small.first + len(small.masses) + d)
        pairs = big.masses[low - big.first : high - big.first].copy()
        pairs *= small.masses[low - d - small.first : high - d - small.first]
        _put(out, low * stride + cell - first, stride, pairs, share * pairs)

    low = max(big.first, small.first + near)
    if low >= end:
        return
    # All of small's points up to the distance `near`: their masses and means, added up.
    up_to = np.minimum(np.arange(low, end) - near - small.first, len(small.masses) - 1)
    masses = np.cumsum(small.masses)[up_to]
    means = np.cumsum(small.masses * np.exp(small.log_values))[up_to]
    shares = np.minimum(means * np.exp(-step * np.arange(low, end)) / math.expm1(out_step), masses)
    pairs = big.masses[low - big.first :]
    _put(out, low * stride - first, stride, pairs * masses, pairs * shares)


def _put(out, start, stride, masses, upper):
    """Adds masses to every `stride`-th cell from `start` on, their upper shares one cell above."""
    stop = start + (len(masses) - 1) * stride + 1
    out[start:stop:stride] += masses - upper
    out[start + 1 : stop + 1 : stride] += upper


def _sum(noise_multipliers):
    """S for these (σ, count), by halving: terms of both halves are alike, as are their grids."""

    @functools.cache
    def of(counts):
        if sum(count for _, count in counts) == 1:
            return _likelihood_ratio(counts[0][0])
        halves = [], []
        extra = 0
        for sigma, count in counts:
            for side in (0, 1):
                part = count // 2 + (count % 2 and extra % 2 == side)
                if part:
                    halves[side].append((sigma, part))
            extra += count % 2
        left, right = (of(tuple(half)) for half in halves)
        return _plus(left, right)

    return of(_rounded(noise_multipliers))


def _rounded(noise_multipliers):
    """Many distinct noise levels as fewer, none of them larger than before.

    Sorted by noise, the steps fall into blocks of one power of two; each block gets its least σ.
    Less noise at any step never means more after it.
    """
    if len(noise_multipliers) <= _MAX_DISTINCT:
        return noise_multipliers
    sigmas, counts = (np.array(each) for each in zip(*noise_multipliers, strict=True))
    bins = int(counts.sum())
    size = 2 ** max(math.ceil(math.log2(bins / _BLOCKS)), 0)
    firsts = np.arange(0, bins, size)
    least = sigmas[np.searchsorted(np.cumsum(counts), firsts, side="right")]
    return _counted(zip(least, np.diff(np.append(firsts, bins)), strict=True))
