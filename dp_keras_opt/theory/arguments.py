"""The checks of arguments that these functions share."""

import math

import numpy as np


def check_positive(name, values):
    values = np.asarray(values, float)
    if not (values.size and np.all((values > 0) & np.isfinite(values))):
        raise ValueError(f"{name} must be positive and finite, received {values.tolist()!r}.")


def check_convexity(strong_convexity, smoothness):
    if not 0 < strong_convexity <= smoothness < math.inf:
        raise ValueError(
            "strong_convexity and smoothness must satisfy 0 < strong_convexity ≤ smoothness < ∞, "
            f"received {strong_convexity!r} and {smoothness!r}."
        )


def check_batch(batch_size, num_examples):
    if not 1 <= batch_size <= num_examples:
        raise ValueError(
            "batch_size and num_examples must satisfy 1 ≤ batch_size ≤ num_examples, received "
            f"{batch_size!r} and {num_examples!r}."
        )
