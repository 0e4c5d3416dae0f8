"""How a privacy budget is best spread over the steps, where the noise of some matters more.

Where the noise enters an error bound as Σ_t w_t·(its variance at t), and a step whose noise has
scale s spends a share of the budget proportional to s⁻ᵖ, the best share is ∝ w_t^{p/(2+p)}
(Lagrange). Pure ε with Laplace noise has p = 1, zCDP with Gaussian noise p = 2.
"""

import numpy as np
import numpy.typing as npt

from dp_keras_opt.theory.arguments import check_positive


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
    check_positive("the budget", epsilon)
    return epsilon * shares(weights, 1)


def allocate_rho(weights: npt.ArrayLike, rho: float) -> np.ndarray:
    """Splits a zCDP budget ρ over the steps: ρ_t = ρ·w_t^{1/2}/Σ_j w_j^{1/2}, for Gaussian noise.

    Minimises Σ_t w_t·σ_t² for full batches, where ρ_t ∝ 1/σ_t².

    Args and errors: as for `allocate_epsilon`.
    """
    check_positive("the budget", rho)
    return rho * shares(weights, 2)


def shares(weights: npt.ArrayLike, exponent: float) -> np.ndarray:
    """Each step's share of the budget, w_t^{p/(2+p)}/Σ_j w_j^{p/(2+p)}.

    Args:
        weights: w_1, …, w_T.
        exponent: p: a step whose noise has scale s spends in proportion to s⁻ᵖ.

    Raises:
        ValueError: a weight is not positive and finite.
    """
    check_positive("weights", weights)
    weights = np.asarray(weights, float)
    roots = (weights / weights.max()) ** (exponent / (2 + exponent))  # powers must not overflow
    return roots / np.sum(roots)


def adp_improvement(step_sizes: npt.ArrayLike) -> float:
    """M_dp/M_adp = T·Ση_t²/(Ση_t)² ≥ 1: what noise that follows the step sizes gains.

    The ratio of the noise terms of two bounds at one budget: noise of the same size at each step,
    over noise with a standard deviation ∝ η_t^{−1/2}.

    Args:
        step_sizes: η_1, …, η_T > 0.

    Raises:
        ValueError: a step size is not positive and finite.

    Reference: Wu, Wang, Cristali, Gu and Willett, "Adaptive differentially private empirical risk
    minimization", 2021, arXiv:2110.07435, Remark 4.1; its b_t is η/η_t.
    """
    check_positive("step_sizes", step_sizes)
    step_sizes = np.asarray(step_sizes, float)
    return float(np.mean(step_sizes**2) / np.mean(step_sizes) ** 2)
