"""Momentum of each example, before the clip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from dp_keras_opt.checks import is_number, whole_number
from dp_keras_opt.clipping.query import Point
from dp_keras_opt.optimizers.filters import AtPoints, Filter

if TYPE_CHECKING:
    from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class PerExampleMomentum(AtPoints):
    """Each example's gradients at the last k weights, averaged before the clip, then a filter.

        Σ_{j<k} β^j·∇f(x_{t−j}) / Σ_{j<k} β^j

    of each example in the batch is clipped as one. An average varies less than its parts, so that
    the clip takes less of it; the noise is then smoothed by a filter. A step takes k forward and
    backward passes, and k − 1 buffers of the size of the model. At the first steps only the weights
    that there were count.

    Args:
        length: k ≥ 1; 1 is the plain gradient.
        beta: β in (0, 1].
        then: None, or the filter that g̃_t then goes through, as `gradient_filter` is given.

    Raises:
        ValueError: an argument is out of range, or `then` chooses points itself.

    Reference: Xu, Ranbaduge, Wang, Rakotoarivelo and Smith, "Enhancing DPSGD via per-sample
    momentum and low-pass filtering", AAAI 2026, arXiv:2511.08841 (DP-PMLF).
    """

    def __init__(
        self,
        length: int = 2,
        beta: float = 0.9,
        then: Filter | str | Mapping[str, Any] | None = None,
    ) -> None:
        self.length = whole_number(length, "length")
        if not (is_number(beta) and 0 < beta <= 1):
            raise ValueError(f"beta must be in (0, 1], received {beta!r}.")
        self.beta = float(beta)
        super().__init__(then)

    def _prepare(
        self, optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
    ) -> None:
        self._variables = list(variables)
        self._past = [
            [optimizer.add_variable(v.shape, dtype="float32", name="past") for v in variables]
            for _ in range(self.length - 1)
        ]
        self._steps = optimizer.add_variable((), dtype="int32", name="steps_past")

    def points(self, optimizer: PrivateOptimizer) -> tuple[Point, ...] | None:
        if self.length == 1:
            return None
        steps = tf.convert_to_tensor(self._steps)
        weights = [tf.where(steps >= j, self.beta**j, 0.0) for j in range(self.length)]
        total = tf.add_n(weights)
        points = [Point(weights[0] / total)]
        for j, past in enumerate(self._past, start=1):
            offsets = [
                tf.where(steps >= j, tf.convert_to_tensor(p) - tf.cast(v, tf.float32), 0.0)
                for v, p in zip(self._variables, past, strict=True)
            ]
            points.append(Point(weights[j] / total, offsets))
        return tuple(points)

    def _keep(self, optimizer: keras.optimizers.Optimizer, gradients: list[tf.Tensor]) -> None:
        now = [tf.cast(v, tf.float32) for v in self._variables]
        for newer, older in reversed(list(zip([now, *self._past], self._past, strict=False))):
            for variable, value in zip(older, newer, strict=True):
                optimizer.assign(variable, tf.convert_to_tensor(value))
        optimizer.assign(self._steps, tf.convert_to_tensor(self._steps) + 1)

    def get_config(self) -> dict[str, Any]:
        return {"length": self.length, "beta": self.beta} | super().get_config()
