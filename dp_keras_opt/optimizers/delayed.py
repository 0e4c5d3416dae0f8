"""DP²: private training with delayed preconditioners.

A cycle of s1 + s2 steps. In the SGD phase the plain gradient is released, and averaged over the s1
steps the noise in it falls by √s1; the average refreshes v. In the adaptive phase the examples are
clipped in the geometry 1/(√v + ε) of that v, and the privatized *preconditioned* gradient is the
step. One σ serves both phases, so the cost is that of DP-SGD.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import keras
import tensorflow as tf
from keras import ops

from dp_keras_opt.accounting.batch_sizes import BatchSizeLike
from dp_keras_opt.checks import whole_number
from dp_keras_opt.noise.mechanism import Release
from dp_keras_opt.optimizers import clip_norms, settings
from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer
from dp_keras_opt.optimizers.recursions import bounded_step, running_mean, running_sum
from dp_keras_opt.optimizers.settings import (
    FilterLike,
    NoiseLike,
    NoiseScheduleLike,
    Setting,
)
from dp_keras_opt.types import ClipNorm, ClippingStyle, LearningRate

if TYPE_CHECKING:
    from dp_keras_opt.clipping.query import Query
    from dp_keras_opt.noise.released import Released

_Ablation = Literal["extra_query", "noise_before_preconditioning"]


def _delay(name: str, value: Any) -> tuple[int, ...]:
    phases = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(phases) != 2:
        raise ValueError(f"{name} must be s or (s1, s2), numbers of steps; received {value!r}.")
    return tuple(whole_number(steps, name, 1, "It is a number of steps.") for steps in phases)


_TWO_BOUNDS = (
    "the bounds of its two phases are of gradients in different geometries, and a count is of one"
)


def _clip_norm(name: str, value: Any) -> float | clip_norms.ClipNormSchedule:
    value = clip_norms.resolve(name, value)
    clip_norms.refuse_quantile(value, name, _TWO_BOUNDS)
    return value


class DelayedPreconditioner(PrivateOptimizer, keras.optimizers.Optimizer):
    """What `DP2RMSprop`, `DP2Adagrad` and `DP2Yogi` share; each says how v takes in a square.

    Regularisers and `weight_decay` are preconditioned as the gradient of the loss is.

    Args:
        learning_rate: η1 of the SGD phase, a float, a Keras schedule or a callable. Defaults to
            0.1.
        adaptive_learning_rate: η2 of the adaptive phase, a float or a Keras schedule. Defaults to
            0.1.
        epsilon: ε of the geometry 1/(√v + ε). Defaults to 1e-7.
        clip_norm: C1 of the SGD phase.
        {{private_arguments}}
        {{keras_arguments}}

    Raises:
        ValueError: a phase is not at least one step long, or an argument is out of range.

    Reference: Li, Zaheer, Liu, Reddi, McMahan and Smith, "Differentially private adaptive
    optimization with delayed preconditioners", ICLR 2023, arXiv:2212.00309, Algorithm 1; the
    ablations are its variants 1 (Algorithm 2) and 2.
    """

    _no_quantile = _TWO_BOUNDS

    adaptive_clip_norm = Setting(
        _clip_norm, "C2 of the adaptive phase, for preconditioned gradients."
    )
    delay = Setting(_delay, "(s1, s2), lengths of the phases in steps; one number for both.")
    subtract_noise = Setting(
        settings.boolean,
        "whether the variance that the noise adds to the averaged square, σ²C1²/(s1·B²), is taken "
        "off before v takes it in (never below 0).",
    )
    ablation = Setting(
        settings.one_of(None, "extra_query", "noise_before_preconditioning"),
        'None, or one of the paper\'s two: "extra_query" (the plain gradient is released at every '
        "step, beside the preconditioned one: two releases from one batch, accounted as such at "
        "every step; v is refreshed at the first step and every s1 steps) and "
        '"noise_before_preconditioning" (the gradient is clipped and noised as it is, then divided '
        "by √v + ε).",
    )

    def __init__(
        self,
        learning_rate: LearningRate = 0.1,
        adaptive_learning_rate: float | keras.optimizers.schedules.LearningRateSchedule = 0.1,
        epsilon: float = 1e-7,
        delay: int | Sequence[int] = 100,
        *,
        adaptive_clip_norm: ClipNorm,
        subtract_noise: bool = False,
        ablation: _Ablation | None = None,
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
        self.adaptive_learning_rate = adaptive_learning_rate
        self.epsilon = settings.positive("epsilon", epsilon)
        self.delay = delay
        self.adaptive_clip_norm = adaptive_clip_norm
        self.subtract_noise = subtract_noise
        self.ablation = ablation

    def accumulate(self, v: Any, square: Any) -> Any:
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
        """s of this step, in float32 like the gradients, whatever the variables are."""
        return [
            ops.where(adaptive, 1.0 / (ops.sqrt(ops.cast(v, "float32")) + self.epsilon), 1.0)
            for v in self._second_moments
        ]

    def queries(self) -> tuple[Query, ...]:
        adaptive, _ = self._phase
        adaptive_bound = clip_norms.at(self.adaptive_clip_norm, self.iterations)
        clip_norm = ops.where(adaptive, adaptive_bound, self.current_clip_norm)
        if self.ablation == "noise_before_preconditioning":
            return (self.query(clip_norm=clip_norm),)
        preconditioned = self.query(self._geometry(adaptive), clip_norm)
        return (preconditioned, self.query()) if self.ablation else (preconditioned,)

    def releases_for(self, noise_multiplier: float) -> tuple[Release, ...]:
        count = 2 if self.ablation == "extra_query" else 1
        return tuple(Release(i, "mean", noise_multiplier, self.noise) for i in range(count))

    def update(self, released: Sequence[Released]) -> None:
        adaptive, refresh = self._phase
        answer, plain = (
            part._replace(value=self._regularized(part.value))
            for part in (released[0].unscaled(), released[-1].unscaled())
        )
        gradients = answer.value
        if self.ablation == "extra_query":
            pairs = zip(plain.value, gradients, strict=True)
            gradients = [ops.where(refresh, p, g) for p, g in pairs]
        # Filtered in the coordinates of the gradient: the same thing in both phases.
        gradients = self._filtered(gradients, answer.noise_std)
        # Not the geometry of the query where the noise comes before the preconditioning.
        geometry = released[0].scale or self._geometry(adaptive)
        steps = self._preconditioned(gradients, geometry, self._rate(adaptive))
        self._collect(adaptive, refresh, plain.value, released[-1].noise_std)
        self._step(steps)

    def _preconditioned(self, gradients, geometry, rate):
        """rate·s·(gradient + weight_decay·w) of each variable."""
        steps = []
        for g, s, variable in zip(gradients, geometry, self._trainable_variables, strict=True):
            if self.weight_decay is not None and self._use_weight_decay(variable):
                g = g + self.weight_decay * ops.cast(variable, g.dtype)
            steps.append(rate * s * g)
        return steps

    def _collect(self, adaptive, refresh, plain, noise_std):
        """Adds a released plain gradient to the sum; at its end v takes in the mean squared."""

        def collect():
            power = ops.square(ops.convert_to_tensor(noise_std, "float32"))
            self.assign_add(self._noise_power, power)
            for total, g in zip(self._sums, plain, strict=True):
                self.assign_add(total, g)
            tf.cond(refresh, self._refresh, lambda: None)

        if self.ablation == "extra_query":
            collect()
        else:  # gradients of the adaptive phase never enter the sum
            tf.cond(adaptive, lambda: None, collect)

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
        # What `update` hands on is the step itself: the rate is that of the phase.
        self.assign_sub(variable, ops.cast(gradient, variable.dtype))

    def _apply_weight_decay(self, variables):
        """It is part of the step, since it is preconditioned too."""

    def _rate(self, adaptive):
        """The learning rate of the phase."""
        rate = self.adaptive_learning_rate
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            rate = rate(self.iterations)
        plain = ops.cast(self.learning_rate, "float32")
        return ops.where(adaptive, ops.cast(rate, "float32"), plain)

    def get_config(self) -> dict[str, Any]:
        rate = self.adaptive_learning_rate
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            rate = keras.saving.serialize_keras_object(rate)
        return super().get_config() | {"adaptive_learning_rate": rate, "epsilon": self.epsilon}

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
    """DP² with v ← ρ·v + (1−ρ)·ḡ², ḡ the mean of the gradients of an SGD phase.

    In the SGD phase w ← w − η1·g̃, in the adaptive phase w ← w − η2·g̃ with g̃ the privatized mean of
    the gradients preconditioned by 1/(√v + ε). Regularisers and `weight_decay` are preconditioned
    as the gradient of the loss is.

    Args:
        learning_rate: η1 of the SGD phase, a float, a Keras schedule or a callable. Defaults to
            0.1.
        adaptive_learning_rate: η2 of the adaptive phase, a float or a Keras schedule. Defaults to
            0.1.
        epsilon: ε of the geometry 1/(√v + ε). Defaults to 1e-7.
        rho: ρ, decay of v. Defaults to 0.9.
        clip_norm: C1 of the SGD phase.
        {{private_arguments}}
        {{keras_arguments}}

    Raises:
        ValueError: a phase is not at least one step long, or an argument is out of range.

    Reference: Li, Zaheer, Liu, Reddi, McMahan and Smith, "Differentially private adaptive
    optimization with delayed preconditioners", ICLR 2023, arXiv:2212.00309, Algorithm 1.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.1,
        adaptive_learning_rate: float | keras.optimizers.schedules.LearningRateSchedule = 0.1,
        epsilon: float = 1e-7,
        delay: int | Sequence[int] = 100,
        *,
        rho: float = 0.9,
        adaptive_clip_norm: ClipNorm,
        subtract_noise: bool = False,
        ablation: _Ablation | None = None,
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
            adaptive_learning_rate=adaptive_learning_rate,
            epsilon=epsilon,
            delay=delay,
            adaptive_clip_norm=adaptive_clip_norm,
            subtract_noise=subtract_noise,
            ablation=ablation,
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
        self.rho = rho

    def accumulate(self, v: Any, square: Any) -> Any:
        return running_mean(v, square, self.rho)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"rho": self.rho}


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DP2Yogi(DP2RMSprop):
    """DP² with v ← v + (1−ρ)·sign(ḡ² − v)·ḡ², ḡ the mean of the gradients of an SGD phase.

    The rest is as in `DP2RMSprop`. (The paper prints sign(ḡ − v²), where the units do not agree.)

    Args:
        learning_rate: η1 of the SGD phase, a float, a Keras schedule or a callable. Defaults to
            0.1.
        adaptive_learning_rate: η2 of the adaptive phase, a float or a Keras schedule. Defaults to
            0.1.
        epsilon: ε of the geometry 1/(√v + ε). Defaults to 1e-7.
        rho: ρ, decay of v. Defaults to 0.9.
        clip_norm: C1 of the SGD phase.
        {{private_arguments}}
        {{keras_arguments}}

    Raises:
        ValueError: a phase is not at least one step long, or an argument is out of range.

    Reference: Li, Zaheer, Liu, Reddi, McMahan and Smith, "Differentially private adaptive
    optimization with delayed preconditioners", ICLR 2023, arXiv:2212.00309, Algorithm 1 and
    appendix; Zaheer, Reddi, Sachan, Kale and Kumar, "Adaptive methods for nonconvex optimization",
    NeurIPS 2018, Algorithm 2.
    """

    def accumulate(self, v: Any, square: Any) -> Any:
        return bounded_step(v, square, self.rho)


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DP2Adagrad(DelayedPreconditioner):
    """DP² with v ← v + ḡ², ḡ the mean of the gradients of an SGD phase.

    The rest is as in `DP2RMSprop`.

    Args:
        learning_rate: η1 of the SGD phase, a float, a Keras schedule or a callable. Defaults to
            0.1.
        adaptive_learning_rate: η2 of the adaptive phase, a float or a Keras schedule. Defaults to
            0.1.
        epsilon: ε of the geometry 1/(√v + ε). Defaults to 1e-7.
        clip_norm: C1 of the SGD phase.
        {{private_arguments}}
        {{keras_arguments}}

    Raises:
        ValueError: a phase is not at least one step long, or an argument is out of range.

    Reference: Li, Zaheer, Liu, Reddi, McMahan and Smith, "Differentially private adaptive
    optimization with delayed preconditioners", ICLR 2023, arXiv:2212.00309, Algorithm 1 and
    appendix; Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and
    stochastic optimization", JMLR 12, 2011.
    """

    def accumulate(self, v: Any, square: Any) -> Any:
        return running_sum(v, square)
