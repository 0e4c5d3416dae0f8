"""AdaClip: a bound for each coordinate, from what the gradients differ by there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from dp_keras_opt.clipping.query import Query
from dp_keras_opt.optimizers.geometries import Mean, kept_between

if TYPE_CHECKING:
    from dp_keras_opt.noise.released import Released
    from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class AdaClip(Mean):
    """Each example contributes clip((g − a)/b): a the mean so far, b from the spread around it.

    b_j = ŝ_j^(1/4)·(Σ_i ŝ_i^(1/2))^(1/2) for the variance ŝ_j of an example's gradient in each
    coordinate: of all b for which the expected squared length is 1, that of the least noise in all.
    With e = g̃_t − a_t and g̃_t − a_{t+1} = (1 − w_t)·e, w_t = (1 − β)/(1 − β^t),

        s_t = β·s_{t−1} + (1 − β)·((1 − w_t)·e)²,
        ŝ_t = min(max(B·(s_t/κ_t − (σCb_t/B)²), low), high),

    κ_t the same recursion run on what is expected of gradients of variance 1. b_1 = 1. Costs three
    buffers of the size of the model. With `DPAdam(beta_1=beta)` this is DP-MacAdam, but for two
    corrections. Its κ is that of the product of g̃ − a before and after the update, where its
    algorithm squares the latter. And it has no B: a bound from the spread of means is √B too short,
    nearly all is clipped, the spread of what is left is smaller still, and so on down to `low`.
    `clip_norm` is in units of the expected length: 1 to begin with.

    Args:
        beta: β in (0, 1), of mean and variance.
        low, high: between which ŝ is kept, 0 < low ≤ high.

    Attributes:
        bounds: b, a variable for each trainable one, once the optimizer is built. It is computed
            from what was released, so that it may be shown.

    Raises:
        ValueError: an argument is out of range.

    Reference: Pichapati, Suresh, Yu, Reddi and Kumar, "AdaCliP: adaptive clipping for private SGD",
    2019, arXiv:1908.07643; Tasnim, Sankar and Kosut, "DP-MacAdam: differentially private mechanism
    with adaptive clipping and adaptive momentum", 2026, arXiv:2606.05435.
    """

    def __init__(self, beta: float = 0.9, low: float = 1e-12, high: float = 1.0) -> None:
        super().__init__(beta)
        if self.beta == 0:
            raise ValueError("beta must be in (0, 1): of one gradient there is no spread.")
        self.low, self.high = kept_between(low, high)

    def build(self, optimizer: PrivateOptimizer, variables: Sequence[keras.Variable]) -> None:
        super().build(optimizer, variables)

        def like(name, initializer):
            return [
                optimizer.add_variable(v.shape, initializer, dtype="float32", name=name)
                for v in variables
            ]

        self._squares, self.bounds = (
            like("geometry_square", "zeros"),
            like("geometry_bound", "ones"),
        )
        self._expected = optimizer.add_variable((), dtype="float32", name="geometry_expected")

    def seen(self, optimizer: PrivateOptimizer, query: Query) -> Query:
        scale = [1 / tf.convert_to_tensor(bound) for bound in self.bounds]
        return super().seen(optimizer, query)._replace(scale=scale)

    def update(self, optimizer: PrivateOptimizer, released: Released, answer: Released) -> None:
        before, old = self.centre(), tf.convert_to_tensor(self._weight)
        super().update(optimizer, released, answer)
        new = tf.convert_to_tensor(self._weight)
        kept = self.beta * old / new  # 1 − w_t
        # The centre has a variance of (1 − β)(1 + β^t)/((1 + β)(1 − β^t)), and e one more: in all
        # 2(1 − β^t)/((1 + β)(1 − β^(t−1))), of which `kept`² is left.
        expected = tf.math.divide_no_nan(2 * kept**2 * new, (1 + self.beta) * old)
        optimizer.assign(self._expected, self._next(self._expected, expected))
        total = tf.convert_to_tensor(self._expected)
        size, variances = tf.cast(optimizer.expected_batch_size, tf.float32), []
        stds: Any = answer.noise_std  # one of each coordinate, since bounds differ
        parts = zip(answer.value, before, stds, self._squares, strict=True)
        for gradient, centre, noise_std, square in parts:
            left = kept * (tf.cast(gradient, tf.float32) - centre)
            optimizer.assign(square, self._next(square, left**2))
            variance = tf.math.divide_no_nan(tf.convert_to_tensor(square), total) - noise_std**2
            variances.append(tf.clip_by_value(size * variance, self.low, self.high))
        root = tf.sqrt(tf.add_n([tf.reduce_sum(tf.sqrt(variance)) for variance in variances]))
        for bound, variance in zip(self.bounds, variances, strict=True):
            # After the first step nothing is known of the spread yet.
            new_bound = tf.sqrt(tf.sqrt(variance)) * root
            optimizer.assign(bound, tf.where(total > 0, new_bound, tf.convert_to_tensor(bound)))

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"low": self.low, "high": self.high}
