"""DP²: private training with delayed preconditioners (the DP² paper, Algorithm 1).

A cycle of s1 + s2 steps. In the SGD phase the plain gradient is released, and averaged over the s1
steps the noise in it falls by √s1; the average refreshes v. In the adaptive phase the examples are
clipped in the geometry 1/(√v + ε) of that v, and the privatized *preconditioned* gradient is the
step. One σ serves both phases, so the cost is that of DP-SGD.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import keras
import tensorflow as tf
from keras import ops

from dp_keras_opt.checks import whole_number
from dp_keras_opt.noise.mechanism import Release
from dp_keras_opt.optimizers.private_optimizer import (
    PrivateOptimizer,
    _bool,
    _clip_norm,
    _FrozenAtBuild,
    _one_of,
)
from dp_keras_opt.types import LearningRate

if TYPE_CHECKING:
    from dp_keras_opt.clipping.query import Query
    from dp_keras_opt.noise.release import Released

_ABLATIONS = (None, "extra_query", "noise_before_preconditioning")


def _delay(name: str, value: Any) -> tuple[int, ...]:
    phases = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(phases) != 2:
        raise ValueError(f"{name} must be s or (s1, s2), numbers of steps; received {value!r}.")
    return tuple(whole_number(steps, name, 1, "It is a number of steps.") for steps in phases)


class DelayedPreconditioner(PrivateOptimizer, keras.optimizers.Optimizer):
    """What `DP2RMSprop`, `DP2Adagrad` and `DP2Yogi` share; each says how v takes in a square.

    Regularisers and `weight_decay` are preconditioned as the gradient of the loss is.

    Args:
        learning_rate: η1 of the SGD phase, a float, a Keras schedule or a callable. Defaults to
            0.1.
        adaptive_learning_rate: η2 of the adaptive phase, a float or a Keras schedule. Defaults to
            0.1.
        epsilon: ε of the geometry 1/(√v + ε). Defaults to 1e-7.
        delay: (s1, s2), lengths of the phases in steps; one number for both. Defaults to 100.
        clip_norm: C1 of the SGD phase.
        adaptive_clip_norm: C2 of the adaptive phase, for preconditioned gradients.
        subtract_noise: whether the variance that the noise adds to the averaged square,
            σ²C1²/(s1·B²), is taken off before v takes it in (never below 0).
        ablation: None, or one of the paper's two: "extra_query" (the plain gradient is released at
            every step, beside the preconditioned one: two releases from one batch, accounted as
            such at every step; v is refreshed at the first step and every s1 steps) and
            "noise_before_preconditioning" (the gradient is clipped and noised as it is, then
            divided by √v + ε).
        batch_size: see `PrivateOptimizer`.
        **kwargs: the others of `PrivateOptimizer`, and of Keras's optimizers:
            `weight_decay`, `use_ema` and others.

    Raises:
        ValueError: a phase is not at least one step long, or an argument is out of range.
    """

    adaptive_clip_norm = _FrozenAtBuild(_clip_norm)
    delay = _FrozenAtBuild(_delay)
    subtract_noise = _FrozenAtBuild(_bool)
    ablation = _FrozenAtBuild(_one_of(*_ABLATIONS))

    def __init__(
        self,
        learning_rate: LearningRate = 0.1,
        adaptive_learning_rate: float | keras.optimizers.schedules.LearningRateSchedule = 0.1,
        epsilon: float = 1e-7,
        delay: int | Sequence[int] = 100,
        *,
        clip_norm: float,
        adaptive_clip_norm: float,
        batch_size: int,
        subtract_noise: bool = False,
        ablation: Literal["extra_query", "noise_before_preconditioning"] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate=learning_rate, clip_norm=clip_norm, batch_size=batch_size, **kwargs
        )
        if not isinstance(epsilon, numbers.Real) or not 0 < epsilon < float("inf"):
            raise ValueError(f"epsilon must be positive and finite, received {epsilon!r}.")
        self.adaptive_learning_rate = adaptive_learning_rate
        self.epsilon = float(epsilon)
        self.delay = delay
        self.adaptive_clip_norm = adaptive_clip_norm
        self.subtract_noise = subtract_noise
        self.ablation = ablation

    def accumulate(self, v, square):
        """The next v."""
        raise TypeError(f"{type(self).__name__} does not define how v accumulates.")

    def build(self, variables: Sequence[keras.Variable]) -> None:
        if self.built:
            return
        super().build(variables)
        self._second_moments, self._sums = self.add_optimizer_variables(
            variables, ["second_moment", "gradient_sum"]
        )
        self._noise_power = self.add_variable((), dtype="float32", name="noise_power")

    @property
    def _clip_norms(self):
        return (self.clip_norm, self.adaptive_clip_norm)

    @property
    def _phase(self):
        """Whether this step is adaptive, and whether it ends a collection of gradients."""
        if self.ablation == "extra_query":
            refresh = ops.equal(self.iterations % self.delay[0], 0)
            return ops.logical_not(refresh), refresh
        place = self.iterations % sum(self.delay)
        return place >= self.delay[0], ops.equal(place, self.delay[0] - 1)

    @property
    def second_moment_estimates(self) -> list[tf.Tensor]:
        return [ops.convert_to_tensor(v) for v in self._second_moments]

    def _geometry(self, adaptive):
        """In float32, like the gradients, whatever the variables are."""
        return [
            ops.where(adaptive, 1.0 / (ops.sqrt(ops.cast(v, "float32")) + self.epsilon), 1.0)
            for v in self._second_moments
        ]

    def queries(self) -> tuple[Query, ...]:
        adaptive, _ = self._phase
        clip_norm = ops.where(adaptive, self.adaptive_clip_norm, self.clip_norm)
        if self.ablation == "noise_before_preconditioning":
            return (self.query(clip_norm=clip_norm),)
        preconditioned = self.query(self._geometry(adaptive), clip_norm)
        return (preconditioned, self.query()) if self.ablation else (preconditioned,)

    def releases_for(self, noise_multiplier: float) -> tuple[Release, ...]:
        count = 2 if self.ablation == "extra_query" else 1
        return tuple(Release(i, "mean", noise_multiplier, self.noise) for i in range(count))

    def update(self, released: Sequence[Released]) -> None:
        adaptive, refresh = self._phase
        geometry = self._geometry(adaptive)
        noise_std = released[0].noise_std
        if self.ablation == "noise_before_preconditioning":
            plain = self._regularized(released[0].value)
            steps = [g * s for g, s in zip(plain, geometry, strict=True)]
            noise_std = [noise_std * s for s in geometry]
        else:
            steps = plain = self._regularized(released[0].value, geometry)
        if self.ablation == "extra_query":
            plain = self._regularized(released[1].value)
            steps = [ops.where(refresh, p, g) for p, g in zip(plain, steps, strict=True)]
        power = ops.square(ops.convert_to_tensor(released[-1].noise_std, "float32"))
        if self.ablation == "extra_query":
            self._collect(plain, power, refresh)
        else:  # gradients of the adaptive phase never enter the sum
            tf.cond(adaptive, lambda: None, lambda: self._collect(plain, power, refresh))
        self._apply(steps, noise_std)

    def _filtered(self, gradients, noise_std):
        """Plain gradients are what is filtered: the same thing in both phases."""
        if self.gradient_filter is None:
            return gradients
        geometry = self._geometry(self._phase[0])
        stds = noise_std if isinstance(noise_std, list) else [noise_std] * len(gradients)
        plain = [g / s for g, s in zip(gradients, geometry, strict=True)]
        stds = [std / s for std, s in zip(stds, geometry, strict=True)]
        smooth = super()._filtered(plain, stds)
        return [g * s for g, s in zip(smooth, geometry, strict=True)]

    def _collect(self, plain, power, refresh):
        """Adds a released plain gradient to the sum; at its end v takes in the mean squared."""
        self.assign_add(self._noise_power, power)
        for total, g in zip(self._sums, plain, strict=True):
            self.assign_add(total, g)
        tf.cond(refresh, self._refresh, lambda: None)

    def _refresh(self):
        count = self._count()
        excess = self._noise_power / count**2 if self.subtract_noise else 0.0
        for v, total in zip(self._second_moments, self._sums, strict=True):
            square = ops.maximum(ops.square(total / count) - excess, 0.0)
            self.assign(v, self.accumulate(ops.convert_to_tensor(v), square))
            self.assign(total, ops.zeros_like(total))
        self.assign(self._noise_power, ops.zeros(()))

    def _count(self):
        """How many gradients the sum holds at a refresh."""
        if self.ablation == "extra_query":  # the first refresh comes at the first step
            return ops.where(ops.equal(self.iterations, 0), 1.0, float(self.delay[0]))
        return float(self.delay[0])

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        rate = ops.cast(self._rate(learning_rate), variable.dtype)
        self.assign_sub(variable, rate * ops.cast(gradient, variable.dtype))

    def _apply_weight_decay(self, variables):
        if self.weight_decay is None:
            return
        decay = self.weight_decay * self._rate(self.learning_rate)
        geometry = self._geometry(self._phase[0])
        for variable, s in zip(variables, geometry, strict=True):
            if self._use_weight_decay(variable):
                value = ops.convert_to_tensor(variable)
                self.assign_sub(variable, ops.cast(decay * s, value.dtype) * value)

    def _rate(self, learning_rate):
        """The learning rate of the phase."""
        rate = self.adaptive_learning_rate
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            rate = rate(self.iterations)
        adaptive, _ = self._phase
        return ops.where(adaptive, ops.cast(rate, "float32"), ops.cast(learning_rate, "float32"))

    def get_config(self) -> dict[str, Any]:
        rate = self.adaptive_learning_rate
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            rate = keras.saving.serialize_keras_object(rate)
        return super().get_config() | {
            "adaptive_learning_rate": rate,
            "epsilon": self.epsilon,
            "delay": list(self.delay),
            "adaptive_clip_norm": self.adaptive_clip_norm,
            "subtract_noise": self.subtract_noise,
            "ablation": self.ablation,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> DelayedPreconditioner:
        if isinstance(config["adaptive_learning_rate"], dict):
            rate = keras.saving.deserialize_keras_object(config["adaptive_learning_rate"])
            config = config | {"adaptive_learning_rate": rate}
        return super().from_config(config, custom_objects=custom_objects)


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DP2RMSprop(DelayedPreconditioner):
    """DP² with v ← ρ·v + (1−ρ)·ḡ². Arguments: `rho` (0.9) and those of `DelayedPreconditioner`."""

    def __init__(self, *args: Any, rho: float = 0.9, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rho = rho

    def accumulate(self, v: tf.Tensor, square: tf.Tensor) -> tf.Tensor:
        return self.rho * v + (1 - self.rho) * square

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"rho": self.rho}


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DP2Yogi(DP2RMSprop):
    """DP² with v ← v + (1−ρ)·sign(ḡ² − v)·ḡ². Arguments: those of `DP2RMSprop`."""

    def accumulate(self, v: tf.Tensor, square: tf.Tensor) -> tf.Tensor:
        return v + (1 - self.rho) * ops.sign(square - v) * square


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DP2Adagrad(DelayedPreconditioner):
    """DP² with v ← v + ḡ². Arguments: those of `DelayedPreconditioner`."""

    def accumulate(self, v: tf.Tensor, square: tf.Tensor) -> tf.Tensor:
        return v + square
