"""Baselines that use public data: rows of each batch that the user declares public.

`data.with_public(private, public)` puts them there. They are neither clipped nor noised nor
accounted, and every privacy statement says so.
"""

import math

import keras
from keras import ops

from dp_keras_opt.clipping.query import Query
from dp_keras_opt.noise.mechanism import Release
from dp_keras_opt.optimizers.moments import SideInformation
from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer
from dp_keras_opt.optimizers.rmsprop import DPRMSprop


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class AdaDPS(DPRMSprop):
    """Clips and noises in the geometry of public gradients (Li et al., ICML 2022).

    v is RMSProp's average of the squares of public gradients; the examples are clipped as
    g/(√v + ε), and w ← w − η·(privatized preconditioned gradient). Arguments: those of `DPRMSprop`,
    with `second_moment` fixed.
    """

    def __init__(self, *args, **kwargs):
        kwargs.setdefault("second_moment", SideInformation(scaled=True))
        super().__init__(*args, **kwargs)


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class PDADPMD(PrivateOptimizer, keras.optimizers.Optimizer):
    """Mixes private and public gradients (PDA-DPMD, Amid et al., ICML 2022).

    w ← w − η·(α_t·g̃ + (1−α_t)·g_public), α_t = cos(π(t−1)/(2T)): from the private to the public.

    Args:
        learning_rate: η, a float, a Keras schedule or a callable.
        steps: T, the number of steps of the training; beyond it only public gradients are used.
        clip_norm, batch_size, noise_multiplier, noise, noise_schedule, clipping, normalize, seed:
            see `PrivateOptimizer`.
    """

    needs_public = True

    def __init__(self, learning_rate=0.01, *, steps, clip_norm, batch_size, **kwargs):
        super().__init__(
            learning_rate=learning_rate, clip_norm=clip_norm, batch_size=batch_size, **kwargs
        )
        if isinstance(steps, bool) or steps != int(steps) or steps < 1:
            raise ValueError(f"steps must be a positive integer, received {steps!r}.")
        self.steps = int(steps)

    def queries(self):
        return (self.query(), Query(rows="public"))

    def releases_for(self, noise_multiplier):
        private = Release(0, "mean", noise_multiplier, self.noise)
        return (private, Release(1, "public_mean", 0.0, self.noise))

    def update(self, released):
        done = ops.minimum(ops.cast(self.iterations, "float32") / self.steps, 1.0)
        alpha = ops.cos(math.pi / 2 * done)
        private, public = (part.value for part in released)
        self._apply(
            [alpha * g + (1 - alpha) * p for g, p in zip(private, public, strict=True)]
        )

    def update_step(self, gradient, variable, learning_rate):
        rate = ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * ops.cast(gradient, variable.dtype))

    def get_config(self):
        return super().get_config() | {"steps": self.steps}
