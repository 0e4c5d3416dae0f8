"""ADP with AdaGrad-Norm's step size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras import ops

from dp_keras_opt.accounting.batch_sizes import BatchSizeLike
from dp_keras_opt.checks import whole_number
from dp_keras_opt.noise import schedules
from dp_keras_opt.noise.schedules import NoiseSchedule
from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer
from dp_keras_opt.optimizers.settings import (
    FilterLike,
    NoiseLike,
    positive,
    refuse_noise_schedule,
)
from dp_keras_opt.types import ClipNorm, ClippingStyle, LearningRate

if TYPE_CHECKING:
    from dp_keras_opt.noise.released import Released


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class ADPAdagradNorm(PrivateOptimizer, keras.optimizers.Optimizer):
    """SGD with AdaGrad-Norm's step size η/b_t, from privatized gradients, and less noise early.

    b_t² = b_{t−1}² + max(‖g̃_t‖² − P_t, ν), P_t the expected squared norm of the noise in g̃_t, and
    θ ← θ − η·g̃_t/b_t. The noise follows a guess of b_t that is fixed in advance,
    α_t ∝ (b_0² + t·c)^{1/4}. (The paper takes ‖·‖ of the raw gradient, which its privacy theorem
    does not cover.)

    Args:
        learning_rate: η, a float, a Keras schedule or a callable. Defaults to 1.0.
        steps: T, how many steps the noise schedule is made for; training past it is refused. None
            for those of the first `fit`.
        growth: c > 0, the guess of ‖g‖² in b_t². Defaults to 1e-3.
        initial: b_0² > 0. Defaults to 20.
        floor: ν > 0, by how much b_t² grows at least. Defaults to 1e-5.
        {{private_arguments}}
        {{keras_arguments}}

    Raises:
        ValueError: an argument is out of range, or `noise_schedule` is given.

    Reference: Wu, Wang, Cristali, Gu and Willett, "Adaptive differentially private empirical risk
    minimization", 2021, arXiv:2110.07435, section 6; Ward, Wu and Bottou, "AdaGrad stepsizes: sharp
    convergence over nonconvex landscapes", ICML 2019, arXiv:1806.01811.
    """

    _derived_settings = frozenset({"noise_schedule"})

    def __init__(
        self,
        learning_rate: LearningRate = 1.0,
        *,
        steps: int | None = None,
        growth: float = 1e-3,
        initial: float = 20.0,
        floor: float = 1e-5,
        clip_norm: ClipNorm,
        batch_size: BatchSizeLike | None = None,
        noise_multiplier: float | None = None,
        noise: NoiseLike = "gaussian",
        clipping: ClippingStyle = "flat",
        normalize: bool = False,
        gradient_filter: FilterLike = None,
        secure_noise: bool = False,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_noise_schedule(type(self).__name__, kwargs)
        growth, initial = positive("growth", growth), positive("initial", initial)
        floor = positive("floor", floor)

        def allocated(steps):
            weights = [1 / (initial + growth * t) for t in range(1, steps + 1)]
            return schedules.allocate(weights, noise)

        schedule: NoiseSchedule = schedules.Open(allocated)
        if steps is not None:
            schedule = allocated(whole_number(steps, "steps"))
        super().__init__(
            learning_rate=learning_rate,
            noise_schedule=schedule,
            clip_norm=clip_norm,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            noise=noise,
            clipping=clipping,
            normalize=normalize,
            gradient_filter=gradient_filter,
            secure_noise=secure_noise,
            seed=seed,
            **kwargs,
        )
        self.growth, self.initial, self.floor = growth, initial, floor

    @property
    def steps(self) -> int | None:
        """How many steps the noise schedule is made for; None before that is settled."""
        return self.noise_schedule.length

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
        own = ("steps", "growth", "initial", "floor")
        return config | {name: getattr(self, name) for name in own}
