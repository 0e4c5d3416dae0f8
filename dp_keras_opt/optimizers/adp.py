"""ADP-SGD: more of the budget where steps are large."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras import ops

from dp_keras_opt.checks import whole_number
from dp_keras_opt.noise import schedules
from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer
from dp_keras_opt.optimizers.sgd import DPSGD
from dp_keras_opt.types import LearningRate

if TYPE_CHECKING:
    from dp_keras_opt.noise.mechanism import Mechanism
    from dp_keras_opt.noise.release import Released


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class ADPSGD(DPSGD):
    """DP-SGD whose noise at step t is in proportion to η_t^(−1/2), η_t its step size.

    θ ← θ − η_t·(clipped mean + noise of std α_t·σC/B), with `schedules.inverse_root_step_size`. At
    equal ε, full batches and a given sequence of step sizes, the error bound is smaller than that
    of constant noise by `theory.adp_improvement(step sizes)`. So it is with samples, as long as σ
    is well above 1; near 1, constant noise can be several times better. The learning rate may
    be changed later on, like that of any optimizer; the noise stays as it was fixed.

    Args:
        learning_rate: a Keras `LearningRateSchedule` that stays above 0, or a float (then the noise
            is constant).
        steps: T, how many steps the schedule is made for; training past it is refused.
        clip_norm, batch_size: see `PrivateOptimizer`.
        **kwargs: the other arguments of `DPSGD` but `noise_schedule`.

    Raises:
        ValueError: the learning rate reaches 0 or below within T steps, or is a callable, which
            could change; or `noise_schedule` is given.

    Reference: Algorithm 1 of the paper on adaptive noise for differentially private SGD (ADP-SGD),
    without the extra η_t of its equations (3) and (11).
    """

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule,
        steps: int,
        *,
        clip_norm: float,
        batch_size: int,
        noise: Mechanism | str = "gaussian",
        **kwargs: Any,
    ) -> None:
        _refuse_schedule(self, kwargs)
        if callable(learning_rate) and not isinstance(
            learning_rate, keras.optimizers.schedules.LearningRateSchedule
        ):
            raise ValueError(
                "ADPSGD needs a learning rate that is known in advance: a number or a Keras "
                "LearningRateSchedule."
            )
        steps = whole_number(steps, "steps")
        schedule = schedules.inverse_root_step_size(learning_rate, steps, noise)
        super().__init__(
            learning_rate,
            clip_norm=clip_norm,
            batch_size=batch_size,
            noise=noise,
            noise_schedule=schedule,
            **kwargs,
        )
        self.steps = steps

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["noise_schedule"]
        return config | {"steps": self.steps}


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class ADPAdagradNorm(PrivateOptimizer, keras.optimizers.Optimizer):
    """SGD with AdaGrad-Norm's step size η/b_t, from privatized gradients, and less noise early.

    b_t² = b_{t−1}² + max(‖g̃_t‖² − P_t, ν), P_t the expected squared norm of the noise in g̃_t, and
    θ ← θ − η·g̃_t/b_t. The noise follows a guess of b_t that is fixed in advance,
    α_t ∝ (b_0² + t·c)^{1/4}. (The paper takes ‖·‖ of the raw gradient, which its privacy theorem
    does not cover.)

    Args:
        learning_rate: η, a float, a Keras schedule or a callable. Defaults to 1.0.
        steps: T, how many steps the noise schedule is made for; training past it is refused.
        growth: c > 0, the guess of ‖g‖² in b_t². Defaults to 1e-3.
        initial: b_0² > 0. Defaults to 20.
        floor: ν > 0, by how much b_t² grows at least. Defaults to 1e-5.
        clip_norm, batch_size: see `PrivateOptimizer`.
        **kwargs: the others of `PrivateOptimizer` but `noise_schedule`, and of Keras's optimizers:
            `weight_decay`, `use_ema` and others.

    Raises:
        ValueError: an argument is out of range, or `noise_schedule` is given.

    Reference: section 6 of the paper on adaptive noise for differentially private SGD (ADP-SGD);
    Ward, Wu and Bottou, "AdaGrad stepsizes", ICML 2019.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 1.0,
        *,
        steps: int,
        growth: float = 1e-3,
        initial: float = 20.0,
        floor: float = 1e-5,
        clip_norm: float,
        batch_size: int,
        noise: Mechanism | str = "gaussian",
        **kwargs: Any,
    ) -> None:
        _refuse_schedule(self, kwargs)
        steps = whole_number(steps, "steps")
        for name, value in (("growth", growth), ("initial", initial), ("floor", floor)):
            if not (isinstance(value, numbers.Real) and 0 < value < math.inf):
                raise ValueError(f"{name} must be positive and finite, received {value!r}.")
        weights = [1 / (initial + growth * t) for t in range(1, steps + 1)]
        super().__init__(
            learning_rate=learning_rate,
            clip_norm=clip_norm,
            batch_size=batch_size,
            noise=noise,
            noise_schedule=schedules.allocate(weights, noise),
            **kwargs,
        )
        self.steps, self.growth = steps, float(growth)
        self.initial, self.floor = float(initial), float(floor)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        if self.built:
            return
        super().build(variables)
        self._square = self.add_variable(
            (), keras.initializers.Constant(self.initial), dtype="float32", name="square"
        )

    def update(self, released: Sequence[Released]) -> None:
        gradients = self._regularized(released[0].value)
        size = sum(math.prod(g.shape) for g in gradients)
        power = size * ops.square(ops.convert_to_tensor(released[0].noise_std, "float32"))
        norm = sum(ops.sum(ops.square(g)) for g in gradients)
        self.assign_add(self._square, ops.maximum(norm - power, self.floor))
        self._apply(gradients, released[0].noise_std)

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        rate = ops.cast(learning_rate, "float32") / ops.sqrt(self._square)
        step = ops.cast(rate, variable.dtype) * ops.cast(gradient, variable.dtype)
        self.assign_sub(variable, step)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["noise_schedule"]
        own = ("steps", "growth", "initial", "floor")
        return config | {name: getattr(self, name) for name in own}


def _refuse_schedule(optimizer, kwargs):
    if kwargs.pop("noise_schedule", None) is not None:
        raise ValueError(
            f"{type(optimizer).__name__} makes its own noise schedule. For another one use DPSGD "
            "with noise_schedule=..."
        )
