"""A clip norm that follows a quantile of the gradients' norms, by counts that are released."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from dp_keras_opt.checks import is_number
from dp_keras_opt.clipping.bounds import LEAST, MOST, bound

#: B over the noise on the counts, where that is not given: the paper's.
_EXAMPLES_PER_NOISE = 20


@keras.saving.register_keras_serializable(package="dp_keras_opt")
@dataclasses.dataclass(frozen=True)
class Quantile:
    """A clip norm that finds itself: `clip_norm=dp.clipping.Quantile(0.5)`.

    Beside the clipped sum, each step releases how many of the batch's units have a norm of at most
    C, less half their number, with noise of std σ_b; and then

        share = ½ + (Σ_i (b_i − ½) + noise)/B,    C ← C·exp(−η_C·(share − γ)),

    b_i 1 for a unit that is not clipped and 0 for another, B the expected batch size. So C goes to
    where a share γ of the units is below it, whatever their scale. Where layers are clipped on
    their own, each has a C_l and a count of its own. The squares of the parts' norms add up, so the
    whole is bounded by C = √ΣC_l²; the noise on it is σ·C in every coordinate, whatever layer that
    is of, as for constant bounds.

    A unit whose gradient is zero (one of weight 0, padding), or not finite, is in no count: it says
    nothing of how long gradients are.

    Args:
        quantile: γ in (0, 1), the share of the units that is not to be clipped.
        initial: C at the first step. Far off, it costs steps: at γ = ½ and η_C = 0.2, about 23 for
            a factor of 10.
        learning_rate: η_C > 0.
        count_noise: σ_b, the std of the noise on each count; None for a twentieth of the expected
            batch size, of the smallest where it changes.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: sum and counts of a step are together one Gaussian mechanism whose noise multiplier
    is the optimizer's `noise_multiplier` z. To that end the noise on the sum is a little more than
    z·C: σ·C with σ = (z⁻² − L·(2σ_b)⁻²)^(−½) for L counts. All that C is computed from is released,
    and so is C: it may be published. A z for which the counts alone would spend all of it,
    σ_b ≤ z·√L/2, is refused.

    Reference: Andrew, Thakkar, McMahan and Ramaswamy, "Differentially private learning with
    adaptive clipping", NeurIPS 2021, arXiv:1905.03871, Algorithm 1.
    """

    quantile: float = 0.5
    _: dataclasses.KW_ONLY
    initial: float = 1.0
    learning_rate: float = 0.2
    count_noise: float | None = None

    def __post_init__(self) -> None:
        if not (is_number(self.quantile) and 0 < self.quantile < 1):
            raise ValueError(f"quantile must be in (0, 1), received {self.quantile!r}.")
        initial = bound("initial", self.initial)
        if initial == math.inf:
            raise ValueError("initial must be finite: C is multiplied from step to step.")
        for name in ("learning_rate", "count_noise"):
            value = getattr(self, name)
            is_left_out = name == "count_noise" and value is None
            if not is_left_out and not (is_number(value) and 0 < value < math.inf):
                raise ValueError(f"{name} must be positive and finite, received {value!r}.")
        for name, value in vars(self).items():  # NumPy's numbers, too
            object.__setattr__(self, name, None if value is None else float(value))

    def noise_on_counts(self, batch_size: int | None) -> float | None:
        """σ_b; None where it follows from a batch size that is not known yet."""
        if self.count_noise is not None or batch_size is None:
            return self.count_noise
        return batch_size / _EXAMPLES_PER_NOISE

    def start(self, proportions: Sequence[float]) -> list[float]:
        """C_l of the first step, in these proportions, where √ΣC_l² = `initial`."""
        whole = math.hypot(*proportions)
        return [self.initial * share / whole for share in proportions]

    def next(self, bounds: tf.Tensor, shares: tf.Tensor) -> tf.Tensor:
        """C_l of the next step.

        Args:
            bounds: C_l of this one, (L,).
            shares: of the units below them, as released, (L,).
        """
        moved = bounds * tf.exp(-self.learning_rate * (shares - self.quantile))
        return tf.clip_by_value(moved, LEAST, MOST / bounds.shape[0] ** 0.5)

    def get_config(self) -> dict[str, Any]:
        """Constructor arguments, as in Keras."""
        return dict(vars(self))

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Quantile:
        """The one with these constructor arguments."""
        return cls(**config)

    def __str__(self) -> str:
        quantile, *others = ((name, f"{v:g}") for name, v in vars(self).items() if v is not None)
        return f"Quantile({', '.join([quantile[1], *map('='.join, others)])})"
