"""Strategies of correlated noise: their coefficients, sensitivities and errors, in NumPy.

A strategy is a lower-triangular matrix C; the noise of the steps is C⁻¹z. What is released is
C⁻¹(C x + z), x the clipped sums of the steps: one Gaussian mechanism on C x, whose sensitivity is
how far one example, with all its participations, moves C x.

Reference: Choquette-Choo, Ganesh, McKenna, McMahan, Rush, Thakurta and Xu, "(Amplified) banded
matrix factorization: a unified approach to private training", NeurIPS 2023, arXiv:2306.08153.
"""

import functools

import numpy as np
from scipy import optimize, signal, special


def square_root_coefficients(count):
    """c_k = Π_{j≤k} (2j − 1)/(2j): the Toeplitz square root of the prefix sums, C·C = A."""
    j = np.arange(1, count)
    return np.cumprod(np.append(1.0, (2 * j - 1) / (2 * j)))


def inverse_square_root_coefficients(count):
    """r_k = Π_{j≤k} (2j − 3)/(2j): those of the inverse of the square root of the prefix sums."""
    j = np.arange(1, count)
    return np.cumprod(np.append(1.0, (2 * j - 3) / (2 * j)))


@functools.lru_cache(maxsize=64)
def banded_coefficients(steps, bands, workload):
    """The banded Toeplitz coefficients of least error, of unit norm (a tuple).

    Minimises (mean_t ‖row t of A·C⁻¹‖²)·‖c‖² over c_1, …, c_{b−1} with c_0 = 1, starting from those
    of the square root (L-BFGS).

    Args:
        steps: T.
        bands: b ≤ T.
        workload: the `Workload` A; its learning rates are taken as constant.
    """
    left = (steps - np.arange(steps)) / steps  # in how many of the rows each entry stands

    def error_and_gradient(tail):
        c = np.append(1.0, tail)
        sums = workload.response(inverse_coefficients(c, steps))
        spread = signal.lfilter([1.0], c, sums)
        power, norm = left @ sums**2, c @ c
        moved = np.array([(left * sums)[k:] @ spread[: steps - k] for k in range(1, bands)])
        return power * norm, 2 * power * tail - 2 * norm * moved

    if bands == 1:
        return (1.0,)
    with np.errstate(over="ignore", invalid="ignore"):  # where a step of the search goes too far
        found = optimize.minimize(
            error_and_gradient,
            square_root_coefficients(bands)[1:],
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 500},
        )
    c = np.append(1.0, found.x)
    return tuple((c / np.linalg.norm(c)).tolist())


def decaying_coefficients(scales, decays, steps):
    """c_0 = 1, c_k = Σ_j ω_j·θ_j^{k−1}: of a buffered linear Toeplitz matrix.

    Args:
        scales: ω, (buffers,).
        decays: θ, (buffers,).
        steps: T.
    """
    powers = np.asarray(decays)[:, None] ** np.arange(steps - 1)
    return np.append(1.0, np.asarray(scales) @ powers)


@functools.lru_cache(maxsize=64)
def buffered_parameters(steps, buffers, separation, workload):
    """(ω, θ) of the buffered linear Toeplitz matrix of least error, for `decaying_coefficients`.

    Minimises (mean_t ‖row t of A·C⁻¹‖²)·sensitivity² over θ in (0, 1) and ω > 0 with Σω ≤ 1
    (L-BFGS): the coefficients are then non-negative and fall from step to step, so that the
    sensitivity is exact.

    Args:
        steps: T.
        buffers: how many ω and θ.
        separation: as for `toeplitz_sensitivity`.
        workload: the `Workload` A; its learning rates are taken as constant.

    Returns:
        Two tuples of floats, in falling order of θ.
    """

    def parameters(free):
        decays = special.expit(free[:buffers])
        return special.softmax(np.append(free[buffers:], 0.0))[:-1], decays

    def log_error(free):
        coefficients = decaying_coefficients(*parameters(free), steps)
        moved = toeplitz_sensitivity(coefficients, steps, separation)
        return np.log(toeplitz_error(coefficients, steps, workload) * moved)

    # Memories from 1 step to all, both ends left out: of two long ones the search frees neither.
    memories = np.geomspace(1, max(steps, 4), buffers + 2)[1:-1]
    start = np.append(special.logit(1 - 1 / memories), np.zeros(buffers))
    found = optimize.minimize(log_error, start, method="L-BFGS-B", options={"maxiter": 500})
    scales, decays = parameters(found.x)
    order = np.argsort(-decays)
    return tuple(scales[order].tolist()), tuple(decays[order].tolist())


@functools.lru_cache(maxsize=64)
def best_fraction(steps, separation, workload):
    """λ in (0, 1): of the last draw so much is taken back for the least error."""

    def log_error(fraction):
        coefficients = fraction ** np.arange(steps)
        moved = toeplitz_sensitivity(coefficients, steps, separation)
        return np.log(toeplitz_error(coefficients, steps, workload) * moved)

    found = optimize.minimize_scalar(
        lambda free: log_error(special.expit(free)), bounds=(-4.0, 12.0), method="bounded"
    )
    return float(special.expit(found.x))


def toeplitz_error(coefficients, steps, workload):
    """√(mean_t ‖row t of A·C⁻¹‖²) of Toeplitz C and constant learning rates."""
    sums = workload.response(inverse_coefficients(coefficients, steps))
    return float(np.sqrt(np.mean(np.cumsum(sums**2))))


def inverse_coefficients(coefficients, steps):
    """The first column of C⁻¹, for Toeplitz C."""
    impulse = np.zeros(steps)
    impulse[0] = 1.0
    return signal.lfilter([1.0], coefficients, impulse)


def toeplitz_sensitivity(coefficients, steps, separation=None, levels=None):
    """How far one example moves C x that takes part at steps i, i + separation, … with norm 1.

    Of non-negative coefficients this is the largest such move over all i, and for non-increasing
    ones, all at one level, over all patterns at least so far apart; otherwise it is a bound.

    Args:
        coefficients: of C.
        steps: T.
        separation: steps between two participations; None for one participation.
        levels: None, or factors α on the noise of the steps, (T,): then of C·diag(α)⁻¹.
    """
    response = np.abs(np.asarray(coefficients)[:steps])
    separation = separation or steps
    # At one level the first pattern has all the rows of the others, and no fewer participations.
    firsts = range(1 if levels is None else min(separation, steps))
    scales = np.ones(steps) if levels is None else 1 / np.asarray(levels, np.float64)[:steps]

    def moved(first):
        total = np.zeros(steps)
        for step in range(first, steps, separation):
            rows = total[step : step + len(response)]
            rows += scales[step] * response[: len(rows)]
        return float(np.linalg.norm(total))

    return max(map(moved, firsts))


def matrix_sensitivity(matrix, steps, separation=None, levels=None):
    """The same for any lower-triangular matrix: the largest over all first participations i."""
    columns = np.abs(matrix[:steps, :steps])
    if levels is not None:
        columns = columns / np.asarray(levels, np.float64)[:steps]
    separation = separation or steps
    return max(
        float(np.linalg.norm(columns[:, first::separation].sum(axis=1)))
        for first in range(min(separation, steps))
    )


def tree_sensitivity(steps, separation=None):
    """A bound for the binary tree over the steps: √(levels) for one participation.

    A node over 2^l steps holds at most ⌈2^l/separation⌉ of the k participations of an example.
    """
    levels = steps.bit_length()
    count = 1 if separation is None else -(-steps // separation)
    held = [
        1 if separation is None else min(count, -(-(2**level) // separation))
        for level in range(levels)
    ]
    return float(np.sqrt(count * np.sum(held)))
