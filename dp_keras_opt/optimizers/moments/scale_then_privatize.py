"""Clipping and noise in the geometry of the last second moment."""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops

from dp_keras_opt.checks import is_number
from dp_keras_opt.optimizers.moments.base import Rule, SecondMoment


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class ScaleThenPrivatize(SecondMoment):
    """Clips and adds noise in the geometry of the last v̂, then scales back.

    s_t = 1/(√v̂_{t−1} + ε_s1), with v from the scaled-back privatized gradients. Scaled gradients
    have a norm near √d, d the number of weights: tune `clip_norm` anew, relative to √d.

    Args:
        epsilon: ε_s1 of the geometry; None takes the optimizer's epsilon.

    Reference: Ganesh, McMahan and Thakurta, "On design principles for private adaptive optimizers",
    2025, arXiv:2507.01129v1, Algorithm 8.
    """

    scaled = True

    def __init__(self, epsilon: float | None = None) -> None:
        if epsilon is not None and not (is_number(epsilon) and 0 < epsilon < math.inf):
            raise ValueError(f"epsilon must be positive and finite, received {epsilon!r}.")
        self.epsilon = epsilon

    def check(self, rule: Rule) -> None:
        if not (self.epsilon or rule.epsilon):
            raise ValueError("scale_then_privatize needs epsilon > 0: s_1 is 1/epsilon.")

    def _geometry_root(self, rule, v_hat):
        return ops.sqrt(v_hat) + (rule.epsilon if self.epsilon is None else self.epsilon)

    def get_config(self) -> dict[str, Any]:
        return {"epsilon": self.epsilon}
