"""The privacy barrier for numbers that are released once, such as a count: noise by NumPy.

A few numbers leave time for the care that `secure_noise` takes with each draw: four uniform ones in
double precision. The bits are those of the operating system.
"""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from dp_keras_opt.noise import entropy
from dp_keras_opt.noise.mechanism import Mechanism


class _FromSystem:
    """Where the draws of `released` come from: as a `NoiseSource`, without a state."""

    dtype = tf.float64
    on_host = True

    def draw(self, distribution, shape):
        """Fresh draws of a `Distribution`, a float64 array."""

        def words(*size):
            return entropy.words(math.prod(size)).reshape(size)

        return next(iter(distribution.secure(words, math.prod(shape)))).reshape(shape)


def released(
    total: np.ndarray, mechanism: Mechanism, multiplier: float, sensitivity: float
) -> np.ndarray:
    """total + multiplier·sensitivity·noise, with fresh noise at every call.

    Args:
        total: a sum over units, float64.
        mechanism: a `Mechanism` whose draws are independent.
        multiplier: its noise multiplier.
        sensitivity: by how much one unit more or fewer moves the total, in the mechanism's norm.
    """
    (noise,) = mechanism.unit_noise([np.shape(total)], _FromSystem())  # type: ignore[arg-type]
    return np.asarray(total, np.float64) + multiplier * sensitivity * noise
