"""The heavy ball: its rate and its error on quadratics, and a bound for any strongly convex F.

Reference: Kuru, Birbil, Gürbüzbalaban and Yıldırım, "Differentially private
accelerated optimization algorithms", SIAM Journal on Optimization 32(2), 2022,
doi:10.1137/20M1355847, arXiv:2008.01989; equations are numbered
as in the journal.
"""

import math

import numpy as np
import numpy.typing as npt
from scipy import optimize

from dp_keras_opt.theory.arguments import check_convexity, check_positive

#: P = P_11·[0] + P_12·[1] + P_22·[2].
_SYMMETRIC = np.array([[[1, 0], [0, 0]], [[0, 1], [1, 0]], [[0, 0], [0, 1]]], float)


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
    check_convexity(strong_convexity, smoothness)
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


def _check_eigenvalues(eigenvalues) -> np.ndarray:
    check_positive("eigenvalues", eigenvalues)
    return np.sort(np.atleast_1d(np.asarray(eigenvalues, float)))


def _check_heavy_ball(learning_rate, momentum) -> tuple[np.ndarray, np.ndarray]:
    check_positive("learning_rate", learning_rate)
    learning_rate, momentum = np.asarray(learning_rate, float), np.asarray(momentum, float)
    if not np.all((momentum >= 0) & (momentum < 1)):
        raise ValueError(f"momentum must be in [0, 1), received {momentum.tolist()!r}.")
    return learning_rate, momentum
