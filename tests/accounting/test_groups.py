"""What is said of several units together, against integrals over the group's draws."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from dp_keras_opt.accounting import Ledger, RandomRepetitions, Sampling
from dp_keras_opt.accounting.groups import group_epsilon, group_privacy
from dp_keras_opt.noise import BandedMatrix, Laplace, Release, schedules
from tests.helpers.events import needs_mixtures

DELTA = 1e-5
POISSON = Sampling.poisson(20, 6)


def hockey_sticks(p, q, epsilon, cell):
    """The two divergences of densities on a grid."""
    factor = math.exp(epsilon)
    return [
        np.maximum(first - factor * second, 0).sum() * cell for first, second in [(p, q), (q, p)]
    ]


@needs_mixtures
@pytest.mark.parametrize("size, adjacency", [(2, "add_or_remove_one"), (5, "zero_out")])
def test_a_poisson_step_is_a_mixture_over_the_number_drawn(size, adjacency, make_ledger):
    """δ of the ε that is stated, by integration of the definition."""
    sigma = 3.0
    ledger = make_ledger(Sampling.poisson(20, 6, adjacency), 1, sigma)
    epsilon, is_joint = group_epsilon(ledger.segments, size, DELTA)
    grid, step = np.linspace(-40, 50, 90_001, retstep=True)
    with_group = sum(
        math.comb(size, j) * 0.3**j * 0.7 ** (size - j) * stats.norm.pdf(grid, j, sigma)
        for j in range(size + 1)
    )
    found = max(hockey_sticks(with_group, stats.norm.pdf(grid, 0, sigma), epsilon, step))
    assert is_joint and found <= DELTA * (1 + 1e-6)
    assert found == pytest.approx(DELTA, rel=0.02)


@needs_mixtures
def test_two_steps_of_a_schedule_are_composed(gaussians):
    ledger = Ledger()
    ledger.begin(gaussians(1.0), POISSON, schedule=schedules.Fixed([2.0, 3.0]))
    ledger.reserve(2)
    epsilon, _ = group_epsilon(ledger.segments, 2, 1e-3)
    grid, step = np.linspace(-20, 24, 1101, retstep=True)
    chances = [0.49, 0.42, 0.09]
    joint = [
        [
            sum(c * stats.norm.pdf(grid, j, s) for j, c in enumerate(chances)),
            stats.norm.pdf(grid, 0, s),
        ]
        for s in (2.0, 3.0)
    ]
    both = [np.outer(joint[0][side], joint[1][side]) for side in (0, 1)]
    assert max(hockey_sticks(*both, epsilon, step**2)) == pytest.approx(1e-3, rel=0.02)


@needs_mixtures
@pytest.mark.parametrize("angle", [0.0, 0.7, 2.0, math.pi])
def test_no_directions_of_the_gradients_exceed_it(angle, make_ledger):
    sigma, q, delta = 1.5, 0.3, 1e-3
    epsilon, _ = group_epsilon(make_ledger(POISSON, 1, sigma).segments, 2, delta)
    axis, step = np.linspace(-12, 14, 521, retstep=True)
    gradients = np.array([[1.0, 0.0], [math.cos(angle), math.sin(angle)]])

    def density(mean):
        return np.outer(*(stats.norm.pdf(axis, each, sigma) for each in mean))

    mixture = sum(
        np.prod([q if each else 1 - q for each in drawn]) * density(np.array(drawn) @ gradients)
        for drawn in itertools.product([0, 1], repeat=2)
    )
    found = max(hockey_sticks(mixture, density([0.0, 0.0]), epsilon, step**2))
    assert found <= delta * (1 + 1e-3)  # the grid errs by less
    if angle == 0:
        assert found == pytest.approx(delta, rel=0.02)


@needs_mixtures
@pytest.mark.parametrize("size, expected", [(2, 6.01), (3, 9.63), (5, 17.9), (10, 44.1)])
def test_movielens(size, expected, make_ledger):
    """The run of the README."""
    ledger = make_ledger(Sampling.poisson(80_000, 1024), 1580, 1.124)
    epsilon, _ = group_epsilon(ledger.segments, size, 1e-6)
    assert epsilon == pytest.approx(expected, rel=1.5e-3)


@pytest.mark.parametrize(
    "sampling",
    [Sampling.full(50), Sampling.full(50, "replace_one"), Sampling.shuffled(50, 10, "zero_out"),
     Sampling.fixed_order(50, 10)],
)  # fmt: skip
def test_without_amplification_k_units_are_one_of_k_times_the_norm(sampling, make_ledger):
    epsilon, is_joint = group_epsilon(make_ledger(sampling, 10, 12.0).segments, 4, DELTA)
    assert epsilon == pytest.approx(make_ledger(sampling, 10, 3.0).epsilon(DELTA, "pld"), rel=1e-3)
    assert not is_joint


def test_correlated_noise_moves_by_k_times_its_sensitivity():
    found = []
    for multiplier in (12.0, 3.0):
        ledger = Ledger()
        release = Release(0, "mean", multiplier, BandedMatrix(10, 2))
        ledger.begin((release,), Sampling.fixed_order(50, 10))
        ledger.reserve(10)
        found.append(ledger)
    epsilon, _ = group_epsilon(found[0].segments, 4, DELTA)
    assert epsilon == pytest.approx(found[1].epsilon(DELTA, "pld"), rel=1e-3)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling.without_replacement(1000, 10),
        Sampling.poisson(1000, 10, "replace_one"),
        Sampling.cyclic_poisson(1000, 10, 3),
        Sampling.shuffled_accounted_as_poisson(1000, 10),
    ],
)
def test_elsewhere_units_are_taken_one_by_one_at_the_same_delta(sampling, make_ledger):
    """The best of the deltas of one unit that keep that of the group."""
    ledger = make_ledger(sampling, 30, 4.0)
    epsilon, is_joint = group_epsilon(ledger.segments, 3, DELTA)
    assert not is_joint
    best = math.inf
    for log_delta in np.linspace(math.log(DELTA) - 6, math.log(DELTA), 16):
        found = group_privacy(ledger.epsilon(math.exp(log_delta)), math.exp(log_delta), 3)
        if found[1] <= DELTA:
            best = min(best, found[0])
    assert best * 0.96 <= epsilon <= best * 1.002


def test_a_private_selection_is_taken_one_by_one(gaussians):
    ledger = Ledger()
    ledger.begin(gaussians(3.0), POISSON, selection=RandomRepetitions(2.0))
    ledger.reserve(2)
    assert not group_epsilon(ledger.segments, 2, DELTA).is_joint


def test_laplace_noise_has_k_times_epsilon_at_any_delta():
    ledger = Ledger()
    ledger.begin((Release(0, "mean", 4.0, Laplace()),), Sampling.full(9))
    ledger.reserve(3)
    for delta in (0.0, 1e-6):
        assert group_epsilon(ledger.segments, 5, delta) == (pytest.approx(5 * 3 / 4.0), False)


@pytest.mark.parametrize("sampling", [POISSON, Sampling.cyclic_poisson(20, 5, 2)])
def test_without_noise_there_is_no_guarantee(sampling, make_ledger):
    assert group_epsilon(make_ledger(sampling, 1, 0.0).segments, 2, DELTA).epsilon == math.inf


def test_a_large_group_is_priced_in_wider_cells(make_ledger):
    """Which can only raise ε. For one Gaussian far apart it is μ²/2 + μ·z, z the quantile of δ."""
    ledger = make_ledger(Sampling.full(5000), 1, 1.0)
    epsilon, _ = group_epsilon(ledger.segments, 1000, DELTA)
    exact = 1000**2 / 2 + 1000 * stats.norm.isf(DELTA)
    assert exact * (1 - 1e-6) <= epsilon <= exact * 1.001
