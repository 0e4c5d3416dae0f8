"""Strategies of correlated noise: their coefficients, sensitivities and errors, in NumPy.

A strategy is a lower-triangular matrix C; the noise of the steps is C⁻¹z. What is released is
C⁻¹(C x + z), x the clipped sums of the steps: one Gaussian mechanism on C x, whose sensitivity is
how far one example, with all its participations, moves C x.
"""

import functools

import numpy as np
from scipy import optimize, signal


def square_root_coefficients(count):
    """c_k = Π_{j≤k} (2j − 1)/(2j): the Toeplitz square root of the prefix sums, C·C = A."""
    j = np.arange(1, count)
    return np.cumprod(np.append(1.0, (2 * j - 1) / (2 * j)))


@functools.lru_cache(maxsize=64)
def banded_coefficients(steps, bands):
    """The banded Toeplitz coefficients of least prefix-sum error, of unit norm (a tuple).

    Minimises (mean_t ‖row t of A·C⁻¹‖²)·‖c‖² over c_1, …, c_{b−1} with c_0 = 1, starting from those
    of the square root (L-BFGS).

    Args:
        steps: T.
        bands: b ≤ T.
    """
    left = (steps - np.arange(steps)) / steps  # in how many of the rows each entry stands

    def error_and_gradient(tail):
        c = np.append(1.0, tail)
        sums = np.cumsum(inverse_coefficients(c, steps))
        spread = signal.lfilter([1.0], c, sums)
        power, norm = left @ sums**2, c @ c
        moved = np.array([(left * sums)[k:] @ spread[: steps - k] for k in range(1, bands)])
        return power * norm, 2 * power * tail - 2 * norm * moved

    if bands == 1:
        return (1.0,)
    found = optimize.minimize(
        error_and_gradient,
        square_root_coefficients(bands)[1:],
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 500},
    )
    c = np.append(1.0, found.x)
    return tuple((c / np.linalg.norm(c)).tolist())


def inverse_coefficients(coefficients, steps):
    """The first column of C⁻¹, for Toeplitz C."""
    impulse = np.zeros(steps)
    impulse[0] = 1.0
    return signal.lfilter([1.0], coefficients, impulse)


def toeplitz_sensitivity(coefficients, steps, separation=None):
    """How far one example moves C x that takes part at steps i, i + separation, … with norm 1.

    Of non-negative coefficients this is the largest such move over all i, and for non-increasing
    ones over all patterns at least so far apart; otherwise it is a bound.

    Args:
        coefficients: of C.
        steps: T.
        separation: steps between two participations; None for one participation.
    """
    pattern = np.zeros(steps)
    pattern[:: separation or steps] = 1.0
    moved = signal.lfilter(np.abs(coefficients), [1.0], pattern)
    return float(np.linalg.norm(moved))


def matrix_sensitivity(matrix, steps, separation=None):
    """The same for any lower-triangular matrix: the largest over all first participations i."""
    columns = np.abs(matrix[:steps, :steps])
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
