"""Independent Gaussian noise: the mechanism of DP-SGD."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import dp_accounting
import keras
import numpy as np
import tensorflow as tf

from dp_keras_opt.noise import bits, host
from dp_keras_opt.noise.distribution import Distribution, drawn
from dp_keras_opt.noise.mechanism import Mechanism
from dp_keras_opt.noise.source import NoiseSource


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class Gaussian(Mechanism):
    """Independent Gaussian noise of std σ·C on each coordinate.

    Formal guarantee: releasing a sum of L2 sensitivity C with this noise is the Gaussian
    mechanism with noise multiplier σ. It holds for real numbers; the rounding of float32 draws
    is not covered.

    Reference: Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar and Zhang, "Deep learning with
    differential privacy", CCS 2016, doi:10.1145/2976749.2978318, arXiv:1607.00133, Algorithm 1.
    """

    norm = "l2"
    budget_exponent = 2

    def event(self, multiplier: float) -> dp_accounting.DpEvent:
        return dp_accounting.GaussianDpEvent(multiplier)

    def unit_noise(
        self, shapes: Sequence[Any], source: NoiseSource, stream: Any = 0
    ) -> list[tf.Tensor]:
        return drawn(source, NORMAL, shapes)

    def std(self, step: int | tf.Tensor) -> float | tf.Tensor:
        return 1.0


def _normal_and_rest(source, shape):
    """Standard normals, float32: two by Box and Muller's method from 128 random bits.

    They are never 0 and end at 9.49, with a probability of 2.3·10⁻²¹ beyond. Those that TensorFlow
    draws end at 5.68, and what lies beyond would tell a sum apart from its neighbour with a
    probability above many a delta.

    Reference: Box and Muller, "A note on the generation of random normal deviates", The Annals of
    Mathematical Statistics 29(2), 1958, doi:10.1214/aoms/1177706645.
    """
    size = math.prod(shape)
    words = source.words(2, (size + 1) // 2)
    radius = tf.sqrt(2 * bits.exponential(words[0], source.dtype))
    normals = radius * tf.stack(bits.circle(words[1], source.dtype))
    return tuple(
        tf.reshape(tf.reshape(both, [-1])[:size], shape)
        for both in (normals, bits.rest(words, source.dtype))
    )


def _host_normal(words, size):
    yield host.normals(words, size)
    yield host.rest(words, size, np.float32)


def _secure_normal(words, size):
    """Standard normals, float64: two by Box and Muller's method, added, over √2."""
    yield host.sum_of_two(words, size, lambda uniform: np.sqrt(host.exponential(uniform)))
    yield host.rest(words, size, np.float64)


#: Standard normals.
NORMAL = Distribution(
    lambda source, shape: _normal_and_rest(source, shape)[0], _host_normal, _secure_normal
)

#: The same, and uniform draws in (−1, 1) of the same shape, for who adds normals up: near 0 a sum
#: of normals is a multiple of their last digit. With the uniform draws in units of that digit it is
#: as fine there as a normal.
NORMAL_AND_REST = Distribution(_normal_and_rest, _host_normal, _secure_normal, 2)
