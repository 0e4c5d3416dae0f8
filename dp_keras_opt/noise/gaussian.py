"""Independent Gaussian noise: the mechanism of DP-SGD."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dp_accounting
import keras
import tensorflow as tf

from dp_keras_opt.noise.mechanism import Mechanism

if TYPE_CHECKING:
    from dp_keras_opt.noise.entropy import NoiseSource


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class Gaussian(Mechanism):
    """Independent Gaussian noise of std σ·C on each coordinate (Abadi et al. 2016).

    Formal guarantee: releasing a sum of L2 sensitivity C with this noise is the Gaussian
    mechanism with noise multiplier σ. It holds for real numbers; the rounding of float32 draws
    is not covered.
    """

    norm = "l2"
    budget_exponent = 2

    def event(self, multiplier: float) -> dp_accounting.DpEvent:
        return dp_accounting.GaussianDpEvent(multiplier)

    def unit_noise(
        self, shapes: Sequence[Any], source: NoiseSource, stream: Any = 0
    ) -> list[tf.Tensor]:
        return [source.normal(shape) for shape in shapes]

    def std(self, step: int | tf.Tensor) -> float | tf.Tensor:
        return 1.0
