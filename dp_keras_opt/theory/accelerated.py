"""Nesterov's method and its multistage variant: recursions of their errors, and bounds.

Reference: Kuru, Birbil, Gürbüzbalaban and Yıldırım, "Differentially private
accelerated optimization algorithms", SIAM Journal on Optimization 32(2), 2022,
doi:10.1137/20M1355847, arXiv:2008.01989; equations are numbered
as in the journal.
"""

import itertools
import math
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dp_keras_opt.checks import whole_number
from dp_keras_opt.theory.arguments import check_convexity, check_positive

#: Contractions (T,) and gains (T,) of each step.
Recursion: TypeAlias = tuple[np.ndarray, np.ndarray]

#: The weight of E_0, and those (T,) of the noise of each step.
Weights: TypeAlias = tuple[float, np.ndarray]


def nesterov_momentum(
    strong_convexity: float, learning_rate: float | np.ndarray
) -> float | np.ndarray:
    """β = (1 − √(μα))/(1 + √(μα)).

    Args:
        strong_convexity: μ > 0.
        learning_rate: α, or an array of them, one per step.

    Raises:
        ValueError: μ or α is not positive, or μα > 1.
    """
    root = np.sqrt(_scaled(strong_convexity, learning_rate))
    return (1 - root) / (1 + root)


def nesterov_recursion(
    strong_convexity: float,
    smoothness: float,
    learning_rate: float,
    steps: int,
    authors: bool = False,
) -> Recursion:
    """Contractions 1 − √(μα) and gains α(1 + αL) of Nesterov's method, for each step (4.2).

    Args:
        strong_convexity: μ > 0.
        smoothness: L ≥ μ.
        learning_rate: α in (0, 1/L].
        steps: T ≥ 1.
        authors: True for the numbers of the authors' code: gains of half the size, and an E_0 of
            twice the size. They reproduce its choices; they are no bound for noise of scale b.

    Returns:
        (contractions (T,), gains (T,)).

    Raises:
        ValueError: an argument is out of its range.
    """
    stages = np.ones(whole_number(steps, "steps"), int)
    return _recursion(strong_convexity, smoothness, stages, np.full(steps, learning_rate), authors)


def stages(
    strong_convexity: float, smoothness: float, c: float = 1.0, p: float = 1
) -> Iterator[tuple[int, float]]:
    """Length and learning rate of each stage of the multistage method, without end (4.7).

    Stage 1 takes ⌈2√κ ln √κ⌉ steps, but at least 1, at c/L; stage k ≥ 2 takes 2^k·⌈√κ ln 2^{p+2}⌉
    steps at c/(2^{2k}·L).

    Args:
        strong_convexity: μ > 0.
        smoothness: L ≥ μ.
        c: in (0, 1], scales all learning rates.
        p: at least 1, lengthens the stages from the second on.

    Returns:
        An iterator of (steps, learning rate).

    Raises:
        ValueError: an argument is out of its range.
    """
    check_convexity(strong_convexity, smoothness)
    if not 0 < c <= 1:
        raise ValueError(f"c must be in (0, 1], received {c!r}.")
    if not p >= 1:
        raise ValueError(f"p must be at least 1, received {p!r}.")
    root = math.sqrt(smoothness / strong_convexity)
    unit = math.ceil(root * (p + 2) * math.log(2))
    first = max(1, math.ceil(2 * root * math.log(root))), c / smoothness
    later = ((2**k * unit, c / (4.0**k * smoothness)) for k in itertools.count(2))
    return itertools.chain([first], later)


def multistage_stages(
    strong_convexity: float, smoothness: float, steps: int, c: float = 1.0, p: float = 1
) -> tuple[np.ndarray, np.ndarray]:
    """The stage (from 1) and the learning rate of each step of the multistage method.

    Args and errors: as for `stages`; T is `steps`.

    Returns:
        (stages (T,), learning rates (T,)).
    """
    steps = whole_number(steps, "steps")
    numbers: list[int] = []
    rates: list[float] = []
    for number, (length, rate) in enumerate(stages(strong_convexity, smoothness, c, p), 1):
        length = min(length, steps - len(numbers))
        numbers += [number] * length
        rates += [rate] * length
        if len(numbers) == steps:
            break
    return np.array(numbers), np.array(rates)


def multistage_recursion(
    strong_convexity: float,
    smoothness: float,
    steps: int,
    c: float = 1.0,
    p: float = 1,
    authors: bool = False,
) -> Recursion:
    """Contractions and gains of the multistage method, for each step (4.8).

    Those of Nesterov's method at the learning rate of the stage; the contraction of the first step
    of a new stage is doubled, since the momentum starts anew there.

    Args:
        strong_convexity, smoothness, steps, c, p: as for `multistage_stages`.
        authors: as for `nesterov_recursion`.

    Returns:
        (contractions (T,), gains (T,)).

    Raises:
        ValueError: an argument is out of its range.
    """
    stages, learning_rates = multistage_stages(strong_convexity, smoothness, steps, c, p)
    return _recursion(strong_convexity, smoothness, stages, learning_rates, authors)


def nesterov_weights(
    strong_convexity: float,
    smoothness: float,
    learning_rate: float,
    steps: int,
    authors: bool = False,
) -> Weights:
    """a_{T,0} and a_{T,1}, …, a_{T,T} of Nesterov's method (4.3).

    a_{T,0} = (1 − √(μα))^T and a_{T,t} = (1 − √(μα))^{T−t}·α(1 + αL).

    Args and errors: as for `nesterov_recursion`.

    Returns:
        (a_{T,0}, array (T,)).
    """
    return unrolled(nesterov_recursion(strong_convexity, smoothness, learning_rate, steps, authors))


def multistage_weights(
    strong_convexity: float,
    smoothness: float,
    steps: int,
    c: float = 1.0,
    p: float = 1,
    authors: bool = False,
) -> Weights:
    """a_{T,0} and a_{T,1}, …, a_{T,T} of the multistage method (4.8).

    With s_i the stage of step i, a_{T,0} = 2^{s_T−1}·Π_i (1 − √(μα_i)) and
    a_{T,t} = 2^{s_T−s_t}·Π_{i>t} (1 − √(μα_i))·α_t(1 + α_t·L).

    Args and errors: as for `multistage_recursion`.

    Returns:
        (a_{T,0}, array (T,)).
    """
    return unrolled(multistage_recursion(strong_convexity, smoothness, steps, c, p, authors))


def unrolled(recursion: Recursion) -> Weights:
    """The weights of E_0 and of each step's noise after the last step.

    Args:
        recursion: (contractions (T,), gains (T,)).

    Returns:
        (a_{T,0}, array (T,) of a_{T,1}, …, a_{T,T}).
    """
    contractions, gains = recursion
    left = np.cumprod(contractions[::-1])[::-1]  # Π_{i≥t}
    left[left < np.finfo(float).tiny] = 0.0  # subnormal numbers do not fall any more
    return float(left[0]), np.append(left[1:], 1.0) * gains


def accelerated_bound(
    weights: Weights,
    initial_error: float,
    noise_variance: npt.ArrayLike,
    dimension: int,
    sampling_variance: float = 0.0,
) -> float:
    """E_T ≤ a_{T,0}·E_0 + Σ_t a_{T,t}·(d·variance_t + σ_s²)/2, for any noise of mean 0 (4.3).

    Args:
        weights: (a_{T,0}, (T,)), as `nesterov_weights` and `multistage_weights` give them.
        initial_error: E_0; see the head of this module for what makes the bound hold.
        noise_variance: per coordinate of the mean gradient, a number or one for each step: 2b_t²
            for Laplace noise of scale b_t, σ_t² for Gaussian noise.
        dimension: d, the number of weights of the model.
        sampling_variance: σ_s² from `sampling_variance`; 0 for full batches.
    """
    first, others = weights
    noise_power = dimension * np.asarray(noise_variance) + sampling_variance
    return float(first * initial_error + np.sum(others * noise_power) / 2)


def optimal_bounds(
    recursion: Recursion, initial_error: float, noise_cost: float, exponent: float = 1
) -> np.ndarray:
    """The bound after τ = 1, …, T steps, each τ with the best allocation of the budget (4.6).

    a_{τ,0}·E_0 + noise_cost·(Σ_{j≤τ} a_{τ,j}^{p/(2+p)})^{(2+p)/p}. Takes O(T).

    Args:
        recursion: as `nesterov_recursion` and `multistage_recursion` give it.
        initial_error: E_0.
        noise_cost: d·variance/2 of a step that has the whole budget: d·S_1²/(n²ε²) for Laplace
            noise and pure ε; d·S_2²/(4n²ρ) for Gaussian noise and ρ-zCDP, with L2 sensitivity S_2.
        exponent: p of the budget, which fixes Σ_t scale_t^{−p}: 1 for Laplace noise and pure ε, 2
            for Gaussian noise and zCDP.

    Returns:
        Array (T,).

    Raises:
        ValueError: the exponent is not positive.
    """
    if not exponent > 0:
        raise ValueError(f"exponent must be positive, received {exponent!r}.")
    power = exponent / (2 + exponent)
    contractions, gains = (np.asarray(part, float) for part in recursion)
    sums, total = np.empty(len(gains)), 0.0
    for t, (contraction, gain) in enumerate(
        zip((contractions**power).tolist(), (gains**power).tolist(), strict=True)
    ):
        total = contraction * total + gain
        sums[t] = total
    return np.cumprod(contractions) * initial_error + noise_cost * sums ** (1 / power)


def best_number_of_steps(
    recursion: Recursion, initial_error: float, noise_cost: float, exponent: float = 1
) -> int:
    """T', the number of steps up to T with the smallest bound: later ones cost more than they gain.

    Args and errors: as for `optimal_bounds`.
    """
    return int(np.argmin(optimal_bounds(recursion, initial_error, noise_cost, exponent))) + 1


def _recursion(strong_convexity, smoothness, stages, learning_rates, authors):
    check_convexity(strong_convexity, smoothness)
    stiffness = _scaled(smoothness, learning_rates)
    contractions = 1 - np.sqrt(strong_convexity * learning_rates)
    contractions *= 2.0 ** np.diff(stages, prepend=0 if authors else 1)
    return contractions, learning_rates * (1 + stiffness) / (2 if authors else 1)


def _scaled(curvature, learning_rate):
    """curvature·α, which must be in (0, 1], but for rounding."""
    check_positive("The curvature", curvature)
    check_positive("learning_rate", learning_rate)
    product = np.asarray(learning_rate, float) * curvature
    if np.any(product > 1 + 1e-9):
        raise ValueError(
            f"learning_rate must be at most 1/{curvature:.6g} here, received {learning_rate!r}."
        )
    return np.minimum(product, 1.0)[()]
