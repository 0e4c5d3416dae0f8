"""Budgets that hold for choices which looked at results: sums, limits, and what is refused."""

import dataclasses
import json
import math

import dp_accounting
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import dp_keras_opt as dp
from dp_keras_opt import accounting
from dp_keras_opt.accounting import (
    Budget,
    GaussianFilter,
    Ledger,
    Plan,
    RandomRepetitions,
    RenyiFilter,
    Sampling,
)
from dp_keras_opt.accounting.privacy_filters import FilterBudget, kept_filter
from dp_keras_opt.accounting.segment import Segment
from dp_keras_opt.noise import BandedMatrix, Gaussian, Laplace, Release, TreeAggregation, schedules

DELTA = 1e-5
N, B = 1000, 50
POISSON, FULL = Sampling.poisson(N, B), Sampling.full(N)
RENYI, GAUSSIAN = RenyiFilter(16), GaussianFilter()
OF_RENYI = Budget(2.0, DELTA, RENYI).filter
OF_GAUSSIAN = Budget(2.0, DELTA, GAUSSIAN).filter


def by_conversion(divergence, order, delta=DELTA):
    """ε of a Rényi divergence: Canonne, Kamath and Steinke 2020, proposition 12."""
    logs = np.log(delta) + np.log(order)
    return divergence + np.log((order - 1) / order) - logs / (order - 1)


def gaussian_delta(epsilon, mu):
    """Of one Gaussian release: Balle and Wang 2018, theorem 8."""
    phi = stats.norm.cdf
    return phi(mu / 2 - epsilon / mu) - np.exp(epsilon) * phi(-mu / 2 - epsilon / mu)


@pytest.fixture
def train(gaussians):
    """Makes a ledger, or goes on with one, by parts (noise multiplier, steps) or (…, sampling)."""

    def make(*parts, ledger=None, filter=None, sampling=POISSON):
        ledger = Ledger() if ledger is None else ledger
        for sigma, steps, *other in parts:
            ledger.begin(gaussians(sigma), *(other or [sampling]), filter=filter)
            ledger.reserve(steps)
            ledger.settle(steps, steps)
        return ledger

    return make


# The sums.


@pytest.mark.parametrize("order", [1.5, 16, 64.0])
@pytest.mark.parametrize("adjacency", ["add_or_remove_one", "replace_one"])
def test_gaussians_without_sampling_at_one_order(train, order, adjacency):
    full = Sampling.full(N, adjacency)
    ledger = train((1.5, 3), (4.0, 7), sampling=full)
    sensitivity = 2 if adjacency == "replace_one" else 1
    divergence = order * sensitivity**2 / 2 * (3 / 1.5**2 + 7 / 4.0**2)
    expected = by_conversion(divergence, order)
    assert ledger.epsilon(DELTA, RenyiFilter(order)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("order", [2.5, 16])
def test_poisson_steps_at_one_order(train, order):
    ledger = train((1.0, 40), (2.0, 30, Sampling.poisson(N, 100)))
    accountant = dp_accounting.rdp.RdpAccountant(orders=[order])
    for probability, sigma, steps in ((0.05, 1.0, 40), (0.1, 2.0, 30)):
        gaussian = dp_accounting.GaussianDpEvent(sigma)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(probability, gaussian), steps)
    expected = accountant.get_epsilon(DELTA)
    assert ledger.epsilon(DELTA, RenyiFilter(order)) == pytest.approx(expected, rel=1e-12)


def test_what_is_not_proved_is_not_amplified(train):
    """A replaced example among Poisson batches, and balls in bins."""
    gaussian = train((1.0, 40), sampling=Sampling.full(N, "replace_one"))
    poisson = train((1.0, 40), sampling=Sampling.poisson(N, B, "replace_one"))
    assert poisson.epsilon(DELTA, RENYI) == gaussian.epsilon(DELTA, RENYI)
    assert poisson.epsilon(DELTA, "rdp") < poisson.epsilon(DELTA, RENYI) / 2
    bins = train((2.0, 21), sampling=Sampling.balls_in_bins(N, B))  # two epochs were begun
    expected = by_conversion(16 / 2 * 2 / 2.0**2, 16)
    assert bins.epsilon(DELTA, RENYI) == pytest.approx(expected, rel=1e-12)


def test_subsets_of_fixed_size_at_one_order(train):
    ledger = train((3.0, 20), sampling=Sampling.without_replacement(N, B))
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    event = dp_accounting.SampledWithoutReplacementDpEvent(N, B, dp_accounting.GaussianDpEvent(1.5))
    accountant = dp_accounting.rdp.RdpAccountant([16], relation).compose(event, 20)
    expected = accountant.get_epsilon(DELTA)
    assert ledger.epsilon(DELTA, RENYI) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("sampling", [FULL, Sampling.shuffled(N, B, "zero_out")])
def test_the_gaussian_sum_is_exact(train, sampling):
    parts = (3.0, 40), (8.0, 21)
    passes = (40, 21) if sampling is FULL else (2, 2)  # of 20 steps; begun ones count
    mu = math.sqrt(passes[0] / 3.0**2 + passes[1] / 8.0**2)
    epsilon = train(*parts, sampling=sampling).epsilon(DELTA, GAUSSIAN)
    assert gaussian_delta(epsilon, mu) == pytest.approx(DELTA, rel=1e-6)


def test_a_schedule_and_several_releases_count(gaussians):
    ledger = Ledger()
    ledger.begin(gaussians(4.0, 12.0), FULL, schedules.Fixed([1.0, 0.5, 2.0]))
    ledger.reserve(3)
    mu = math.sqrt((1 / 4.0**2 + 1 / 12.0**2) * (1 + 4 + 1 / 4))
    assert gaussian_delta(ledger.epsilon(DELTA, GAUSSIAN), mu) == pytest.approx(DELTA, rel=1e-6)
    expected = by_conversion(16 * mu**2 / 2, 16)
    assert ledger.epsilon(DELTA, RENYI) == pytest.approx(expected, rel=1e-12)


def test_nothing_and_no_noise(train):
    for each in (RENYI, GAUSSIAN):
        assert Ledger().epsilon(DELTA, each) == 0.0
        assert train((0.0, 1), sampling=FULL).epsilon(DELTA, each) == math.inf


@pytest.mark.parametrize("mechanism", [BandedMatrix(24, 4), TreeAggregation(24)])
def test_a_run_of_correlated_noise_costs_at_most_its_price_at_every_step(mechanism):
    """Whatever an example's gradients are, in the steps that it is in: Σ ‖(CΔ)_t‖² in n steps."""
    sampling = Sampling.fixed_order(48, 6, adjacency="zero_out")  # every 8th step
    rng = np.random.default_rng(0)
    noise_of_steps = mechanism.inverse(24)  # C⁻¹
    matrix = np.linalg.inv(noise_of_steps)
    prices = []
    for steps in range(1, 25):
        releases = (Release(0, "mean", 1.0, mechanism),)
        segment = Segment("run", releases, schedules.Constant(), sampling, steps=steps)
        budget = segment.event()
        prices.append(budget.noise_multiplier**-2)
    worst = np.zeros(24)
    for first in range(8):
        for draw in range(40):
            moved = rng.normal(size=(24, 2)) if draw else np.ones((24, 2))
            moved /= np.linalg.norm(moved, axis=1, keepdims=True)
            moved[[step for step in range(24) if step % 8 != first]] = 0.0
            spent = np.cumsum(np.sum((matrix @ moved) ** 2, axis=1))
            worst = np.maximum(worst, spent)
    assert np.all(worst <= np.array(prices) * (1 + 1e-9))
    assert np.all(np.diff(prices) >= -1e-12)


# The limits.


@pytest.mark.parametrize("each", [RENYI, RenyiFilter(3.5), GAUSSIAN], ids=str)
@pytest.mark.parametrize(("epsilon", "delta"), [(6.0, 1e-5), (8.0, 1e-2), (20.0, 1e-9)])
def test_the_limit_is_the_largest_sum(train, each, epsilon, delta):
    sigma = FilterBudget(each, epsilon, delta).noise_multiplier
    assert train((sigma, 1), sampling=FULL).epsilon(delta, each) == pytest.approx(epsilon, rel=1e-9)
    assert train((sigma * 0.999, 1), sampling=FULL).epsilon(delta, each) > epsilon


def test_another_delta_is_that_of_the_limit():
    divergence = 2.0 - by_conversion(0.0, 16)
    assert OF_RENYI.epsilon_at(DELTA) == 2.0
    assert OF_RENYI.epsilon_at(1e-3) == pytest.approx(by_conversion(divergence, 16, 1e-3))
    mu = 1 / OF_GAUSSIAN.noise_multiplier
    assert gaussian_delta(2.0, mu) == pytest.approx(DELTA, rel=1e-9)
    assert gaussian_delta(OF_GAUSSIAN.epsilon_at(1e-9), mu) == pytest.approx(1e-9, rel=1e-6)


@pytest.mark.parametrize("each", [RENYI, GAUSSIAN])
def test_a_budget_is_used_up_and_never_exceeded(gaussians, train, each):
    budget, ledger = Budget(2.0, DELTA, each), Ledger()
    ledger.begin(gaussians(20.0), FULL, filter=budget.filter)
    limit = budget.limit(ledger)
    assert train((20.0, limit), sampling=FULL).epsilon(DELTA, each) <= 2.0
    assert train((20.0, limit + 1), sampling=FULL).epsilon(DELTA, each) > 2.0


def test_a_filter_has_no_tolerance(gaussians, train):
    """Other budgets allow one part in a million for another machine; a limit is the guarantee."""
    spent = train((20.0, 50), sampling=FULL).epsilon(DELTA, GAUSSIAN)
    for epsilon, steps in ((spent, 50), (spent * (1 - 1e-7), 49)):
        ledger, budget = Ledger(), Budget(epsilon, DELTA, GAUSSIAN)
        ledger.begin(gaussians(20.0), FULL, filter=budget.filter)
        assert budget.limit(ledger) == steps


_CHOICES = st.lists(
    st.tuples(
        st.floats(0.6, 8.0),  # σ
        st.sampled_from([10, 50, 200]),  # batch size
        st.integers(1, 400),  # steps that are wanted
        st.floats(0.0, 1.0),  # of which this share runs
    ),
    min_size=1,
    max_size=6,
)


@given(choices=_CHOICES, order=st.sampled_from([2.5, 8, 32]))
@settings(max_examples=40, deadline=None)
def test_no_choice_exceeds_the_limit(choices, order):
    budget = Budget(7.0, DELTA, RenyiFilter(order))
    _choose(budget, choices, lambda size: Sampling.poisson(N, size))


@given(choices=_CHOICES)
@settings(max_examples=40, deadline=None)
def test_no_choice_exceeds_the_limit_of_gaussians(choices):
    _choose(Budget(7.0, DELTA, GAUSSIAN), choices, lambda size: Sampling.shuffled(N, size))


def _choose(budget, choices, sampling_of):
    """Trains as was chosen, as far as the budget goes, and adds it up by dp_accounting."""
    ledger = Ledger()
    accountant = dp_accounting.rdp.RdpAccountant([getattr(budget.accountant, "order", 2.0)])
    for sigma, size, steps, share in choices:
        sampling = sampling_of(size)
        ledger.begin((Release(0, "mean", sigma, Gaussian()),), sampling, filter=budget.filter)
        ran = math.ceil(share * min(steps, budget.limit(ledger)))
        if not ran:
            continue
        ledger.reserve(ran)
        gaussian = dp_accounting.GaussianDpEvent(sigma)
        if sampling.is_poisson:
            accountant.compose(dp_accounting.PoissonSampledDpEvent(size / N, gaussian), ran)
        else:  # replace_one
            gaussian = dp_accounting.GaussianDpEvent(sigma / 2)
            accountant.compose(gaussian, math.ceil(ran / sampling.period))
    if budget.accountant is not GAUSSIAN:
        assert accountant.get_epsilon(DELTA) <= 7.0 * (1 + 1e-12)
    elif ledger.steps:  # at order 2 the divergence of a Gaussian is μ²
        assert gaussian_delta(7.0, math.sqrt(accountant._rdp[0])) <= DELTA * (1 + 1e-9)
    if ledger.steps:
        assert kept_filter([each for each in ledger.segments if each.steps]) == budget.filter
        assert ledger.epsilon_as_planned(DELTA) == 7.0 >= ledger.epsilon(DELTA)


# Why: what other accountants would say of choices.


def _sampled_delta(epsilon, probability, sigma):
    """δ at every real ε of a Gaussian that is sampled, where the example is removed."""
    epsilon = np.asarray(epsilon)
    found = -np.expm1(epsilon)
    high = epsilon > np.log1p(-probability)
    ratio = np.exp(epsilon[high]) - 1 + probability
    threshold = sigma**2 * np.log(ratio / probability) + 0.5
    tail = stats.norm.sf
    without = tail(threshold / sigma)
    with_it = (1 - probability) * without + probability * tail((threshold - 1) / sigma)
    found[high] = with_it - np.exp(epsilon[high]) * without
    return found


def _after_a_gaussian(mu, epsilon, *deltas):
    """δ of a Gaussian release and one of what may follow: of each, and of the worst choice."""
    z = np.linspace(-12, 12, 100_001)
    weights = stats.norm.pdf(z) * (z[1] - z[0])
    losses = mu**2 / 2 + mu * z
    found = [delta(epsilon - losses) for delta in deltas]
    return [float(weights @ each) for each in found], float(weights @ np.max(found, axis=0))


def test_loss_distributions_are_no_filter(train):
    """Each continuation is within the budget by PLD; whoever chooses by the first result is not."""
    epsilon, sigma, sampled, mu = 1.0, 1 / 0.3, (0.01, 0.3), 0.36181
    parts = {
        "sampled": (0.3, 1, Sampling.poisson(100, 1)),
        "Gaussian": (1 / mu, 1, Sampling.full(100)),
    }
    each, chosen = _after_a_gaussian(
        0.3, epsilon, lambda e: _sampled_delta(e, *sampled), lambda e: gaussian_delta(e, mu)
    )
    assert each == pytest.approx([0.0045417, 0.0045417], rel=1e-3)
    assert chosen == pytest.approx(0.0071973, rel=1e-3)
    for part in parts.values():
        ledger = train((sigma, 1, Sampling.full(100)), part)
        assert ledger.epsilon(0.00455, "pld") <= epsilon  # so the natural filter lets both run
    # A filter at one order lets one of them run at most, or has a δ that covers the choice.
    for order in (2.0, 4.0, 8.0, 16.0):
        spent = [
            train((sigma, 1, Sampling.full(100)), part).epsilon(0.00455, RenyiFilter(order))
            for part in parts.values()
        ]
        assert max(spent) > epsilon


def test_a_filter_covers_the_choice(train):
    """The same choice, at the ε that both continuations keep by one order."""
    delta = 0.00455
    parts = (0.3, 1, Sampling.poisson(100, 1)), (1 / 0.36181, 1, Sampling.full(100))
    for order in (2.0, 4.0, 8.0, 16.0):
        kept = max(
            train((1 / 0.3, 1, Sampling.full(100)), part).epsilon(delta, RenyiFilter(order))
            for part in parts
        )
        _, chosen = _after_a_gaussian(
            0.3,
            kept,
            lambda e: _sampled_delta(e, 0.01, 0.3),
            lambda e: gaussian_delta(e, 0.36181),
        )
        assert chosen <= delta


def test_the_best_order_afterwards_says_less_than_one_that_was_fixed(train):
    """Two histories that results may lead to, and the order at which each is cheapest."""
    few, many = (0.8, 4, Sampling.poisson(N, 10)), (4.0, 60, FULL)
    orders = [1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0]
    prices = np.array(
        [[train(h).epsilon(DELTA, RenyiFilter(order)) for order in orders] for h in (few, many)]
    )
    best = prices.min(axis=1)
    assert prices[0].argmin() != prices[1].argmin()
    scaled = prices / best[:, None]  # of a budget that each would just keep by its best order
    assert scaled.max(axis=0).min() > 1.15  # at no order do both keep it
    for history, epsilon in zip((few, many), best, strict=True):
        assert train(history).epsilon(DELTA, "rdp") <= epsilon * (1 + 1e-9)


# The order.


def test_the_order_of_a_plan_is_the_cheapest():
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, batch_size=B)
    found = RenyiFilter.planned(optimizer, POISSON, 200, epsilon=2.0, delta=DELTA)
    assert optimizer.noise_multiplier is None and optimizer.plan is None
    sigmas = {}
    for order in (found.order - 1, found.order, found.order + 1.0, 8.0, 64.0):
        fresh = dp.optimizers.DPSGD(0.1, clip_norm=1.0, batch_size=B)
        each = RenyiFilter(order)
        sigmas[order] = accounting.calibrate(fresh, POISSON, 200, 2.0, DELTA, each)
    assert min(sigmas, key=sigmas.get) == found.order
    by_rdp = dp.optimizers.DPSGD(0.1, clip_norm=1.0, batch_size=B)
    assert sigmas[found.order] <= 1.001 * accounting.calibrate(
        by_rdp, POISSON, 200, 2.0, DELTA, "rdp"
    )


def test_the_order_of_noise_that_is_given():
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, batch_size=B, noise_multiplier=1.3)
    found = RenyiFilter.planned(optimizer, POISSON, 200, epsilon=9.0, delta=DELTA)
    accountant = dp_accounting.rdp.RdpAccountant()
    gaussian = dp_accounting.GaussianDpEvent(1.3)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(B / N, gaussian), 200)
    assert found.order == accountant.get_epsilon_and_optimal_order(DELTA)[1]


@pytest.mark.parametrize("order", [None, 1.0, 1, -3, math.inf, math.nan, "16", True])
def test_what_is_no_order(order):
    with pytest.raises(ValueError, match="order must be a number above"):
        RenyiFilter(order)
    with pytest.raises(TypeError):
        RenyiFilter()


@pytest.mark.parametrize(
    ("epsilon", "delta", "accountant", "message"),
    [
        (math.inf, DELTA, RENYI, "positive and finite"),
        (0.0, DELTA, GAUSSIAN, "positive and finite"),
        (1.0, 0, RENYI, "delta in"),
        (1.0, 0.0, GAUSSIAN, "delta in"),
        (1.0, 1e-6, RenyiFilter(2.0), "no epsilon below 12.43 .* larger order"),
        (1.0, DELTA, RenyiFilter, "privacy filter"),
    ],
)
def test_what_no_filter_can_keep(epsilon, delta, accountant, message):
    with pytest.raises(ValueError, match=message):
        Budget(epsilon, delta, accountant)


# What is refused.

_CORRELATED = BandedMatrix(20, 2)


@pytest.mark.parametrize(
    ("accountant", "sampling", "mechanism", "named"),
    [
        (RENYI, Sampling.truncated_poisson(N, B, 80), Gaussian(), "'truncated_poisson' sampling"),
        (RENYI, Sampling.shuffled_accounted_as_poisson(N, B), Gaussian(), "a heuristic"),
        (RENYI, POISSON, Laplace(), "Laplace noise"),
        (RENYI, Sampling.cyclic_poisson(N, 10, groups=4), _CORRELATED, "correlated noise"),
        (GAUSSIAN, FULL, Laplace(), "Laplace noise"),
        (GAUSSIAN, POISSON, Gaussian(), "'poisson' sampling, which amplifies"),
        (GAUSSIAN, Sampling.balls_in_bins(N, B), Gaussian(), "'balls_in_bins' sampling"),
        (GAUSSIAN, Sampling.without_replacement(N, B), Gaussian(), "'without_replacement'"),
        (GAUSSIAN, Sampling.cyclic_poisson(N, 10, groups=4), Gaussian(), "'cyclic_poisson'"),
        (GAUSSIAN, Sampling.cyclic_poisson(N, 10, groups=4), _CORRELATED, "correlated noise"),
    ],
)
def test_refused_by_name(accountant, sampling, mechanism, named):
    releases = (Release(0, "mean", 2.0, mechanism),)
    ledger, budget = Ledger(), Budget(5.0, DELTA, accountant)
    with pytest.raises(ValueError, match=named):
        ledger.begin(releases, sampling, filter=budget.filter)
    assert ledger.current is None
    ledger.begin(releases, sampling)  # without a filter, as before
    ledger.reserve(1)
    with pytest.raises(ValueError, match=named):
        ledger.epsilon(DELTA, accountant)


@pytest.mark.parametrize("each", [RENYI, GAUSSIAN], ids=str)
def test_a_private_selection_is_refused(gaussians, make_optimizer, each):
    chosen = RandomRepetitions(3.0)
    with pytest.raises(ValueError, match="private selection"):
        Ledger().begin(
            gaussians(2.0), FULL, selection=chosen, filter=Budget(5.0, DELTA, each).filter
        )
    with pytest.raises(ValueError, match="private selection"):
        accounting.calibrate(
            make_optimizer(batch_size=N), FULL, 5, 2.0, DELTA, each, selection=chosen
        )


def test_steps_without_a_common_sum_are_refused(train):
    ledger = train((4.0, 3), filter=OF_RENYI)
    for other in (
        Sampling.poisson(N, B, unit="user"),
        Sampling.poisson(N, B, adjacency="zero_out"),
    ):
        with pytest.raises(ValueError, match="no common sum"):
            train((4.0, 3, other), ledger=ledger, filter=OF_RENYI)
    mixed = (Sampling.poisson(N, B, "replace_one"), Sampling.without_replacement(N, B))
    with pytest.raises(ValueError, match="no common sum"):
        train(*((4.0, 3, each) for each in mixed)).epsilon(DELTA, RENYI)
    assert ledger.steps == 3


def test_a_filter_begins_before_the_first_step(train):
    ledger = train((4.0, 3))
    with pytest.raises(ValueError, match="fixed before the first step"):
        train((4.0, 3), ledger=ledger, filter=OF_RENYI)
    assert ledger.steps == 3


@pytest.mark.parametrize(
    "other",
    [
        FilterBudget(RENYI, 3.0, DELTA),
        FilterBudget(RENYI, 1.5, DELTA),
        FilterBudget(RENYI, 2.0, 1e-4),
        FilterBudget(RenyiFilter(17), 2.0, DELTA),
        FilterBudget(GAUSSIAN, 2.0, DELTA),
    ],
    ids=str,
)
def test_a_filter_stays_as_it_is(train, other):
    ledger = train((40.0, 3, FULL), filter=OF_RENYI)
    with pytest.raises(ValueError, match="another privacy filter"):
        train((40.0, 3, FULL), ledger=ledger, filter=other)
    train((50.0, 2, FULL), ledger=ledger, filter=OF_RENYI)
    assert ledger.steps == 5


def test_no_step_leaves_a_filter(train):
    ledger = train((4.0, 3), filter=OF_RENYI)
    with pytest.raises(ValueError, match="ran under a privacy filter .* model.budget"):
        train((4.0, 3), ledger=ledger)


@pytest.mark.parametrize("accountant", ["pld", "rdp", "pure", RenyiFilter(17), GAUSSIAN], ids=str)
def test_other_accountants_are_refused(train, make_optimizer, accountant):
    ledger = train((4.0, 3), filter=OF_RENYI)
    asked = (
        lambda: ledger.epsilon(DELTA, accountant),
        lambda: ledger.epsilon_as_planned(DELTA, accountant),
        lambda: ledger.epsilon_bracket(DELTA, accountant),
        lambda: ledger.statement(DELTA, accountant),
        lambda: ledger.risk(accountant),
        lambda: ledger.affordable_steps(2.0, DELTA, accountant),
        lambda: Budget(20.0, DELTA, accountant).limit(ledger),
        lambda: accounting.calibrate(
            make_optimizer(batch_size=B), POISSON, 5, 2.0, DELTA, accountant, spent=ledger
        ),
    )
    for ask in asked:
        with pytest.raises(
            ValueError, match="does not bound steps that ran under a privacy filter"
        ):
            ask()


def test_auto_is_the_filter(train, make_optimizer):
    ledger = train((4.0, 300), filter=OF_RENYI)
    assert ledger.epsilon(DELTA) == ledger.epsilon(DELTA, RENYI) > 0.5
    assert ledger.affordable_steps(2.0, DELTA) == ledger.affordable_steps(2.0, DELTA, RENYI)
    optimizer = make_optimizer(batch_size=B)
    sigma = accounting.calibrate(optimizer, POISSON, 100, 2.0, DELTA, spent=ledger)
    assert optimizer.plan.accountant == RENYI
    train((sigma, 100), ledger=ledger, filter=OF_RENYI)
    assert 2.0 * (1 - 1e-3) < ledger.epsilon(DELTA) <= 2.0


def test_auto_is_known_before_the_first_step(gaussians):
    ledger = Ledger()
    ledger.begin(gaussians(4.0), POISSON, filter=OF_RENYI)
    with pytest.raises(ValueError, match="does not bound"):
        ledger.epsilon(DELTA, "pld")


# What is kept.


def test_it_survives_files(train, tmp_path):
    path = tmp_path / "spent.jsonl"
    ledger = train((4.0, 30), ledger=Ledger(path), filter=OF_RENYI)
    train((8.0, 200), ledger=ledger, filter=OF_RENYI)
    ledger.unlock()
    read = (Ledger.from_json(ledger.to_json()), Ledger.read(path), Ledger(path))
    for again in read:
        assert [each.filter for each in again.segments] == [OF_RENYI, OF_RENYI]
        assert again.epsilon_as_planned(DELTA) == 2.0
        assert again.epsilon(DELTA) == ledger.epsilon(DELTA)
        with pytest.raises(ValueError, match="another privacy filter"):
            train((40.0, 1), ledger=again, filter=FilterBudget(RENYI, 3.0, DELTA))
    config = json.loads(ledger.to_json())["segments"][0]["filter"]
    own = {"epsilon": 2.0, "delta": DELTA, "before": 0}
    assert config == {"kind": "renyi", "order": 16.0} | own
    assert FilterBudget.from_config(OF_GAUSSIAN.get_config()) == OF_GAUSSIAN


def test_ledgers_without_a_filter_stay_as_they_were(train):
    assert "filter" not in train((4.0, 3)).to_json()


def test_a_filter_of_another_kind_is_no_ledger(train):
    text = train((4.0, 3), filter=OF_RENYI).to_json().replace('"renyi"', '"other"')
    with pytest.raises(ValueError, match="no privacy filter of kind 'other'"):
        Ledger.from_json(text)


def test_a_plan_keeps_it():
    plan = Plan(POISSON, 60, 2.0, DELTA, RENYI, noise_multiplier=1.25)
    assert Plan.from_config(json.loads(json.dumps(plan.get_config()))) == plan


def test_no_step_ahead_is_on_file(train, gaussians, tmp_path):
    """A process that is killed has then counted no step that its budget did not allow."""
    budget, path = Budget(2.0, DELTA, RENYI), tmp_path / "spent.jsonl"
    ledger = Ledger(path)
    ledger.begin(gaussians(4.0), POISSON, filter=budget.filter)
    limit = budget.limit(ledger)
    assert limit > 200
    ledger.reserve(limit)
    read = Ledger.read(path)
    assert read.steps == limit and read.epsilon_as_planned(DELTA) == 2.0


def test_a_merged_copy_changes_nothing(train):
    ledger = train((4.0, 200), (5.0, 100), filter=OF_RENYI)
    copy = Ledger.from_json(ledger.to_json())
    train((6.0, 50), ledger=ledger, filter=OF_RENYI)
    for one, other in ((ledger, copy), (copy, ledger)):
        one.merge(other)
        assert one.steps == 350 and one.epsilon_as_planned(DELTA) == 2.0
        train((9.0, 1), ledger=Ledger.from_json(one.to_json()), filter=OF_RENYI)


@pytest.mark.parametrize("forked", [False, True])
def test_ledgers_that_kept_the_limit_apart_lose_it(train, forked):
    """What each would have spent had it seen more is not known: a small sum promises nothing."""
    first = train((4.0, 100), filter=OF_RENYI)
    second = Ledger.from_json(first.to_json()) if forked else Ledger()
    train((4.0, 10), ledger=first, filter=OF_RENYI)
    train((4.0, 20), ledger=second, filter=OF_RENYI)
    assert first.epsilon_as_planned(DELTA) == second.epsilon_as_planned(DELTA) == 2.0
    first.merge(second)
    assert first.epsilon(DELTA) < 2.0 and math.isinf(first.epsilon_as_planned(DELTA))
    text = _said(first)
    assert "its guarantee is lost" in text and "whatever was chosen" not in text
    assert first.risk().basis == "unbounded"


def test_a_run_that_went_on_after_it_was_copied(train):
    first = train((4.0, 100), filter=OF_RENYI)
    second = Ledger.from_json(first.to_json())
    first.reserve(10)
    train((4.0, 20), ledger=second, filter=OF_RENYI)
    second.merge(first)
    assert second.steps == 130 and "its guarantee is lost" in _said(second)


def test_ledgers_that_knew_of_each_other_keep_it(train):
    """As of two models that share weights and train in turns."""
    first, second = train((4.0, 30), filter=OF_RENYI), Ledger()
    for _ in range(3):
        for one, other in ((second, first), (first, second)):
            one.absorb(other)
            train((4.0, 20), ledger=one, filter=OF_RENYI)
    assert first.steps == 30 + 6 * 20 and first.epsilon_as_planned(DELTA) == 2.0
    assert "whatever was chosen" in _said(first)


def test_a_merged_ledger_of_several_filters_has_none(train):
    for other in (None, FilterBudget(RENYI, 3.0, DELTA)):
        ledger = train((4.0, 300), filter=OF_RENYI)
        ledger.merge(train((5.0, 100), filter=other))
        text = _said(ledger)
        assert "its guarantee is lost" in text and "count as fixed beforehand" in text
        assert "whatever was chosen" not in text
        assert ledger.epsilon(DELTA) == train((4.0, 300), (5.0, 100)).epsilon(DELTA)
        assert ledger.risk().basis == "unbounded" and math.isinf(ledger.epsilon_as_planned(DELTA))
        for filter in (OF_RENYI, other or FilterBudget(RENYI, 3.0, DELTA)):
            with pytest.raises(ValueError, match="privacy filter"):
                train((9.0, 1), ledger=ledger, filter=filter)
        train((9.0, 1), ledger=ledger)
        assert ledger.steps == 401


def test_steps_of_others_end_a_segment(train, gaussians):
    ledger = train((4.0, 3), filter=OF_RENYI)
    ledger.absorb(Ledger.from_json(ledger.to_json()))
    assert ledger.current is not None
    for other in (train((4.0, 3), filter=OF_RENYI), train((4.0, 3))):
        train((4.0, 1), ledger=ledger, filter=OF_RENYI)
        ledger.absorb(other)
        assert ledger.current is None
    assert ledger.steps == 11


# What is said.


def _said(ledger, delta=DELTA, **kwargs):
    return " ".join(ledger.statement(delta, **kwargs).split())


def test_the_statement_gives_the_budget_and_not_what_was_spent(train):
    ledger = train((4.0, 30), (9.0, 10), filter=OF_RENYI)
    ledger.plan(500)
    text = _said(ledger)
    assert "with epsilon = 2.000 at delta = 1e-05." in text
    assert "budget of a privacy filter (Renyi filter of order 16, epsilon = 2 at" in text
    assert "It holds whatever was chosen after looking at" in text
    assert "Stopped early" not in text and "fixed beforehand" not in text
    assert "Accounting: Renyi filter of order 16, dp-accounting" in text
    assert f"{ledger.epsilon(DELTA):.3f}" not in text
    assert ledger.epsilon_as_planned(DELTA) == 2.0


def test_a_plan_that_is_not_known_needs_no_condition(train):
    ledger = train((4.0, 30), filter=OF_RENYI)
    ledger.plan(math.inf)
    assert "Stopped early" not in _said(ledger)


def test_the_statement_at_another_delta(train):
    ledger = train((4.0, 30), filter=OF_RENYI)
    epsilon = math.ceil(1000 * by_conversion(2.0 - by_conversion(0.0, 16), 16, 1e-3)) / 1000
    text = _said(ledger, 1e-3)
    assert f"with epsilon = {epsilon:.3f} at delta = 0.001." in text
    assert "converted from the limit of the filter's sum" in text
    assert "converted" not in _said(ledger)


def test_parts_that_differ_count_as_fixed(train):
    said = "count as fixed beforehand: the guarantee does not cover a choice of them"
    assert said not in _said(train((4.0, 30)))
    assert said not in _said(train((4.0, 30), (4.0, 30)))
    assert said in _said(train((4.0, 30), (5.0, 30)))
    assert said in _said(train((4.0, 30), (4.0, 30, Sampling.poisson(N, 60))))


def test_what_exceeds_its_budget_is_said_to(train):
    ledger = train((1.0, 200), filter=OF_RENYI)  # by hand, past the guard
    text = _said(ledger)
    assert "its guarantee is lost" in text and "whatever was chosen" not in text
    assert ledger.epsilon(DELTA) > 2.0 and math.isinf(ledger.epsilon_as_planned(DELTA))
    assert ledger.risk().basis == "unbounded"


def test_the_risk_of_a_gaussian_filter_is_that_of_one_gaussian(train):
    few, many = (train((40.0, steps, FULL), filter=OF_GAUSSIAN).risk() for steps in (1, 90))
    mu = 1 / OF_GAUSSIAN.noise_multiplier
    rates = np.array([0.001, 0.01, 0.1, 0.5, 0.9])
    expected = stats.norm.cdf(stats.norm.ppf(rates) + mu)
    for risk in (few, many):  # whatever was spent
        found = risk.true_positive_rate(rates)
        assert np.all(found >= expected) and np.all(found <= expected + 1e-4)
        assert risk.basis == "budget of a filter" and "budget of the privacy filter" in str(risk)


def test_the_risk_of_a_renyi_filter_follows_from_its_limit(train):
    few, many = (train((4.0, steps), filter=OF_RENYI).risk() for steps in (1, 300))
    assert few.basis == "budget of a filter"
    divergence = 2.0 - by_conversion(0.0, 16)
    for rate in (0.001, 0.01, 0.1):
        lines = [
            math.exp(by_conversion(divergence, 16, delta)) * rate + delta
            for delta in 10.0 ** -np.arange(1, 13)
        ]
        assert few.true_positive_rate(rate) <= min(lines) + 1e-12
        assert few.true_positive_rate(rate) == many.true_positive_rate(rate)
        # No Gaussian release of this divergence does better than what is said.
        mu = math.sqrt(2 * divergence / 16)
        assert few.true_positive_rate(rate) >= stats.norm.cdf(stats.norm.ppf(rate) + mu)


def test_groups_follow_from_the_budget(train):
    few, many = (train((4.0, steps), filter=OF_RENYI) for steps in (1, 300))
    said = [
        _said(each, group_size=2).partition("Groups:")[2].partition(".")[0] for each in (few, many)
    ]
    assert said[0] == said[1] and "any 2 examples together, epsilon =" in said[0]
    epsilon = float(_said(few, group_size=2).partition("together, epsilon = ")[2].split()[0])
    # As from (ε, δ') of the limit: Vadhan 2017, lemma 2.2, at the best δ' of a grid.
    divergence = 2.0 - by_conversion(0.0, 16)
    best = math.inf
    for log_delta in np.linspace(math.log(DELTA) - 30, math.log(DELTA), 3001):
        one = by_conversion(divergence, 16, math.exp(log_delta))
        if math.exp(log_delta) * (1 + math.exp(one)) <= DELTA:
            best = min(best, 2 * one)
    assert best - 2e-3 <= epsilon <= best * 1.01


def test_segments_say_in_what_they_ran(train):
    (segment,) = train((4.0, 3), filter=OF_RENYI).segments
    assert dataclasses.replace(segment, filter=None) != segment
    assert segment.filter == OF_RENYI == Budget(2, DELTA, RenyiFilter(16)).filter
    assert str(Budget(2, DELTA, RENYI)) == "ε = 2 at δ = 1e-05, by a Renyi filter of order 16"


@pytest.mark.parametrize("sigma, delta", [(0.5, 1e-6), (3.0, 1e-5), (40.0, 0.01), (200.0, 0.3)])
def test_gaussians_are_priced_alike_without_what_dp_accounting_has_now(sigma, delta, monkeypatch):
    from dp_keras_opt.accounting import privacy_filters

    for name in ("get_epsilon_gaussian", "get_sigma_gaussian"):
        monkeypatch.delattr(dp_accounting, name, raising=False)
    found = privacy_filters._epsilon_of_gaussian(sigma, delta)

    def of(epsilon):
        a, b = 1 / (2 * sigma) - epsilon * sigma, -1 / (2 * sigma) - epsilon * sigma
        return stats.norm.cdf(a) - math.exp(epsilon) * stats.norm.cdf(b)

    assert found == 0.0 or of(found) == pytest.approx(delta, rel=1e-5)
    assert of(found) <= delta * (1 + 1e-9)
    if found:
        assert privacy_filters._sigma_of_gaussian(found, delta) == pytest.approx(sigma, rel=1e-6)
