"""DP-AdaGrad: AdaGrad on privatized gradients."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from dp_keras_opt.optimizers.adaptive import AdaptiveOptimizer
from dp_keras_opt.types import LearningRate


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DPAdagrad(AdaptiveOptimizer, keras.optimizers.Adagrad):
    """Differentially private AdaGrad.

    v ← v + square, w ← w − η·g̃/root(v); by default the square is g̃² and the root √v + ε. (Keras's
    own divides by √(v + ε), and starts v at 0.1.)

    Args:
        learning_rate: a float, a Keras schedule or a callable. Defaults to 0.001.
        initial_accumulator_value: v before the first step. Defaults to 0.0.
        epsilon: added to the root. Defaults to 1e-7.
        clip_norm, batch_size, noise_multiplier: see `PrivateOptimizer`.
        second_moment: see `AdaptiveOptimizer`. Defaults to "post_processing".
        **kwargs: the others of `PrivateOptimizer`, and of `keras.optimizers.Adagrad`:
            `weight_decay`, `use_ema` and others.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        initial_accumulator_value: float = 0.0,
        epsilon: float = 1e-7,
        *,
        clip_norm: float,
        batch_size: int,
        noise_multiplier: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate=learning_rate,
            initial_accumulator_value=initial_accumulator_value,
            epsilon=epsilon,
            clip_norm=clip_norm,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            **kwargs,
        )

    @property
    def second_moments(self) -> Sequence[keras.Variable]:
        return self._accumulators

    def accumulate(self, v: tf.Tensor, square: tf.Tensor) -> tf.Tensor:
        return v + square

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        gradient = ops.cast(gradient, variable.dtype)
        rate = ops.cast(learning_rate, variable.dtype)
        self._descend(variable, rate * gradient / self._take_in(variable))
