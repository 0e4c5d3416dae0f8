"""Poisson sampling whose large draws are cut: its price, against integrals from the definition."""

import functools
import importlib.metadata
import math

import dp_accounting
import numpy as np
import pytest
from scipy import stats

import dp_keras_opt as dp
from dp_keras_opt import accounting
from dp_keras_opt.accounting import Ledger, Sampling, accountant
from dp_keras_opt.noise import Gaussian, Laplace, Release
from dp_keras_opt.optimizers import moments
from tests.helpers.events import HAS_TRUNCATION, needs_truncation

N, Q, CAP, SIGMA = 20, 0.3, 7, 0.8
GRID, STEP = np.linspace(-14.0, 14.0, 40_001, retstep=True)


def cut(n=N, size=6, cap=CAP, **kwargs):
    return Sampling.truncated_poisson(n, size, cap, **kwargs)


def hockey_stick(p, q, epsilon):
    """max over sets of P(set) - e^ε·Q(set), of two densities on the grid."""
    return np.maximum(p - math.exp(epsilon) * q, 0).sum() * STEP


def normal(mean):
    return stats.norm.pdf(GRID, mean, SIGMA)


@functools.cache
def composed(sampling):
    """The accountant of one step."""
    event = sampling.sampled(dp_accounting.GaussianDpEvent(SIGMA))
    return accountant.make_accountant("pld", sampling).compose(event)


def accounted_delta(sampling, epsilon):
    return composed(sampling).get_delta(epsilon)


@needs_truncation
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0, 2.5])
def test_a_step_is_the_mixture_of_its_definition(epsilon):
    """Over the number r of others that were drawn: of M in M + 1 the unit is one, M/(r+1) often."""
    others = np.arange(N)
    chance = stats.binom.pmf(others, N - 1, Q)
    is_cut = others >= CAP
    kept = np.sum(chance[is_cut] * Q * CAP / (others[is_cut] + 1)) / chance[is_cut].sum()
    plain, zero = (1 - Q) * normal(0) + Q * normal(1), normal(0)
    plus, minus = ((1 - kept) * normal(0) + kept * normal(mean) for mean in (2, -2))
    expected = chance[~is_cut].sum() * max(
        hockey_stick(plain, zero, epsilon), hockey_stick(zero, plain, epsilon)
    ) + chance[is_cut].sum() * hockey_stick(plus, minus, epsilon)
    assert accounted_delta(cut(), epsilon) == pytest.approx(expected, rel=1e-4)


@needs_truncation
@pytest.mark.parametrize("n, size, cap", [(6, 3, 3), (20, 6, 7)])
def test_no_data_set_exceeds_it(n, size, cap):
    """The batch's sum, enumerated over all draws, where the others pull against the unit."""
    q = size / n
    with_unit, without = np.zeros_like(GRID), np.zeros_like(GRID)
    for r in range(n):
        chance = stats.binom.pmf(r, n - 1, q)
        kept = q * min(1, cap / (r + 1))
        for gradient, density in ((1, with_unit), (0, without)):
            density += chance * kept * normal(gradient - min(r, cap - 1))
            density += chance * (1 - kept) * normal(-min(r, cap))
    assert with_unit.sum() * STEP == pytest.approx(1)
    for epsilon in (0.0, 0.5, 1.5):
        bound = accounted_delta(Sampling.truncated_poisson(n, size, cap), epsilon)
        assert hockey_stick(with_unit, without, epsilon) <= bound + 1e-9
        assert hockey_stick(without, with_unit, epsilon) <= bound + 1e-9


@pytest.mark.parametrize("p", [0.02, 0.4, 0.9])
@pytest.mark.parametrize("alpha", [0.5, 1.0, 3.0])
def test_opposite_replacements_are_the_worst(p, alpha):
    """H_α of (1-p)·N(0) + p·N(x) and (1-p)·N(0) + p·N(y) over the plane, for |x|, |y| ≤ 2."""
    axis = np.linspace(-9, 11, 801)
    first, second = np.meshgrid(axis, axis, indexing="ij")
    cell = (axis[1] - axis[0]) ** 2

    def density(x, y):
        return np.exp(-((first - x) ** 2 + (second - y) ** 2) / 2) / (2 * np.pi)

    def divergence(x, y):
        gap = (1 - p) * (1 - alpha) * density(0, 0)
        gap = gap + p * density(*x) - alpha * p * density(*y)
        return np.maximum(gap, 0).sum() * cell

    worst = divergence((2, 0), (-2, 0))
    for length in (1.0, 2.0):
        for angle in np.linspace(0, np.pi, 5)[:-1]:
            y = length * np.cos(angle), length * np.sin(angle)
            assert divergence((2, 0), y) <= worst + 1e-9
            assert divergence(y, (2, 0)) <= worst + 1e-9


@needs_truncation
@pytest.mark.parametrize("cap, expected", [(768, 2.714), (704, 3.191)])
def test_epsilon_is_that_of_the_event(cap, expected, make_ledger):
    ledger = make_ledger(cut(60_000, 600, cap), 1000, 0.9)
    event = dp_accounting.TruncatedSubsampledGaussianDpEvent(60_000, 0.01, cap, 0.9)
    direct = dp_accounting.pld.PLDAccountant().compose(event, 1000).get_epsilon(1e-6)
    assert direct == pytest.approx(expected, abs=1e-3)
    assert ledger.epsilon(1e-6, "pld") == pytest.approx(direct, rel=1e-5)  # on another grid


@needs_truncation
def test_a_cap_that_is_never_reached_costs_nothing(make_ledger):
    for cap in (1000, 500):
        never = make_ledger(cut(1000, 10, cap), 20)
        poisson = make_ledger(Sampling.poisson(1000, 10, "zero_out"), 20)
        assert never.epsilon(1e-6, "pld") == poisson.epsilon(1e-6, "pld")


@needs_truncation
def test_a_dear_cap_warns_with_one_that_is_not(make_optimizer, recwarn):
    def epsilon(sampling):
        return accounting.epsilon(make_optimizer(4.0, 200), sampling, 20, 1e-5, "pld")

    with pytest.warns(UserWarning, match="cuts so many draws") as warned:
        dear = epsilon(cut(2000, 200, 220))
    free = int(str(warned[0].message).split("From max_batch_size=")[1].split(" ")[0])
    uncut = epsilon(Sampling.poisson(2000, 200, "zero_out"))
    recwarn.clear()
    assert dear > 1.01 * uncut > epsilon(cut(2000, 200, free)) / 1.001
    assert not [each for each in recwarn if "cuts" in str(each.message)]
    with pytest.warns(UserWarning, match="cuts so many draws"):
        assert epsilon(cut(2000, 200, free - 1)) > 1.009 * uncut


@needs_truncation
def test_calibration_meets_its_budget(make_optimizer):
    optimizer, sampling = make_optimizer(None, 200), cut(2000, 200, 300)
    found = accounting.calibrate(optimizer, sampling, 20, 0.5, 1e-5, "pld")
    assert accounting.epsilon(optimizer, sampling, 20, 1e-5, "pld") <= 0.5
    less = make_optimizer(found * (1 - 1e-4), 200)
    assert accounting.epsilon(less, sampling, 20, 1e-5, "pld") > 0.5


@needs_truncation
def test_releases_of_a_batch_are_one_and_none_without_noise_is_private(make_ledger, gaussians):
    two = Ledger()
    two.begin(gaussians(1.0, 2.0), cut())
    two.reserve(3)
    (segment,) = two.segments
    event = cut().sampled(dp_accounting.GaussianDpEvent((1 + 1 / 4) ** -0.5))
    assert isinstance(event, dp_accounting.TruncatedSubsampledGaussianDpEvent)
    assert segment.event() == dp_accounting.SelfComposedDpEvent(event, 3)
    assert make_ledger(cut(), 2, 0.0).epsilon(1e-5, "pld") == math.inf


@needs_truncation
@pytest.mark.parametrize("name", ["rdp", "pure"])
def test_other_accountants_are_refused(name, make_ledger):
    with pytest.raises(ValueError, match="only a privacy loss distribution.*accountant='pld'"):
        make_ledger(cut(), 1).epsilon(1e-5, name)


def test_a_version_without_the_event_refuses_all(make_ledger):
    if HAS_TRUNCATION:
        pytest.skip("this version has it")
    version = importlib.metadata.version("dp-accounting")
    with pytest.raises(ValueError, match=f"dp_accounting {version}.*Update dp-accounting"):
        make_ledger(cut(), 1).epsilon(1e-5, "pld")


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: cut(adjacency="add_or_remove_one"), "number of units.*zero_out"),
        (lambda: cut(adjacency="replace_one"), "no bound is established"),
        (lambda: cut(cap=5), "max_batch_size=5 is below the expected batch_size=6"),
        (lambda: cut(cap=None), "max_batch_size must be an integer"),
        (
            lambda: Sampling.from_config(
                cut().get_config() | {"unit": "user", "examples_per_unit": 3}
            ),
            "units that are one example each",
        ),
        (
            lambda: Sampling.from_config(
                Sampling.poisson(20, 6).get_config() | {"max_batch_size": 7}
            ),
            "Only truncated Poisson sampling has max_batch_size",
        ),
    ],
)
def test_refuses(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize("noise", [Laplace(), dp.noise.BandedMatrix(8, 2)])
def test_other_noise_is_refused(noise):
    with pytest.raises(ValueError, match="Gaussian noise that is independent"):
        cut().check_releases([Release(0, "mean", 1.0, noise)])
    cut().check_releases([Release(0, "mean", 1.0, Gaussian())])


def test_as_json_and_in_words():
    assert Sampling.from_config(cut().get_config()) == cut()
    assert "max_batch_size" not in Sampling.poisson(20, 6).get_config()
    assert "more than 7 a uniformly random subset" in cut().describe()


def test_joint_moments_need_no_more_than_the_cap():
    sampling = Sampling.truncated_poisson(20, 2, 3)
    joint = moments.Joint(1.0, max_batch_size=3, adjacency="zero_out")
    joint.check_sampling(sampling)
    with pytest.raises(ValueError, match="max_batch_size of at least 4"):
        joint.check_sampling(Sampling.poisson(20, 2, "zero_out"))
    with pytest.raises(ValueError, match="at least 3.*No batch of this sampling exceeds 3"):
        moments.Joint(1.0, adjacency="zero_out").check_sampling(sampling)
