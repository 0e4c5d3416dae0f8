"""Bounds against transcriptions of the specification, and against what the methods do."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import linalg, optimize

from dp_keras_opt import plots, theory

NESTEROV, MULTISTAGE = theory.nesterov_recursion, theory.multistage_recursion

curvatures = st.tuples(st.floats(0.01, 1.0), st.floats(1.0, 50.0)).map(
    lambda pair: (pair[0], pair[0] * pair[1])
)


# Problems whose expected error is known exactly: quadratics, coordinate by coordinate.


def exact_error(kind, eigenvalues, rates, momenta, start, noise_variance, restarts=()):
    """E_0, …, E_T of F(x) = Σλ_i·x_i²/2, from the second moments of (x_t, x_{t−1}).

    Args:
        kind: "nesterov" (the gradient where the momentum leads) or "heavy ball".
        rates, momenta, noise_variance: one for each step.
        start: x_0, every coordinate.
        restarts: steps (from 0) before which x_{t−1} is set to x_t.
    """
    errors = np.zeros(len(rates) + 1)
    for eigenvalue in eigenvalues:
        moments = np.full((2, 2), float(start) ** 2)
        errors[0] += eigenvalue * moments[0, 0] / 2
        for t, (alpha, beta) in enumerate(zip(rates, momenta, strict=True)):
            if t in restarts:
                moments = np.full((2, 2), moments[0, 0])
            if kind == "nesterov":
                row = (1 - alpha * eigenvalue) * np.array([1 + beta, -beta])
            else:
                row = np.array([1 + beta - alpha * eigenvalue, -beta])
            step = np.array([row, [1, 0]])
            moments = step @ moments @ step.T
            moments[0, 0] += alpha**2 * noise_variance[t]
            errors[t + 1] += eigenvalue * moments[0, 0] / 2
    return errors


def spectrum(mu, smoothness, dimension=3):
    return np.linspace(mu, smoothness, dimension)


# Nesterov and multistage: the weights.


def transcribed_weights(mu, smoothness, rates, stages, authors=False):
    """(4.8) as it is printed, with the initial weight of the specification."""
    steps = len(rates)

    def remaining(t):
        return math.prod(1 - math.sqrt(mu * rates[i]) for i in range(t, steps))

    first = 2.0 ** (stages[-1] - (0 if authors else 1)) * remaining(0)
    others = [
        2.0 ** (stages[-1] - stages[t])
        * remaining(t + 1)
        * rates[t]
        * (0.5 if authors else 1.0)
        * (1 + rates[t] * smoothness)
        for t in range(steps)
    ]
    return first, others


@pytest.mark.parametrize("authors", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 50])
def test_nesterov_weights(steps, authors):
    mu, smoothness, alpha = 0.3, 7.0, 0.1
    expected = transcribed_weights(mu, smoothness, [alpha] * steps, [1] * steps, authors)
    first, others = theory.nesterov_weights(mu, smoothness, alpha, steps, authors)
    assert first == pytest.approx(expected[0], rel=1e-12)
    np.testing.assert_allclose(others, expected[1], rtol=1e-12)
    if not authors:
        root = math.sqrt(mu * alpha)
        assert first == pytest.approx((1 - root) ** steps)
        assert others[-1] == pytest.approx(alpha * (1 + alpha * smoothness))


@pytest.mark.parametrize("authors", [False, True])
@pytest.mark.parametrize("c", [1.0, 0.1])
def test_multistage_weights(c, authors):
    mu, smoothness, steps = 1.0, 20.0, 300
    stages, rates = theory.multistage_stages(mu, smoothness, steps, c)
    expected = transcribed_weights(mu, smoothness, rates, stages, authors)
    first, others = theory.multistage_weights(mu, smoothness, steps, c, authors=authors)
    assert stages[-1] == 5
    assert first == pytest.approx(expected[0], rel=1e-12)
    np.testing.assert_allclose(others, expected[1], rtol=1e-11)


@pytest.mark.parametrize("p", [1, 2.5])
@pytest.mark.parametrize("kappa", [1.0, 1.5, 20.0, 255.0])
def test_stages(kappa, p):
    mu, c = 0.5, 0.7
    stages, rates = theory.multistage_stages(mu, mu * kappa, 5000, c, p)
    lengths = np.bincount(stages)[1:]
    assert lengths[0] == max(1, math.ceil(2 * math.sqrt(kappa) * math.log(math.sqrt(kappa))))
    for k in range(2, len(lengths)):
        assert lengths[k - 1] == 2**k * math.ceil(math.sqrt(kappa) * math.log(2 ** (p + 2)))
    assert len(stages) == 5000 and (np.diff(stages) >= 0).all()
    for k in range(1, len(lengths) + 1):
        expected = c / (mu * kappa) / (1 if k == 1 else 2 ** (2 * k))
        np.testing.assert_allclose(rates[stages == k], expected)


def test_a_short_training_is_one_stage_of_nesterov():
    mu, smoothness = 0.02, 5.0
    multistage = theory.multistage_weights(mu, smoothness, 60, c=0.5)
    nesterov = theory.nesterov_weights(mu, smoothness, 0.5 / smoothness, 60)
    assert multistage[0] == pytest.approx(nesterov[0])
    np.testing.assert_allclose(multistage[1], nesterov[1])


def test_within_a_stage_the_weights_grow_and_at_a_change_they_drop():
    stages, _ = theory.multistage_stages(1.0, 20.0, 300)
    _, weights = theory.multistage_weights(1.0, 20.0, 300)
    grows = np.diff(weights) > 0
    np.testing.assert_array_equal(grows, np.diff(stages) == 0)


# The budget.


weights_of_steps = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)


@pytest.mark.parametrize("exponent", [1, 2])
@settings(max_examples=25, deadline=None)
@given(weights=weights_of_steps, budget=st.floats(0.01, 10))
def test_allocations_are_what_an_optimizer_finds(exponent, weights, budget):
    """min Σ w_t·b_t² with Σ b_t^{−p} = budget; the shares of the budget as a softmax."""
    w = np.array(weights)

    def cost(logits):
        share = np.exp(logits - np.max(logits))
        return np.log(np.sum(w * (budget * share / share.sum()) ** (-2 / exponent)))

    best = optimize.minimize(cost, np.zeros(len(w)), method="BFGS", options={"gtol": 1e-8}).x
    expected = budget * np.exp(best) / np.exp(best).sum()
    allocate = theory.allocate_epsilon if exponent == 1 else theory.allocate_rho
    actual = allocate(w, budget)
    assert actual.sum() == pytest.approx(budget)
    np.testing.assert_allclose(actual, expected, rtol=1e-3)
    # And the closed form of the minimum, which `optimal_bounds` is made of.
    power = exponent / (2 + exponent)
    minimum = np.sum(w**power) ** (1 / power) * budget ** (-2 / exponent)
    assert np.sum(w * actual ** (-2 / exponent)) == pytest.approx(minimum)


@pytest.mark.parametrize("authors", [False, True])
@pytest.mark.parametrize("exponent", [1, 2])
@pytest.mark.parametrize("method", ["nesterov", "multistage"])
@settings(max_examples=8, deadline=None)
@given(curvatures, st.floats(0.1, 1), st.floats(0.01, 100), st.floats(1e-6, 1))
def test_best_number_of_steps(method, exponent, authors, curvature, c, error, cost):
    """Against the formula, with the weights of every number of steps up to 60."""
    mu, smoothness = curvature

    def recursion(steps):
        if method == "nesterov":
            return NESTEROV(mu, smoothness, c / smoothness, steps, authors)
        return MULTISTAGE(mu, smoothness, steps, c, authors=authors)

    power = exponent / (2 + exponent)
    expected = np.array(
        [
            first * error + cost * np.sum(others**power) ** (1 / power)
            for first, others in (theory.unrolled(recursion(steps)) for steps in range(1, 61))
        ]
    )
    bounds = theory.optimal_bounds(recursion(60), error, cost, exponent)
    np.testing.assert_allclose(bounds, expected, rtol=1e-9)
    best = theory.best_number_of_steps(recursion(60), error, cost, exponent)
    assert expected[best - 1] == pytest.approx(expected.min(), rel=1e-9)


def test_optimal_bound_is_the_bound_at_the_optimal_allocation():
    mu, smoothness, d, n, sensitivity, epsilon, error = 0.1, 4.0, 20, 1000, 2.0, 0.5, 3.0
    _, weights = theory.nesterov_weights(mu, smoothness, 0.2, 30)
    scales = theory.laplace_scale(
        theory.allocate_epsilon(weights, epsilon), sensitivity, batch_size=n, num_examples=n
    )
    actual = theory.accelerated_bound(
        theory.nesterov_weights(mu, smoothness, 0.2, 30), error, 2 * scales**2, d
    )
    cost = d * sensitivity**2 / (n * epsilon) ** 2
    expected = theory.optimal_bounds(NESTEROV(mu, smoothness, 0.2, 30), error, cost)[-1]
    assert actual == pytest.approx(expected)
    constant = theory.laplace_scale(epsilon / 30, sensitivity, n, n)
    uniform = theory.accelerated_bound(
        theory.nesterov_weights(mu, smoothness, 0.2, 30), error, 2 * constant**2, d
    )
    assert actual < uniform

    rho = 0.02  # zCDP of the mean over n: Σ (S_2/n)²/(2σ_t²)
    variances = (sensitivity / n) ** 2 / (2 * theory.allocate_rho(weights, rho))
    actual = theory.accelerated_bound(
        theory.nesterov_weights(mu, smoothness, 0.2, 30), error, variances, d
    )
    cost = d * sensitivity**2 / (4 * n**2 * rho)
    expected = theory.optimal_bounds(NESTEROV(mu, smoothness, 0.2, 30), error, cost, 2)[-1]
    assert actual == pytest.approx(expected)


def test_choices_of_the_paper():
    """L, κ, n_1 and the number of steps of DP-NAG-opt, with E_0 = 10, ε = 1, S_1 = 40, d = 20."""
    n, d, mu = 10**5, 20, 0.02
    u = np.random.RandomState(1).random_sample((d, n)).T
    smoothness = np.linalg.eigvalsh(u.T @ u / n)[-1] + 0.02
    assert smoothness == pytest.approx(5.1001, abs=5e-5)
    assert smoothness / mu == pytest.approx(255.0, abs=0.05)
    stages, _ = theory.multistage_stages(mu, smoothness, 1000)
    assert np.sum(stages == 1) == 89

    def chosen(**options):
        return [
            theory.best_number_of_steps(
                NESTEROV(mu, smoothness, 1 / smoothness, steps, **options), 10, d * 40**2 / n**2
            )
            for steps in (100, 200, 500, 1000)
        ]

    assert chosen(authors=True) == [100, 136, 136, 136]
    assert chosen() == [100, 106, 106, 106]


def test_many_steps_are_no_matter():
    recursion = NESTEROV(0.02, 5.1, 1 / 5.1, 100_000)
    assert theory.best_number_of_steps(recursion, 10, 3.2e-6) == 106
    with pytest.raises(ValueError, match="weights must be positive"):
        theory.allocate_epsilon(theory.unrolled(recursion)[1], 1.0)


# Laplace noise.


@pytest.mark.parametrize("m, n", [(100, 100), (1, 1000), (256, 50_000)])
@pytest.mark.parametrize("epsilon", [1e-9, 1e-3, 1.0, 50.0, 800.0])
def test_laplace_scale_and_its_inverse(epsilon, m, n):
    sensitivity = 3.0
    scale = theory.laplace_scale(epsilon, sensitivity, m, n)
    if epsilon <= 50:
        direct = sensitivity / (m * math.log1p(math.expm1(epsilon) * n / m))
        assert scale == pytest.approx(direct, rel=1e-12)
    if m == n:
        assert scale == pytest.approx(sensitivity / (n * epsilon))
    assert theory.laplace_epsilon(scale, sensitivity, m, n) == pytest.approx(epsilon, rel=1e-9)


def test_laplace_scales_of_an_allocation():
    epsilons = np.array([0.1, 0.2, 0.7])
    scales = theory.laplace_scale(epsilons, 2.0, 10, 1000)
    assert scales.shape == (3,)
    np.testing.assert_allclose(theory.laplace_epsilon(scales, 2.0, 10, 1000), epsilons)


def test_laplace_noise_is_as_private_as_stated():
    """Two neighbours' outputs, one number, full batch: the likelihoods differ by at most e^ε."""
    scale = theory.laplace_scale(0.5, 2.0, 4, 4)
    outputs = np.linspace(-20, 20, 4001)
    ratio = (np.abs(outputs - 2.0 / 4) - np.abs(outputs)) / scale
    assert np.max(ratio) == pytest.approx(0.5)


def test_sampling_variance_bounds_that_of_all_batches():
    """Every batch of m of n = 6, for gradients some of which are S_1 = 2 apart."""
    gradients = np.array([[1.0, 0], [-1, 0], [0, 1], [0, -1], [0.5, 0.5], [1, 0]])
    distances = np.abs(gradients[:, None] - gradients[None]).sum(axis=2)
    for m in range(1, 7):
        means = [np.mean(gradients[list(batch)], axis=0) for batch in combinations(range(6), m)]
        variance = np.mean(np.sum((means - np.mean(gradients, axis=0)) ** 2, axis=1))
        bound = theory.sampling_variance(distances.max(), m, 6)
        assert variance <= bound + 1e-12
    assert theory.sampling_variance(2.0, 1, 1) == 0
    assert theory.sampling_variance(2.0, 6, 6) == 0
    halves = np.array([-1.0, -1, -1, 1, 1, 1])  # for which the bound is sharp
    variance = np.var([np.mean(halves[list(batch)]) for batch in combinations(range(6), 2)])
    assert theory.sampling_variance(2.0, 2, 6) == pytest.approx(variance)


@pytest.mark.parametrize("steps, factor", [(11_760, 1.737), (23_520, 1.879)])
def test_adp_improvement(steps, factor):
    step_sizes = 1 / np.sqrt(20 + np.arange(steps))
    assert theory.adp_improvement(step_sizes) == pytest.approx(factor, abs=5e-4)
    assert theory.adp_improvement(3 * step_sizes) == pytest.approx(factor, abs=5e-4)
    assert theory.adp_improvement(np.ones(10)) == pytest.approx(1)


# Bounds against what happens.


@settings(max_examples=40, deadline=None)
@given(curvatures, st.floats(0.01, 1), st.floats(0, 1), st.integers(1, 80))
def test_nesterov_on_quadratics_stays_below_its_bound(curvature, c, variance, steps):
    mu, smoothness = curvature
    eigenvalues, alpha = spectrum(mu, smoothness), c / smoothness
    beta = theory.nesterov_momentum(mu, alpha)
    noise = np.full(steps, variance)
    errors = exact_error("nesterov", eigenvalues, [alpha] * steps, [beta] * steps, 2.0, noise)
    lyapunov = errors[0] + mu / 2 * 3 * 2.0**2
    assert lyapunov <= 2 * errors[0]
    bound = theory.accelerated_bound(
        theory.nesterov_weights(mu, smoothness, alpha, steps), lyapunov, variance, 3
    )
    assert errors[-1] <= bound * (1 + 1e-9)


def test_the_error_alone_is_no_initial_value_of_the_bound():
    """On μx²/2 without noise, E_t/((1 − √(μα))^t·E_0) comes up to 4/e."""
    mu, alpha = 1e-6, 1.0
    beta, steps = theory.nesterov_momentum(mu, alpha), 2000
    errors = exact_error("nesterov", [mu], [alpha] * steps, [beta] * steps, 1.0, np.zeros(steps))
    ratio = errors / (errors[0] * (1 - math.sqrt(mu * alpha)) ** np.arange(steps + 1))
    assert np.max(ratio) == pytest.approx(4 / math.e, rel=1e-3)
    assert np.argmax(ratio) == pytest.approx(1000, abs=5)


@settings(max_examples=25, deadline=None)
@given(curvatures, st.floats(0.1, 1), st.floats(0, 1), st.integers(1, 150))
def test_multistage_on_quadratics_stays_below_its_bound(curvature, c, variance, steps):
    mu, smoothness = curvature
    stages, rates = theory.multistage_stages(mu, smoothness, steps, c)
    momenta = theory.nesterov_momentum(mu, rates)
    restarts = set(np.flatnonzero(np.diff(stages)) + 1)
    noise = variance * (1 + np.arange(steps) % 3)
    errors = exact_error("nesterov", spectrum(mu, smoothness), rates, momenta, 2.0, noise, restarts)
    lyapunov = errors[0] + mu / 2 * 3 * 2.0**2
    weights = theory.multistage_weights(mu, smoothness, steps, c)
    assert errors[-1] <= theory.accelerated_bound(weights, lyapunov, noise, 3) * (1 + 1e-9)


def log_cosh(mu, smoothness):
    """F and ∇F of a strongly convex function that is not quadratic: Σ (L−μ)·ln cosh x + μx²/2."""
    excess = smoothness - mu
    return (
        lambda x: np.sum(excess * np.log(np.cosh(x)) + mu / 2 * x**2, axis=-1),
        lambda x: excess * np.tanh(x) + mu * x,
    )


@pytest.mark.parametrize("method", ["nesterov", "heavy ball"])
def test_laplace_noise_beyond_quadratics_stays_below_the_bound(method):
    """2000 runs; the bound is compared with the mean less five standard errors."""
    mu, smoothness, steps, runs, d, scale = 0.2, 2.0, 40, 2000, 4, 0.3
    value, gradient = log_cosh(mu, smoothness)
    alpha = 0.25 / smoothness
    beta = theory.nesterov_momentum(mu, alpha) if method == "nesterov" else 0.2
    rng = np.random.default_rng(0)
    start = np.full(d, 1.5)
    x = previous = np.tile(start, (runs, 1))
    for _ in range(steps):
        ahead = x + beta * (x - previous)
        noisy = gradient(ahead if method == "nesterov" else x) + rng.laplace(0, scale, x.shape)
        x, previous = ahead - alpha * noisy, x
    errors = value(x)
    error, squared = value(start), start @ start
    if method == "nesterov":
        bound = theory.accelerated_bound(
            theory.nesterov_weights(mu, smoothness, alpha, steps),
            error + mu / 2 * squared,
            2 * scale**2,
            d,
        )
    else:
        bound = theory.heavy_ball_matrix_bound(
            steps, mu, smoothness, alpha, beta, error, math.sqrt(squared), 2 * scale**2, d
        )
    assert np.mean(errors) - 5 * np.std(errors) / math.sqrt(runs) <= bound
    assert bound < error  # it says something


# The heavy ball.


def heavy_ball_step(eigenvalue, alpha, beta):
    return np.array([[1 + beta - alpha * eigenvalue, -beta], [1, 0]])


heavy_balls = st.tuples(curvatures, st.floats(0.01, 1.9), st.floats(0, 0.99))


@settings(max_examples=50, deadline=None)
@given(heavy_balls)
def test_heavy_ball_rate_is_the_spectral_radius(setting):
    (mu, smoothness), c, beta = setting
    radius = max(
        np.max(np.abs(np.linalg.eigvals(heavy_ball_step(eigenvalue, c / smoothness, beta))))
        for eigenvalue in spectrum(mu, smoothness, 20)
    )
    rate = theory.heavy_ball_rate(mu, smoothness, c / smoothness, beta)
    assert rate == pytest.approx(radius, abs=1e-6)  # a double eigenvalue has half of the digits


def test_polyaks_choice_has_the_best_rate():
    mu, smoothness = 0.1, 4.0
    root = math.sqrt(smoothness / mu)
    best = (root - 1) / (root + 1)
    alpha = 4 / (math.sqrt(mu) + math.sqrt(smoothness)) ** 2
    assert theory.heavy_ball_rate(mu, smoothness, alpha, best**2) == pytest.approx(best, abs=1e-6)
    others = theory.heavy_ball_rate(
        mu, smoothness, np.linspace(0.01, 1, 200)[:, None], np.linspace(0, 0.99, 200)
    )
    assert others.shape == (200, 200)
    assert np.min(others) >= best - 1e-6


@settings(max_examples=50, deadline=None)
@given(heavy_balls)
def test_heavy_ball_floor_is_l_times_the_stationary_spread(setting):
    (mu, smoothness), c, beta = setting
    eigenvalues, alpha, variance = spectrum(mu, smoothness), c / smoothness, 0.3
    spread = 0.0
    for eigenvalue in eigenvalues:
        noise = np.diag([alpha**2 * variance, 0])
        step = heavy_ball_step(eigenvalue, alpha, beta)
        spread += linalg.solve_discrete_lyapunov(step, noise)[0, 0]
    floor = theory.heavy_ball_floor(eigenvalues[::-1], alpha, beta, variance)
    assert floor == pytest.approx(smoothness * spread, rel=1e-4)
    terms = [
        2 * alpha * (1 + beta) / ((1 - beta) * x * (2 + 2 * beta - alpha * x)) for x in eigenvalues
    ]
    assert floor == pytest.approx(smoothness * variance / 2 * sum(terms))


@settings(max_examples=50, deadline=None)
@given(heavy_balls, st.floats(0, 1))
def test_heavy_ball_on_quadratics_stays_below_its_bound(setting, variance):
    (mu, smoothness), c, beta = setting
    eigenvalues, alpha, steps = spectrum(mu, smoothness), c / smoothness, 60
    errors = exact_error(
        "heavy ball", eigenvalues, [alpha] * steps, [beta] * steps, 2.0, np.full(steps, variance)
    )
    bounds = theory.heavy_ball_bound(
        np.arange(steps + 1), eigenvalues, alpha, beta, 2.0 * math.sqrt(3), variance
    )
    assert (errors <= bounds * (1 + 1e-9)).all()


def test_heavy_ball_bound_has_the_units_of_its_function():
    """10·F, with a tenth of the learning rate and ten times the noise, makes the same steps."""
    small = theory.heavy_ball_bound(7, [0.5, 1.0], 0.8, 0.4, 3.0, 0.1)
    large = theory.heavy_ball_bound(7, [5.0, 10.0], 0.08, 0.4, 3.0, 10.0)
    assert large == pytest.approx(10 * small)


def test_heavy_ball_bound_without_momentum_at_once_at_the_minimum():
    bounds = theory.heavy_ball_bound(np.arange(3), [2.0], 0.5, 0.0, 1.0, 0.0)
    np.testing.assert_allclose(bounds, [4.0, 2.0, 0.0])  # of the error 1, 0, 0


def test_a_heavy_ball_that_diverges_has_no_bound():
    assert theory.heavy_ball_rate(1.0, 2.0, 1.1, 0.0) > 1
    assert theory.heavy_ball_floor([1.0, 2.0], 1.1, 0.0, 1.0) == math.inf
    assert theory.heavy_ball_bound(3, [1.0, 2.0], 1.1, 0.0, 1.0, 1.0) == math.inf
    floors = theory.heavy_ball_floor([1.0, 2.0], 1.1, np.array([0.0, 0.5]), 1.0)
    assert floors[0] == math.inf and np.isfinite(floors[1])
    assert theory.heavy_ball_matrix_bound(3, 1.0, 2.0, 1.1, 0.0, 1.0, 1.0, 1.0, 1) == math.inf


@pytest.mark.representatives(4)
@pytest.mark.parametrize("steps", [0, 1, 30])
@pytest.mark.parametrize("c, beta", [(1.0, 0.0), (0.5, 0.1), (0.1, 0.4)])
def test_matrix_bound_holds_on_quadratics(c, beta, steps):
    mu, smoothness, variance = 0.5, 3.0, 0.05
    alpha = c / smoothness
    errors = exact_error(
        "heavy ball",
        spectrum(mu, smoothness),
        [alpha] * steps,
        [beta] * steps,
        2.0,
        np.full(steps, variance),
    )
    bound = theory.heavy_ball_matrix_bound(
        steps, mu, smoothness, alpha, beta, errors[0], 2.0 * math.sqrt(3), variance, 3
    )
    assert errors[-1] <= bound < 20 * errors[-1]


@settings(max_examples=25, deadline=None)
@given(st.floats(0.01, 1), st.floats(0.01, 1), st.floats(0, 0.9), st.floats(0.1, 0.99))
def test_the_matrix_inequality_is_that_of_the_proposition(mu, alpha, beta, rho):
    """(3.14) with L = c = 1 and the sign of B corrected."""
    rng = np.random.default_rng(0)
    p11, p12, p22, c0 = rng.normal(size=4)
    a, b = np.array([[1 + beta, -beta], [1, 0]]), np.array([[-alpha], [0]])
    p = np.array([[p11, p12], [p12, p22]])
    phi = np.block([[a.T @ p @ a - rho**2 * p, a.T @ p @ b], [b.T @ p @ a, b.T @ p @ b]])
    x0 = np.array([[2 * mu, 0, -(mu + 1)], [0, 0, 0], [-(mu + 1), 0, 2]])
    lean = (1 - alpha) * beta
    x1 = [[-(beta**2), beta**2, -lean], [beta**2, -(beta**2), lean], [-lean, lean, 0]]
    x1 = np.array(x1) / 2
    x1[2, 2] = alpha * (2 - alpha) / 2
    x2 = np.array([[mu, 0, -1], [0, 0, 0], [-1, 0, 0]]) / 2
    constant, matrices = theory.heavy_ball._heavy_ball_inequality(mu, alpha, beta)(rho)
    actual = constant + np.tensordot([p11, p12, p22, c0], matrices, 1)
    np.testing.assert_allclose(actual, c0 * x0 + x1 + (1 - rho**2) * x2 - phi, atol=1e-12)


def test_matrix_bound_has_the_rate_of_gradient_descent():
    """Without momentum the distance shrinks by 1 − μα: so does the bound, up to a factor."""
    bound = theory.heavy_ball_matrix_bound(40, 0.2, 1.0, 0.5, 0.0, 1.0, 2.0, 0.0, 1)
    assert bound <= 3 * (1 - 0.2 * 0.5) ** 80
    assert bound >= (1 - 0.2 * 0.5) ** 80 * 0.2 / 2 * 2.0**2  # what 0.1x² does from x = 2


def test_matrix_bound_of_a_long_training_is_near_the_floor_on_quadratics():
    arguments = 0.5 / 3, 0.1
    floor = theory.heavy_ball_floor([0.5, 1.75, 3.0], *arguments, 0.05)
    bound = theory.heavy_ball_matrix_bound(3000, 0.5, 3.0, *arguments, 10.0, 3.0, 0.05, 3)
    assert bound < 1.1 * floor


def test_matrix_bound_has_the_units_of_its_function():
    small = theory.heavy_ball_matrix_bound(9, 0.5, 1.0, 0.8, 0.1, 2.0, 3.0, 0.1, 2, 0.05)
    large = theory.heavy_ball_matrix_bound(9, 5.0, 10.0, 0.08, 0.1, 20.0, 3.0, 10.0, 2, 5.0)
    assert large == pytest.approx(10 * small, rel=1e-6)


# Plots.


def test_figures_of_the_paper():
    pytest.importorskip("matplotlib").use("Agg")
    axes = plots.heavy_ball_rate()
    assert len(axes.get_lines()) == 6
    curve, best = axes.get_lines()[:2]
    np.testing.assert_allclose(
        curve.get_ydata(), theory.heavy_ball_rate(0.5, 1.0, 0.1, curve.get_xdata())
    )
    assert best.get_xdata() == pytest.approx((1 - math.sqrt(0.5 * 0.1)) ** 2, abs=1e-3)

    axes = plots.heavy_ball_bound(noise_std_per_step=1e-2)
    assert len(axes.get_lines()) == 4
    for line in axes.get_lines():
        bound = line.get_ydata()
        assert 0 < np.argmin(bound) < 249  # falls, then rises with the noise
    assert plots.heavy_ball_bound(axes=axes) is axes

    axes = plots.multistage_noise()
    for line, stages in zip(axes.get_lines(), (2, 3, 4, 5), strict=True):
        scales = line.get_ydata()
        assert np.sum(np.diff(scales) > 0) == stages - 1  # jumps up at a stage change alone
        assert np.sum(1 / scales) == pytest.approx(1)


# Errors.


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: theory.nesterov_momentum(0.0, 0.1), "curvature must be positive"),
        (lambda: theory.nesterov_momentum(1.0, -0.1), "learning_rate must be positive"),
        (lambda: theory.nesterov_momentum(1.0, 1.1), "at most 1/1"),
        (lambda: theory.nesterov_weights(2.0, 1.0, 0.1, 5), "0 < strong_convexity ≤ smoothness"),
        (lambda: theory.nesterov_weights(1.0, 2.0, 0.6, 5), "at most 1/2"),
        (lambda: theory.nesterov_weights(1.0, 2.0, 0.5, 0), "steps must be"),
        (lambda: theory.nesterov_weights(1.0, 2.0, 0.5, 2.5), "steps must be"),
        (lambda: theory.multistage_stages(2.0, 1.0, 5), "0 < strong_convexity ≤ smoothness"),
        (lambda: theory.multistage_stages(0.0, 1.0, 5), "0 < strong_convexity ≤ smoothness"),
        (lambda: theory.multistage_stages(1.0, 2.0, 5, c=0.0), "c must be in"),
        (lambda: theory.multistage_stages(1.0, 2.0, 5, c=1.1), "c must be in"),
        (lambda: theory.multistage_stages(1.0, 2.0, 5, p=0), "p must be"),
        (lambda: theory.multistage_stages(1.0, 2.0, 0), "steps must be"),
        (lambda: theory.allocate_epsilon([1.0, 0.0], 1.0), "weights must be positive"),
        (lambda: theory.allocate_epsilon([], 1.0), "weights must be positive"),
        (lambda: theory.allocate_rho([1.0], math.nan), "budget must be positive"),
        (lambda: theory.optimal_bounds(([0.5], [1.0]), 1.0, 1.0, 0), "exponent must be"),
        (lambda: theory.laplace_scale(0.0, 1.0, 1, 1), "epsilon_step must be positive"),
        (lambda: theory.laplace_scale(1.0, 1.0, 11, 10), "1 ≤ batch_size ≤ num_examples"),
        (lambda: theory.laplace_epsilon(0.0, 1.0, 1, 1), "scale must be positive"),
        (lambda: theory.laplace_epsilon(1.0, -1.0, 1, 1), "sensitivity must be positive"),
        (lambda: theory.sampling_variance(1.0, 0, 10), "1 ≤ batch_size ≤ num_examples"),
        (lambda: theory.adp_improvement([1.0, 0.0]), "step_sizes must be positive"),
        (lambda: theory.heavy_ball_rate(1.0, 2.0, 0.0, 0.5), "learning_rate must be positive"),
        (lambda: theory.heavy_ball_rate(1.0, 2.0, 0.5, 1.0), "momentum must be in"),
        (lambda: theory.heavy_ball_floor([0.0, 1.0], 0.5, 0.5, 1.0), "eigenvalues must be"),
        (lambda: theory.heavy_ball_bound(-1, [1.0], 0.5, 0.5, 1.0, 1.0), "not be negative"),
    ],
)
def test_what_is_out_of_range_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
