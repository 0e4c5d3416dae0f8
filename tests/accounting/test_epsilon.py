"""Epsilon against dp_accounting called directly, and against the numbers of spec/core.md."""

import math

import dp_accounting
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

import dp_keras_opt as dp
from dp_keras_opt import accounting
from dp_keras_opt.accounting import Sampling
from dp_keras_opt.accounting.accountant import make_accountant
from dp_keras_opt.accounting.events import segment_event, step_event
from dp_keras_opt.noise import Gaussian, Release, schedules

DELTA = 1e-5
RELATION = dp_accounting.NeighboringRelation
gaussian = dp_accounting.GaussianDpEvent


def rdp(*events, relation=RELATION.ADD_OR_REMOVE_ONE):
    accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=relation)
    for event, count in events:
        accountant.compose(event, count)
    return accountant.get_epsilon(DELTA)


def exact_gaussian(multiplier, delta):
    """Epsilon of one Gaussian mechanism (Balle and Wang 2018, theorem 8)."""

    def gap(epsilon):
        a, b = 1 / (2 * multiplier), epsilon * multiplier
        return norm.cdf(a - b) - math.exp(epsilon) * norm.cdf(-a - b) - delta

    return brentq(gap, 0, 50)


@pytest.mark.parametrize(
    ("n", "delta", "steps", "expected"),
    [(25_000, 1e-5, 39_000, 3.0305), (246_092, 1e-6, 192_250, 0.8936)],
)
def test_settings_of_paper_000(make_optimizer, n, delta, steps, expected):
    sampling = Sampling.poisson(n, 64)
    epsilon = accounting.epsilon(make_optimizer(1.0), sampling, steps, delta, "rdp")
    assert epsilon == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
    ("adjacency", "multiplier", "delta", "expected"),
    [
        ("add_or_remove_one", 1.0, 1e-7, 5.3493),
        ("zero_out", 1.0, 1e-7, 5.3493),
        ("replace_one", 2.0, 1e-5, 4.377),
    ],
)
def test_exact_gaussian(make_optimizer, adjacency, multiplier, delta, expected):
    optimizer = make_optimizer(multiplier, batch_size=100)
    epsilon = accounting.epsilon(optimizer, Sampling.full(100, adjacency), 1, delta, "pld")
    assert epsilon == pytest.approx(expected, abs=1e-3)
    factor = 2 if adjacency == "replace_one" else 1
    assert epsilon == pytest.approx(exact_gaussian(multiplier / factor, delta), abs=1e-3)


@pytest.mark.parametrize("adjacency", ["add_or_remove_one", "zero_out", "replace_one"])
def test_poisson(make_optimizer, adjacency):
    sampling = Sampling.poisson(10_000, 64, adjacency)
    told = 1.1 / 2 if adjacency == "replace_one" else 1.1
    expected = rdp((dp_accounting.PoissonSampledDpEvent(0.0064, gaussian(told)), 500))
    epsilon = accounting.epsilon(make_optimizer(1.1), sampling, 500, DELTA, "rdp")
    assert epsilon == pytest.approx(expected)


def test_heuristic_is_priced_as_poisson(make_optimizer):
    epsilons = [
        accounting.epsilon(make_optimizer(1.1), make(10_000, 64), 500, DELTA)
        for make in (Sampling.poisson, Sampling.shuffled_accounted_as_poisson)
    ]
    assert epsilons[0] == epsilons[1]


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_without_replacement_counts_two_clip_norms_once(make_optimizer, adjacency):
    sampling = Sampling.without_replacement(10_000, 64, adjacency)
    event = dp_accounting.SampledWithoutReplacementDpEvent(10_000, 64, gaussian(1.5))
    expected = rdp((event, 50), relation=RELATION.REPLACE_ONE)
    assert accounting.epsilon(make_optimizer(3.0), sampling, 50, DELTA) == pytest.approx(expected)


def test_without_replacement_of_everything_is_the_plain_gaussian(make_optimizer):
    # Rényi divergence of order a of N(0, σ²C²) shifted by 2C: a (2/σ)² / 2, then the conversion.
    optimizer = make_optimizer(3.0, batch_size=100)
    epsilon = accounting.epsilon(optimizer, Sampling.without_replacement(100, 100), 5, DELTA, "rdp")
    orders = np.array([1 + x / 10 for x in range(1, 100)] + list(range(11, 64)))
    spent = 5 * orders * (2 / 3.0) ** 2 / 2
    converted = spent + np.log1p(-1 / orders) - np.log(DELTA * orders) / (orders - 1)
    assert epsilon == pytest.approx(converted.min())
    full = Sampling.full(100, "replace_one")
    assert epsilon == accounting.epsilon(optimizer, full, 5, DELTA, "rdp")


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.parametrize(("steps", "epochs"), [(1, 1), (16, 1), (17, 2), (160, 10)])
def test_shuffled_is_one_gaussian_an_epoch(make_optimizer, adjacency, steps, epochs):
    sampling = Sampling.shuffled(1000, 64, adjacency)  # 16 steps an epoch
    told = 8.0 / 2 if adjacency == "replace_one" else 8.0
    epsilon = accounting.epsilon(make_optimizer(8.0), sampling, steps, DELTA, "rdp")
    assert epsilon == pytest.approx(rdp((gaussian(told), epochs)))


def test_shuffled_epoch_counts_its_least_noise(make_optimizer):
    sampling = Sampling.shuffled(128, 64, "zero_out")  # 2 steps an epoch
    optimizer = make_optimizer(8.0, noise_schedule=schedules.Fixed([2, 1, 3, 4, 0.5]))
    expected = rdp((gaussian(8.0), 1), (gaussian(24.0), 1), (gaussian(4.0), 1))
    epsilon = accounting.epsilon(optimizer, sampling, 5, DELTA, "rdp")
    assert epsilon == pytest.approx(expected)


def test_two_releases_of_one_batch_are_one_gaussian(make_optimizer, gaussians):
    event = step_event(gaussians(1.0, 2.0, 3.0), "replace_one", alpha=2.0)
    assert event.noise_multiplier == pytest.approx((1 / 1 + 1 / 4 + 1 / 9) ** -0.5)
    optimizer = make_optimizer(1.0, ratios=(math.sqrt(2), math.sqrt(2)))
    sampling = Sampling.poisson(10_000, 64)
    assert accounting.epsilon(optimizer, sampling, 100, DELTA) == pytest.approx(
        accounting.epsilon(make_optimizer(1.0), sampling, 100, DELTA)
    )


def test_unequal_noise_is_composed_step_by_step(make_optimizer):
    alphas = [1.0, 1.5, 1.0, 2.0, 1.5]
    optimizer = make_optimizer(0.8, noise_schedule=schedules.Fixed(alphas))
    expected = rdp(
        *((dp_accounting.PoissonSampledDpEvent(0.01, gaussian(0.8 * a)), 1) for a in alphas)
    )
    epsilon = accounting.epsilon(optimizer, Sampling.poisson(6400, 64), 5, DELTA, "rdp")
    assert epsilon == pytest.approx(expected)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=60), st.integers(2, 5))
def test_rounding_of_many_factors_only_over_counts(alphas, max_distinct):
    sampling = Sampling.full(100)
    releases = (Release(0, "mean", 3.0, Gaussian()),)

    def epsilon(most, length):
        event = segment_event(releases, sampling, alphas[:length], max_distinct=most)
        parts = getattr(event, "events", [event])
        assert len(parts) <= most
        assert sum(part.count for part in parts) == length
        return rdp((event, 1))

    rounded = [epsilon(max_distinct, length) for length in range(1, len(alphas) + 1)]
    assert rounded[-1] >= epsilon(400, len(alphas)) - 1e-9
    assert all(a <= b + 1e-9 for a, b in zip(rounded, rounded[1:], strict=False))


def test_rounding_is_tight(gaussians):
    alphas = np.geomspace(1, 10, 2000)
    sampling = Sampling.full(100)
    rounded = rdp((segment_event(gaussians(50.0), sampling, alphas), 1))
    exact = rdp((gaussian(50.0 * (alphas**-2.0).sum() ** -0.5), 1))
    assert exact <= rounded <= exact * 1.02


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 5000), st.floats(0.6, 5), st.integers(200, 50_000), st.floats(1.01, 3))
def test_monotone_in_steps_noise_and_examples(steps, sigma, n, factor):
    def epsilon(steps, sigma, n):
        releases = (Release(0, "mean", sigma, Gaussian()),)
        sampling = Sampling.poisson(n, 64)
        event = segment_event(releases, sampling, 1.0, steps)
        return make_accountant("rdp", sampling).compose(event).get_epsilon(1e-6)

    spent = epsilon(steps, sigma, n)
    assert epsilon(math.ceil(steps * factor), sigma, n) >= spent
    assert epsilon(steps, sigma * factor, n) <= spent * (1 + 1e-9)
    assert epsilon(steps, sigma, math.ceil(n * factor)) <= spent * (1 + 1e-9)


def test_replaced_poisson_example_is_over_counted():
    # The true worst pair of a replaced example, order a = 2: mixtures with means C and -C.
    q, sigma, x = 0.1, 1.5, np.linspace(-40, 40, 80_001)
    base = (1 - q) * norm.pdf(x, 0, sigma)
    pair = [base + q * norm.pdf(x, mean, sigma) for mean in (1, -1)]
    true = math.log(np.sum(pair[0] ** 2 / pair[1]) * (x[1] - x[0]))
    told = math.log1p(q**2 * math.expm1((2 / sigma) ** 2))  # Poisson, multiplier σ/2, order 2
    assert true < told


def test_pld_is_no_looser_than_rdp(make_optimizer):
    sampling = Sampling.poisson(2000, 64)
    loose, tight = (
        accounting.epsilon(make_optimizer(1.0), sampling, 50, DELTA, name)
        for name in ("rdp", "pld")
    )
    assert 0.5 * loose < tight < loose


@pytest.mark.parametrize("sampling", [Sampling.poisson(1000, 64), Sampling.shuffled(1000, 64)])
@pytest.mark.parametrize("name", ["rdp", "pld"])
def test_nothing_costs_nothing_and_no_noise_costs_everything(make_optimizer, sampling, name):
    assert accounting.epsilon(make_optimizer(1.0), sampling, 0, DELTA, name) == 0
    assert accounting.epsilon(make_optimizer(0.0), sampling, 1, DELTA, name) == math.inf
    assert accounting.epsilon(make_optimizer(0.0), sampling, 0, DELTA, name) == 0


def test_no_noise_without_replacement(make_optimizer):
    sampling = Sampling.without_replacement(1000, 64)
    assert accounting.epsilon(make_optimizer(0.0), sampling, 1, DELTA) == math.inf


@pytest.mark.parametrize("delta", [0, 1, 1.5, -1e-5, float("nan"), True, "1e-5", None])
def test_refuses_delta(make_optimizer, delta):
    with pytest.raises(ValueError, match=r"delta must be a number in \(0, 1\).*received"):
        accounting.epsilon(make_optimizer(1.0), Sampling.poisson(1000, 64), 1, delta)


def test_warns_of_a_large_delta(make_optimizer):
    with pytest.warns(UserWarning, match="not below 1/num_examples"):
        accounting.epsilon(make_optimizer(1.0), Sampling.poisson(1000, 64), 1, 1e-3)


@pytest.mark.parametrize("name", ["gdp", None, ["rdp"]])
def test_refuses_accountant(make_optimizer, name):
    with pytest.raises(ValueError, match="accountant must be one of"):
        accounting.epsilon(make_optimizer(1.0), Sampling.poisson(1000, 64), 1, DELTA, name)


def test_pld_refuses_subsets_of_fixed_size(make_optimizer):
    sampling = Sampling.without_replacement(1000, 64)
    with pytest.raises(ValueError, match="Use accountant='rdp', or Poisson"):
        accounting.epsilon(make_optimizer(1.0), sampling, 1, DELTA, "pld")


def test_refuses_noise_that_the_accountant_does_not_know(make_optimizer, monkeypatch):
    monkeypatch.setattr(Gaussian, "event", lambda self, m: dp_accounting.LaplaceDpEvent(m))
    with pytest.raises(ValueError, match="'rdp' cannot price this noise with 'poisson'"):
        accounting.epsilon(make_optimizer(1.0), Sampling.poisson(1000, 64), 1, DELTA, "rdp")


def test_refuses_an_optimizer_of_another_batch_size(make_optimizer):
    with pytest.raises(ValueError, match="batch_size=32.*batch_size=64"):
        accounting.epsilon(make_optimizer(1.0, 32), Sampling.poisson(1000, 64), 1, DELTA)
    with pytest.raises(ValueError, match="sampling must be a"):
        accounting.epsilon(make_optimizer(1.0), "poisson", 1, DELTA)


def test_refuses_what_releases_nothing_or_nonsense(gaussians):
    with pytest.raises(ValueError, match="releases is empty"):
        step_event((), "zero_out")
    for multiplier in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="must be numbers >= 0"):
            step_event(gaussians(multiplier), "zero_out")


def test_batches_and_epochs(make_optimizer):
    """As `calibrate` takes them."""
    rows = np.zeros((60, 2), "float32")
    batches = dp.data.poisson_batches((rows, rows), 10)
    optimizer = make_optimizer(1.0, batch_size=10)
    expected = accounting.epsilon(optimizer, batches.sampling, 12, DELTA)
    for either in (batches, batches.sampling):
        assert accounting.epsilon(optimizer, either, epochs=2, delta=DELTA) == expected
        text = accounting.statement(optimizer, either, epochs=2, delta=DELTA)
        assert text == accounting.statement(optimizer, batches.sampling, 12, DELTA)
    for function in (accounting.epsilon, accounting.statement):
        with pytest.raises(ValueError, match="Give steps or epochs, and not both"):
            function(optimizer, batches, 12, DELTA, epochs=2)
        with pytest.raises(ValueError, match="Give steps or epochs, and not both"):
            function(optimizer, batches, delta=DELTA)
        with pytest.raises(ValueError, match="delta must be a number"):
            function(optimizer, batches, 12)
        with pytest.raises(ValueError, match="sampling must be"):
            function(optimizer, 100, epochs=2, delta=DELTA)


def test_refuses_steps(make_optimizer):
    optimizer = make_optimizer(1.0, noise_schedule=schedules.Fixed([1.0, 2.0]))
    for steps, match in ((-1, "steps must be"), (1.0, "steps must be"), (3, "noise schedule")):
        with pytest.raises(ValueError, match=match):
            accounting.epsilon(optimizer, Sampling.poisson(1000, 64), steps, DELTA)


def test_the_divergences_of_a_step_are_computed_once(monkeypatch, make_optimizer):
    """They take up to 0.2 s, and a budget's search or a report after each batch asks for them."""
    optimizer = make_optimizer(0.8125, batch_size=300)
    sampling = Sampling.poisson(1000, 300)
    event = dp_accounting.PoissonSampledDpEvent(0.3, dp_accounting.GaussianDpEvent(0.8125))
    theirs = [
        dp_accounting.rdp.RdpAccountant().compose(event, steps).get_epsilon(1e-5)
        for steps in (1, 7, 30)
    ]
    computed = []
    one = dp_accounting.rdp.rdp_privacy_accountant._compute_rdp_poisson_subsampled_gaussian
    monkeypatch.setattr(
        dp_accounting.rdp.rdp_privacy_accountant,
        "_compute_rdp_poisson_subsampled_gaussian",
        lambda *args, **kwargs: computed.append(1) or one(*args, **kwargs),
    )
    ours = [accounting.epsilon(optimizer, sampling, steps, 1e-5, "rdp") for steps in (1, 7, 30)]
    assert ours == theirs and len(computed) == 1
