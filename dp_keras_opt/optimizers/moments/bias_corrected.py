"""The second moment with the noise's share taken off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras import ops

from dp_keras_opt.checks import is_number
from dp_keras_opt.optimizers.moments.base import Rule, SecondMoment

if TYPE_CHECKING:
    from dp_keras_opt.noise.released import Released


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class BiasCorrected(SecondMoment):
    """Post-processing with the noise's share taken off (DP-AdamBC).

    Divides by √max(v̂ − Φ, f²). Φ is v's own recursion run on the noise variance of each step, so
    it is right for every linear rule and under a noise schedule. The recursions of Yogi and AMSGrad
    are not linear, and are refused.

    Args:
        floor: None for f = ε of the optimizer; or f over σC/B, the noise's standard deviation in
            one coordinate of the released mean (of Gaussian noise that is independent from step to
            step), and then ε is the least f. Coordinates whose signal is below the noise then take
            steps of learning_rate/f along the gradient, as SGD does: 1.0 is a good start.

    Raises:
        ValueError: `floor` is not positive and finite; or, by the optimizer, the rule is not
            linear, or σ and B are not known when the floor is needed.

    Reference: Tang, Shpilevskiy and Lécuyer, "DP-AdamBC: your DP-Adam is actually DP-SGD (unless
    you apply bias correction)", AAAI 2024, arXiv:2312.14334; Ganesh, McMahan and Thakurta, "On
    design principles for private adaptive optimizers", 2025, arXiv:2507.01129v1, Algorithm 7.
    """

    takes_geometry = True

    def __init__(self, floor: float | None = None) -> None:
        if floor is not None and not (is_number(floor) and 0 < floor < math.inf):
            raise ValueError(f"floor must be None, or positive and finite; received {floor!r}.")
        self.floor = None if floor is None else float(floor)

    def check(self, rule: Rule) -> None:
        if not rule.linear:
            raise ValueError(
                "second_moment='bias_corrected' needs a second moment that is linear in the "
                f"squares; that of {type(rule).__name__} is not, as it is configured here. Use "
                "DPAdam (without amsgrad), DPRMSprop or DPAdagrad."
            )

    def build(self, rule: Rule, variables: Sequence[keras.Variable]) -> None:
        self._power = rule.add_variable((), dtype="float32", name="noise_power")

    def squares(
        self, rule: Rule, released: Sequence[Released], gradients: Sequence[tf.Tensor]
    ) -> Sequence[tf.Tensor]:
        squares = super().squares(rule, released, gradients)
        if not self._corrects_squares(rule):
            return squares
        stds = released[0].unscaled().noise_std
        stds = stds if isinstance(stds, list) else [stds] * len(squares)
        return [s - ops.cast(std, s.dtype) ** 2 for s, std in zip(squares, stds, strict=True)]

    def update(
        self, rule: Rule, released: Sequence[Released], gradients: Sequence[tf.Tensor]
    ) -> None:
        super().update(rule, released, gradients)
        power = ops.square(ops.convert_to_tensor(released[0].noise_std, "float32"))
        if self._corrects_squares(rule):
            power = ops.zeros_like(power)
        rule.assign(self._power, rule.accumulate(ops.convert_to_tensor(self._power), power))

    def _corrects_squares(self, rule):
        """Whether the noise is taken off before v takes a square in, which for linear rules is the
        same: where it differs between weights, or which steps v holds does."""
        return rule.geometry is not None or rule.sparse_embeddings is not None

    def estimate(self, rule: Rule, v: tf.Tensor, steps: int | tf.Tensor) -> tf.Tensor:
        phi = rule.corrected(ops.convert_to_tensor(self._power), steps)
        v_hat = super().estimate(rule, v, steps)
        return v_hat - ops.cast(phi, v_hat.dtype)

    def root(self, rule: Rule, v_hat: tf.Tensor) -> tf.Tensor:
        return ops.sqrt(ops.maximum(v_hat, self._least_root(rule) ** 2))

    def _least_root(self, rule: Rule) -> float | tf.Tensor:
        """f: what a step is divided by at least.

        Raises:
            ValueError: it is a multiple of the noise, and σ or B is not set yet.
        """
        if self.floor is None:
            return rule.epsilon
        sigma, bound, size = rule.noise_on_sum, rule.current_clip_norm, rule.expected_batch_size
        if sigma is None or size is None:
            raise ValueError(
                "BiasCorrected(floor=...) is a multiple of the noise in one coordinate, σC/B. Set "
                "noise_multiplier and batch_size before, e.g. by "
                "dp_keras_opt.accounting.calibrate."
            )
        noise = sigma * bound / size if sigma else 0.0  # 0, too, where the bound is infinite
        return ops.maximum(self.floor * noise, rule.epsilon)

    def get_config(self) -> dict[str, Any]:
        return {"floor": self.floor}

    def check_geometry(self, name: str) -> None:
        super().check_geometry(name)
        if self.floor is not None:
            raise ValueError(
                "BiasCorrected(floor=...) is a multiple of the noise in one coordinate, which "
                f"under geometry={name} differs from one to another. Leave the floor out."
            )
