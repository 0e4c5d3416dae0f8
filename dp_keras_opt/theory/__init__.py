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

References: Kuru, Birbil, Gürbüzbalaban and Yıldırım, "Differentially private accelerated
optimization algorithms", SIAM Journal on Optimization 32(2), 2022, doi:10.1137/20M1355847,
arXiv:2008.01989; equations are numbered as in the journal.
"""

from dp_keras_opt.theory.accelerated import (
    accelerated_bound,
    best_number_of_steps,
    multistage_recursion,
    multistage_stages,
    multistage_weights,
    nesterov_momentum,
    nesterov_recursion,
    nesterov_weights,
    optimal_bounds,
    stages,
    unrolled,
)
from dp_keras_opt.theory.budgets import (
    adp_improvement,
    allocate_epsilon,
    allocate_rho,
)
from dp_keras_opt.theory.heavy_ball import (
    heavy_ball_bound,
    heavy_ball_floor,
    heavy_ball_matrix_bound,
    heavy_ball_rate,
)
from dp_keras_opt.theory.sampling import (
    laplace_epsilon,
    laplace_scale,
    sampling_variance,
)

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
