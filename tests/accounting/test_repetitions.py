"""Private selection against its definition, and against dp_accounting called directly."""

import math

import dp_accounting
import numpy as np
import pytest

from dp_keras_opt.accounting import Ledger, RandomRepetitions, Sampling, calibrate

SAMPLING = Sampling.poisson(10_000, 100)


def probabilities(mean, shape):
    """Definition 1 of Papernot and Steinke, summed up in float64; γ by bisection on the mean."""
    k = np.arange(1, 20_000)

    def at(gamma):
        rising = np.cumsum(np.log((np.arange(len(k)) + shape) / (np.arange(len(k)) + 1)))
        if shape:
            logs = k * math.log1p(-gamma) - math.log(gamma**-shape - 1) + rising
        else:
            logs = k * math.log1p(-gamma) - np.log(k) - math.log(math.log(1 / gamma))
        return np.exp(logs)

    low, high = 1e-4, 1 - 1e-9
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if (at(middle) * k).sum() > mean else (low, middle)
    return k, at(low)


@pytest.mark.representatives(4)
@pytest.mark.parametrize("shape", [0, 0.5, 1, 3])
@pytest.mark.parametrize("mean", [1.5, 8])
def test_the_number_of_runs_has_the_distribution_that_is_priced(mean, shape):
    k, expected = probabilities(mean, shape)
    assert expected.sum() == pytest.approx(1, abs=1e-6)
    generator = np.random.default_rng(0)
    repetitions = RandomRepetitions(mean, shape)
    draws = np.array([repetitions.draw(generator) for _ in range(3000)])
    for count in (1, 2, 5):  # 24 tests at 5 standard errors: a false alarm in 1e5 runs
        p = expected[k <= count].sum()
        share = (draws <= count).mean()
        assert abs(share - p) <= 5 * math.sqrt(max(p * (1 - p), 1e-4) / len(draws))


def test_a_mean_of_one_is_a_single_run():
    generator = np.random.default_rng(0)
    assert {RandomRepetitions(1, shape).draw(generator) for shape in (0, 1, 2)} == {1}


@pytest.mark.parametrize("shape", [0, 1])
def test_epsilon_is_that_of_dp_accounting(make_optimizer, shape):
    ledger = Ledger()
    optimizer = make_optimizer(noise_multiplier=1.0, batch_size=100)
    repetitions = RandomRepetitions(10, shape)
    ledger.begin(optimizer.releases, SAMPLING, selection=repetitions)
    ledger.reserve(200)
    accountant = dp_accounting.rdp.RdpAccountant()
    run = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0)), 200
    )
    accountant.compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(run, 10, shape))
    assert ledger.epsilon(1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)
    single = Ledger.of(optimizer, SAMPLING, 200).epsilon(1e-5)
    assert single < ledger.epsilon(1e-5) < 10 * single
    assert Ledger.from_json(ledger.to_json()).segments == ledger.segments
    text = " ".join(ledger.statement(1e-5).split())
    assert "the best of a random number of such runs, 10 in the mean" in text


def test_ledgers_of_before_have_no_selection(make_optimizer):
    ledger = Ledger.of(make_optimizer(noise_multiplier=1.0, batch_size=100), SAMPLING, 5)
    old = ledger.to_json().replace(',\n   "selection": null', "")
    assert '"selection"' not in old
    assert Ledger.from_json(old).segments[0].selection is None


@pytest.mark.parametrize("budget", [{"num_trainings": 5}, {"selection": RandomRepetitions(5, 1)}])
def test_calibration_for_several_runs(make_optimizer, budget):
    optimizer = make_optimizer(noise_multiplier=None, batch_size=100)
    sigma = calibrate(optimizer, SAMPLING, 50, 2.0, 1e-5, "rdp", **budget)

    def spent(multiplier):
        accountant = dp_accounting.rdp.RdpAccountant()
        step = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(multiplier))
        if "num_trainings" in budget:
            accountant.compose(step, 5 * 50)
        else:
            run = dp_accounting.SelfComposedDpEvent(step, 50)
            accountant.compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(run, 5, 1))
        return accountant.get_epsilon(1e-5)

    assert spent(sigma) <= 2.0 < spent(sigma * (1 - 2e-4))


def test_errors(make_optimizer):
    for mean, shape in ((0.5, 1), (math.inf, 1), (2, -1), (2, math.inf), (True, 1), (2, "1")):
        with pytest.raises(ValueError, match="must be a number from"):
            RandomRepetitions(mean, shape)
    ledger = Ledger()
    optimizer = make_optimizer(noise_multiplier=1.0, batch_size=100)
    ledger.begin(optimizer.releases, SAMPLING, selection=RandomRepetitions(2))
    ledger.reserve(10)
    with pytest.raises(ValueError, match="cannot price a private selection"):
        ledger.epsilon(1e-5, "pld")


def test_without_noise_there_is_no_epsilon(make_optimizer):
    ledger = Ledger()
    optimizer = make_optimizer(noise_multiplier=0.0, batch_size=100)
    ledger.begin(optimizer.releases, SAMPLING, selection=RandomRepetitions(2))
    ledger.reserve(10)
    assert ledger.epsilon(1e-5) == math.inf
