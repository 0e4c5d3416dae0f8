"""The price of balls in bins, held against integrals, dp_accounting, simulation and a slow bound.

The integrals need one dimension less than there are bins: given all others, the expectation over
the last lognormal is the price of an option (Black and Scholes), in closed form.
"""

import functools
import math

import dp_accounting
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize, special

from dp_keras_opt.accounting import random_allocation
from dp_keras_opt.accounting.accountant import make_accountant
from dp_keras_opt.accounting.loss_distributions import LossDistributionAccountant
from dp_keras_opt.accounting.random_allocation import (
    RandomAllocationAccountant,
    RandomAllocationDpEvent,
    UnamplifiedRdpAccountant,
)
from dp_keras_opt.accounting.sampling import Sampling

INFINITY = math.inf
POISSON = Sampling.poisson(100, 10)


def event(*noise_multipliers):
    return RandomAllocationDpEvent(noise_multipliers, len(noise_multipliers))


def equal(sigma, bins):
    return RandomAllocationDpEvent(((sigma, bins),), bins)


@functools.lru_cache(maxsize=64)
def sides(epoch, epochs=1):
    """The composed losses of an example removed and of one added."""
    accountant = RandomAllocationAccountant()
    accountant.compose(dp_accounting.SelfComposedDpEvent(epoch, epochs))
    return accountant._pld._pmf_remove, accountant._pld._pmf_add


def bound(epoch, epsilon):
    """δ of (remove, add)."""
    return [side.get_delta_for_epsilon(epsilon) for side in sides(epoch)]


def priced(epoch, epochs, delta, accountant=RandomAllocationAccountant):
    composed = accountant().compose(dp_accounting.SelfComposedDpEvent(epoch, epochs))
    return composed.get_epsilon(delta)


def call(strike, sigma):
    """E (L − strike)₊ for L = exp(x/σ − 1/(2σ²))."""
    if strike <= 0:
        return 1 - strike
    d = 0.5 / sigma - sigma * math.log(strike)
    return special.ndtr(d) - strike * special.ndtr(d - 1 / sigma)


def put(strike, sigma):
    """E (strike − L)₊."""
    if strike <= 0:
        return 0.0
    d = 0.5 / sigma - sigma * math.log(strike)
    return strike * special.ndtr(1 / sigma - d) - special.ndtr(-d)


def gaussian(sigma, delta):
    """ε of one Gaussian release, which is one bin."""
    if call(1, sigma) <= delta:
        return 0.0
    return optimize.brentq(
        lambda e: call(math.exp(e), sigma) - delta, 0, 0.5 / sigma**2 + 9 / sigma
    )


def exact(sigmas, epsilon):
    """δ of (remove, add), for two or three bins."""
    level = len(sigmas) * math.exp(epsilon)
    below = len(sigmas) * math.exp(-epsilon)
    *others, last = sigmas

    def over_others(price, strike):
        def integrand(*xs):
            ratios = [math.exp(x / s - 0.5 / s**2) for x, s in zip(xs, others, strict=True)]
            density = math.exp(-0.5 * sum(x * x for x in xs)) / math.sqrt(2 * math.pi) ** len(xs)
            return density * price(strike - sum(ratios), last)

        reach = 9 + 1 / min(others)
        if len(others) == 1:
            kink = others[0] * math.log(strike) + 0.5 / others[0]
            places = sorted({-reach, min(max(kink, -reach), reach), 0.0, reach})
            return sum(
                integrate.quad(integrand, a, b, epsabs=0, epsrel=1e-10, limit=400)[0]
                for a, b in zip(places, places[1:], strict=False)
            )
        x, weights = np.polynomial.legendre.leggauss(250)
        return sum(
            reach**2 * u * v * integrand(reach * a, reach * b)
            for a, u in zip(x, weights, strict=True)
            for b, v in zip(x, weights, strict=True)
        )

    return over_others(call, level) / len(sigmas), over_others(put, below) / below


# (σ of the bins, ε, δ if removed, δ if added), from independent integration.
INTEGRALS = [
    ((1, 1), 0.5, 0.14917752, 0.14268697),
    ((1, 1), 1, 0.059206501, 0.050197662),
    ((1, 1), 2, 0.0047457776, 0.0020559245),
    ((2, 2), 1, 6.4612837e-4, 4.7900624e-4),
    ((0.5, 0.5), 1, 0.4045775, 0.38033919),
    ((1, 2), 1, 0.0301976, 0.0081551299),
    ((1, 1, 1), 0.5, 0.1068406, 0.09809494),
    ((1, 1, 1), 1, 0.03350077, 0.02383871),
    ((1, 1, 1), 2, 0.00161412, 2.60281e-4),
    ((2, 2, 2), 1, 8.771561e-5, 4.512086e-5),
]


@pytest.mark.parametrize(("sigmas", "epsilon", "remove", "add"), INTEGRALS)
def test_two_and_three_bins_are_the_integrals(sigmas, epsilon, remove, add):
    for delta, truth in zip(bound(event(*sigmas), epsilon), (remove, add), strict=True):
        assert truth * (1 - 1e-6) <= delta <= truth * 1.002  # they are given to 6 digits


@pytest.mark.parametrize(("sigmas", "epsilon", "remove", "add"), INTEGRALS[:6] + INTEGRALS[7:8])
def test_the_integrals_themselves(sigmas, epsilon, remove, add):
    assert exact(sigmas, epsilon) == pytest.approx(
        (remove, add), rel=1e-5 if len(sigmas) == 2 else 1e-4
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.floats(0.25, 8), st.floats(0.25, 8), st.floats(-2, 4),
)  # fmt: skip
def test_never_below_the_integral(first, second, epsilon):
    truths = exact((first, second), epsilon)
    for delta, truth in zip(bound(event(first, second), epsilon), truths, strict=True):
        assert truth * (1 - 1e-9) <= delta <= truth * 1.01 + 1e-12


@pytest.mark.parametrize("epsilon", [-1, 0.5, 2, 4])
def test_tails_count_in_full(monkeypatch, epsilon):
    """Where a hundredth is cut off at a time, the bound is no less one."""
    monkeypatch.setattr(random_allocation, "_TAIL", 1e-2)
    monkeypatch.setattr(random_allocation, "_TAIL_IN_DEVIATIONS", -special.ndtri(1e-2))
    for sigmas in ((1, 1), (0.7, 2)):
        losses = random_allocation.epoch_losses.__wrapped__(event(*sigmas).noise_multipliers, 1e-3)
        for pmf, truth in zip(
            (losses._pmf_remove, losses._pmf_add), exact(sigmas, epsilon), strict=True
        ):
            assert truth <= pmf.get_delta_for_epsilon(epsilon) <= truth + 0.1
            assert pmf._probs.sum() + pmf._infinity_mass >= 1 - 1e-12


def test_tiny_delta():
    """ε at δ = 1e-12 is that of the integral, from above; for less than can be told, infinite."""
    for side, pmf in enumerate(sides(event(1, 1))):

        def excess(epsilon, side=side):
            return math.log(max(exact((1, 1), epsilon)[side], 1e-300)) - math.log(1e-12)

        truth = optimize.brentq(excess, 1, 12)
        assert truth <= pmf.get_epsilon_for_delta(1e-12) <= truth * 1.001
    assert priced(equal(1.0, 2), 1000, 1e-17) == INFINITY
    assert priced(equal(1.0, 2), 1000, 1e-17, UnamplifiedRdpAccountant) < INFINITY


# δ = 1e-6: (bins, σ, epochs, ε if removed, ε if added, of Poisson by PLD), by a slower bound
# whose losses were rounded up to multiples of 1e-3: up to 5e-4 an epoch too large.
TABLE = [
    (100, 0.9, 1, 1.2516, 0.5667, 1.3601),
    (100, 0.9, 10, 2.5125, 2.0775, 2.7135),
    (209, 0.456, 1, 6.958, 1.308, 8.429),
    (209, 0.456, 10, 14.482, 5.892, 15.973),
]


@pytest.mark.parametrize(("bins", "sigma", "epochs", "remove", "add", "poisson"), TABLE)
def test_table(bins, sigma, epochs, remove, add, poisson):
    spent = [side.get_epsilon_for_delta(1e-6) for side in sides(equal(sigma, bins), epochs)]
    for epsilon, slower in zip(spent, (remove, add), strict=True):
        assert slower - 7e-4 - 6e-4 * epochs <= epsilon <= slower + 5e-4
    assert max(spent) < poisson
    assert priced(equal(sigma, bins), epochs, 1e-6) == max(spent)


@pytest.mark.parametrize(("bins", "sigma"), [(100, 0.9), (30, 1.5)])
def test_not_below_a_bound_from_below(bins, sigma):
    """The L_i rounded to multiples of a step, down for `remove` and up for `add`, and cut off.

    On a uniform grid with one Fourier transform, whose noise is far below δ.
    """
    step, delta = 2.0**-8, 1e-6
    top = math.exp(0.5 / sigma**2 + 5.6 / sigma)
    size = 1 << math.ceil(math.log2((top + 3 * bins) / step))
    edges = step * np.arange(round(top / step) + 1)
    with np.errstate(divide="ignore"):
        cumulative = special.ndtr(sigma * np.log(edges) + 0.5 / sigma)
    cells = np.diff(cumulative)
    removed, added = sides(equal(sigma, bins))
    for up, side in ((0, removed), (1, added)):
        once = np.zeros(size)
        once[up : up + len(cells)] = cells  # what is above the top is lost: less of either stick
        values = step / bins * np.arange(size)
        masses = np.maximum(np.fft.irfft(np.fft.rfft(once) ** bins, size), 0)

        def stick(epsilon, up=up, values=values, masses=masses):
            alpha = math.exp(epsilon)
            return masses @ np.maximum(1 - alpha * values if up else values - alpha, 0)

        below = optimize.brentq(lambda e: stick(e) - delta, 0, 5)
        assert below <= side.get_epsilon_for_delta(delta) <= below + 0.01


@pytest.mark.parametrize(
    ("bins", "sigma", "epochs", "epsilon"), [(100, 0.9, 1, 0.3), (20, 1.0, 5, 1.0)]
)
def test_simulation(bins, sigma, epochs, epsilon):
    """Within 4.5 standard errors of both hockey sticks: a false alarm once in 70,000 such tests."""
    draws, rng = 200_000, np.random.default_rng(18)
    for removed in (True, False):
        loss = np.zeros(draws)
        for part in np.array_split(np.arange(draws), 20):
            for _ in range(epochs):
                x = rng.standard_normal((len(part), bins))
                x[:, 0] += removed / sigma  # P, by symmetry with the example in the first bin
                loss[part] += np.log(np.mean(np.exp(x / sigma - 0.5 / sigma**2), axis=1))
        loss = loss if removed else -loss
        values = np.maximum(-np.expm1(epsilon - loss), 0)
        delta = sides(equal(sigma, bins), epochs)[not removed].get_delta_for_epsilon(epsilon)
        assert abs(delta - values.mean()) <= 4.5 * values.std() / math.sqrt(draws)


@pytest.mark.parametrize(("sigma", "epochs"), [(0.5, 1), (1.0, 1), (3.0, 10), (20.0, 400)])
def test_one_bin_is_the_gaussian(sigma, epochs):
    analytic = gaussian(sigma / math.sqrt(epochs), 1e-6)
    assert priced(equal(sigma, 1), epochs, 1e-6) == pytest.approx(analytic, rel=1e-4)


@pytest.mark.parametrize("epochs", [1, 5])
def test_one_step_of_two_is_poisson_sampling_at_a_half(epochs):
    """A step of infinite noise releases nothing. Removed and added are what they are there."""
    poisson = dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(1.0))
    composed = zip(sides(event(1.0, INFINITY), epochs), sides(poisson, epochs), strict=True)
    for side, truth in composed:
        truth = truth.get_epsilon_for_delta(1e-6)
        assert truth * 0.9999 <= side.get_epsilon_for_delta(1e-6) <= truth * 1.003


@pytest.mark.parametrize(
    ("bins", "sigma", "epochs"), [(10_000, 5.0, 100), (100_000, 2.0, 200), (1_000, 1e5, 10**10)]
)
def test_many_bins_are_nearly_a_gaussian(bins, sigma, epochs):
    """By the central limit theorem, with the variance of S/t, that of the lognormal over t."""
    mu = math.sqrt(epochs * math.expm1(sigma**-2) / bins)
    accountant = RandomAllocationAccountant(value_discretization_interval=mu / 2000)
    if epochs > 1000:  # so many that dp_accounting is slow: their limit, of ten
        mu, epochs = mu / math.sqrt(epochs / 10), 10
        accountant = RandomAllocationAccountant(value_discretization_interval=mu / 2000)
    accountant.compose(dp_accounting.SelfComposedDpEvent(equal(sigma, bins), epochs))
    truth = gaussian(1 / mu, 1e-3)
    assert accountant.get_epsilon(1e-3) == pytest.approx(truth, rel=0.02)


@pytest.mark.parametrize(
    ("bins", "sigma"), [(2, 0.1), (100, 0.1), (100_000, 0.4), (10_000, 20), (2, 1e9), (10_000, 1e9)]
)
def test_extremes_are_between_nothing_and_no_amplification(bins, sigma):
    spent = priced(equal(sigma, bins), 1, 1e-6)
    assert 0 <= spent <= gaussian(min(sigma, 1e6), 1e-6) + 1e-3


def test_monotone_in_noise_epochs_and_bins():
    for spent in (
        [priced(equal(0.8 * 1.05**k, 50), 2, 1e-6) for k in range(7)],
        [priced(equal(0.9, 50), epochs, 1e-6) for epochs in (9, 4, 3, 2, 1)],
        [priced(equal(1.0, bins), 3, 1e-6) for bins in (1, 2, 3, 5, 21, 40)],
        [priced(event(*(5 * [1.0]), *(5 * [late])), 3, 1e-6) for late in (0.9, 1, 1.3, 9)],
    ):
        assert all(a > b for a, b in zip(spent, spent[1:], strict=False)), spent


@pytest.mark.parametrize(
    ("bins", "sigma", "epochs"), [(100, 0.9, 5), (1000, 5.0, 10), (209, 0.456, 1)]
)
def test_finer_grids_change_little(monkeypatch, bins, sigma, epochs):
    coarse = RandomAllocationAccountant(value_discretization_interval=1e-4)
    whole = dp_accounting.SelfComposedDpEvent(equal(sigma, bins), epochs)
    epsilon = coarse.compose(whole).get_epsilon(1e-6)
    monkeypatch.setattr(random_allocation, "_RESOLUTION", random_allocation._RESOLUTION / 2)
    monkeypatch.setattr(random_allocation, "_COARSEST", random_allocation._COARSEST / 2)
    fine = RandomAllocationAccountant(value_discretization_interval=5e-5)
    finer = fine.compose(whole).get_epsilon(1e-6)
    assert finer <= epsilon <= finer * 1.005


# The parts: splits keep mass and mean, and no hockey stick falls.


def sticks(values, masses, levels):
    return np.maximum(values[:, None] - levels, 0).T @ masses


masses_of = st.lists(
    st.floats(0, 1).map(lambda m: m**8 * 1e-3 if m < 0.5 else m), min_size=1, max_size=30
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(masses_of, st.floats(-3, 3), st.floats(0.001, 0.5), st.floats(0.0005, 1))
def test_a_split_keeps_mass_and_mean_and_raises_hockey_sticks(masses, start, gap, step):
    masses = np.array(masses)
    log_values = start + gap * np.arange(len(masses))
    first, split = random_allocation._split(log_values, masses, step)
    points = np.exp(step * (first + np.arange(len(split))))
    assert np.all(split >= 0)
    assert split.sum() == pytest.approx(masses.sum(), rel=1e-12)
    assert split @ points == pytest.approx(masses @ np.exp(log_values), rel=1e-11)
    levels = np.exp(np.linspace(start - 1, log_values[-1] + 1, 20))
    before = sticks(np.exp(log_values), masses, levels)
    assert np.all(sticks(points, split, levels) >= before - 1e-11 * np.abs(before).max())


def summand(masses, first, fineness, zero, variance):
    masses = np.array(masses) / np.sum(masses) * (1 - zero)
    return random_allocation._Sum(first, masses, fineness, zero, 0.0, 1, variance)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    masses_of.filter(any), masses_of.filter(any), st.integers(-15, 15), st.integers(-15, 15),
    st.integers(1, 5), st.integers(1, 5), st.floats(0, 0.1), st.floats(0.01, 10),
    st.sampled_from((1e-20, 1e-2)),
)  # fmt: skip
def test_a_sum_is_the_sum_of_all_pairs(p, q, i, j, f, g, zero, variance, tail):
    """Whatever the grids: mass and mean are kept, with what was cut off, and no stick falls."""
    x, y = summand(p, i, f, zero, variance), summand(q, j, g, zero / 2, variance)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_allocation, "_TAIL", tail)  # at 1e-2, most of these are cut off
        z = random_allocation._plus(x, y)
    (a, p), (b, q) = (
        (np.append(0, np.exp(each.log_values)), np.append(each.zero, each.masses))
        for each in (x, y)
    )
    values, masses = np.add.outer(a, b).ravel(), np.outer(p, q).ravel()
    points, split = np.append(0, np.exp(z.log_values)), np.append(z.zero, z.masses)
    assert np.all(split >= 0) and z.lost >= 0
    assert split.sum() == pytest.approx(1, rel=1e-12)
    mean = masses @ values
    assert split @ points <= mean * (1 + 1e-12)
    assert split @ points + z.lost >= mean * (1 - 1e-12)
    levels = np.linspace(0, values.max() * 1.1, 40)
    rounding = 1e-13 * levels[-1]
    above = sticks(points, split, levels) + z.lost
    assert np.all(above >= sticks(values, masses, levels) - rounding)
    below = sticks(-points, split, -levels)
    assert np.all(below >= sticks(-values, masses, -levels) - rounding)


@pytest.mark.parametrize("sigma", [0.1, 0.3, 1.0, 4.0, 100.0, 1e5])
def test_one_lognormal(sigma):
    ratio = random_allocation._likelihood_ratio(sigma)
    values = np.exp(ratio.log_values)
    assert ratio.masses.sum() + ratio.zero == pytest.approx(1, abs=1e-12)
    assert ratio.masses @ values == pytest.approx(1, abs=1e-11)
    assert 0 <= ratio.zero <= 1e-19 and 0 <= ratio.lost <= 1e-19
    for x in (-6, -2, -0.5, 0, 0.5, 2, 6):
        level = math.exp(x / sigma)
        stick = ratio.masses @ np.maximum(values - level, 0)
        mirrored = ratio.masses @ np.maximum(level - values, 0)
        assert call(level, sigma) * (1 - 1e-9) - 1e-14 <= stick <= call(level, sigma) * 1.01 + 1e-14
        assert put(level, sigma) * (1 - 1e-9) - 1e-14 <= mirrored


def test_a_negative_mass_is_an_error():
    with pytest.raises(ArithmeticError, match="negative"):
        random_allocation._between(np.array([1.0]), np.array([0.5]))


def test_losses_are_distributions():
    """Total masses are 1, finite or not: nothing is lost of either side."""
    for bins, sigma in ((2, 1.0), (100, 0.4), (1000, 3.0)):
        for side in sides(equal(sigma, bins)):
            assert side._probs.sum() + side._infinity_mass == pytest.approx(1, abs=1e-11)
        losses = random_allocation.epoch_losses(((sigma, bins),), 1e-4)
        assert 0 <= losses._pmf_remove._infinity_mass < 1e-18
        assert 0 <= losses._pmf_add._infinity_mass < 1e-18


# Noise that changes within an epoch.


def test_many_noise_levels_are_rounded_down_by_rank(monkeypatch):
    sigmas = np.geomspace(3, 0.7, 61)
    monkeypatch.setattr(random_allocation, "_BLOCKS", 16)
    rounded = np.repeat(*zip(*random_allocation._rounded(event(*sigmas).noise_multipliers)))  # noqa: B905
    assert np.array_equal(rounded, np.repeat(np.sort(sigmas)[::4], 4)[:61])
    coarse = priced(event(*sigmas), 1, 1e-6)
    monkeypatch.setattr(random_allocation, "_BLOCKS", 64)
    random_allocation.epoch_losses.cache_clear()
    assert priced(event(*sigmas), 1, 1e-6) < coarse < 1.1 * priced(event(*sigmas), 1, 1e-6)
    random_allocation.epoch_losses.cache_clear()


def test_few_noise_levels_are_not_rounded():
    levels = event(*np.linspace(1, 2, 8)).noise_multipliers
    assert random_allocation._rounded(levels) == levels


def test_a_schedule_is_between_its_extremes():
    least, most = (priced(equal(sigma, 40), 2, 1e-6) for sigma in (0.8, 1.6))
    mixed = priced(event(*(20 * [0.8]), *(20 * [1.6])), 2, 1e-6)
    assert most < mixed < least


def test_hundreds_of_noise_levels():
    sigmas = np.geomspace(4, 1, 600)
    spent = priced(event(*sigmas), 5, 1e-6)
    assert priced(equal(4.0, 600), 5, 1e-6) < spent < priced(equal(1.0, 600), 5, 1e-6)


# Events and accountants.


def test_ways_to_give_the_noise():
    one_by_one = event(2.0, 1, 2)
    assert one_by_one == RandomAllocationDpEvent(((2.0, 2), (1.0, 1)), 3)
    assert one_by_one.noise_multipliers == ((1.0, 1), (2.0, 2))
    assert hash(one_by_one) == hash(RandomAllocationDpEvent(one_by_one.noise_multipliers, 3))
    assert one_by_one.least_noise == 1.0


@pytest.mark.parametrize(
    ("noise_multipliers", "bins", "match"),
    [
        ((1.0, 1.0), 3, "2 steps, but bins=3"),
        ((1.0, -1.0), 2, "numbers >= 0"),
        ((1.0, math.nan), 2, "numbers >= 0"),
        (("1",), 1, "numbers >= 0"),
        ((), 0, "bins must be"),
        (((1.0, 1.5),), 1, "a count"),
        ((1.0,), True, "bins must be"),
    ],
)
def test_refused_events(noise_multipliers, bins, match):
    with pytest.raises(ValueError, match=match):
        RandomAllocationDpEvent(noise_multipliers, bins)


@pytest.mark.parametrize("kind", [RandomAllocationAccountant, UnamplifiedRdpAccountant])
def test_replaced_examples_are_refused(kind):
    accountant = kind(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    assert not accountant.supports(equal(1.0, 10))
    with pytest.raises(dp_accounting.UnsupportedEventError, match="not for one that is replaced"):
        accountant.compose(equal(1.0, 10))


def test_no_noise_is_not_private():
    accountant = RandomAllocationAccountant().compose(event(1.0, 0.0))
    assert accountant.get_epsilon(1e-6) == INFINITY and accountant.get_delta(50.0) == 1
    assert priced(event(1.0, 0.0), 1, 1e-6, UnamplifiedRdpAccountant) == INFINITY
    beside = RandomAllocationAccountant().compose(equal(1.0, 10))
    assert beside.get_epsilon(1e-6) < INFINITY
    assert beside.compose(dp_accounting.NonPrivateDpEvent()).get_epsilon(1e-6) == INFINITY


def test_next_to_no_noise():
    """An infinite ε by PLD, in no time; a finite one by RDP."""
    assert priced(equal(0.01, 100), 10, 1e-6) == INFINITY
    assert priced(equal(0.01, 100), 10, 1e-6, UnamplifiedRdpAccountant) < 1e6


def test_nothing_released():
    assert priced(equal(INFINITY, 10), 5, 1e-6) == 0
    assert priced(equal(INFINITY, 1), 5, 1e-6) < 1e-3


def test_rdp_is_without_amplification():
    epoch = event(3.0, 1.0, 2.0)
    for delta in (1e-6, 1e-30):
        gaussian = dp_accounting.GaussianDpEvent(1.0)
        truth = priced(gaussian, 7, delta, dp_accounting.rdp.RdpAccountant)
        assert priced(epoch, 7, delta, UnamplifiedRdpAccountant) == truth
    assert priced(epoch, 7, 1e-6) < priced(epoch, 7, 1e-6, UnamplifiedRdpAccountant)
    chosen, truth = (
        priced(dp_accounting.dp_event.RepeatAndSelectDpEvent(run, 5.0, 1.0), 1, 1e-6, kind)
        for run, kind in (
            (epoch, UnamplifiedRdpAccountant),
            (gaussian, dp_accounting.rdp.RdpAccountant),
        )
    )
    assert chosen == truth


def test_with_other_events_in_one_composition():
    """Whatever the order; a Gaussian beside it adds what it adds to a Gaussian alike."""
    poisson = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0))
    epoch, full = equal(1.0, 20), dp_accounting.GaussianDpEvent(4.0)
    events = [dp_accounting.SelfComposedDpEvent(epoch, 3), poisson, full]
    together, reversed_ = (
        priced(dp_accounting.ComposedDpEvent(parts), 1, 1e-6) for parts in (events, events[::-1])
    )
    assert together == pytest.approx(reversed_, rel=1e-9)
    apart = [priced(part, 1, 1e-6) for part in events]
    assert max(apart) < together < sum(apart)
    one_bin = dp_accounting.ComposedDpEvent([equal(2.0, 1), full])
    truth = gaussian((2.0**-2 + 4.0**-2) ** -0.5, 1e-6)
    assert priced(one_bin, 1, 1e-6) == pytest.approx(truth, rel=1e-4)


def test_composed_at_once_or_one_by_one():
    accountant = RandomAllocationAccountant()
    for _ in range(4):
        accountant.compose(equal(0.9, 30))
    assert accountant.get_epsilon(1e-6) == pytest.approx(priced(equal(0.9, 30), 4, 1e-6), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "kind"), [("pld", LossDistributionAccountant), ("rdp", UnamplifiedRdpAccountant)]
)
def test_accountants_by_name(name, kind):
    accountant = make_accountant(name, POISSON)
    assert isinstance(accountant, kind) and accountant.supports(equal(1.0, 10))


@pytest.mark.parametrize(("bins", "sigma", "epochs"), [(100, 0.9, 10), (10, 2.0, 3), (1, 4.0, 2)])
def test_the_accountant_of_ledgers_agrees(bins, sigma, epochs):
    found = priced(equal(sigma, bins), epochs, 1e-6, lambda: make_accountant("pld", POISSON))
    assert found == pytest.approx(priced(equal(sigma, bins), epochs, 1e-6), rel=1e-3)


def test_little_noise_and_none_in_a_ledger():
    for sigma in (0.0, 0.05):
        assert (
            priced(event(sigma, 1.0), 1, 1e-6, lambda: make_accountant("pld", POISSON)) == math.inf
        )
    endless = event(math.inf, math.inf)
    assert priced(endless, 1, 1e-6, lambda: make_accountant("pld", POISSON)) == 0.0


def test_numbers_of_other_precision_share_no_divergences():
    """0.8125 in 32 bits equals 0.8125, and what is computed from it does not."""

    def sampled(number):
        gaussian = dp_accounting.GaussianDpEvent(number(0.8125))
        return dp_accounting.PoissonSampledDpEvent(number(0.03125), gaussian)

    random_allocation._rdp_of.cache_clear()
    for number in (np.float32, np.float64, float):
        found = UnamplifiedRdpAccountant().compose(sampled(number), 40).get_epsilon(1e-5)
        accountant = dp_accounting.rdp.RdpAccountant().compose(sampled(float), 40)
        assert found == accountant.get_epsilon(1e-5)
