"""DP-RMSProp: RMSProp on privatized gradients."""

from typing import Any

import keras
import tensorflow as tf
from keras import ops

from dp_keras_opt.optimizers.adaptive import AdaptiveOptimizer
from dp_keras_opt.types import LearningRate


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DPRMSprop(AdaptiveOptimizer, keras.optimizers.RMSprop):
    """Differentially private RMSProp.

    v ← ρ·v + (1−ρ)·square, w ← w − η·g̃/root(v), without bias correction; by default the square is
    g̃² and the root √v + ε. (Keras's own divides by √(v + ε).)

    Args:
        learning_rate: a float, a Keras schedule or a callable. Defaults to 0.001.
        rho: ρ, decay of v. Defaults to 0.9.
        momentum: decay of the accumulated steps, 0 for none. Defaults to 0.0.
        epsilon: added to the root. Defaults to 1e-7.
        clip_norm, batch_size, noise_multiplier: see `PrivateOptimizer`.
        second_moment: see `AdaptiveOptimizer`. Defaults to "post_processing".
        **kwargs: the others of `PrivateOptimizer`, and of `keras.optimizers.RMSprop`:
            `weight_decay`, `use_ema` and others.

    Raises:
        ValueError: `centered=True`, which is defined for none of the sources of the moment.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        *,
        clip_norm: float,
        batch_size: int,
        noise_multiplier: float | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.pop("centered", False):
            raise ValueError("DPRMSprop does not take centered=True; use DPAdam or leave it out.")
        super().__init__(
            learning_rate=learning_rate,
            rho=rho,
            momentum=momentum,
            epsilon=epsilon,
            clip_norm=clip_norm,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            **kwargs,
        )

    def accumulate(self, v: tf.Tensor, square: tf.Tensor) -> tf.Tensor:
        return v + (square - v) * (1 - self.rho)

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        rate = ops.cast(learning_rate, variable.dtype)
        step = rate * ops.cast(gradient, variable.dtype) / self._take_in(variable)
        if self.momentum > 0:
            m = self._momentums[self._get_variable_index(variable)]
            self.assign(m, self.momentum * m + step)
            step = ops.convert_to_tensor(m)
        self._descend(variable, step)

    @property
    def smooths(self) -> bool:
        return self.momentum > 0
