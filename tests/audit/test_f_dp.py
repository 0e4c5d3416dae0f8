"""Guesses against whole trade-off curves: a linear program, closed cases, and known mechanisms."""

import math

import numpy as np
import pytest
from scipy import optimize, stats

from dp_keras_opt import audit


def lines_of(epsilons, deltas):
    """(slopes, heights): f is the largest of height − slope · x, written from the definition."""
    pairs = [
        pair
        for epsilon, delta in zip(epsilons, deltas, strict=True)
        for pair in (
            (math.exp(epsilon), 1 - delta),
            (math.exp(-epsilon), math.exp(-epsilon) * (1 - delta)),
        )
    ]
    return pairs + [(0.0, 0.0)]


def worst_case(m, r, v, lines):
    """max P[correct ≥ v] over all distributions that the theorem allows, a linear program."""
    numbers = np.arange(r + 1)
    rows, limits = [], []
    for i in range(1, r + 1):
        right = np.where(numbers >= i, numbers, 0) / m
        wrong = np.where(numbers >= i - 1, r - numbers, 0) / m
        for slope, height in lines:  # wrong ≥ height − slope·(1 − right)
            rows.append(slope * right - wrong)
            limits.append(slope - height)
    solution = optimize.linprog(
        -(numbers >= v).astype(float), A_ub=rows, b_ub=limits, A_eq=[np.ones(r + 1)], b_eq=[1.0]
    )
    return -solution.fun


@pytest.mark.parametrize(
    "m, r, v", [(40, 40, 40), (40, 40, 31), (40, 12, 11), (40, 12, 6), (9, 1, 1)]
)
@pytest.mark.parametrize(
    "epsilons, deltas", [([0.0], [0.0]), ([1.0], [0.0]), ([2.0, 1.0, 0.3], [1e-4, 0.02, 0.15])]
)
def test_the_p_value_is_the_worst_case(m, r, v, epsilons, deltas):
    p = audit.trade_off_p_value(m, r, v, audit.trade_off_of(epsilons, deltas))
    assert p == pytest.approx(worst_case(m, r, v, lines_of(epsilons, deltas)), rel=1e-6, abs=1e-8)


def test_one_guess_among_many_canaries():
    # r = v = 1: w_0 = 1 − p, right = p/m, wrong = (1 − p)/m; so (1 − p)/m = f(1 − p/m). With
    # f(x) = e^−ε(1 − x) near x = 1, that is 1 − p = e^−ε·p: p = 1/(1 + e^−ε), whatever m.
    for m in (1, 50):
        p = audit.trade_off_p_value(m, 1, 1, audit.trade_off_of([1.5], [0.0]))
        assert p == pytest.approx(1 / (1 + math.exp(-1.5)), abs=1e-9)
    # And for a Gaussian with m = 1: 1 − p = Φ(Φ⁻¹(p) − μ), so p = Φ(μ/2).
    p = audit.trade_off_p_value(1, 1, 1, audit.gaussian_trade_off(1.3))
    assert p == pytest.approx(stats.norm.cdf(0.65), abs=1e-9)


def test_trade_off_curves():
    # N(0, 1) against N(μ, 1): the test "above t" errs with 1 − Φ(t) and Φ(t − μ).
    for t in (-1.0, 0.3, 2.0):
        value = audit.gaussian_trade_off(0.8)(stats.norm.sf(t))
        assert value == pytest.approx(stats.norm.cdf(t - 0.8), rel=1e-9)
    assert audit.gaussian_trade_off(0.8)(1.0) == 0 and audit.gaussian_trade_off(0.8)(0.0) == 1
    # From many (ε, δ) the curve of the Gaussian comes back, from below.
    deltas = np.geomspace(1e-6, 0.5, 60)
    many = audit.trade_off_of([audit.gaussian_epsilon(0.8, d) for d in deltas], deltas)
    for x in (0.01, 0.2, 0.5, 0.9):
        exact = audit.gaussian_trade_off(0.8)(x)
        assert exact - 3e-3 < many(x) <= exact + 1e-6
    assert audit.trade_off_of([math.inf], [1e-5])(0.3) == 0.0  # which says nothing
    # δ of μ-GDP at ε is Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2).
    epsilon = audit.gaussian_epsilon(0.8, 1e-5)
    below = [stats.norm.cdf(-epsilon / 0.8 + s * 0.4) for s in (1, -1)]
    assert below[0] - math.exp(epsilon) * below[1] == pytest.approx(1e-5, rel=1e-3)
    assert audit.gaussian_epsilon(0.0, 1e-5) == 0 and audit.gaussian_epsilon(1.0, 0.0) == math.inf


# Validity, where the law of the number of right guesses is known.


@pytest.mark.parametrize("m", [20, 300, 2000])
@pytest.mark.parametrize("mu", [0.3, 1.0, 2.5])
def test_no_number_of_right_guesses_of_independent_gaussians_is_rarer_than_its_p_value(m, mu):
    # A coin told through N(±μ/2, 1) is guessed with probability Φ(μ/2), each on its own.
    for v in np.linspace(m // 2, m, 12).astype(int):
        truth = stats.binom.sf(v - 1, m, stats.norm.cdf(mu / 2))
        assert audit.trade_off_p_value(m, m, v, audit.gaussian_trade_off(mu)) >= truth


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_the_p_value_is_attained_by_a_training_that_leaks_rarely(share):
    """With probability `share` each coin is told, rightly with probability 0.9; else nothing is."""
    m, right = 2000, 0.9

    def trade_off(x):
        # The likelihood ratios 9, 1, 1/9 have the masses 0.1·share, 1 − share, 0.9·share without.
        ends = np.cumsum([0, 0.1 * share, 1 - share, 0.9 * share])
        return float(np.interp(x, ends, 1 - np.cumsum([0, 0.9 * share, 1 - share, 0.1 * share])))

    for v in (1000, 1100, 1500, 1780, 1800, 1820):
        truth = share * stats.binom.sf(v - 1, m, right) + (1 - share) * stats.binom.sf(
            v - 1, m, 0.5
        )
        p = audit.trade_off_p_value(m, m, v, trade_off)
        assert p >= truth
        if v == 1780:  # nearly all of what leaks is as good as that
            assert p < 1.3 * truth


@pytest.mark.parametrize("mu", [0.5, 2.0])
def test_the_bound_on_mu_is_right_as_often_as_it_says(mu):
    rng, m, repetitions = np.random.default_rng(0), 1000, 300
    found = []
    for _ in range(repetitions):
        coins = rng.random(m) < 0.5
        order = np.argsort(mu * coins + rng.normal(size=m))
        correct = int(coins[order[-50:]].sum() + (~coins[order[:50]]).sum())
        found.append(audit.gaussian_mu_bound(m, 100, correct, 0.95))
    # Too high in at most 5% of the runs, 15 of 300: 32 and more come once in 20,000 tests.
    assert np.sum(np.array(found) > mu) < 32
    assert np.median(found) > mu / 4


@pytest.mark.parametrize("m, r, v", [(1000, 1000, 700), (1000, 200, 180), (10_000, 600, 590)])
def test_of_gaussians_it_proves_more_than_the_bound_on_epsilon(m, r, v):
    mu = audit.gaussian_mu_bound(m, r, v)
    assert audit.gaussian_epsilon(mu, 1e-5) > 1.3 * audit.one_run_bound(m, r, v, 1e-5)
    # The bound is where the p-value is what the confidence leaves.
    assert audit.trade_off_p_value(m, r, v, audit.gaussian_trade_off(mu)) == pytest.approx(
        0.05, abs=1e-4
    )
    assert audit.gaussian_mu_bound(m, r, v, 0.999) < mu


def test_guesses_that_are_right_by_half_prove_nothing():
    assert audit.gaussian_mu_bound(100, 100, 50) == 0.0
    assert audit.gaussian_mu_bound(100, 1, 1) == 0.0
    assert audit.trade_off_p_value(100, 10, 0, audit.gaussian_trade_off(1.0)) == 1.0


def test_many_runs():
    # Of n runs without an error Clopper and Pearson say 1 − s^{1/n}, s = 0.025 for each kind.
    rate = 1 - 0.025 ** (1 / 40)
    expected = 2 * stats.norm.isf(rate)
    assert audit.many_run_mu_bound(0, 40, 0, 40) == pytest.approx(expected, rel=1e-9)
    assert audit.many_run_mu_bound(20, 40, 20, 40) == 0.0
    assert audit.many_run_mu_bound(40, 40, 0, 40) == 0.0
    assert audit.many_run_mu_bound(40, 40, 40, 40) == 0.0


def test_what_is_no_trade_off_is_refused():
    one, other = audit.gaussian_trade_off(1.0), audit.trade_off_of([1.0], [0.0])
    for wrong in (
        lambda x: min(one(x), other(x)),  # not convex
        lambda x: 1.2 - x,
        lambda x: x / 4,
        lambda x: math.nan,
    ):
        with pytest.raises(ValueError, match="is convex"):
            audit.trade_off_p_value(10, 10, 5, wrong)
    for counts in ((10, 11, 5), (10, 5, 6), (10, 5, -1), (10, 0, 0)):
        with pytest.raises(ValueError, match="guesses <= canaries"):
            audit.gaussian_mu_bound(*counts)
    with pytest.raises(ValueError, match="Each ε"):
        audit.trade_off_of([-1.0], [0.1])


def test_the_excess_over_a_curve_in_both_directions():
    fpr, fnr = (stats.beta.ppf(0.975, errors + 1, 40 - errors) for errors in (4, 10))
    found = audit.many_run_excess(4, 40, 10, 40, lambda rate: 2 * rate)
    assert found == pytest.approx(max(1 - fnr - 2 * fpr, 1 - fpr - 2 * fnr), rel=1e-9)
    assert audit.many_run_excess(0, 10**6, 0, 10**6, lambda rate: 0.3) == pytest.approx(
        0.7, abs=1e-4
    )
    assert audit.many_run_excess(20, 40, 20, 40, lambda rate: rate) < 0
