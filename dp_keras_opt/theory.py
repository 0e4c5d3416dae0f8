"""Error bounds of private first-order methods, and the noise and the steps that minimise them.

Plain numbers and NumPy arrays, nothing of TensorFlow. Throughout, F is μ-strongly convex and
L-smooth (`strong_convexity`, `smoothness`; κ = L/μ), α is the learning rate, β the momentum, x_0
the start, x* the minimiser and E_t = E[F(x_t)] − F(x*) the error after t steps. Noise is added to
the **mean** gradient of a batch; Laplace noise of scale b has the variance 2b² per coordinate.

Accelerated methods (Nesterov's and its multistage variant) obey a recursion

    E_t ≤ contraction_t·E_{t−1} + gain_t·(expected squared norm of the noise at t)/2,

which `nesterov_recursion` and `multistage_recursion` give and other functions take. Unrolled over T
steps it is E_T ≤ a_{T,0}·E_0 + Σ_t a_{T,t}·(…): the weights a say how much the noise of each step
matters in the end, and so how a privacy budget is best spent.

**What E_0 is.** The recursion is one of a Lyapunov function, which starts at
F(x_0) − F(x*) + (μ/2)‖x_0 − x*‖², at most twice F(x_0) − F(x*). With that as E_0 the bounds hold.
With F(x_0) − F(x*) alone, as the paper writes, the error can exceed them: on the quadratic μx²/2,
without noise, by a factor of up to 4/e.

Reference: the papers on differentially private accelerated optimization algorithms (DP-SHB, DP-NAG,
DP-MASG) and on adaptive noise for step size schedules (ADP-SGD). Equations are cited by number.
"""

import itertools
import math
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import optimize

from dp_keras_opt.checks import whole_number

__all__ = [
    "accelerated_bound",
    "adp_improvement",
    "allocate_epsilon",
    "allocate_rho",
    "best_number_of_steps",
    "heavy_ball_bound",
    "heavy_ball_floor",
    "heavy_ball_matrix_bound",
    "heavy_ball_rate",
    "laplace_epsilon",
    "laplace_scale",
    "multistage_recursion",
    "multistage_stages",
    "multistage_weights",
    "nesterov_momentum",
    "nesterov_recursion",
    "nesterov_weights",
    "optimal_bounds",
    "sampling_variance",
    "stages",
    "unrolled",
]

#: Contractions (T,) and gains (T,) of each step.
Recursion: TypeAlias = tuple[np.ndarray, np.ndarray]

#: The weight of E_0, and those (T,) of the noise of each step.
Weights: TypeAlias = tuple[float, np.ndarray]

# Nesterov's method and the multistage method.


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
    _check_convexity(strong_convexity, smoothness)
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


def sampling_variance(sensitivity: float, batch_size: int, num_examples: int) -> float:
    """σ_s² = (S_1²/4)·(1/m)·(n − m)/(n − 1), bounds E‖batch gradient − full gradient‖² (3.13).

    Args:
        sensitivity: S_1, the largest L1 distance of the gradients of two examples.
        batch_size: m, drawn without replacement.
        num_examples: n.

    Raises:
        ValueError: unless 1 ≤ m ≤ n.
    """
    _check_batch(batch_size, num_examples)
    if batch_size == num_examples:
        return 0.0
    left = (num_examples - batch_size) / (num_examples - 1)
    return sensitivity**2 / 4 / batch_size * left


# Spending a privacy budget.


def allocate_epsilon(weights: npt.ArrayLike, epsilon: float) -> np.ndarray:
    """Splits a pure ε over the steps: ε_t = ε·w_t^{1/3}/Σ_j w_j^{1/3}, for Laplace noise (4.5).

    Minimises Σ_t w_t·b_t² for full batches, where ε_t = S_1/(n·b_t); for smaller ones it is a
    guide.

    Args:
        weights: w_1, …, w_T, how much the noise variance of each step matters: a_{T,1}, …, a_{T,T}
            of an accelerated method, η_t² of gradient descent with step sizes η_t.
        epsilon: ε > 0, to be added up to.

    Raises:
        ValueError: a weight is not positive and finite (with very many steps the weights of the
            first underflow: take fewer, see `best_number_of_steps`), or ε is not.
    """
    return epsilon * _shares(weights, epsilon, 1)


def allocate_rho(weights: npt.ArrayLike, rho: float) -> np.ndarray:
    """Splits a zCDP budget ρ over the steps: ρ_t = ρ·w_t^{1/2}/Σ_j w_j^{1/2}, for Gaussian noise.

    Minimises Σ_t w_t·σ_t² for full batches, where ρ_t ∝ 1/σ_t².

    Args and errors: as for `allocate_epsilon`.
    """
    return rho * _shares(weights, rho, 2)


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


def laplace_scale(
    epsilon_step: float | np.ndarray, sensitivity: float, batch_size: int, num_examples: int
) -> float | np.ndarray:
    """b of the Laplace noise on the mean over m examples: S_1/(m·ln(1 + (e^ε − 1)·n/m)) (3.4).

    Args:
        epsilon_step: ε of one step, a number or an array.
        sensitivity: S_1, the largest L1 distance of the gradients of two examples: 2C when they are
            clipped to the L1 norm C and one may be replaced.
        batch_size: m, drawn without replacement.
        num_examples: n.

    Raises:
        ValueError: an ε or S_1 is not positive, or not 1 ≤ m ≤ n.
    """
    _check_batch(batch_size, num_examples)
    _check_positive("epsilon_step", epsilon_step)
    _check_positive("sensitivity", sensitivity)
    with np.errstate(over="ignore"):
        growth = np.expm1(epsilon_step) * (num_examples / batch_size)
    # Beyond the range of floats ln(1 + (eᵉ − 1)·n/m) is ε + ln(n/m).
    within = np.where(
        np.isfinite(growth), np.log1p(growth), epsilon_step + np.log(num_examples / batch_size)
    )
    return sensitivity / (batch_size * within)[()]


def laplace_epsilon(
    scale: float | np.ndarray, sensitivity: float, batch_size: int, num_examples: int
) -> float | np.ndarray:
    """ε of one step with Laplace noise of scale b: ln(1 + (m/n)(e^{S_1/(bm)} − 1)) (3.3).

    The inverse of `laplace_scale`. Pure ε adds up over the steps.

    Args:
        scale: b, a number or an array.
        sensitivity, batch_size, num_examples: as for `laplace_scale`.

    Raises:
        ValueError: b or S_1 is not positive, or not 1 ≤ m ≤ n.
    """
    _check_batch(batch_size, num_examples)
    _check_positive("scale", scale)
    _check_positive("sensitivity", sensitivity)
    within, rate = sensitivity / (np.asarray(scale) * batch_size), batch_size / num_examples
    with np.errstate(over="ignore"):
        growth = rate * np.expm1(within)
    return np.where(np.isfinite(growth), np.log1p(growth), within + np.log(rate))[()]


def adp_improvement(step_sizes: npt.ArrayLike) -> float:
    """M_dp/M_adp = T·Ση_t²/(Ση_t)² ≥ 1: what noise that follows the step sizes gains.

    The ratio of the noise terms of two bounds at one budget: noise of the same size at each step,
    over noise with a standard deviation ∝ η_t^{−1/2}.

    Args:
        step_sizes: η_1, …, η_T > 0.

    Raises:
        ValueError: a step size is not positive and finite.

    Reference: Remark 4.1 of the ADP-SGD paper, whose b_t is η/η_t.
    """
    _check_positive("step_sizes", step_sizes)
    step_sizes = np.asarray(step_sizes, float)
    return float(np.mean(step_sizes**2) / np.mean(step_sizes) ** 2)


# The heavy ball.


def heavy_ball_rate(
    strong_convexity: float,
    smoothness: float,
    learning_rate: float | np.ndarray,
    momentum: float | np.ndarray,
) -> float | np.ndarray:
    """ρ, the factor by which each step of the heavy ball shrinks distances on a quadratic (3.18).

    The largest modulus of ((1 + β − αλ) ± √((1 + β − αλ)² − 4β))/2 over λ = μ and λ = L.

    Args:
        strong_convexity: μ > 0, the smallest eigenvalue.
        smoothness: L ≥ μ, the largest.
        learning_rate: α > 0, a number or an array.
        momentum: β in [0, 1), a number or an array.

    Returns:
        A number or an array; from 1 on the method does not converge.

    Raises:
        ValueError: an argument is out of its range.
    """
    _check_convexity(strong_convexity, smoothness)
    learning_rate, momentum = _check_heavy_ball(learning_rate, momentum)
    moduli = []
    for eigenvalue in (strong_convexity, smoothness):
        trace = 1 + momentum - learning_rate * eigenvalue
        root = np.sqrt(trace**2 - 4 * momentum + 0j)
        moduli += [np.abs(trace + root) / 2, np.abs(trace - root) / 2]
    return np.max(moduli, axis=0)[()]


def heavy_ball_floor(
    eigenvalues: npt.ArrayLike,
    learning_rate: float | np.ndarray,
    momentum: float | np.ndarray,
    noise_variance: float | np.ndarray,
) -> float | np.ndarray:
    """What noise leaves of the error on a quadratic, however many steps are taken; at most this.

    L·(σ²/2)·Σ_i 2α(1 + β)/((1 − β)·λ_i·(2 + 2β − αλ_i)): L times the stationary E‖x_t − x*‖².

    Args:
        eigenvalues: λ_1, …, λ_d > 0 of the quadratic; L is the largest.
        learning_rate: α > 0.
        momentum: β in [0, 1), a number or an array.
        noise_variance: σ² per coordinate, a number or an array: 2b² for Laplace noise of scale b.

    Returns:
        A number or an array; ∞ where the method does not converge.

    Raises:
        ValueError: an argument is out of its range.

    Reference: Theorem 3.5.
    """
    eigenvalues = _check_eigenvalues(eigenvalues)
    learning_rate, momentum = _check_heavy_ball(learning_rate, momentum)
    smoothness = eigenvalues[-1]
    rate = heavy_ball_rate(eigenvalues[0], smoothness, learning_rate, momentum)
    stable = np.asarray(rate < 1)
    stiffness = np.multiply.outer(learning_rate, eigenvalues)
    slack = np.where(stable[..., None], 2 + 2 * momentum[..., None] - stiffness, 1.0)
    spread = np.sum(1 / (eigenvalues * slack), axis=-1)
    gain = smoothness * learning_rate * (1 + momentum) / (1 - momentum) * spread
    return np.where(stable, gain, math.inf)[()] * noise_variance


def heavy_ball_bound(
    steps: int | np.ndarray,
    eigenvalues: npt.ArrayLike,
    learning_rate: float,
    momentum: float,
    initial_distance: float,
    noise_variance: float | np.ndarray,
) -> float | np.ndarray:
    """E_t ≤ V·C_t²·ρ^{2t} + floor for the heavy ball on a quadratic (3.17).

    V = L·‖x_0 − x*‖² and C_t² = (t+1)² + (t−1)² + t²(ρ² + ρ^{−2}): the squared entries of the t-th
    power of each coordinate's 2 × 2 matrix add up to at most C_t²·ρ^{2t}. The paper says no more
    than C_t = O(t); its V lacks the factor L/2, without which the two sides differ in units, and
    has a further term, which is not needed.

    Args:
        steps: t ≥ 0, a number or an array.
        eigenvalues, learning_rate, momentum: as for `heavy_ball_floor`, but β a number.
        initial_distance: ‖x_0 − x*‖; x_{−1} = x_0.
        noise_variance: σ² per coordinate, a number or one for each of `steps`, when the number of
            steps decides on the noise.

    Returns:
        A number or an array; ∞ where the method does not converge.

    Raises:
        ValueError: an argument is out of its range.
    """
    eigenvalues = _check_eigenvalues(eigenvalues)
    floor = heavy_ball_floor(eigenvalues, learning_rate, momentum, noise_variance)
    rate = heavy_ball_rate(eigenvalues[0], eigenvalues[-1], learning_rate, momentum)
    t = np.asarray(steps, float)
    if np.any(t < 0):
        raise ValueError(f"steps must not be negative, received {steps!r}.")
    after = np.maximum(t, 1)  # ρ^{2t−2}·(C_tρ)², also for ρ = 0; at t = 0 it is 2, the identity's
    powers = ((after + 1) ** 2 + (after - 1) ** 2) * rate**2 + after**2 * (rate**4 + 1)
    powers = np.where(t > 0, rate ** (2 * after - 2) * powers, 2.0)
    return (eigenvalues[-1] * initial_distance**2 * powers + floor)[()]


def heavy_ball_matrix_bound(
    steps: int,
    strong_convexity: float,
    smoothness: float,
    learning_rate: float,
    momentum: float,
    initial_error: float,
    initial_distance: float,
    noise_variance: float,
    dimension: int,
    sampling_variance: float = 0.0,
    rates: int = 10,
) -> float:
    """A bound on E_t for the heavy ball on any strongly convex F, from a matrix inequality (3.15).

    For each rate ρ of a grid, a linear program with cutting planes finds P ⪰ 0 (2 × 2) and c_0 ≥ 0
    which prove that V(x_t, x_{t−1}) = ⟨·, P·⟩ + F(x_t) − F* shrinks by ρ² a step, with the smallest
    bound; the smallest over the grid is returned. Much momentum at a large learning rate has no
    such proof.

    Differs from the paper: B of (3.10) has the other sign; the dimension counts once; and the term
    of V(x_0, x_0) is divided by 1 + 2|P|/(P_22·L), as that of the noise is.

    Args:
        steps: t ≥ 0, a number.
        strong_convexity: μ > 0.
        smoothness: L ≥ μ.
        learning_rate: α > 0.
        momentum: β in [0, 1).
        initial_error: F(x_0) − F*.
        initial_distance: ‖x_0 − x*‖; x_{−1} = x_0.
        noise_variance: per coordinate, 2b² for Laplace noise of scale b.
        dimension: d.
        sampling_variance: σ_s² from `sampling_variance`; 0 for full batches.
        rates: at least 2, how many ρ the grid has; it is refined twice around the best.

    Returns:
        The bound; ∞ if nothing was proved.

    Raises:
        ValueError: an argument is out of its range.

    Reference: Proposition 3.4.
    """
    slowest = heavy_ball_rate(strong_convexity, smoothness, learning_rate, momentum)
    if slowest >= 1:
        return math.inf
    # In units in which L = 1: F, α and the noise are scaled, x is not.
    power = (dimension * noise_variance + sampling_variance) / smoothness**2
    alpha, start = learning_rate * smoothness, initial_error / smoothness
    inequality = _heavy_ball_inequality(strong_convexity / smoothness, alpha, momentum)

    def bound(rate):
        left = rate ** (2 * steps)
        noise = alpha**2 * power * (1 - left) / (1 - rate**2)
        spread = left * initial_distance**2
        objective = np.array([spread + noise, 2 * spread, spread, 0.0])
        found = _minimise(objective, *inequality(rate))
        if found is None:
            return math.inf
        p11, p12, p22, _ = found
        held = 1 + 2 * (p11 * p22 - p12**2) / p22
        return (left * start + noise / 2 + objective @ found) / held

    best, gaps = math.inf, (1 - slowest, 1e-3 * (1 - slowest))
    for _ in range(3):  # each time between the neighbours of the best
        grid = np.geomspace(*gaps, rates)
        bounds = [bound(1 - gap) for gap in grid]
        place = np.argmin(bounds)
        best = min(best, bounds[place])
        gaps = grid[max(place - 1, 0)], grid[min(place + 1, rates - 1)]
    return float(best * smoothness)


def _heavy_ball_inequality(mu, alpha, beta):
    """ρ → (M_0, M), such that (3.14) is M_0 + Σ_i z_i·M_i ⪰ 0 in z = (P_11, P_12, P_22, c_0).

    In units in which L = 1, and with c = 1.
    """
    quadratic = np.array([[2 * mu, 0, -(1 + mu)], [0, 0, 0], [-(1 + mu), 0, 2]])
    turn = np.array([1, -1, 0])
    descent = -(beta**2) * np.outer(turn, turn).astype(float)
    descent[2, :2] = descent[:2, 2] = -(1 - alpha) * beta * turn[:2]
    descent[2, 2] = alpha * (2 - alpha)
    convexity = np.array([[mu, 0, -1], [0, 0, 0], [-1, 0, 0]])
    following = np.array([[1 + beta, -beta, -alpha], [1, 0, 0]])  # from (x_t, x_{t−1}, ∇F(x_t))
    now = np.eye(2, 3)

    def inequality(rate):
        lyapunov = [rate**2 * now.T @ p @ now - following.T @ p @ following for p in _SYMMETRIC]
        constant = (descent + (1 - rate**2) * convexity) / 2
        return constant, np.array([*lyapunov, quadratic])

    return inequality


#: P = P_11·[0] + P_12·[1] + P_22·[2].
_SYMMETRIC = np.array([[[1, 0], [0, 0]], [[0, 1], [1, 0]], [[0, 0], [0, 1]]], float)


def _minimise(objective, constant, matrices, margin=1e-7, largest=1e4, rounds=300):
    """argmin of objective·z subject to constant + Σ z_i·matrices_i ⪰ 0, P ⪰ 0 and c_0 ≥ 0, or None.

    Kelley's method: a linear program whose constraints are eigenvectors that violated these before.
    They are asked for with a margin, so that what is returned fulfils the inequalities exactly.
    """
    bounds = [(margin, largest), (-largest, largest), (margin, largest), (0, largest)]
    rows, limits = [], []
    for _ in range(rounds):
        program = optimize.linprog(
            objective / np.max(np.abs(objective), initial=1e-300),
            A_ub=-np.array(rows) if rows else None,
            b_ub=-np.array(limits) if rows else None,
            bounds=bounds,
        )
        if program.status != 0:
            return None
        z, violated = program.x, False
        p = np.tensordot(z[:3], _SYMMETRIC, 1)
        for matrix, base, parts in (
            (constant + np.tensordot(z, matrices, 1), constant, matrices),
            (p, np.zeros((2, 2)), [*_SYMMETRIC, np.zeros((2, 2))]),
        ):
            values, vectors = np.linalg.eigh(matrix)
            for value, v in zip(values, vectors.T, strict=True):
                if value < 0:
                    violated = True
                    rows.append([v @ part @ v for part in parts])
                    limits.append(margin - v @ base @ v)
        if not violated:
            return z
    return None


# Shared pieces.


def _recursion(strong_convexity, smoothness, stages, learning_rates, authors):
    _check_convexity(strong_convexity, smoothness)
    stiffness = _scaled(smoothness, learning_rates)
    contractions = 1 - np.sqrt(strong_convexity * learning_rates)
    contractions *= 2.0 ** np.diff(stages, prepend=0 if authors else 1)
    return contractions, learning_rates * (1 + stiffness) / (2 if authors else 1)


def _shares(weights, budget, exponent):
    _check_positive("weights", weights)
    _check_positive("the budget", budget)
    roots = np.asarray(weights, float) ** (exponent / (2 + exponent))
    return roots / np.sum(roots)


def _scaled(curvature, learning_rate):
    """curvature·α, which must be in (0, 1], but for rounding."""
    _check_positive("The curvature", curvature)
    _check_positive("learning_rate", learning_rate)
    product = np.asarray(learning_rate, float) * curvature
    if np.any(product > 1 + 1e-9):
        raise ValueError(
            f"learning_rate must be at most 1/{curvature:.6g} here, received {learning_rate!r}."
        )
    return np.minimum(product, 1.0)[()]


def _check_convexity(strong_convexity, smoothness):
    if not 0 < strong_convexity <= smoothness < math.inf:
        raise ValueError(
            "strong_convexity and smoothness must satisfy 0 < strong_convexity ≤ smoothness < ∞, "
            f"received {strong_convexity!r} and {smoothness!r}."
        )


def _check_eigenvalues(eigenvalues) -> np.ndarray:
    _check_positive("eigenvalues", eigenvalues)
    return np.sort(np.atleast_1d(np.asarray(eigenvalues, float)))


def _check_heavy_ball(learning_rate, momentum) -> tuple[np.ndarray, np.ndarray]:
    _check_positive("learning_rate", learning_rate)
    learning_rate, momentum = np.asarray(learning_rate, float), np.asarray(momentum, float)
    if not np.all((momentum >= 0) & (momentum < 1)):
        raise ValueError(f"momentum must be in [0, 1), received {momentum.tolist()!r}.")
    return learning_rate, momentum


def _check_batch(batch_size, num_examples):
    if not 1 <= batch_size <= num_examples:
        raise ValueError(
            "batch_size and num_examples must satisfy 1 ≤ batch_size ≤ num_examples, received "
            f"{batch_size!r} and {num_examples!r}."
        )


def _check_positive(name, values):
    values = np.asarray(values, float)
    if not (values.size and np.all((values > 0) & np.isfinite(values))):
        raise ValueError(f"{name} must be positive and finite, received {values.tolist()!r}.")
