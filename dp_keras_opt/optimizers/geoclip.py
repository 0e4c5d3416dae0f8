"""GeoClip: a bound for each direction, from the covariance of the released gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from dp_keras_opt.checks import whole_number
from dp_keras_opt.clipping.bounds import LEAST
from dp_keras_opt.clipping.geometry import LowRank
from dp_keras_opt.clipping.query import Query
from dp_keras_opt.optimizers.geometries import Spread

if TYPE_CHECKING:
    from dp_keras_opt.noise.released import Released
    from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class GeoClip(Spread):
    """Each example contributes clip(M(g − a)): M from the covariance of the released gradients.

    M = (Σ_i √λ_i)^(−½)·Λ^(−¼) along the eigenvectors of the covariance of examples' gradients: of
    all M for which the expected squared length is 1, that of the least noise in all. What is known
    of the covariance are `rank` directions of all weights together, and one variance λ₀ in all
    others. With x = g̃_t − a_t and the covariance N of the noise in g̃_t, of

        β₂·C_{t−1} + (1 − β₂)·B·(x xᵀ − N)

    the leading eigenvectors are kept, and the rest is added to λ₀, evenly. It begins at 1/d for d
    weights, where M = 1. Costs rank + 1 buffers of the size of the model. `clip_norm` is in units
    of the expected length: 1 to begin with.

    Three things differ from the paper. Its low-rank algorithm clips and adds noise in the kept
    directions alone: what is released lies in their span, so that they never leave it, the first
    `rank` weights, as it begins; here the others are seen as well. It leaves N in, with which the
    spread of large models grows from step to step; and it has no B (see `AdaClip`). What is left of
    the noise in a is not taken off: how much of it is there depends on how much is clipped. Where
    nothing is, it is (1 − β)/(1 + β) of N, and from C²σ²d/B = (1 + β)/(1 − β) on λ₀ would grow.

    Args:
        rank: how many directions, fewer than weights.
        beta: β in [0, 1), of the mean a.
        beta_2: β₂ in (0, 1), of the covariance.
        low, high: between which its eigenvalues count, 0 < low ≤ high.

    Raises:
        ValueError: an argument is out of range; or, by the optimizer, there are no more weights
            than directions.

    Reference: Gilani, Tasnim, Sankar and Kosut, "GeoClip: geometry-aware clipping for
    differentially private SGD", NeurIPS 2025, arXiv:2506.06549.
    """

    def __init__(
        self,
        rank: int = 16,
        beta: float = 0.9,
        beta_2: float = 0.99,
        low: float = 1e-12,
        high: float = 1.0,
    ) -> None:
        super().__init__(beta, beta_2, low, high)
        self.rank = whole_number(rank, "rank")

    def build(self, optimizer: PrivateOptimizer, variables: Sequence[keras.Variable]) -> None:
        super().build(optimizer, variables)
        self._shapes = [tuple(v.shape) for v in variables]
        size = sum(map(math.prod, self._shapes))
        if size <= self.rank:
            raise ValueError(
                f"GeoClip(rank={self.rank}) needs more weights than directions; the model has "
                f"{size}. Give a smaller rank."
            )

        def add(shape, initializer, name):
            return optimizer.add_variable(shape, initializer, dtype="float32", name=name)

        first = keras.initializers.Identity()  # any: all eigenvalues are equal
        self._basis = add((size, self.rank), first, "geometry_basis")
        start = keras.initializers.Constant(1 / size)
        self._variances = add((self.rank,), start, "geometry_variances")
        self._others = add((), start, "geometry_other_variance")

    def seen(self, optimizer: PrivateOptimizer, query: Query) -> Query:
        along, others = self._kept(self._variances), self._kept(self._others)
        basis = tf.transpose(tf.convert_to_tensor(self._basis))
        sizes = list(map(math.prod, self._shapes))
        parts = zip(tf.split(basis, sizes, axis=1), self._shapes, strict=True)
        directions = [tf.reshape(part, (self.rank, *shape)) for part, shape in parts]
        # Up to a factor, that nothing be stretched: the bound is in units of the shortest.
        least = tf.minimum(tf.reduce_min(along), others)
        geometry = LowRank(directions, (least / along) ** 0.25, (least / others) ** 0.25)
        query = super().seen(optimizer, query)._replace(geometry=geometry)
        if query.counts:  # a bound that finds itself is in these units already
            return query
        total = tf.reduce_sum(tf.sqrt(along)) + (sum(sizes) - self.rank) * tf.sqrt(others)
        clip_norm = query.clip_norm * least**0.25 * tf.sqrt(total)
        return query._replace(clip_norm=tf.maximum(clip_norm, LEAST))

    def update(self, optimizer: PrivateOptimizer, released: Released, answer: Released) -> None:
        before, known = self.centre(), self._weight > 0
        super().update(optimizer, released, answer)
        pairs = zip(answer.value, before, strict=True)
        x = tf.concat([tf.reshape(tf.cast(g, tf.float32) - a, [-1]) for g, a in pairs], axis=0)
        basis, size = tf.convert_to_tensor(self._basis), x.shape[0]
        inner = tf.linalg.matvec(basis, x, transpose_a=True)
        rest = x - tf.linalg.matvec(basis, inner)
        rest -= tf.linalg.matvec(basis, tf.linalg.matvec(basis, rest, transpose_a=True))
        length = tf.norm(rest)
        # In the directions and that of the rest: a matrix of rank + 1.
        inverse, std = released.geometry.inverse, tf.convert_to_tensor(released.noise_std)
        noise = tf.concat([inverse.along**2, [(size - self.rank) * inverse.rest**2]], axis=0)
        y = tf.concat([inner, [length]], axis=0)
        new = y[:, None] * y[None, :] - tf.linalg.diag(std**2 * noise)
        old = tf.linalg.diag(tf.concat([tf.convert_to_tensor(self._variances), [0.0]], axis=0))
        share = (1 - self.beta_2) * tf.cast(optimizer.expected_batch_size, tf.float32)
        values, vectors = tf.linalg.eigh(self.beta_2 * old + share * new)  # ascending
        extended = tf.concat([basis, tf.math.divide_no_nan(rest, length)[:, None]], axis=1)
        kept = tf.matmul(extended, vectors[:, 1:])
        # Orthonormal but for rounding, which a step of Newton and Schulz keeps from adding up, in a
        # tenth of the time of a QR decomposition.
        gram = tf.matmul(kept, kept, transpose_a=True)
        kept = tf.matmul(kept, 1.5 * tf.eye(self.rank) - 0.5 * gram)
        others = self.beta_2 * tf.convert_to_tensor(self._others) + values[0] / (size - self.rank)
        for variable, value in (
            (self._basis, kept), (self._variances, values[1:]), (self._others, others)
        ):  # fmt: skip
            # The first release tells the mean, and nothing of what is around it.
            optimizer.assign(variable, tf.where(known, value, tf.convert_to_tensor(variable)))

    def get_config(self) -> dict[str, Any]:
        return {"rank": self.rank} | super().get_config()
