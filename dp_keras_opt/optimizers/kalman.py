"""A Kalman filter of the gradient, whose prediction is each example's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from dp_keras_opt.checks import is_number
from dp_keras_opt.clipping.query import Point
from dp_keras_opt.optimizers.filters import Filter

if TYPE_CHECKING:
    from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DiSK(Filter):
    """A simplified Kalman filter: ĝ_t = (1 − κ)·ĝ_{t−1} + κ·g̃_t, g̃_t ahead of the gradient.

    What the old estimate lags behind by is how the gradient changed in the last step d_t = x_t −
    x_{t−1}. Each example adds that to its own gradient before it is clipped:

        ∇f(x_t) + (1 − κ)/(κγ)·(∇f(x_t + γ·d_t) − ∇f(x_t)),

    of which g̃_t is the clipped and noisy mean. So a step takes two forward and backward passes; one
    where γ = (1 − κ)/κ, for then ∇f(x_t) falls out. Costs two buffers of the size of the model.

    Args:
        kappa: κ in (0, 1], the weight of what is new. 1 is no filter.
        gamma: γ > 0, how far ahead of x_t the second gradient is taken; None for (1 − κ)/κ.

    Raises:
        ValueError: κ or γ is out of range.

    Guarantee: that of one clipped sum, since all of an example is clipped as one. (The authors'
    published code divides the noise by √(c² + (1 − c)²), c = (1 − κ)/(κγ): where that is above 1,
    its ε does not hold.)

    Reference: Zhang, Bu, Balle, Hong, Razaviyayn and Mirrokni, "DiSK: differentially private
    optimizer with simplified Kalman filter for noise reduction", ICLR 2025, arXiv:2410.03883.
    """

    chooses_points = True

    def __init__(self, kappa: float = 0.7, gamma: float | None = 0.5) -> None:
        if not (is_number(kappa) and 0 < kappa <= 1):
            raise ValueError(f"kappa must be in (0, 1], received {kappa!r}.")
        if gamma is not None and not (is_number(gamma) and 0 < gamma < float("inf")):
            raise ValueError(f"gamma must be positive and finite, or None; received {gamma!r}.")
        self.kappa = float(kappa)
        self.gamma = None if gamma is None else float(gamma)

    def build(
        self, optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
    ) -> None:
        self._variables = list(variables)
        self._estimates = [optimizer.add_variable_from_reference(v, "estimate") for v in variables]
        self._previous = [
            optimizer.add_variable(v.shape, dtype="float32", name="previous") for v in variables
        ]
        self._steps = optimizer.add_variable((), dtype="int32", name="steps_in_estimate")

    def points(self, optimizer: PrivateOptimizer) -> tuple[Point, ...] | None:
        ahead = (1 - self.kappa) / self.kappa
        if not ahead:
            return None
        gamma = ahead if self.gamma is None else self.gamma
        is_first = tf.equal(tf.convert_to_tensor(self._steps), 0)
        offsets = [
            tf.where(is_first, 0.0, gamma * (tf.cast(v, tf.float32) - tf.convert_to_tensor(p)))
            for v, p in zip(self._variables, self._previous, strict=True)
        ]
        weight = ahead / gamma
        moved = Point(weight, offsets)
        return (moved,) if weight == 1 else (Point(1 - weight), moved)

    def __call__(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: list[tf.Tensor],
        noise_power: float | tf.Tensor,
    ) -> list[tf.Tensor]:
        for variable, previous in zip(self._variables, self._previous, strict=True):
            optimizer.assign(previous, tf.cast(variable, tf.float32))
        steps = tf.convert_to_tensor(self._steps)
        weight = tf.where(tf.equal(steps, 0), 1.0, self.kappa)
        optimizer.assign(self._steps, steps + 1)
        estimates = []
        for gradient, estimate in zip(gradients, self._estimates, strict=True):
            old, kappa = tf.convert_to_tensor(estimate), tf.cast(weight, estimate.dtype)
            new = old + kappa * (tf.cast(gradient, estimate.dtype) - old)
            optimizer.assign(estimate, new)
            estimates.append(tf.cast(new, gradient.dtype))
        return estimates

    def get_config(self) -> dict[str, Any]:
        return {"kappa": self.kappa, "gamma": self.gamma}

    def __repr__(self):
        return f"DiSK(kappa={self.kappa}, gamma={self.gamma})"
