"""Bounds on attacks, held against closed forms and against tests that are carried out."""

import json
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy import optimize, stats

import dp_keras_opt as dp
from dp_keras_opt.accounting import Ledger, Sampling
from dp_keras_opt.accounting.risk import Risk, of_guarantee
from dp_keras_opt.accounting.trade_off import of_losses, of_pairs

RATES = np.array([0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
N = 100


def ledger(sigma=1.0, steps=1, sampling=None, **options):
    sampling = sampling or Sampling.full(N)
    optimizer = dp.optimizers.DPSGD(
        0.1, clip_norm=1.0, noise_multiplier=sigma, batch_size=sampling.batch_size, **options
    )
    return Ledger.of(optimizer, sampling, steps)


def gaussian(mu, rates):
    return stats.norm.cdf(stats.norm.ppf(rates) + mu)


def laplace(epsilon, rates):
    """The best test of Laplace noise of scale 1/ε against the same, moved by 1."""
    middle = np.where(rates < 0.5, 1 - math.exp(-epsilon) / (4 * rates), 0)
    small = math.exp(epsilon) * rates
    large = 1 - math.exp(-epsilon) * (1 - rates)
    between = (rates > math.exp(-epsilon) / 2) & (rates < 0.5)
    return np.where(rates <= math.exp(-epsilon) / 2, small, np.where(between, middle, large))


# Closed forms.


@pytest.mark.parametrize("sigma, steps", [(1.0, 1), (0.4, 1), (2.0, 9), (5.0, 400)])
def test_gaussian_steps_without_sampling(sigma, steps):
    risk, mu = ledger(sigma, steps).risk(), math.sqrt(steps) / sigma
    expected = gaussian(mu, RATES)
    found = risk.true_positive_rate(RATES)
    assert np.all(found >= expected) and np.all(found <= expected + 1e-4)
    assert risk.advantage == pytest.approx(2 * stats.norm.cdf(mu / 2) - 1, abs=1e-4)
    assert mu <= risk.gaussian_mu() <= mu + 1e-4
    assert risk.basis == "loss distribution" and not risk.is_heuristic


def test_the_reference_numbers():
    risk = ledger(1.0).risk()
    found = [risk.true_positive_rate(rate) for rate in (0.001, 0.01, 0.1)]
    np.testing.assert_allclose(found, [0.018298, 0.092362, 0.389144], atol=1e-5)
    assert risk.advantage == pytest.approx(0.382925, abs=1e-5)
    assert risk.reconstruction(10) == pytest.approx(0.389144, abs=1e-5)
    assert risk.precision(0.01, 0.01) == pytest.approx(0.0853, abs=1e-4)
    # With ε >= 0 alone it would be 1.083.
    assert risk.true_positive_rate(0.7) == pytest.approx(0.9363, abs=1e-4)


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 4.0])
def test_laplace_noise(epsilon):
    risk = ledger(1 / epsilon, noise="laplace").risk()
    expected = laplace(epsilon, RATES)
    found = risk.true_positive_rate(RATES)
    assert np.all(found >= expected) and np.all(found <= expected + 1e-4)
    assert risk.advantage == pytest.approx(1 - math.exp(-epsilon / 2), abs=1e-4)


@pytest.mark.parametrize("noise", [0.1, 0.4])
def test_randomised_response(noise):
    """Says the truth about one bit with probability 1 − noise/2."""
    losses = privacy_loss_distribution.from_randomized_response(noise, 2)
    epsilon = math.log((1 - noise / 2) / (noise / 2))
    exact = np.minimum(math.exp(epsilon) * RATES, 1 - math.exp(-epsilon) * (1 - RATES))
    risk = Risk(tuple(of_losses(losses)), "loss distribution")
    np.testing.assert_allclose(risk.true_positive_rate(RATES), exact, atol=1e-4)
    np.testing.assert_allclose(of_pairs([(epsilon, 0.0)])(RATES), exact, atol=1e-12)
    assert risk.advantage == pytest.approx(1 - noise, abs=1e-4)
    assert of_pairs([(epsilon, 0.0)]).advantage == pytest.approx(1 - noise, abs=1e-12)


def test_one_sampled_step_in_both_directions():
    q, sigma = 0.3, 0.7
    risk = ledger(sigma, sampling=Sampling.poisson(N, round(q * N))).risk()

    def added(rate):  # the best test of N(0, σ²) against the mixture
        return (1 - q) * rate + q * gaussian(1 / sigma, rate)

    def removed(rate):  # and of the mixture against N(0, σ²): the same one, read from its other end
        return 1 - optimize.brentq(lambda error: 1 - added(error) - rate, 0.0, 1.0)

    expected = np.array([max(added(rate), removed(rate)) for rate in RATES])
    found = risk.true_positive_rate(RATES)
    assert np.all(found >= expected - 1e-12) and np.all(found <= expected + 2e-4)


def test_two_sampled_steps_by_the_likelihoods_of_both():
    q, sigma = 0.2, 0.8
    risk = ledger(sigma, 2, Sampling.poisson(N, round(q * N))).risk()
    x = np.linspace(-8 * sigma, 1 + 8 * sigma, 2001)
    without = stats.norm.pdf(x, 0, sigma)
    with_ = (1 - q) * without + q * stats.norm.pdf(x, 1, sigma)
    without, with_ = (np.outer(p, p).ravel() * (x[1] - x[0]) ** 2 for p in (without, with_))
    best = np.zeros(len(RATES))
    for null, other in ((without, with_), (with_, without)):
        order = np.argsort(null / other)
        best = np.maximum(best, np.interp(RATES, np.cumsum(null[order]), np.cumsum(other[order])))
    found = risk.true_positive_rate(RATES)
    assert np.all(found >= best - 1e-6) and np.all(found <= best + 5e-4)


def test_a_posterior_by_the_closed_form():
    risk, (mu, prior, posterior) = ledger(0.5).risk(), (2.0, 0.2, 0.95)
    ratio = (prior / (1 - prior)) / (posterior / (1 - posterior))
    expected = optimize.brentq(lambda t: gaussian(mu, t * ratio) - t, 1e-9, 1.0)
    assert risk.probability_of_posterior(posterior, prior) == pytest.approx(expected, abs=1e-4)
    # What happens: the release is that certain this often where the person took part.
    least = math.log(1 / ratio)
    happens = stats.norm.sf((least - mu**2 / 2) / mu)
    assert 0 < happens <= risk.probability_of_posterior(posterior, prior)
    assert risk.probability_of_posterior(0.2, 0.2) == risk.probability_of_posterior(0.1, 0.2) == 1


# What has no loss distribution, no noise, or no steps.


def test_what_follows_from_epsilon_and_delta_alone():
    epsilon, delta = 1.0, 1e-3
    risk = of_guarantee(epsilon, delta)
    exact = np.minimum(
        math.exp(epsilon) * RATES + delta, 1 - math.exp(-epsilon) * (1 - delta - RATES)
    )
    np.testing.assert_allclose(risk.true_positive_rate(RATES), np.minimum(exact, 1), atol=1e-12)
    expected = np.max(np.minimum(
        math.exp(epsilon) * (grid := np.linspace(0, 1, 100_001)) + delta,
        1 - math.exp(-epsilon) * (1 - delta - grid),
    ) - grid)  # fmt: skip
    assert risk.advantage == pytest.approx(expected, abs=1e-4)
    assert risk.basis == "epsilon and delta" and "alone" in str(risk)


def test_rdp_has_pairs_only_and_never_says_less():
    planned = ledger(2.0, 4)
    by_rdp, exact = planned.risk("rdp"), planned.risk()
    assert by_rdp.basis == "epsilon and delta"
    assert np.all(by_rdp.true_positive_rate(RATES) >= exact.true_positive_rate(RATES))
    assert by_rdp.true_positive_rate(0.1) < 0.9
    # One pair alone says less than several.
    one = of_guarantee(planned.epsilon(1e-6), 1e-6)
    assert by_rdp.true_positive_rate(0.01) < one.true_positive_rate(0.01)


def test_a_sampling_without_a_loss_distribution():
    risk = ledger(3.0, 10, Sampling.without_replacement(N, 10)).risk()
    assert risk.basis == "epsilon and delta" and risk.true_positive_rate(0.01) < 1
    assert "which of two candidates" in risk.sentence


def test_pure_privacy_needs_no_delta():
    by_pure = ledger(2.0, noise="laplace").risk("pure")
    np.testing.assert_allclose(
        by_pure.true_positive_rate(RATES),
        np.minimum(math.exp(0.5) * RATES, 1 - math.exp(-0.5) * (1 - RATES)), atol=1e-9,
    )  # fmt: skip


def test_without_noise_nothing_is_bounded():
    risk = ledger(0.0).risk()
    assert risk.basis == "unbounded" and risk.advantage == 1
    assert risk.true_positive_rate(0.001) == risk.reconstruction(10) == 1
    assert math.isinf(risk.gaussian_mu()) and "may tell for certain" in risk.sentence
    json.dumps(risk.to_dict(), allow_nan=False)


def test_without_a_step_there_is_only_guessing():
    risk = ledger(1.0, 0).risk()
    assert risk.basis == "no release" and "Nothing was released" in str(risk)
    np.testing.assert_allclose(risk.true_positive_rate(RATES), RATES, atol=1e-12)
    assert risk.advantage == 0 and risk.gaussian_mu() < 1e-4


def test_a_stopped_plan_counts_as_planned():
    spent = ledger(2.0, 2)
    spent.plan(30)
    found, planned = spent.risk(), ledger(2.0, 32).risk()
    assert found.advantage == pytest.approx(planned.advantage, abs=1e-9)


def test_steps_that_do_not_compose_are_refused():
    spent = ledger(1.0)
    spent.merge(ledger(1.0, 1, Sampling.shuffled(N, 10)))
    with pytest.raises(ValueError, match="do not compose"):
        spent.risk()


def test_a_heuristic_is_called_one():
    risk = ledger(1.0, 10, Sampling.shuffled_accounted_as_poisson(N, 10)).risk()
    assert risk.is_heuristic and "HEURISTIC" in str(risk) and not risk.to_dict()["proven"]


@pytest.mark.parametrize(
    "condition, words",
    [
        ("noise seed", "NO DIFFERENTIAL PRIVACY"),
        ("batch seed", "sampling amplifies nothing"),
        ("stated sampling", "Epsilon rests on their word"),
    ],
)
def test_what_the_bounds_rest_on_is_said(condition, words):
    spent = ledger(1.0)
    assert not spent.risk().conditions and words not in str(spent.risk())
    spent.begin(spent.segments[0].releases, spent.segments[0].sampling, conditions=[condition])
    spent.reserve(1)
    risk = spent.risk()
    assert risk.conditions == (condition,) and words in str(risk)
    assert risk.to_dict()["conditions"] == [condition]
    assert spent.statement(1e-5).count(words) == 1


@pytest.mark.parametrize(
    "ask",
    [
        lambda risk: risk.true_positive_rate(1.1),
        lambda risk: risk.true_positive_rate([0.1, -0.1]),
        lambda risk: risk.precision(0.0, 0.5),
        lambda risk: risk.precision(0.1, 1.0),
        lambda risk: risk.probability_of_posterior(1.0, 0.5),
        lambda risk: risk.probability_of_posterior(0.9, 0.0),
        lambda risk: risk.reconstruction(1),
        lambda risk: risk.gaussian_mu(0.0),
        lambda risk: risk.gaussian_mu(0.5),
    ],
)
def test_what_is_no_probability_is_refused(ask):
    with pytest.raises(ValueError, match="received"):
        ask(ledger(1.0).risk())


# Texts.


def test_percentages_are_rounded_up():
    risk = ledger(1.0).risk()
    assert "at most 38.3 percentage points" in risk.sentence  # 0.382925
    assert "at most 9.3%" in risk.sentence  # 0.092364
    assert "1.9%" in str(risk) and "39.0%" in str(risk)


def test_the_statement_says_what_it_means():
    text = ledger(1.0).statement(1e-5)
    assert "What it means:" in text and "38.3 percentage points" in text.replace("\n", " ")
    by_rdp = ledger(1.0).statement(1e-5, "rdp").replace("\n", " ")
    assert "from epsilon and delta alone" in by_rdp
    assert "What it means" not in ledger(0.0).statement(1e-5)


# Attacks that are carried out.


def _attacked(sigma, runs, planted_sigma=None, seed=0):
    """Members' and others' scores from the noisy sums of three sampled steps, q = ½."""
    rng = np.random.default_rng(seed)
    sigma = planted_sigma or sigma

    def scores(is_member):
        drawn = is_member * (rng.random((runs, 3)) < 0.5)
        return np.sum(np.log(0.5 + 0.5 * np.exp(
            ((drawn + sigma * rng.standard_normal((runs, 3))) - 0.5) / sigma**2
        )), axis=1)  # fmt: skip

    return scores(1), scores(0)


@pytest.mark.parametrize("planted, lies_below", [(1.0, True), (2 / 3, False)])
def test_the_best_attack_lies_below_and_with_too_little_noise_above(planted, lies_below):
    """200,000 runs: a bound is passed by chance with a probability below 1e-6."""
    risk = ledger(1.0, 3, Sampling.poisson(N, N // 2)).risk()
    members, others = _attacked(1.0, 200_000, planted)
    above = []
    for rate in (0.01, 0.1, 0.3):
        threshold = np.quantile(others, 1 - rate)
        hits, false = np.sum(members > threshold), np.sum(others > threshold)
        least = stats.beta.ppf(1e-7, hits, len(members) - hits + 1)
        most = stats.beta.isf(1e-7, false + 1, len(others) - false)
        above.append(least > risk.true_positive_rate(most))
    assert any(above) != lies_below
    if lies_below:  # and it is not far below
        assert np.mean(members > np.quantile(others, 0.9)) > risk.true_positive_rate(0.1) - 0.02


def test_dp_accounting_gives_the_same_divergences():
    """Each line of the curve is δ(ε) of dp_accounting, both directions asked one by one."""
    event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0))
    composed = dp_accounting.pld.PLDAccountant().compose(event, 50)
    risk = ledger(1.0, 50, Sampling.poisson(N, 10)).risk()
    for epsilon in (0.2, 1.0, 2.0):
        delta = composed.get_delta(epsilon)
        for rate in RATES:
            assert risk.true_positive_rate(rate) <= math.exp(epsilon) * rate + delta + 1e-4


def test_the_picture_shows_the_curve_and_guessing():
    pytest.importorskip("matplotlib")
    risk = ledger(1.0).risk()
    axes = dp.plots.trade_off({"σ = 1": risk})
    curve, guessing = axes.get_lines()
    rates, found = curve.get_data()
    np.testing.assert_allclose(found, risk.true_positive_rate(rates))
    np.testing.assert_allclose(*guessing.get_data())
    with pytest.raises(ValueError, match="nothing to draw"):
        dp.plots.trade_off({})


@pytest.mark.parametrize("epsilon", [0.5, 5.0])
def test_a_posterior_of_pure_privacy(epsilon):
    """Whose curve begins at 0. Randomised response makes members certain up to e^ε/(1 + e^ε)."""
    limit = math.exp(epsilon) / (1 + math.exp(epsilon))
    planned = ledger(1 / epsilon, noise="laplace")
    for risk in (of_guarantee(epsilon, 0.0), planned.risk("pure"), planned.risk("rdp")):
        assert risk.probability_of_posterior(limit - 1e-6, 0.5) >= limit - 1e-3
        assert risk.probability_of_posterior((1 + limit) / 2, 0.5) < 1e-6
    by_losses = planned.risk().probability_of_posterior(limit - 1e-3, 0.5)
    assert by_losses <= planned.risk("pure").probability_of_posterior(limit - 1e-3, 0.5) + 1e-6
