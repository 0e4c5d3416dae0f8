"""What the noise of the steps does to the weights: the workload, and the error it leaves.

After step t the weights are their start minus Σ_j A[t, j]·g_j, g the released gradients: A is the
workload. With noise C⁻¹z on the gradients, that of the weights is A·C⁻¹z.

Reference: Denisov, McMahan, Rush, Smith and Guha Thakurta, "Improved differential privacy for SGD
via optimal private linear operators on adaptive streams", NeurIPS 2022, arXiv:2202.08312 (momentum
and falling learning rates as workloads).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from scipy import signal

from dp_keras_opt.checks import is_number
from dp_keras_opt.noise import strategies

if TYPE_CHECKING:
    from dp_keras_opt.noise.mechanism import Mechanism

_BLOCK = 256  # columns at a time, so that no T×T matrix is kept


@dataclasses.dataclass(frozen=True)
class Workload:
    """How a rule adds gradients up: v_t = β·v_{t−1} + η_t·g_t and w_t = (1 − 1/h)·w_{t−1} − v_t.

    A rule that divides by a second moment changes their scale from weight to weight, which is not
    known beforehand; its first moment is taken as the momentum.

    Args:
        momentum: β in [0, 1); 0 are the sums of the gradients (prefix sums).
        nesterov: whether w_t = (1 − 1/h)·w_{t−1} − β·v_t − η_t·g_t.
        learning_rates: η, one a step, or None where they are constant. Only their ratios matter.
        horizon: h ≥ 1, the number of steps for which the weights hold on to a gradient; None for
            ever. Around a minimum of curvature κ a step leaves 1 − η·κ of the distance: there h is
            1/(η·κ), and weight decay λ makes it 1/(η·λ).

    Raises:
        ValueError: a number is out of range.
    """

    momentum: float = 0.0
    nesterov: bool = False
    learning_rates: tuple[float, ...] | None = None
    horizon: float | None = None

    def __post_init__(self) -> None:
        if not (is_number(self.momentum) and 0 <= self.momentum < 1):
            raise ValueError(f"momentum must be in [0, 1); received {self.momentum!r}.")
        rates = self.learning_rates
        if rates is not None and not (np.all(np.isfinite(rates)) and min(rates, default=0) >= 0):
            raise ValueError("learning_rates must be finite numbers >= 0, one for each step.")
        if self.horizon is not None and not (is_number(self.horizon) and self.horizon >= 1):
            raise ValueError(
                f"horizon must be None or a number of steps, at least 1; received {self.horizon!r}."
            )

    @property
    def constant(self) -> dict[str, Any]:
        """What of it is the same at every step, as the arguments of the mechanisms made for it."""
        found = {"momentum": self.momentum, "horizon": self.horizon}
        return {name: value for name, value in found.items() if value}

    def within(self, horizon: float | None) -> Workload:
        """The same with this horizon; with None, as it is."""
        return self if horizon is None else dataclasses.replace(self, horizon=horizon)

    def at_levels(self, levels: npt.ArrayLike) -> Workload:
        """What it does to noise whose step t is multiplied by levels[t]."""
        rates = np.asarray(levels, np.float64)
        if self.learning_rates is not None:
            rates = rates * self.learning_rates[: len(rates)]
        return dataclasses.replace(self, learning_rates=tuple(rates.tolist()))

    def response(self, gradients: np.ndarray) -> np.ndarray:
        """What the weights have of these gradients after each step, at learning rate 1: (T, …)."""
        beta, kept = self.momentum, 1 - 1 / (self.horizon or np.inf)
        taken = [1 + beta, -beta] if self.nesterov else [1.0]
        return signal.lfilter(taken, np.polymul([1.0, -kept], [1.0, -beta]), gradients, axis=0)

    def rmse(self, mechanism: Mechanism | None, steps: int, separation: int | None = None) -> float:
        """`spread` × sensitivity: the error of the weights at equal ε.

        In units of σ·C_clip/B, for the σ that one participation needs.

        Args:
            mechanism: of Gaussian noise; None for independent noise.
            steps: T.
            separation: as for `Correlated.sensitivity`.

        Raises:
            ValueError: there are fewer learning rates than steps.
        """
        moved: Any = getattr(mechanism, "sensitivity", _sensitivity_of_independent)
        return self.spread(mechanism, steps) * moved(steps, separation)

    def spread(self, mechanism: Mechanism | None, steps: int) -> float:
        """√(mean_t ‖row t of A·C⁻¹‖²), over the steps: the noise in a weight, in units of
        σ·C_clip/B.

        Args:
            mechanism: of Gaussian noise; None for independent noise.
            steps: T.

        Raises:
            ValueError: there are fewer learning rates than steps.
        """
        inverse: Any = getattr(mechanism, "inverse", _inverse_of_independent)
        first_column = getattr(mechanism, "coefficients", None)
        if not hasattr(mechanism, "inverse"):
            first_column = (1.0,)
        if self.learning_rates is None and first_column is not None:
            return strategies.toeplitz_error(first_column, steps, self)
        rates = np.ones(steps)
        if self.learning_rates is not None:
            if len(self.learning_rates) < steps:
                count = len(self.learning_rates)
                raise ValueError(f"There are {count} learning rates for {steps} steps.")
            rates = np.array(self.learning_rates[:steps])

        total = 0.0
        for start in range(0, steps, _BLOCK):
            columns = slice(start, start + _BLOCK)
            total += float(np.sum(self.response(rates[:, None] * inverse(steps, columns)) ** 2))
        return float(np.sqrt(total / steps))


def _sensitivity_of_independent(steps, separation=None):
    return (1 if separation is None else -(-steps // separation)) ** 0.5


def _inverse_of_independent(steps, columns):
    return np.eye(steps)[:, columns]


def prefix_sum_rmse(
    mechanism: Mechanism | None, steps: int, separation: int | None = None
) -> float:
    """The error of the sums of gradients, at equal ε: `Workload().rmse`.

    Args:
        mechanism: of Gaussian noise; None for independent noise.
        steps: T.
        separation: as for `Correlated.sensitivity`.
    """
    return Workload().rmse(mechanism, steps, separation)
