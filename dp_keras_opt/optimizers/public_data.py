"""Baselines that use public data: rows of each batch that the user declares public.

`data.with_public(private, public)` puts them there. They are neither clipped nor noised nor
accounted, and every privacy statement says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras import ops

from dp_keras_opt.checks import whole_number
from dp_keras_opt.clipping.query import Query
from dp_keras_opt.noise.mechanism import Release
from dp_keras_opt.optimizers.moments import SideInformation
from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer
from dp_keras_opt.optimizers.rmsprop import DPRMSprop
from dp_keras_opt.types import LearningRate

if TYPE_CHECKING:
    from dp_keras_opt.noise.release import Released


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class AdaDPS(DPRMSprop):
    """Clips and noises in the geometry of public gradients (Li et al., ICML 2022).

    w ← w − η·g̃, with g̃ the privatized mean of the gradients preconditioned by 1/(√v + ε), and then
    v ← ρ·v + (1−ρ)·p², p the mean gradient of the public rows of the batch. The geometry is fixed
    before the batch is touched, so it is that of the public gradients up to the step before.
    Arguments: those of `DPRMSprop` without `second_moment`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, second_moment=SideInformation(scaled=True), **kwargs)

    def _take_in(self, variable):
        """Updates v, and returns the root that the geometry was made of: it cancels."""
        v = self.second_moments[self._get_variable_index(variable)]
        root = self.second_moment.root(self, ops.convert_to_tensor(v))
        super()._take_in(variable)
        return root

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["second_moment"]
        return config


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class PDADPMD(PrivateOptimizer, keras.optimizers.Optimizer):
    """Mixes private and public gradients (PDA-DPMD, Amid et al., ICML 2022).

    w ← w − η·(α_t·g̃ + (1−α_t)·g_public), α_t = cos(π(t−1)/(2T)): from the private to the public.

    Args:
        learning_rate: η, a float, a Keras schedule or a callable. Defaults to 0.01.
        steps: T, the number of steps of the training; beyond it only public gradients are used.
        clip_norm, batch_size: see `PrivateOptimizer`.
        **kwargs: the others of `PrivateOptimizer`, and of Keras's optimizers:
            `weight_decay`, `use_ema` and others.
    """

    needs_public = True

    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        *,
        steps: int,
        clip_norm: float,
        batch_size: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate=learning_rate, clip_norm=clip_norm, batch_size=batch_size, **kwargs
        )
        self.steps = whole_number(steps, "steps")

    def queries(self) -> tuple[Query, ...]:
        return (self.query(), Query(rows="public"))

    def releases_for(self, noise_multiplier: float) -> tuple[Release, ...]:
        private = Release(0, "mean", noise_multiplier, self.noise)
        return (private, Release(1, "public_mean", 0.0, self.noise))

    def update(self, released: Sequence[Released]) -> None:
        done = ops.minimum(ops.cast(self.iterations, "float32") / self.steps, 1.0)
        alpha = ops.cos(math.pi / 2 * done)
        private, public = (part.value for part in released)
        mixed = [alpha * g + (1 - alpha) * p for g, p in zip(private, public, strict=True)]
        self._apply(self._regularized(mixed), alpha * released[0].noise_std)

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        rate = ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * ops.cast(gradient, variable.dtype))

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"steps": self.steps}


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class SubspaceAdagrad(PrivateOptimizer, keras.optimizers.Optimizer):
    """Noisy AdaGrad whose noisy squares are projected on a public subspace, in diagonal form.

    Every step releases Σ clip(g_i; C) and Σ clip(g_i; C)² (of each example, coordinate by
    coordinate; sensitivity C²) as two Gaussians from one batch, both with `noise_multiplier`, and
    is accounted as such: as if σ were σ/√2. The noisy squares are projected on the span U of the
    `rank` leading eigenvectors of the public gradients' second-moment matrix,

        v ← v + U Uᵀ(Σ clip(g_i)² + noise)/B,   w ← w − η·g̃/(√max(v, 0) + ε).

    U follows the public rows of each batch by one step of subspace iteration per training step
    (Kairouz, Ribero, Rush and Thakurta, "(Nearly) Dimension Independent Private ERM with AdaGrad
    Rates via Publicly Estimated Subspaces", COLT 2021). A baseline: the squares of a gradient need
    not lie where the gradients do, and what the projection takes away of them is lost.

    Args:
        learning_rate: η, a float, a Keras schedule or a callable. Defaults to 0.01.
        rank: k, the dimension of the subspace; at most the number of weights. Memory and time grow
            by k times the weights. Defaults to 10.
        epsilon: added to the root. Defaults to 1e-7.
        clip_norm, batch_size: see `PrivateOptimizer`.
        **kwargs: the others of `PrivateOptimizer`, and of Keras's optimizers:
            `weight_decay`, `use_ema` and others.

    Raises:
        ValueError: an argument is out of range; or, when built, `rank` exceeds the weights.
    """

    needs_public = True

    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        rank: int = 10,
        epsilon: float = 1e-7,
        *,
        clip_norm: float,
        batch_size: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate=learning_rate, clip_norm=clip_norm, batch_size=batch_size, **kwargs
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
        return (plain, plain._replace(square=True), Query(rows="public", directions=directions))

    def releases_for(self, noise_multiplier: float) -> tuple[Release, ...]:
        private = [Release(i, "mean", noise_multiplier, self.noise) for i in range(2)]
        return (*private, Release(2, "public_mean", 0.0, self.noise))

    def update(self, released: Sequence[Released]) -> None:
        gradient, square, products = (part.value for part in released)
        basis = self._follow(products)
        flat = ops.concatenate([ops.reshape(s, (-1,)) for s in square])
        projected = ops.matmul(basis, ops.matmul(flat, basis))
        for v, part in zip(self._second_moments, self._split(projected), strict=True):
            self.assign_add(v, part)
        self._apply(self._regularized(gradient), released[0].noise_std)

    @property
    def second_moment_estimates(self) -> list[tf.Tensor]:
        return [ops.convert_to_tensor(v) for v in self._second_moments]

    def _follow(self, products):
        """One step of subspace iteration: the basis becomes an orthonormal one of M·U."""
        moved = ops.concatenate([ops.reshape(p, (self.rank, -1)) for p in products], axis=1)
        moved = ops.divide_no_nan(moved, ops.max(ops.abs(moved)))
        # A trace of the old basis: where M is of lower rank, the rest of it stays as it is.
        basis, _ = ops.qr(ops.transpose(moved) + 1e-6 * ops.convert_to_tensor(self._basis))
        self.assign(self._basis, basis)
        return basis

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
