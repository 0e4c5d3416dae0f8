"""Poisson batches in which an example is replaced, under PLD: the loss held against integration."""

import functools

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld
from scipy import optimize, special, stats

from dp_keras_opt import accounting
from dp_keras_opt.accounting import Sampling
from dp_keras_opt.accounting.accountant import make_accountant


def attained(q, sigma, steps, delta, moved, interval=1e-4):
    """ε that a pair of batches really has after so many steps, from below.

    The example moves the sum by one of `moved`, in units of the clip norm, the one that replaces it
    by the other. By integration over the sum and rounding the loss down.
    """
    x = np.linspace(-12 * sigma, 12 * sigma, 400_001)
    first, second = (
        (1 - q) * stats.norm.pdf(x, 0, sigma) + q * stats.norm.pdf(x, c, sigma) for c in moved
    )
    rounded = np.floor(np.log(first / second) / interval).astype(int)
    losses = np.bincount(rounded - rounded.min(), weights=first * (x[1] - x[0]))
    length = steps * (len(losses) - 1) + 1
    size = 1 << int(np.ceil(np.log2(length)))
    composed = np.fft.irfft(np.fft.rfft(losses, size) ** steps, size)[:length]
    loss = (np.arange(length) + steps * rounded.min()) * interval

    def excess(epsilon):
        return np.sum(composed * -np.expm1(np.minimum(epsilon - loss, 0))) - delta

    return optimize.brentq(excess, -5, 30)


def at_half_sigma(q, sigma, steps, delta):
    """What dp_accounting says of the pair that is no bound."""
    event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma / 2))
    accountant = pld.PLDAccountant()
    return accountant.compose(dp_accounting.SelfComposedDpEvent(event, steps)).get_epsilon(delta)


@functools.cache
def priced(q, sigma, steps, noise=dp_accounting.GaussianDpEvent):
    """The accountant for `replace_one`, after these steps; it is told σ/2, as by `events`."""
    sampling = Sampling.poisson(1000, round(1000 * q), "replace_one")
    event = dp_accounting.PoissonSampledDpEvent(q, noise(sigma / 2))
    accountant = make_accountant("pld", sampling)
    return accountant.compose(dp_accounting.SelfComposedDpEvent(event, steps))


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "expected"), [(0.01, 1.0, 1000, 14.82), (0.5, 2.0, 2, 4.85421)]
)
def test_figures(make_optimizer, q, sigma, steps, expected):
    sampling = Sampling.poisson(10_000, round(10_000 * q), "replace_one")
    optimizer = make_optimizer(sigma, batch_size=sampling.batch_size)
    epsilon = accounting.epsilon(optimizer, sampling, steps, 1e-5, "pld")
    assert epsilon == pytest.approx(expected, abs=0.002)
    assert epsilon > at_half_sigma(q, sigma, steps, 1e-5)


def test_a_pair_that_half_the_multiplier_does_not_bound():
    """The examples point in opposite directions: at δ = 0.95 their ε is 0.516, not 0.385."""
    truth = attained(0.95, 1.0, 5, 0.95, (1, -1))
    assert truth == pytest.approx(0.516, abs=1e-3)
    assert at_half_sigma(0.95, 1.0, 5, 0.95) == pytest.approx(0.385, abs=1e-3)
    assert at_half_sigma(0.95, 1.0, 5, 0.95) < truth <= priced(0.95, 1.0, 5).get_epsilon(0.95)


@pytest.mark.representatives(10)
@pytest.mark.parametrize("moved", [(1, -1), (1, 0), (0, 1), (1, 0.5), (0.3, -1)])
@pytest.mark.parametrize(
    ("q", "sigma", "steps"), [(0.95, 1.0, 5), (0.5, 2.0, 2), (0.1, 1.0, 10), (0.3, 0.8, 3)]
)
def test_no_pair_exceeds_the_bound(q, sigma, steps, moved):
    for delta in (0.9, 0.1, 1e-3):
        truth = attained(q, sigma, steps, delta, moved)
        assert truth <= priced(q, sigma, steps).get_epsilon(delta)


def profile(q, sigma, loss):
    """The profile of one step at ε = loss, in closed form, for ε of both signs."""

    def of_positive(e):
        # The mixture exceeds e^ε times the other where exp(2x/σ² − 2/σ²) > (e^ε − 1 + q)/q.
        x = (np.log((np.exp(e) - 1 + q) / q) * sigma**2 + 2) / 2
        upper = (1 - q) * special.ndtr(-x / sigma) + q * special.ndtr((2 - x) / sigma)
        return upper - np.exp(e) * special.ndtr(-x / sigma)

    if loss >= 0:
        return of_positive(loss)
    return 1 - np.exp(loss) + np.exp(loss) * of_positive(-loss)


@pytest.mark.parametrize(("q", "sigma"), [(0.01, 1.0), (0.5, 2.0), (0.95, 1.0), (1.0, 3.0)])
def test_one_step_is_the_formula(q, sigma):
    accountant = priced(q, sigma, 1)
    for loss in (-2.0, -0.5, -0.01, 0.0, 0.013, 0.4, 1.7):
        assert accountant.get_delta(loss) == pytest.approx(profile(q, sigma, loss), rel=1e-3)


def test_without_sampling_it_is_the_gaussian_of_twice_the_sensitivity(make_optimizer):
    optimizer = make_optimizer(2.0, batch_size=100)
    sampled, full = (
        accounting.epsilon(optimizer, sampling, 3, 1e-5, "pld")
        for sampling in (
            Sampling.poisson(100, 100, "replace_one"), Sampling.full(100, "replace_one")
        )
    )  # fmt: skip
    assert sampled == pytest.approx(full, rel=1e-3)


def test_laplace_noise():
    event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.LaplaceDpEvent(1.0))
    half = pld.PLDAccountant().compose(dp_accounting.SelfComposedDpEvent(event, 20))
    spent = priced(0.1, 2.0, 20, dp_accounting.LaplaceDpEvent).get_epsilon(1e-5)
    assert half.get_epsilon(1e-5) <= spent <= 20 * np.log1p(0.1 * np.expm1(1.0))


def test_steps_with_and_without_sampling_compose(make_optimizer):
    optimizer = make_optimizer(2.0, batch_size=100)
    ledger = accounting.Ledger.of(optimizer, Sampling.poisson(1000, 100, "replace_one"), 50)
    alone = ledger.epsilon(1e-5, "pld")
    optimizer = make_optimizer(8.0, batch_size=100)
    ledger.merge(accounting.Ledger.of(optimizer, Sampling.full(100, "replace_one"), 3))
    assert alone < ledger.epsilon(1e-5, "pld") < ledger.epsilon(1e-5, "rdp")
