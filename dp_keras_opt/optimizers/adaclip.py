"""AdaClip: a bound for each coordinate, from what the gradients differ by there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from dp_keras_opt.checks import is_number
from dp_keras_opt.clipping.query import Query
from dp_keras_opt.optimizers.geometries import Spread

if TYPE_CHECKING:
    from dp_keras_opt.noise.released import Released
    from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class AdaClip(Spread):
    """Each example contributes clip((g − a)/b): a the mean so far, b from the spread around it.

    b_j = ŝ_j^(1/4)·(Σ_i ŝ_i^(1/2))^(1/2) for the variance ŝ_j of an example's gradient in each
    coordinate: of all b for which the expected squared length is 1, that of the least noise in all.
    With v_t the variance of g̃_t − a_t for gradients of variance 1, of which none is clipped,

        s_t = β₂·s_{t−1} + (1 − β₂)·B·((g̃_t − a_t)²/v_t − (σCb_t/B)²),
        ŝ_t = min(max(s_t, low), high), of which a share γ is the mean of all coordinates.

    It begins at 1/d for d weights, where b = 1. Costs three buffers of the size of the model.
    `clip_norm` is in units of the expected length: 1 to begin with. With `DPAdam(beta_1=beta)` this
    is DP-MacAdam, but for the spread:

    - There it has no B. A bound from the spread of means is √B too short: nearly all is clipped,
      the spread of what is left is smaller still, and so on down to `low`.
    - With B the noise is what matters. There, what is taken off a mean of squares is the noise of
      the last step, whose bounds are others: bounds swing and, from C²σ²d/B = 3 on, grow to `high`
      on noise alone.
    - There it begins at the first square, of which most is noise, and has no γ. A coordinate whose
      spread comes out negative would have a bound of `low`, whatever its gradients are, and fill
      all of the clip norm.

    Args:
        beta: β in [0, 1), of the mean.
        beta_2: β₂ in (0, 1), of the variance.
        low, high: between which ŝ is kept, 0 < low ≤ high.
        shrinkage: γ in [0, 1]; at 1 all coordinates have one bound.

    Attributes:
        bounds: b, a variable for each trainable one, once the optimizer is built. It is computed
            from what was released, so that it may be shown.

    Raises:
        ValueError: an argument is out of range.

    Reference: Pichapati, Suresh, Yu, Reddi and Kumar, "AdaCliP: adaptive clipping for private SGD",
    2019, arXiv:1908.07643; Tasnim, Sankar and Kosut, "DP-MacAdam: differentially private mechanism
    with adaptive clipping and adaptive momentum", 2026, arXiv:2606.05435.
    """

    def __init__(
        self,
        beta: float = 0.9,
        beta_2: float = 0.99,
        low: float = 1e-12,
        high: float = 1.0,
        shrinkage: float = 0.03,
    ) -> None:
        super().__init__(beta, beta_2, low, high)
        if not (is_number(shrinkage) and 0 <= shrinkage <= 1):
            raise ValueError(f"shrinkage must be in [0, 1], received {shrinkage!r}.")
        self.shrinkage = float(shrinkage)

    def build(self, optimizer: PrivateOptimizer, variables: Sequence[keras.Variable]) -> None:
        super().build(optimizer, variables)

        def like(name, initializer):
            return [
                optimizer.add_variable(v.shape, initializer, dtype="float32", name=name)
                for v in variables
            ]

        count = sum(math.prod(v.shape) for v in variables)
        start = keras.initializers.Constant(1 / count)
        self._variances = like("geometry_variance", start)
        self.bounds = like("geometry_bound", "ones")

    def seen(self, optimizer: PrivateOptimizer, query: Query) -> Query:
        scale = [1 / tf.convert_to_tensor(bound) for bound in self.bounds]
        return super().seen(optimizer, query)._replace(scale=scale)

    def update(self, optimizer: PrivateOptimizer, released: Released, answer: Released) -> None:
        before, old = self.centre(), tf.convert_to_tensor(self._weight)
        super().update(optimizer, released, answer)
        size = tf.cast(optimizer.expected_batch_size, tf.float32)
        # v: 1, and the variance (1 − β)(1 + β^(t−1))/((1 + β)(1 − β^(t−1))) of the mean so far.
        spread = tf.where(old > 0, 2 * self._next(old, 1.0) / ((1 + self.beta) * old), 1.0)
        stds: Any = answer.noise_std  # one of each coordinate, since bounds differ
        parts = zip(answer.value, before, stds, self._variances, strict=True)
        for gradient, centre, noise_std, variance in parts:
            square = (tf.cast(gradient, tf.float32) - centre) ** 2 / spread
            new = self._next(variance, size * (square - noise_std**2), self.beta_2)
            # The first release tells the mean, and nothing of what is around it.
            optimizer.assign(variance, tf.where(old > 0, new, tf.convert_to_tensor(variance)))
        kept = list(map(self._kept, self._variances))
        mean = tf.reduce_mean(tf.concat([tf.reshape(v, [-1]) for v in kept], axis=0))
        kept = [v + self.shrinkage * (mean - v) for v in kept]
        root = tf.sqrt(tf.add_n([tf.reduce_sum(tf.sqrt(v)) for v in kept]))
        for bound, variance in zip(self.bounds, kept, strict=True):
            optimizer.assign(bound, tf.sqrt(tf.sqrt(variance)) * root)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"shrinkage": self.shrinkage}
