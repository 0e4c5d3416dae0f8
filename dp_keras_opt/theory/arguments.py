"""The checks of arguments that these functions share."""

import math

import numpy as np


def check_positive(name, values):
    """Refuses numbers that are not positive and finite, or none at all."""
    values = np.asarray(values, float)
    if not (values.size and np.all((values > 0) & np.isfinite(values))):
        raise ValueError(f"{name} must be positive and finite, received {values.tolist()!r}.")


def check_convexity(strong_convexity, smoothness):
    """Refuses μ and L of no strongly convex, smooth function."""
    if not 0 < strong_convexity <= smoothness < math.inf:
        raise ValueError(
            "strong_convexity and smoothness must satisfy 0 < strong_convexity ≤ smoothness < ∞, "
            f"received {strong_convexity!r} and {smoothness!r}."
        )


def check_batch(batch_size, num_examples):
    """Refuses a batch that is empty or larger than the data."""
    if not 1 <= batch_size <= num_examples:
        raise ValueError(
            "batch_size and num_examples must satisfy 1 ≤ batch_size ≤ num_examples, received "
            f"{batch_size!r} and {num_examples!r}."
        )
