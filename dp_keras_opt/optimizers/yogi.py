"""DP-Yogi: Adam with a second moment that moves by bounded steps."""

from typing import Any

import keras
import tensorflow as tf
from keras import ops

from dp_keras_opt.optimizers.adam import DPAdam
from dp_keras_opt.types import LearningRate


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DPYogi(DPAdam):
    """Differentially private Yogi (Zaheer et al., NeurIPS 2018).

    DPAdam with v ← v + (1−β2)·sign(square − v)·square: v follows the square slowly where it is far
    below it. The arguments are those of `DPAdam`; the default epsilon is 1e-3, as in its paper.
    """

    linear = False

    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-3,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, **kwargs)

    def accumulate(self, v: tf.Tensor, square: tf.Tensor) -> tf.Tensor:
        return v + (1 - self.beta_2) * ops.sign(square - v) * square
