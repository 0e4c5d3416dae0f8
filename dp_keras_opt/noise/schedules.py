"""Noise schedules: step t's noise multiplier is σ·α_t, with α fixed before training.

Where the noise enters an error bound as Σ_t w_t·(its variance at t), one theorem says how to spend
an (unsampled) budget best: `allocate`. The papers differ in their w_t.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from dp_keras_opt import identifiers, theory
from dp_keras_opt.noise.identifiers import get as get_mechanism
from dp_keras_opt.noise.mechanism import Mechanism
from dp_keras_opt.noise.serializable import Serializable
from dp_keras_opt.theory import budgets
from dp_keras_opt.theory.sampling import amplified

__all__ = [
    "Constant",
    "Fixed",
    "NoiseSchedule",
    "allocate",
    "from_function",
    "get",
    "inverse_root_step_size",
    "multistage_optimal",
    "nesterov_optimal",
]


class NoiseSchedule(Serializable):
    """Gives α_t, the factor on the noise multiplier at step t (from 0).

    Everything is fixed in advance: a schedule that looked at the data would itself have to be
    accounted.
    """

    #: Number of steps that the schedule covers, None without end. Training past it is refused.
    length: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether it is yet to be told how many steps it covers; `fit` and `calibrate` do so."""
        return False

    def of_length(self, steps: int) -> NoiseSchedule:
        """The same schedule for this many steps, where it `is_open`."""
        return self

    @abc.abstractmethod
    def alphas(self, start: int, steps: int) -> np.ndarray:
        """α of steps start .. start + steps − 1, a float64 array (for the accountant)."""

    @abc.abstractmethod
    def alpha(self, step: int | tf.Tensor) -> float | tf.Tensor:
        """α of one step, a float32 scalar (for the graph; `step` may be a tensor)."""


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class Constant(NoiseSchedule):
    """The same noise at every step: α_t = 1."""

    def alphas(self, start: int, steps: int) -> np.ndarray:
        return np.ones(steps)

    def alpha(self, step: int | tf.Tensor) -> float | tf.Tensor:
        return 1.0


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class Fixed(NoiseSchedule):
    """α from a list fixed in advance.

    Args:
        values: positive finite factors, one a step.

    Raises:
        ValueError: `values` is empty, or holds a number that is not positive and finite.
    """

    length: int

    def __init__(self, values: Sequence[float] | np.ndarray) -> None:
        # float32 is what the graph multiplies with, so it is also what is accounted.
        self.values = np.asarray(values, np.float32)
        if self.values.ndim != 1 or not self.values.size:
            raise ValueError("A noise schedule needs a non-empty list of factors, one a step.")
        if not (np.isfinite(self.values).all() and (self.values > 0).all()):
            raise ValueError("The factors of a noise schedule must be positive and finite.")
        self.length = len(self.values)

    def alphas(self, start: int, steps: int) -> np.ndarray:
        if start + steps > self.length:
            raise ValueError(
                f"The noise schedule ends after {self.length} steps; "
                f"steps up to {start + steps} were asked for."
            )
        return self.values[start : start + steps].astype(np.float64)

    def alpha(self, step: int | tf.Tensor) -> float | tf.Tensor:
        return keras.ops.take(self.values, step)

    def get_config(self) -> dict[str, Any]:
        return {"values": self.values.tolist()}


class Open(NoiseSchedule):
    """A schedule that is yet to be told for how many steps: `fit` settles it, or `calibrate`.

    Args:
        make: function of the number of steps that gives the schedule.
    """

    is_open = True

    def __init__(self, make: Callable[[int], NoiseSchedule]) -> None:
        self.make = make

    def of_length(self, steps: int) -> NoiseSchedule:
        return self.make(steps)

    def _refuse(self, *_):
        raise ValueError(
            "The noise schedule does not know yet for how many steps it is: fit settles that, at "
            "its start, and so does calibrate. To use or save it before, give it its steps."
        )

    alphas = alpha = get_config = _refuse

    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return id(self)


def from_function(function: Callable[[int], float], steps: int | None = None) -> NoiseSchedule:
    """α_t = function(t) for t = 1, …, T, evaluated now.

    Args:
        function: of an integer; positive numbers.
        steps: T; None for those of the first `fit`.
    """
    if steps is None:
        return Open(lambda steps: from_function(function, steps))
    return Fixed([float(function(t)) for t in range(1, steps + 1)])


def allocate(weights: npt.ArrayLike, mechanism: Mechanism | str = "gaussian") -> Fixed:
    """The noise schedule that minimises Σ_t w_t·(variance at t) at a fixed unsampled budget.

    α_t ∝ w_t^(−1/4) for Gaussian noise (Σ1/σ_t² fixed), α_t ∝ w_t^(−1/3) for Laplace noise (Σ1/b_t
    fixed); scaled so that, unsampled, a noise multiplier spends what it spends without a schedule.
    Under subsampling this is a heuristic; the accountant is exact either way.

    Args:
        weights: w_1, …, w_T > 0, one a step.
        mechanism: what the optimizer's `noise` is.

    Raises:
        ValueError: a weight is not positive and finite, or the noise is not independent from step
            to step.
    """
    weights = np.asarray(weights, np.float64)
    if weights.ndim != 1 or not np.all((weights > 0) & np.isfinite(weights)):
        raise ValueError("weights must be a list of positive finite numbers, one a step.")
    power = _budget_exponent(mechanism)
    spent = len(weights) * budgets.shares(weights, power)  # 1 at a step of an equal share
    return Fixed(spent ** (-1 / power))


def _budget_exponent(mechanism):
    power = get_mechanism(mechanism).budget_exponent
    if power is None:
        raise ValueError(
            "A budget can be spent unevenly with noise that is independent from step to step: "
            f"'gaussian' or 'laplace', not {mechanism!r}."
        )
    return power


def inverse_root_step_size(
    learning_rate: float | keras.optimizers.schedules.LearningRateSchedule,
    steps: int | None = None,
    mechanism: Mechanism | str = "gaussian",
) -> NoiseSchedule:
    """ADP-SGD's schedule: less noise where steps are large, α_t ∝ η_t^(−1/2).

    That is `allocate` with w_t = η_t² (with Laplace noise, α_t ∝ η_t^(−2/3)).

    Args:
        learning_rate: a Keras `LearningRateSchedule`, evaluated now at steps 0, …, T − 1; or a
            number, for constant noise.
        steps: T; None for those of the first `fit`.
        mechanism: what the optimizer's `noise` is.

    Raises:
        ValueError: a step size is not positive and finite.

    Reference: Wu, Wang, Cristali, Gu and Willett, "Adaptive differentially private empirical risk
    minimization", 2021, arXiv:2110.07435, Algorithm 1 and Remark 4.1.
    """
    if steps is None:
        return Open(lambda steps: inverse_root_step_size(learning_rate, steps, mechanism))
    if isinstance(learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        rates = np.array([float(learning_rate(step)) for step in range(steps)])
    else:
        rates = np.full(steps, float(learning_rate))
    wrong = np.flatnonzero(~((rates > 0) & np.isfinite(rates)))
    if len(wrong):
        raise ValueError(
            f"The step size is {rates[wrong[0]]:g} at step {wrong[0]}: noise in proportion to "
            "its inverse root needs step sizes above 0. Train fewer steps, or give the learning "
            "rate schedule a positive end."
        )
    return allocate(rates**2, mechanism)


def nesterov_optimal(
    strong_convexity: float,
    smoothness: float,
    learning_rate: float,
    steps: int | None = None,
    mechanism: Mechanism | str = "gaussian",
    *,
    initial_error: float | None = None,
    noise_cost: float | None = None,
    epsilon: float | None = None,
    sampling_probability: float = 1.0,
    authors: bool = False,
) -> NoiseSchedule:
    """The schedule that minimises the error bound of `DPNesterov` after the last step.

    Later steps get less noise, since what earlier ones added has died away:
    w_t = (1 − √(μα))^{T−t}·α(1 + αL).

    Args:
        strong_convexity: μ.
        smoothness: L.
        learning_rate: α, constant.
        steps: T, the most steps to take; None for those of the first `fit`.
        mechanism: what the optimizer's `noise` is.
        initial_error: E_0 ≥ F(x_0) − F*, a guess. With `noise_cost`, the schedule ends after the
            number of steps T' ≤ T for which the bound is least; its `length` tells.
        noise_cost: what the noise would add to the bound if the whole budget went to one step of
            weight 1: d·S₁²/(n²ε²) for Laplace noise on n examples in d dimensions; see
            `theory.optimal_bounds`.
        epsilon, sampling_probability: with Laplace noise on samples, the total ε and q: the shares
            of ε, not the scales of the noise, are then in proportion to w_t^{1/3}.
        authors: whether weights and T' are those of the authors' code (see docs: schedules).

    Returns:
        A noise schedule of T or T' steps; training past its end is refused.

    Raises:
        ValueError: L < μ, or a number is out of range.

    Reference: Kuru, Birbil, Gürbüzbalaban and Yıldırım, "Differentially private accelerated
    optimization algorithms", SIAM Journal on Optimization 32(2), 2022, doi:10.1137/20M1355847,
    arXiv:2008.01989, sections 4.1 and 4.2.
    """

    def recursion(steps):
        return theory.nesterov_recursion(
            strong_convexity, smoothness, learning_rate, steps, authors
        )

    return _optimal(
        recursion, steps, mechanism, initial_error, noise_cost, epsilon, sampling_probability
    )


def multistage_optimal(
    strong_convexity: float,
    smoothness: float,
    steps: int | None = None,
    c: float = 1.0,
    p: float = 1,
    mechanism: Mechanism | str = "gaussian",
    *,
    initial_error: float | None = None,
    noise_cost: float | None = None,
    epsilon: float | None = None,
    sampling_probability: float = 1.0,
    authors: bool = False,
) -> NoiseSchedule:
    """The schedule that minimises the error bound of `DPMultistageNesterov` after the last step.

    Args:
        c, p: of the stages, see `DPMultistageNesterov`.
        others: see `nesterov_optimal`.

    Returns:
        A noise schedule; training past its end is refused.

    Raises:
        ValueError: L < μ, or a number is out of range.

    Reference: Kuru, Birbil, Gürbüzbalaban and Yıldırım, "Differentially private accelerated
    optimization algorithms", SIAM Journal on Optimization 32(2), 2022, doi:10.1137/20M1355847,
    arXiv:2008.01989, section 4.3.
    """

    def recursion(steps):
        return theory.multistage_recursion(strong_convexity, smoothness, steps, c, p, authors)

    return _optimal(
        recursion, steps, mechanism, initial_error, noise_cost, epsilon, sampling_probability
    )


def _optimal(recursion_of, steps, mechanism, *others):
    if steps is None:
        return Open(lambda steps: _optimal(recursion_of, steps, mechanism, *others))
    return _least_bound(recursion_of(steps), mechanism, *others)


def _least_bound(recursion, mechanism, initial_error, noise_cost, epsilon, probability):
    power = _budget_exponent(mechanism)
    if (initial_error is None) != (noise_cost is None):
        raise ValueError("The number of steps is chosen with both initial_error and noise_cost.")
    if initial_error is not None:
        steps = theory.best_number_of_steps(recursion, initial_error, noise_cost, power)
        recursion = tuple(part[:steps] for part in recursion)
    _, per_step = theory.unrolled(recursion)
    if epsilon is None or probability == 1:
        return allocate(per_step, mechanism)
    if power != 1:
        raise ValueError("epsilon and sampling_probability are for Laplace noise.")
    if not (0 < epsilon < math.inf and 0 < probability < 1):
        raise ValueError("epsilon must be positive, and sampling_probability in (0, 1].")
    shares = theory.allocate_epsilon(per_step, epsilon)
    alphas = 1 / amplified(
        shares, 1 / probability
    )  # what a step's epsilon on the sample comes from
    return Fixed(alphas / np.exp(np.mean(np.log(alphas))))


def get(
    identifier: NoiseSchedule | Sequence[float] | np.ndarray | Mapping[str, Any] | None,
) -> NoiseSchedule:
    """Resolves None (constant noise), a list of factors, a `NoiseSchedule` or a serialised one.

    Raises:
        ValueError: it is none of these, such as a function, which is not fixed in advance.
    """
    if identifier is None:
        return Constant()
    if isinstance(identifier, list | tuple | np.ndarray):
        return Fixed(identifier)
    if callable(identifier):
        raise ValueError(
            "A noise schedule must be fixed before training, for a given number of steps: "
            "noise_schedule=schedules.from_function(function, steps)."
        )
    others = "None, a list of factors, or an object of dp_keras_opt.noise.schedules"
    return identifiers.resolve(identifier, NoiseSchedule, {}, "noise_schedule", others)
