"""Independent Laplace noise: pure differential privacy."""

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
class Laplace(Mechanism):
    """Independent Laplace noise of scale λ·C on each coordinate; examples are clipped in L1.

    Formal guarantee: releasing a sum of L1 sensitivity C with this noise is (1/λ, 0)-differentially
    private; λ is the optimizer's `noise_multiplier`. It holds for real numbers; the rounding of the
    draws is not covered.

    The L1 norm of a gradient grows with the square root of the number of weights more than its L2
    norm: Laplace noise is for small models, or where δ = 0 is wanted.

    Reference: Dwork, McSherry, Nissim and Smith, "Calibrating noise to sensitivity in private data
    analysis", TCC 2006, doi:10.1007/11681878_14, Proposition 1.
    """

    norm = "l1"
    is_pure = True
    budget_exponent = 1

    def event(self, multiplier: float) -> dp_accounting.DpEvent:
        return dp_accounting.LaplaceDpEvent(multiplier)

    def unit_noise(
        self, shapes: Sequence[Any], source: NoiseSource, stream: Any = 0
    ) -> list[tf.Tensor]:
        return drawn(source, LAPLACE, shapes)

    def std(self, step: int | tf.Tensor) -> float | tf.Tensor:
        return math.sqrt(2.0)


def _laplace(source, shape):
    """Draws of scale 1, float32, from 64 random bits each, one of which is the sign.

    They are never 0 and end at 44, where a true one would be with a probability of 2⁻⁶⁴.
    """
    words = source.words(*shape)
    magnitude = tf.bitwise.right_shift(words, tf.constant(1, tf.int64))
    exponential = bits.exponential(magnitude, source.dtype, 63)
    return tf.where(bits.bit(words, 0), exponential, -exponential)


def _host_laplace(words, size):
    drawn = words((size + 1) // 2).view(np.int32)[:size]
    draws = host.exponential(host.numbers(drawn >> 1, words) * 2.0**-31)
    signs = draws.view(np.int32)
    signs ^= (~drawn & 1) << 31
    yield draws


def _secure_laplace(words, size):
    """Draws of scale 1, float64.

    With an exponential e and a uniform angle v, e·sin v is half the difference of two squared
    normals; two such make a difference of two exponential draws.
    """
    yield host.sum_of_two(words, size, host.exponential)


#: Laplace draws of scale 1.
LAPLACE = Distribution(_laplace, _host_laplace, _secure_laplace)
