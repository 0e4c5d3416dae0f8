"""PDA-DPMD: private and public gradients mixed."""

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
from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer
from dp_keras_opt.optimizers.settings import FilterLike, NoiseLike, NoiseScheduleLike
from dp_keras_opt.types import ClipNorm, ClippingStyle, LearningRate

if TYPE_CHECKING:
    from dp_keras_opt.noise.released import Released


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class PDADPMD(PrivateOptimizer, keras.optimizers.Optimizer):
    """Mixes private and public gradients.

    w ← w − η·(α_t·g̃ + (1−α_t)·g_public), α_t = cos(π(t−1)/(2T)): from the private to the public.

    Args:
        learning_rate: η, a float, a Keras schedule or a callable. Defaults to 0.01.
        steps: T, the number of steps of the training; beyond it only public gradients are used.
        {{private_arguments}}
        {{keras_arguments}}

    Raises:
        ValueError: an argument is out of range, or would mean something else here than in Keras.

    Reference: Amid, Ganesh, Mathews, Ramaswamy, Song, Steinke, Suriyakumar, Thakkar and Thakurta,
    "Public data-assisted mirror descent for private model training", ICML 2022, arXiv:2112.00193.
    """

    needs_public = True

    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        *,
        steps: int,
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
        self.steps = whole_number(steps, "steps")

    def queries(self) -> tuple[Query, ...]:
        return (self.query(), Query(population="public"))

    def releases_for(self, noise_multiplier: float) -> tuple[Release, ...]:
        return (self.mean_release(noise_multiplier), Release(1, "public_mean", 0.0, self.noise))

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
