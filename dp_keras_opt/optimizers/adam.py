"""DP-Adam: Adam on privatized gradients, its second moment from the source of your choice."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from dp_keras_opt.optimizers.adaptive import AdaptiveOptimizer, debiased
from dp_keras_opt.types import LearningRate


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DPAdam(AdaptiveOptimizer, keras.optimizers.Adam):
    """Differentially private Adam.

    m ← β1·m + (1−β1)·g̃, v ← β2·v + (1−β2)·square, w ← w − η·m̂/root(v̂), with g̃ the privatized
    gradient, m̂ = m/(1−β1^t) and v̂ = v/(1−β2^t). By default (post-processing) the square is g̃² and
    the root √v̂ + ε; other values of `second_moment` replace one or both. ε stands outside of the
    bias correction, as in the paper; Keras's own Adam divides it by √(1−β2^t).

    Args:
        learning_rate: a float, a Keras schedule or a callable. Defaults to 0.001.
        beta_1, beta_2: decay of the moments. Default to 0.9 and 0.999.
        epsilon: added to the root of the second moment. Defaults to 1e-7.
        amsgrad: whether to divide by the largest v so far. Defaults to False.
        clip_norm, batch_size, noise_multiplier: see `PrivateOptimizer`.
        second_moment: see `AdaptiveOptimizer`. Defaults to "post_processing".
        **kwargs: the others of `PrivateOptimizer`, and of `keras.optimizers.Adam`:
            `weight_decay`, `use_ema` and others.

    Reference: Algorithms 5 to 9 of the paper on design principles for private adaptive optimizers;
    Kingma and Ba, "Adam", ICLR 2015.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        *,
        clip_norm: float,
        batch_size: int,
        noise_multiplier: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate=learning_rate,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            amsgrad=amsgrad,
            clip_norm=clip_norm,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            **kwargs,
        )

    def accumulate(self, v: tf.Tensor, square: tf.Tensor) -> tf.Tensor:
        return v + (square - v) * (1 - self.beta_2)

    def corrected(self, v: tf.Tensor, steps: int | tf.Tensor) -> tf.Tensor:
        return debiased(v, self.beta_2, steps)

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        gradient = ops.cast(gradient, variable.dtype)
        rate = ops.cast(learning_rate, variable.dtype)
        root = self._take_in(variable)
        if self.gradient_filter is None:  # otherwise the filter is the first moment
            m = self._momentums[self._get_variable_index(variable)]
            self.assign_add(m, (gradient - m) * (1 - self.beta_1))
            gradient = ops.convert_to_tensor(m)
            steps = self._steps(self.iterations + 1)
            rate = debiased(rate, self.beta_1, steps)  # instead of m: a scalar
        self._descend(variable, rate * gradient / root)

    @property
    def linear(self) -> bool:  # type: ignore[override]
        return not self.amsgrad

    @property
    def geometry_moments(self) -> Sequence[keras.Variable]:
        return self._velocity_hats if self.amsgrad else self._velocities

    def dominant(self, index: int, v: tf.Tensor) -> tf.Tensor:
        if not self.amsgrad:
            return v
        largest = self._velocity_hats[index]
        self.assign(largest, ops.maximum(largest, v))
        return ops.convert_to_tensor(largest)
