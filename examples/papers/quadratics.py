"""Private optimizers on quadratics: what is left of the loss, in closed form or simulated.

The loss is ½ Σ_j h_j e_j², e the distance to the optimum, in nats of a likelihood: curvature is
then the second moment of an example's gradient, of which the scale is chosen such that Σ h_j = 1.
Examples' gradients have the norm 1, which is the clip norm, and the gradient of a step is

    h_j e_j + N(0, h_j/B) + N(0, ν²),     ν = σ/B,

with the noise of the sample and that of the mechanism. In a geometry s, gradients are scaled before
they are clipped, to a norm C. How long they then are depends on how an example is made:

- dense: each example has all features, and scaled gradients all have the norm √(Σ h_j s_j²);
- sparse: an example has one feature, j with probability h_j, as a user or a word is one of many;
  its scaled gradient has the norm s_j.

A linear rule has a closed form: the weights are a sum of the start and of the noise of all steps,
each times what the rule makes of an impulse. Others are simulated, with normal noise.
"""

import dataclasses

import numpy as np
from numpy.polynomial import polynomial
from scipy import signal

from dp_keras_opt import filters

COPIES = 32  # of each coordinate in a simulation
BETA_1, BETA_2 = 0.9, 0.999  # of Adam
EPSILON = 1e-4  # of geometries, in units of a gradient's norm


@dataclasses.dataclass(frozen=True)
class Problem:
    """A quadratic whose coordinates come in groups that are alike.

    Attributes:
        curvatures: h of each group.
        counts: how many coordinates it has.
        distances: e at the start.
        noise: ν.
        batch_size: B, of the noise of the sample.
        sparse: whether an example has one feature.
    """

    curvatures: np.ndarray
    counts: np.ndarray
    distances: np.ndarray
    noise: float
    batch_size: float
    sparse: bool = False

    def loss(self, squares):
        """½ Σ h e², of e² in (…, groups)."""
        return 0.5 * np.sum(self.counts * self.curvatures * squares, axis=-1)

    def norms(self, scales):
        """The norms of scaled gradients, where scales are (settings, groups, copies)."""
        if self.sparse:
            return scales
        powers = np.mean(scales**2, axis=-1) @ (self.counts * self.curvatures)
        return np.sqrt(powers)[:, None, None].astype(scales.dtype)


def power_law(size, condition, flat, noise, sparse, groups=24, start=1.0, sigma=1.0):
    """A problem whose curvatures fall as a power of their rank.

    Args:
        size: number of weights.
        condition: the largest curvature over the smallest.
        flat: whether the loss at the start is the same for each coordinate, flat or steep; else
            the distance is, and the loss is in the steep ones.
        noise: ν.
        sparse: as in `Problem`.
        groups: that ranks are put in, wider and wider ones.
        start: the loss at the start, in nats.
        sigma: σ, by which the batches are so large.
    """
    edges = np.unique(np.geomspace(1, size + 1, groups + 1).astype(int))
    counts = np.diff(edges)
    ranks = np.sqrt(edges[:-1] * (edges[1:] - 1.0))
    curvatures = ranks ** (-np.log(condition) / np.log(size))
    curvatures /= np.sum(counts * curvatures)
    distances = curvatures**-0.5 if flat else np.ones_like(curvatures)
    distances = distances * np.sqrt(2 * start / np.sum(counts * curvatures * distances**2))
    return Problem(curvatures, counts, distances, noise, sigma / noise, sparse)


def momentum(beta, nesterov=False):
    """(b, a), of the filter b/a between gradient and step: v = βv + g, taken as v or as βv + g."""
    return ([1 + beta, -beta] if nesterov else [1.0]), [1.0, -beta]


def low_pass(name):
    """(b, a) of SGD behind one of the presets of `filters.LowPass`."""
    b, a = filters.PRESETS[name]
    return b, [1.0, *a]


def impulse_responses(rule, rates, curvatures, steps):
    """What a gradient of i steps ago does to the weights, (rates, groups, steps), i from 1 on.

    It is the closed loop of the rule η·b/a, of adding its steps up, and of curvature.
    """
    b, a = rule
    impulse = np.zeros(steps + 1)
    impulse[0] = 1.0
    result = np.empty((len(rates), len(curvatures), steps))
    for place in np.ndindex(result.shape[:2]):
        taken = rates[place[0]] * np.append(0.0, b)
        loop = polynomial.polyadd(polynomial.polymul(a, [1.0, -1.0]), curvatures[place[1]] * taken)
        result[place] = signal.lfilter(taken, loop, impulse)[1:]
    return result


def averaged(responses):
    """The responses of the mean of the weights after the second half of the steps."""
    sums = np.cumsum(responses, axis=-1)
    half = sums.shape[-1] // 2
    sums[..., half:] -= sums[..., : sums.shape[-1] - half].copy()
    return sums / half


def linear_losses(problem, responses, coefficients=(1.0,), price=1.0, levels=1.0):
    """The expected loss after all steps of a linear rule, for each rate.

    Args:
        problem: a `Problem`.
        responses: of the rule, (rates, groups, steps).
        coefficients: c of the Toeplitz matrix whose inverse correlates the noise.
        price: σ over that of independent noise at the same ε.
        levels: σ_t over σ, (steps,), by which correlated noise is multiplied.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # rates that are too high
        left = 1 - problem.curvatures * np.sum(responses, axis=-1)
        sampled = np.sum(responses**2, axis=-1) * problem.curvatures / problem.batch_size
        levelled = responses * np.flip(levels)
        correlated = signal.lfilter([1.0], coefficients, levelled, axis=-1)
        private = np.sum(correlated**2, axis=-1) * (price * problem.noise) ** 2
        losses = problem.loss((left * problem.distances) ** 2 + sampled + private)
    return np.where(np.isfinite(losses), losses, np.inf)


def draws(problem, steps, seed, coefficients=(1.0,)):
    """Two unit noises a step, of the sample and of the mechanism, (groups, COPIES)."""
    rng = np.random.default_rng(seed)
    shape = len(problem.counts), COPIES
    past = np.zeros((len(coefficients) - 1, *shape), np.float32)
    for _ in range(steps):
        sample, z = rng.standard_normal((2, *shape), np.float32)
        z = (z - np.tensordot(coefficients[1:], past, 1)) / coefficients[0]
        past = np.concatenate([z[None], past])[: len(past)]
        yield sample, z.astype(np.float32)


def release(problem, distances, sample, noise, scales=None, clip_norms=None):
    """The gradient of a step, in its geometry before, and as it is after."""
    h = _column(problem.curvatures)
    exact = h * distances + np.sqrt(h / problem.batch_size) * sample
    if scales is None:
        return exact + problem.noise * noise
    kept = np.minimum(1, clip_norms / problem.norms(scales))
    return kept * exact + problem.noise * clip_norms / scales * noise


def adam(problem, settings, noises, power=1.0):
    """Yields the squared distances after each step, (settings, groups, COPIES).

    Args:
        problem: a `Problem`.
        settings: dict of arrays (settings,): "rate"; and, for scale-then-privatize, "share", the
            noise in a scaled coordinate, which says how large the clip norm is. Without it, the
            second moment is bias-corrected and no smaller than the noise.
        noises: of the steps, as `draws` gives them.
        power: variance of the mechanism's noise at a step, in units of ν².
    """
    rates = _setting(settings["rate"])
    scale_first = "share" in settings
    clip_norms = _setting(settings["share"]) / np.float32(problem.noise) if scale_first else None
    e = np.ones_like(rates) * _column(problem.distances) * np.ones(COPIES, np.float32)
    m, v = np.zeros_like(e), np.zeros_like(e)
    floor = np.float32(power * problem.noise**2)
    for t, (sample, noise) in enumerate(noises, 1):
        scales = None
        if scale_first:
            scales = 1 / (np.sqrt(v / max(1 - BETA_2 ** (t - 1), EPSILON)) + EPSILON)
        g = release(problem, e, sample, noise, scales, clip_norms)
        m += (1 - BETA_1) * (g - m)
        v += (1 - BETA_2) * (g * g - v)
        v_hat = v / (1 - BETA_2**t)
        root = (
            np.sqrt(v_hat) + EPSILON if scale_first else np.sqrt(np.maximum(v_hat - floor, floor))
        )
        e -= rates / (1 - BETA_1**t) * m / root
        yield e**2


def delayed(problem, settings, noises):
    """Yields the squared distances after each step of DP²-RMSProp: see `adam`.

    `settings` has "rate" and "adaptive_rate", "share", and "delay", the steps of a phase.
    """
    rates, adaptive = _setting(settings["rate"]), _setting(settings["adaptive_rate"])
    clip_norms = _setting(settings["share"]) / np.float32(problem.noise)
    (delay,) = set(settings["delay"])
    e = np.ones_like(rates) * _column(problem.distances) * np.ones(COPIES, np.float32)
    total, v = np.zeros_like(e), np.zeros_like(e)
    for t, (sample, noise) in enumerate(noises):
        if t // delay % 2 == 0:
            g = release(problem, e, sample, noise)
            e -= rates * g
            total += g
            if (t + 1) % delay == 0:
                v = 0.9 * v + 0.1 * (total / delay) ** 2
                total[:] = 0
                scales = 1 / (np.sqrt(v) + EPSILON)
        else:
            g = release(problem, e, sample, noise, scales, clip_norms)
            e -= adaptive * scales * g
        yield e**2


def best(problem, squares):
    """(the lowest loss, the place of its setting), of squared distances as the rules yield them."""
    losses = problem.loss(np.mean(squares, axis=-1, dtype=np.float64))
    losses = np.where(np.isfinite(losses), losses, np.inf)
    return float(losses.min()), int(losses.argmin())


def _column(values):
    return np.asarray(values, np.float32)[:, None]


def _setting(values):
    return np.asarray(values, np.float32)[:, None, None]
