"""Sharpness-aware steps: the gradient is taken uphill of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from dp_keras_opt.checks import is_number
from dp_keras_opt.clipping.query import Point
from dp_keras_opt.optimizers.filters import AtPoints, Filter

if TYPE_CHECKING:
    from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class SharpnessAware(AtPoints):
    """The gradient at x_t + ρ·g̃_{t−1}/‖g̃_{t−1}‖, up the last noisy gradient, before a filter.

    Flat minima lose less by noise. The direction was released already and is public, so that a step
    costs what another does: one pass, no privacy. Costs one buffer of the size of the model.

    Args:
        radius: ρ > 0, in the L2 norm of all weights.
        then: None, or the filter that g̃_t then goes through, as `gradient_filter` is given.

    Raises:
        ValueError: ρ is out of range, `then` chooses points itself, or, by the optimizer, there is
            a projection: of the last release only a part is kept then.

    Reference: Park, Kim, Choi and Lee, "Differentially private sharpness-aware training", ICML
    2023, arXiv:2306.05651 (DP-SAT).
    """

    def __init__(self, radius: float, then: Filter | str | Mapping[str, Any] | None = None) -> None:
        if not (is_number(radius) and 0 < radius < float("inf")):
            raise ValueError(f"radius must be positive and finite, received {radius!r}.")
        self.radius = float(radius)
        super().__init__(then)

    @property
    def smooths(self) -> bool:
        return self.then is not None and self.then.smooths

    def _prepare(
        self, optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
    ) -> None:
        if getattr(optimizer, "projection", None) is not None:
            raise ValueError(
                "SharpnessAware goes up the last release in the space of the weights, of which a "
                "projection keeps a part. Leave out one of the two."
            )
        self._last = [optimizer.add_variable_from_reference(v, "last_release") for v in variables]

    def points(self, optimizer: PrivateOptimizer) -> tuple[Point, ...] | None:
        last = [tf.cast(tf.convert_to_tensor(v), tf.float32) for v in self._last]
        factor = tf.math.divide_no_nan(self.radius, tf.linalg.global_norm(last))
        return (Point(1.0, [factor * g for g in last]),)

    def _keep(self, optimizer: keras.optimizers.Optimizer, gradients: list[tf.Tensor]) -> None:
        for gradient, last in zip(gradients, self._last, strict=True):
            optimizer.assign(last, tf.cast(gradient, last.dtype))

    def get_config(self) -> dict[str, Any]:
        return {"radius": self.radius} | super().get_config()
