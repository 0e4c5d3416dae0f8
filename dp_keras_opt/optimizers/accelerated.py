"""Accelerated methods: heavy ball, Nesterov, and Nesterov in stages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from dp_keras_opt import theory
from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer
from dp_keras_opt.types import LearningRate

if TYPE_CHECKING:
    from dp_keras_opt.noise.release import Released


class _Accelerated(PrivateOptimizer, keras.optimizers.Optimizer):
    """What heavy ball and Nesterov share: a velocity v_t = x_t − x_{t−1}, and β."""

    smooths = True

    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        momentum: float = 0.9,
        strong_convexity: float | None = None,
        *,
        clip_norm: float,
        batch_size: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate=learning_rate, clip_norm=clip_norm, batch_size=batch_size, **kwargs
        )
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum (β) must be in [0, 1), received {momentum!r}.")
        if strong_convexity is not None and not 0 < strong_convexity < float("inf"):
            raise ValueError(f"strong_convexity (μ) must be positive, received {strong_convexity}.")
        self.momentum = float(momentum)
        self.strong_convexity = strong_convexity

    def build(self, variables: Sequence[keras.Variable]) -> None:
        if self.built:
            return
        super().build(variables)
        self._velocities = self.add_optimizer_variables(variables, "velocity")

    @property
    def _beta(self):
        """β of this step."""
        if self.strong_convexity is None:
            return ops.convert_to_tensor(self.momentum, "float32")
        root = ops.sqrt(self.strong_convexity * ops.cast(self.learning_rate, "float32"))
        return (1 - root) / (1 + root)

    def _accelerate(self, variable, step):
        """v ← βv − step; returns it."""
        v = self._velocities[self._get_variable_index(variable)]
        self.assign(v, ops.cast(self._beta, v.dtype) * v - step)
        return ops.convert_to_tensor(v)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {
            "momentum": self.momentum,
            "strong_convexity": self.strong_convexity,
        }


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DPHeavyBall(_Accelerated):
    """Differentially private heavy ball: x_{t+1} = x_t − α·g̃(x_t) + β(x_t − x_{t−1}).

    Equal to steps of size α/(1−β) along an exponential average of the privatized gradients.

    Args:
        learning_rate: α, a float, a Keras schedule or a callable. Defaults to 0.01.
        momentum: β in [0, 1). Defaults to 0.9.
        strong_convexity: None, or μ > 0, for β = (1 − √(μα))/(1 + √(μα)) in place of `momentum`.
        clip_norm, batch_size: see `PrivateOptimizer`.
        **kwargs: the others of `PrivateOptimizer`, and of Keras's optimizers:
            `weight_decay`, `use_ema` and others.

    Reference: the paper on accelerated private methods, DP-SHB; Polyak, 1964.
    """

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        rate = ops.cast(learning_rate, variable.dtype)
        velocity = self._accelerate(variable, rate * ops.cast(gradient, variable.dtype))
        self.assign_add(variable, velocity)


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DPNesterov(_Accelerated):
    """Differentially private Nesterov: z = x_t + β(x_t − x_{t−1}), x_{t+1} = z − α·g̃(z).

    The gradient is taken at z: the training step moves the variables there and back again, so that
    between steps they hold x and evaluation, checkpoints and export see x. (`DPSGD(nesterov=True)`
    keeps z in the variables, as Keras does.) Arguments: those of `DPHeavyBall`.

    Reference: the paper on accelerated private methods, DP-NAG; Nesterov, 2004.
    """

    def build(self, variables: Sequence[keras.Variable]) -> None:
        if self.built:
            return
        super().build(variables)
        self._extrapolated = self.add_variable((), dtype="bool", name="extrapolated")

    def prepare(self, variables: Sequence[keras.Variable]) -> None:
        beta = ops.where(self._extrapolated, 0.0, self._beta)  # 0 if the variables are at z already
        for variable, v in zip(variables, self._velocities, strict=True):
            self.assign_add(variable, ops.cast(beta, v.dtype) * v)
        self.assign(self._extrapolated, ops.convert_to_tensor(True))

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        step = ops.cast(learning_rate, variable.dtype) * ops.cast(gradient, variable.dtype)
        self._accelerate(variable, step)
        self.assign_sub(variable, step)

    def update(self, released: Sequence[Released]) -> None:
        super().update(released)
        self.assign(self._extrapolated, ops.convert_to_tensor(False))


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class Stages(keras.optimizers.schedules.LearningRateSchedule):
    """The step sizes of `DPMultistageNesterov`, which makes it; see there."""

    def __init__(self, strong_convexity, smoothness, c=1.0, p=1):
        self.arguments = {
            "strong_convexity": float(strong_convexity),
            "smoothness": float(smoothness),
            "c": float(c),
            "p": p,
        }
        stages = theory.stages(strong_convexity, smoothness, c, p)
        lengths, rates = zip(*itertools.islice(stages, 20), strict=True)  # of millions of steps
        self._ends, self._rates = np.cumsum(lengths), np.array([*rates, rates[-1]])

    def __call__(self, step):
        return ops.take(ops.cast(self._rates, "float32"), self._stage(step))

    def _stage(self, step):
        """The stage of a step, from 0."""
        return ops.sum(ops.cast(ops.cast(step, "int64") >= self._ends, "int32"))

    def starts_again(self, step):
        """Whether a stage other than the first begins at this step."""
        return ops.any(ops.equal(ops.cast(step, "int64"), self._ends))

    def get_config(self):
        return dict(self.arguments)


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DPMultistageNesterov(DPNesterov):
    """Nesterov in stages of falling step size, for noise that would otherwise set a floor.

    Stage 1 takes ⌈2√κ·ln √κ⌉ steps of size c/L, stage k ≥ 2 takes 2^k·⌈√κ·ln 2^{p+2}⌉ steps of size
    c/(2^{2k}·L), κ = L/μ; β = (1 − √(μα))/(1 + √(μα)) of the stage's α, and the momentum starts
    anew with each stage.

    Args:
        strong_convexity: μ > 0 of the objective.
        smoothness: L ≥ μ.
        c: in (0, 1], scales the step sizes. Defaults to 1.
        p: a positive integer, lengthens the stages. Defaults to 1.
        clip_norm, batch_size: see `PrivateOptimizer`.
        **kwargs: the others of `PrivateOptimizer`, and of Keras's optimizers:
            `weight_decay`, `use_ema` and others. `noise.schedules.multistage_optimal` makes the
            `noise_schedule` for it.

    Raises:
        ValueError: L < μ, or an argument is out of range.

    Reference: the paper on accelerated private methods, DP-MASG; Aybat et al., NeurIPS 2019. The
    restarts are those of the authors' code.
    """

    def __init__(
        self,
        *,
        strong_convexity: float,
        smoothness: float,
        c: float = 1.0,
        p: int = 1,
        clip_norm: float,
        batch_size: int,
        **kwargs: Any,
    ) -> None:
        stages = Stages(strong_convexity, smoothness, c, p)
        super().__init__(
            stages,
            strong_convexity=strong_convexity,
            clip_norm=clip_norm,
            batch_size=batch_size,
            **kwargs,
        )
        self.stages = stages

    @property
    def _beta(self):
        return ops.where(self.stages.starts_again(self.iterations), 0.0, super()._beta)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        for name in ("learning_rate", "momentum"):
            del config[name]
        return config | self.stages.get_config()
