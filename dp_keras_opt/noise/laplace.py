"""Independent Laplace noise: pure differential privacy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dp_accounting
import keras
import tensorflow as tf

from dp_keras_opt.noise.mechanism import Mechanism

if TYPE_CHECKING:
    from dp_keras_opt.noise.entropy import NoiseSource


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class Laplace(Mechanism):
    """Independent Laplace noise of scale λ·C on each coordinate; examples are clipped in L1.

    Formal guarantee: releasing a sum of L1 sensitivity C with this noise is (1/λ, 0)-differentially
    private (Dwork et al. 2006); λ is the optimizer's `noise_multiplier`. It holds for real numbers;
    the rounding of the draws is not covered.

    The L1 norm of a gradient grows with the square root of the number of weights more than its L2
    norm: Laplace noise is for small models, or where δ = 0 is wanted.
    """

    norm = "l1"
    is_pure = True
    budget_exponent = 1

    def event(self, multiplier: float) -> dp_accounting.DpEvent:
        return dp_accounting.LaplaceDpEvent(multiplier)

    def unit_noise(
        self, shapes: Sequence[Any], source: NoiseSource, stream: Any = 0
    ) -> list[tf.Tensor]:
        return [source.laplace(shape) for shape in shapes]

    def std(self, step: int | tf.Tensor) -> float | tf.Tensor:
        return math.sqrt(2.0)
