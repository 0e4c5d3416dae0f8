"""Baselines that use public data: rows of each batch that the user declares public.

`data.with_public(private, public)` puts them there. They are neither clipped nor noised nor
accounted, and every privacy statement says so.
"""

import math
import numbers

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

    w ← w − η·g̃, with g̃ the privatized mean of the gradients preconditioned by 1/(√v + ε), and then
    v ← ρ·v + (1−ρ)·p², p the mean gradient of the public rows of the batch. The geometry is fixed
    before the batch is touched, so it is that of the public gradients up to the step before.
    Arguments: those of `DPRMSprop` without `second_moment`.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, second_moment=SideInformation(scaled=True), **kwargs)

    def _take_in(self, gradient, variable):
        """Updates v, and returns the root that the geometry was made of: it cancels."""
        v = self.second_moments[self._get_variable_index(variable)]
        root = self.second_moment.root(self, ops.convert_to_tensor(v))
        super()._take_in(gradient, variable)
        return root

    def get_config(self):
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
        clip_norm, batch_size, noise_multiplier, noise, noise_schedule, clipping, normalize, seed:
            see `PrivateOptimizer`.
        **kwargs: `weight_decay`, `use_ema` and the others of Keras's optimizers.
    """

    needs_public = True

    def __init__(self, learning_rate=0.01, *, steps, clip_norm, batch_size, **kwargs):
        super().__init__(
            learning_rate=learning_rate, clip_norm=clip_norm, batch_size=batch_size, **kwargs
        )
        if isinstance(steps, bool) or not isinstance(steps, numbers.Integral) or steps < 1:
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
        mixed = [alpha * g + (1 - alpha) * p for g, p in zip(private, public, strict=True)]
        self._apply(self._regularized(mixed))

    def update_step(self, gradient, variable, learning_rate):
        rate = ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * ops.cast(gradient, variable.dtype))

    def get_config(self):
        return super().get_config() | {"steps": self.steps}
