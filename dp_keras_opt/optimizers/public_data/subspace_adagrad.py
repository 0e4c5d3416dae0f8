"""Noisy AdaGrad whose noisy squares are projected on a public subspace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras import ops

from dp_keras_opt.accounting.batch_sizes import BatchSizeLike
from dp_keras_opt.checks import whole_number
from dp_keras_opt.clipping.query import Query
from dp_keras_opt.noise.mechanism import Release
from dp_keras_opt.optimizers import subspace
from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer
from dp_keras_opt.optimizers.recursions import running_sum
from dp_keras_opt.optimizers.settings import FilterLike, NoiseLike, NoiseScheduleLike
from dp_keras_opt.types import ClipNorm, ClippingStyle, LearningRate

if TYPE_CHECKING:
    from dp_keras_opt.noise.released import Released


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class SubspaceAdagrad(PrivateOptimizer, keras.optimizers.Optimizer):
    """Noisy AdaGrad whose noisy squares are projected on a public subspace, in diagonal form.

    Every step releases Σ clip(g_i; C) and Σ clip(g_i; C)² (of each example, coordinate by
    coordinate; sensitivity C²) as two Gaussians from one batch, both with `noise_multiplier`, and
    is accounted as such: as if σ were σ/√2. The noisy squares are projected on the span U of the
    `rank` leading eigenvectors of the public gradients' second-moment matrix,

        v ← v + U Uᵀ(Σ clip(g_i)² + noise)/B,   w ← w − η·g̃/(√max(v, 0) + ε).

    U follows the public rows of each batch by one step of subspace iteration per training step. A
    baseline: the squares of a gradient need not lie where the gradients do, and what the projection
    takes away of them is lost.

    Args:
        learning_rate: η, a float, a Keras schedule or a callable. Defaults to 0.01.
        rank: k, the dimension of the subspace; at most the number of weights. Memory and time grow
            by k times the weights. Defaults to 10.
        epsilon: added to the root. Defaults to 1e-7.
        {{private_arguments}}
        {{keras_arguments}}

    Raises:
        ValueError: an argument is out of range; or, when built, `rank` exceeds the weights.

    Reference: Kairouz, Ribero, Rush and Thakurta, "(Nearly) dimension independent private ERM with
    AdaGrad rates via publicly estimated subspaces", COLT 2021 (arXiv:2008.06570).
    """

    needs_public = True

    _no_quantile = "it releases gradients and squares of them, each with the noise for itself"

    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        rank: int = 10,
        epsilon: float = 1e-7,
        *,
        clip_norm: ClipNorm,
        batch_size: BatchSizeLike | None = None,
        noise_multiplier: float | None = None,
        noise: NoiseLike = "gaussian",
        noise_schedule: NoiseScheduleLike = None,
        clipping: ClippingStyle = "flat",
        normalize: bool = False,
        gradient_filter: FilterLike = None,
        secure_noise: bool = False,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate=learning_rate,
            clip_norm=clip_norm,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            noise=noise,
            noise_schedule=noise_schedule,
            clipping=clipping,
            normalize=normalize,
            gradient_filter=gradient_filter,
            secure_noise=secure_noise,
            seed=seed,
            **kwargs,
        )
        self.rank = whole_number(rank, "rank")
        self.epsilon = float(epsilon)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        if self.built:
            return
        weights = sum(math.prod(variable.shape) for variable in variables)
        if self.rank > weights:
            raise ValueError(f"rank={self.rank} exceeds the {weights} trainable weights.")
        super().build(variables)
        (self._second_moments,) = self.add_optimizer_variables(variables, ["second_moment"])
        self._basis = self.add_variable(
            (weights, self.rank),
            initializer=keras.initializers.Orthogonal(seed=0),
            dtype="float32",
            name="subspace",
        )

    def queries(self) -> tuple[Query, ...]:
        plain = self.query()
        directions = self._split(ops.transpose(self._basis))
        return (
            plain,
            plain._replace(square=True),
            Query(population="public", directions=directions),
        )

    def releases_for(self, noise_multiplier: float) -> tuple[Release, ...]:
        private = [Release(i, "mean", noise_multiplier, self.noise) for i in range(2)]
        return (*private, Release(2, "public_mean", 0.0, self.noise))

    def update(self, released: Sequence[Released]) -> None:
        gradient, square, products = (part.value for part in released)
        basis = self._next_basis(products)
        self.assign(self._basis, basis)
        flat = ops.concatenate([ops.reshape(s, (-1,)) for s in square])
        projected = ops.matmul(basis, ops.matmul(flat, basis))
        for v, part in zip(self._second_moments, self._split(projected), strict=True):
            self.assign(v, running_sum(ops.convert_to_tensor(v), ops.cast(part, v.dtype)))
        self._apply(self._regularized(gradient), released[0].noise_std)

    @property
    def second_moment_estimates(self) -> list[tf.Tensor]:
        return [ops.convert_to_tensor(v) for v in self._second_moments]

    def _next_basis(self, products):
        """The basis after a step of subspace iteration, from the products M·U (k, *shape)."""
        moved = ops.concatenate([ops.reshape(p, (self.rank, -1)) for p in products], axis=1)
        return subspace.iterate(ops.transpose(moved), ops.convert_to_tensor(self._basis))

    def _split(self, flat):
        """(..., weights) as one tensor per variable, (..., *shape)."""
        shapes = [tuple(variable.shape) for variable in self._trainable_variables]
        parts = tf.split(flat, [math.prod(shape) for shape in shapes], axis=-1)
        return [
            ops.reshape(part, (*part.shape[:-1], *shape))
            for part, shape in zip(parts, shapes, strict=True)
        ]

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        v = ops.convert_to_tensor(self._second_moments[self._get_variable_index(variable)])
        root = ops.sqrt(ops.maximum(v, 0.0)) + self.epsilon
        rate = ops.cast(learning_rate, variable.dtype)
        step = ops.cast(gradient, root.dtype) / root
        self.assign_sub(variable, rate * ops.cast(step, variable.dtype))

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"rank": self.rank, "epsilon": self.epsilon}
