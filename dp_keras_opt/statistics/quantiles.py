"""Quantiles from one release: noisy counts of all that lies below each of many values.

Counts of bins would have to be added up, and their noise with them: after 128 of 256 bins it is 11
times that of one. The square root C of the matrix A = C·C that adds up is what is released of the
counts h: C·h has sensitivity ‖first column of C‖ = 1.7, and C·(C·h + noise), which has all sums
below, at most 1.7² = 3 times the noise of one count.

Reference: Fichtenberger, Henzinger and Upadhyay, "Constant matters: fine-grained error bound on
differentially private continual observation", ICML 2023, arXiv:2202.11205 (the factorization).
"""

from __future__ import annotations

import numpy as np

from dp_keras_opt.types import Norm


def root(size: int) -> np.ndarray:
    """The first column of C, a lower triangular Toeplitz matrix: 1, 1/2, 3/8, …."""
    k = np.arange(1, size)
    return np.cumprod(np.append(1.0, (2 * k - 1) / (2 * k)))


def sensitivity(size: int, norm: Norm) -> float:
    """By how much one unit, in one bin or shared out over several, moves C·h."""
    return float(np.linalg.norm(root(size), 1 if norm == "l1" else 2))


def times_root(vector: np.ndarray) -> np.ndarray:
    """C times a vector."""
    return np.convolve(root(len(vector)), vector)[: len(vector)]


def quantiles(
    noisy: np.ndarray, edges: np.ndarray, number: int, probabilities: np.ndarray
) -> np.ndarray:
    """Where the shares of the units below reach these probabilities, from C·h with noise.

    Args:
        noisy: C·h + noise, h the counts of the bins.
        edges: of the bins, one more than they.
        number: n, how many units there are.
        probabilities: in [0, 1].
    """
    below = np.append(0.0, times_root(noisy)) / number
    # Sums grow; of noisy ones this is halfway between what they reached and what they will reach.
    reached = np.maximum.accumulate(below)
    rising = (reached + np.minimum.accumulate(below[::-1])[::-1]) / 2
    rising += np.linspace(0.0, 1e-9, len(rising))  # so that each share is reached at one place
    return np.interp(probabilities, rising, edges)
