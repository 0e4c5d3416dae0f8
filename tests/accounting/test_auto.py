"""The accountant "auto" and its loss distributions, held against dp_accounting called directly."""

import json
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import common, privacy_loss_distribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from dp_keras_opt import accounting, optimizers
from dp_keras_opt.accounting import Ledger, Sampling, accountant, loss_distributions
from dp_keras_opt.accounting.events import MAX_DISTINCT
from dp_keras_opt.accounting.loss_distributions import LossDistributionAccountant
from dp_keras_opt.accounting.plan import Plan
from dp_keras_opt.accounting.random_allocation import (
    RandomAllocationAccountant,
    RandomAllocationDpEvent,
)
from dp_keras_opt.accounting.repetitions import RandomRepetitions
from dp_keras_opt.accounting.sampled_gaussian import SampledGaussianLoss, sampled_gaussian
from dp_keras_opt.accounting.segment import Segment
from dp_keras_opt.noise import Gaussian, Laplace, Release, schedules
from tests.helpers.draws import draws

fft_module = common.fft
ADD_OR_REMOVE = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
CLOTHES = Sampling.poisson(53_460, 256)
N = 10_000


def poisson(sigma, q, count=1):
    event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
    return dp_accounting.SelfComposedDpEvent(event, count)


def pld(event, interval=1e-4):
    return dp_accounting.pld.PLDAccountant(value_discretization_interval=interval).compose(event)


def rdp(event, relation=ADD_OR_REMOVE):
    return dp_accounting.rdp.RdpAccountant(neighboring_relation=relation).compose(event)


def ours(event, is_replaced=False):
    return LossDistributionAccountant(ADD_OR_REMOVE, is_replaced).compose(event)


def segment(sampling, steps, sigma=1.0, mechanism=None, **kwargs):
    releases = (Release(0, "mean", sigma, mechanism or Gaussian()),)
    kwargs = {"run": "run", "schedule": schedules.get(None)} | kwargs
    return Segment(releases=releases, sampling=sampling, steps=steps, **kwargs)


def spent(*segments, delta=1e-6, name="auto"):
    return accountant.epsilon_of(segments, delta, name)


# The loss distributions.


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "delta", "interval"),
    [
        (256 / 53_460, 0.853, 160, 1e-6, 1e-4),
        (0.01, 1.0, 1000, 1e-5, 1e-4),
        (0.0008, 1.0, 10_000, 1e-7, 5e-5),
        (0.5, 5.0, 1000, 1e-6, 1e-3),
        (0.01, 0.5, 1, 1e-5, 1e-3),
        (0.9, 3.0, 5, 1e-2, 1e-4),
    ],
)
def test_it_is_that_of_dp_accounting(q, sigma, steps, delta, interval):
    event = poisson(sigma, q, steps)
    theirs, found = pld(event, interval), ours(event)
    assert found.get_epsilon(delta) == pytest.approx(theirs.get_epsilon(delta), rel=2e-3)
    epsilon = theirs.get_epsilon(delta)
    for each in (epsilon / 2, epsilon):
        assert found.get_delta(each) == pytest.approx(theirs.get_delta(each), rel=2e-2)


def test_a_gaussian_is_exact_and_from_above():
    for sigma, steps, delta in ((1.0, 1, 1e-7), (30.0, 900, 1e-5), (0.3, 1, 1e-6), (50.0, 1, 1e-3)):
        mu = math.sqrt(steps) / sigma
        accountant = ours(dp_accounting.SelfComposedDpEvent(
            dp_accounting.GaussianDpEvent(sigma), steps
        ))  # fmt: skip
        epsilon = accountant.get_epsilon(delta)
        true = special.ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * special.ndtr(
            -mu / 2 - epsilon / mu
        )  # theorem 8 of Balle and Wang, 2018
        assert delta * (1 - 2e-3) <= true <= delta


@pytest.mark.parametrize(("q", "sigma"), [(0.01, 1.0), (0.3, 0.6), (1e-4, 0.7), (0.99, 4.0)])
def test_one_step_is_never_below_the_truth(q, sigma):
    """δ by integration of both orders of the pair, and not far below what is said."""
    x = np.linspace(-14 * sigma, 14 * sigma + 1, 2_000_001)
    alone = stats.norm.pdf(x, 0, sigma)
    mixed = (1 - q) * alone + q * stats.norm.pdf(x, 1, sigma)
    accountant = ours(poisson(sigma, q))
    for epsilon in (0.0, 0.0123, 0.3, 1.0):
        true = max(
            np.sum(np.maximum(upper - math.exp(epsilon) * lower, 0)) * (x[1] - x[0])
            for upper, lower in ((mixed, alone), (alone, mixed))
        )
        assert true * (1 - 1e-6) - 1e-12 <= accountant.get_delta(epsilon) <= true + 2e-3


@pytest.mark.parametrize("q", [1e-6, 1e-3, 0.5, 1.0])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 1e3, 1e6])
def test_grids_are_powers_of_two_of_a_size_that_fits(q, sigma):
    event = poisson(sigma, q).event if q < 1 else dp_accounting.GaussianDpEvent(sigma)
    interval = loss_distributions.interval_for(event)
    assert math.log2(interval).is_integer()
    losses = loss_distributions.losses_of(
        RandomAllocationAccountant, ADD_OR_REMOVE, event, interval
    )
    assert losses._pmf_remove.size <= 2**19


def test_a_coarser_grid_is_above():
    fine = pld(poisson(0.8, 0.02), 2.0**-12)._pld
    coarse = loss_distributions.coarsened(fine, 2.0**-8)
    for epsilon in np.linspace(-0.1, 4, 97):
        true = fine.get_delta_for_epsilon(epsilon)
        assert true <= coarse.get_delta_for_epsilon(epsilon) * (1 + 1e-12)
        assert coarse.get_delta_for_epsilon(epsilon) <= fine.get_delta_for_epsilon(
            epsilon - 2.0**-8
        ) * (1 + 1e-12)


@pytest.mark.parametrize("sigma", [0.05, 0.02, 0.005])
def test_several_levels_of_next_to_no_noise_are_priced(sigma):
    """Losses above 709 made δ of the coarser grid NaN, and a search for a noise multiplier fail."""

    def price(*levels, name="auto"):
        run = segment(CLOTHES, 3, sigma, schedule=schedules.get([*levels]))
        return spent(run, delta=1e-5, name=name)

    mixed = np.geomspace(0.6, 1.4, 3)
    assert price(*[1.4] * 3) <= price(*mixed) <= price(*mixed, name="rdp") < math.inf
    assert price(*mixed) <= price(*mixed, name="pld")
    if sigma >= 0.05:  # below, "pld" rounds up to infinity
        assert price(*mixed) <= price(*[0.6] * 3)


def test_a_coarser_grid_keeps_the_order_of_profiles():
    """Rounding each loss up did not: this ledger's ε fell by its third step."""
    first = segment(Sampling.poisson(1000, 30), 1, 2.0)
    fine = Sampling.poisson(1000, 1)
    found = [spent(first, segment(fine, steps), delta=1e-5) for steps in range(4)]
    assert found == sorted(found)
    less, more = (ours(poisson(1.0, 0.001, count)).composed() for count in (1, 2))
    epsilons = np.linspace(-0.01, 0.05, 61)
    for pmf in ("_pmf_remove", "_pmf_add"):
        low, high = (
            getattr(loss_distributions.coarsened(each, 2.0**-9), pmf) for each in (less, more)
        )
        low, high = low.get_delta_for_epsilon(epsilons), high.get_delta_for_epsilon(epsilons)
        assert np.all(low <= high + 1e-15)


POINTS = [
    (256 / 53_460, 0.85, 160), (0.01, 2.0, 10_000), (64e-6, 1.0, 10**5), (0.3, 1.5, 7),
    (0.001, 0.4, 3000), (0.01, 1.0, 1),
]  # fmt: skip


@pytest.mark.parametrize(("q", "sigma", "steps"), POINTS)
def test_half_the_interval_moves_epsilon_little(monkeypatch, q, sigma, steps):
    interval_for = loss_distributions.interval_for
    epsilon = ours(poisson(sigma, q, steps)).get_epsilon(1e-6)
    monkeypatch.setattr(loss_distributions, "interval_for", lambda event: interval_for(event) / 2)
    halved = ours(poisson(sigma, q, steps)).get_epsilon(1e-6)
    assert epsilon * (1 - 5e-3) < halved <= epsilon * (1 + 1e-9)


@pytest.mark.parametrize(("first", "second"), [(0.8, 5.0), (30.0, 1.0)])
def test_grids_of_different_kinds_of_steps(first, second):
    """What is on different grids composes to what dp_accounting makes of it on one."""
    event = dp_accounting.ComposedDpEvent(
        [
            poisson(first, 0.003, 300), poisson(second, 0.1, 20),
            dp_accounting.GaussianDpEvent(4.0), dp_accounting.LaplaceDpEvent(5.0),
        ]
    )  # fmt: skip
    theirs = pld(event).get_epsilon(1e-6)
    assert ours(event).get_epsilon(1e-6) == pytest.approx(theirs, rel=3e-3)


@pytest.mark.parametrize(
    ("q", "sigma"),
    [(0.0064, 0.9), (0.05, 2.0), (0.5, 0.3), (1e-6, 0.7), (0.999, 5.0), (0.01, 0.2), (0.3, 40.0),
     (1.0, 2.0)],
)  # fmt: skip
def test_a_step_on_the_grid_is_that_of_dp_accounting(q, sigma):
    interval = 2.0**-9
    theirs = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, value_discretization_interval=interval, sampling_prob=q
    )
    found = sampled_gaussian(sigma, q, interval)
    for ours, other in (
        (found._pmf_remove, theirs._pmf_remove), (found._pmf_add, theirs._pmf_add)
    ):  # fmt: skip
        ours, other = ours.to_dense_pmf(), other.to_dense_pmf()
        assert ours._lower_loss == other._lower_loss
        np.testing.assert_allclose(ours._probs, other._probs, rtol=0, atol=5e-12)
        assert ours._infinity_mass == pytest.approx(other._infinity_mass, rel=1e-9, abs=1e-30)
    for kind in (AdjacencyType.ADD, AdjacencyType.REMOVE):
        epsilons = np.linspace(-3, 3, 1001)
        np.testing.assert_allclose(
            *(
                loss(sigma, sampling_prob=q, adjacency_type=kind).get_delta_for_epsilon(epsilons)
                for loss in (SampledGaussianLoss, GaussianPrivacyLoss)
            ),
            rtol=0, atol=1e-14,
        )  # fmt: skip


def test_what_is_too_much_is_infinite():
    assert ours(poisson(1.0, 0.01, 10)).get_epsilon(1e-13) == math.inf
    assert ours(dp_accounting.NonPrivateDpEvent()).get_delta(5.0) == 1.0
    assert ours(dp_accounting.NoOpDpEvent()).get_epsilon(0.1) == 0.0


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize(
    ("q", "sigma", "steps", "is_bounded"),
    [(0.75, 1e-3, 30, False), (0.75, 0.01, 30, True), (0.01, 0.1, 10**4, True),
     (0.5, 0.3, 10**6, False)],
)  # fmt: skip
def test_hardly_any_noise_fills_no_memory(monkeypatch, q, sigma, steps, is_bounded, is_replaced):
    sizes = []
    fft = fft_module.fft
    monkeypatch.setattr(fft_module, "fft", lambda x, n, *a: sizes.append(n) or fft(x, n, *a))
    event = poisson(sigma, q, steps)
    epsilon = ours(event, is_replaced).get_epsilon(1e-6)
    assert (epsilon < math.inf) == is_bounded
    assert max(sizes, default=0) < (2**25 if is_bounded else 2**18)
    assert not is_bounded or 0 < epsilon < rdp(event).get_epsilon(1e-6)


def test_gaussians_without_sampling_are_one():
    event = dp_accounting.ComposedDpEvent(
        [
            dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(sigma), 3)
            for sigma in (5.0, 7.0, 11.0)
        ]
    )
    whole = dp_accounting.GaussianDpEvent((3 * (5**-2 + 7**-2 + 11**-2)) ** -0.5)
    assert ours(event).get_epsilon(1e-6) == ours(whole).get_epsilon(1e-6)


# The smallest bound.


def test_it_is_the_smaller_of_both(make_optimizer):
    for sigma, steps, delta in ((1.0, 200, 1e-6), (0.6, 10, 1e-4), (3.0, 5000, 1e-8)):
        event = poisson(sigma, 0.0064, steps)
        found = accounting.epsilon(make_optimizer(sigma), Sampling.poisson(N, 64), steps, delta)
        both = [rdp(event).get_epsilon(delta), pld(event).get_epsilon(delta)]
        assert found == pytest.approx(min(both), rel=3e-3)


def test_the_clothes_need_less_noise(monkeypatch):
    """n = 53,460, B = 256, 160 steps, ε = 1, δ = 1e-6: σ = 1.072 by RDP."""
    evaluations = []
    composed = LossDistributionAccountant.composed
    monkeypatch.setattr(
        LossDistributionAccountant,
        "composed",
        lambda self: evaluations.append(1) or composed(self),
    )
    optimizer = optimizers.DPSGD(clip_norm=1.0, batch_size=256)
    sigma = accounting.calibrate(optimizer, CLOTHES, 160, 1.0, 1e-6)
    assert sigma == pytest.approx(0.853, abs=1e-3)
    assert len(evaluations) <= 16
    assert pld(poisson(sigma, 256 / 53_460, 160), 2e-5).get_epsilon(1e-6) <= 1.0
    assert pld(poisson(sigma * 0.999, 256 / 53_460, 160), 2e-5).get_epsilon(1e-6) > 1.0
    by_rdp = accounting.calibrate(optimizer, CLOTHES, 160, 1.0, 1e-6, "rdp")
    assert by_rdp == pytest.approx(1.072, abs=1e-3)
    assert optimizer.plan.accountant == "rdp"


def test_a_tiny_delta_is_that_of_rdp(make_optimizer):
    sampling = Sampling.poisson(N, 64)
    for delta in (1e-15, 1e-30):
        found, by_rdp, by_pld = (
            accounting.epsilon(make_optimizer(1.0), sampling, 100, delta, name)
            for name in ("auto", "rdp", "pld")
        )
        assert found == by_rdp < by_pld == math.inf


def test_laplace_noise():
    sampling = Sampling.poisson(N, 64)
    few = segment(sampling, 3, 2.0, Laplace())
    many = segment(sampling, 3000, 2.0, Laplace())
    assert spent(few, delta=0) == spent(few, delta=0, name="pure")
    assert spent(many) < 0.5 * spent(many, name="pure")
    assert spent(few) <= spent(few, name="pure")
    gaussian = segment(sampling, 100)
    assert spent(few, gaussian) < spent(few, name="pure") + spent(gaussian)
    price = accountant.price_of([few, gaussian], 1e-6)
    assert price.accountants == ("pld",) and set(price.asked) == {"pld", "pure", "rdp"}


def test_delta_is_divided_where_accountants_differ():
    """Subsets of fixed size have no loss distribution: RDP prices them, at its part of delta."""
    shuffled = segment(Sampling.shuffled(N, 100), 100, 10.0)
    subsets = segment(Sampling.without_replacement(N, 100), 50, 3.0)
    gaussian = dp_accounting.GaussianDpEvent(5.0)
    event = dp_accounting.SampledWithoutReplacementDpEvent(
        N, 100, dp_accounting.GaussianDpEvent(1.5)
    )
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    rest = rdp(dp_accounting.SelfComposedDpEvent(event, 50), relation).get_epsilon(5e-7)
    expected = pld(gaussian).get_epsilon(5e-7) + rest
    assert spent(shuffled, subsets) == pytest.approx(expected, rel=1e-3)
    price = accountant.price_of([shuffled, subsets], 1e-6)
    assert price.accountants == ("pld", "rdp")
    assert spent(subsets) == pytest.approx(
        rdp(dp_accounting.SelfComposedDpEvent(event, 50), relation).get_epsilon(1e-6)
    )
    # Never the sum of what is smallest for each at the whole of delta.
    assert spent(shuffled, subsets) > spent(shuffled) + spent(subsets)


def test_private_selection_is_that_of_rdp():
    chosen = segment(CLOTHES, 10, selection=RandomRepetitions(5))
    assert spent(chosen) == spent(chosen, name="rdp")
    beside = segment(CLOTHES, 10)
    assert spent(chosen, beside) <= spent(chosen, beside, name="rdp")
    with pytest.raises(ValueError, match="'pld' cannot price a private selection"):
        spent(chosen, name="pld")


def test_a_replaced_example_has_only_what_is_proved():
    sampling = Sampling.poisson(1000, 10, "replace_one")
    replaced = segment(sampling, 1000)
    assert spent(replaced, delta=1e-5) == spent(replaced, delta=1e-5, name="pld")
    assert spent(replaced, delta=1e-5) == pytest.approx(14.82, abs=2e-3)
    # RDP at σ/2 is no bound that is proved; without amplification it is.
    tiny = spent(replaced, delta=1e-20)
    gaussian = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(0.5), 1000)
    assert tiny == pytest.approx(rdp(gaussian).get_epsilon(1e-20))
    assert spent(replaced, delta=1e-20, name="rdp") < tiny


def test_a_replaced_example_at_large_delta_exceeds_half_the_multiplier():
    sampling = Sampling.poisson(100, 95, "replace_one")
    with pytest.warns(UserWarning, match="not below"):
        found = spent(segment(sampling, 5), delta=0.95)
    half = pld(poisson(0.5, 0.95, 5)).get_epsilon(0.95)
    assert half == pytest.approx(0.385, abs=1e-3)
    assert found >= 0.516


def test_many_levels_are_priced_by_fewer_evaluations_of_rdp(monkeypatch, make_optimizer):
    """RDP takes 25 ms a level: a few that are no less show that PLD is smaller."""
    levels = []
    compose = dp_accounting.rdp.RdpAccountant._maybe_compose

    def counted(self, event, count, do_compose):
        levels.append(isinstance(event, dp_accounting.PoissonSampledDpEvent))
        return compose(self, event, count, do_compose)

    monkeypatch.setattr(dp_accounting.rdp.RdpAccountant, "_maybe_compose", counted)
    schedule = schedules.Fixed(np.linspace(1, 2, 120))
    optimizer = make_optimizer(0.9, noise_schedule=schedule)
    found = accounting.epsilon(optimizer, Sampling.poisson(N, 64), 120, 1e-6)
    assert sum(levels) <= 40
    alphas = schedule.alphas(0, 120)
    grouped = [poisson(0.9 * np.mean(each), 0.0064, 4) for each in np.split(alphas, 30)]
    theirs = pld(dp_accounting.ComposedDpEvent(grouped)).get_epsilon(1e-6)
    assert found == pytest.approx(theirs, rel=1e-2)


def test_rounding_brackets_the_truth(make_optimizer):
    steps = MAX_DISTINCT + 1
    schedule = schedules.Fixed(np.geomspace(1, 2, steps))
    optimizer = make_optimizer(2.0, noise_schedule=schedule, batch_size=1000)
    ledger = Ledger.of(optimizer, Sampling.poisson(N, 1000), steps)
    lower, upper = ledger.epsilon_bracket(1e-6)
    assert lower <= ledger.epsilon(1e-6, exact=True) <= upper == ledger.epsilon(1e-6)
    assert upper < lower * 1.02
    assert "would lie between" in " ".join(ledger.statement(1e-6).split())


# Steps are added.

_POISSON = Sampling.poisson(1000, 30)
_STEPS = st.tuples(
    st.sampled_from(
        [
            _POISSON, Sampling.full(1000), Sampling.poisson(1000, 1),
            Sampling.cyclic_poisson(1000, 10, 5),
        ]
    ),
    st.floats(0.5, 40),
    st.integers(1, 60),
    st.sampled_from([Gaussian, Laplace]),
)  # fmt: skip
_REPLACED = st.tuples(
    st.sampled_from(
        [
            Sampling.poisson(1000, 30, "replace_one"), Sampling.full(1000, "replace_one"),
            Sampling.shuffled(1000, 100), Sampling.without_replacement(1000, 30),
        ]
    ),
    st.floats(1, 40),
    st.integers(1, 60),
    st.just(Gaussian),
)  # fmt: skip


@draws(6)
@given(st.one_of(st.lists(each, min_size=2, max_size=4) for each in (_STEPS, _REPLACED)))
def test_epsilon_never_falls_when_steps_are_added(parts):
    segments, before = [], 0.0
    for place, (sampling, sigma, steps, mechanism) in enumerate(parts):
        for count in (max(steps // 2, 1), steps):
            segments[place:] = [segment(sampling, count, sigma, mechanism())]
            found = spent(*segments, delta=1e-5)
            assert found >= before * (1 - 1e-7)
            before = found
            for name in ("rdp", "pld"):
                if name == "rdp" and sampling.adjacency == "replace_one":
                    continue  # for Poisson batches it is not proved
                try:
                    assert found <= spent(*segments, delta=1e-5, name=name) * (1 + 1e-12)
                except ValueError as error:
                    assert "cannot price" in str(error)


@draws(8)
@given(
    st.floats(1e-5, 0.6), st.floats(0.5, 20), st.integers(1, 5000), st.floats(1.001, 3),
    st.sampled_from([1e-3, 1e-6, 1e-9]),
)  # fmt: skip
def test_monotone_in_steps_and_noise(q, sigma, steps, factor, delta):
    epsilon = ours(poisson(sigma, q, steps)).get_epsilon(delta)
    assert ours(poisson(sigma, q, math.ceil(steps * factor))).get_epsilon(delta) >= epsilon * (
        1 - 1e-7
    )
    more_noise = ours(poisson(sigma * factor, q, steps)).get_epsilon(delta)
    assert more_noise <= epsilon * (1 + 1e-7) or epsilon == math.inf


def test_one_run_in_two_segments_costs_as_much():
    whole, parts = segment(CLOTHES, 160), [segment(CLOTHES, 60), segment(CLOTHES, 100)]
    assert spent(*parts) == pytest.approx(spent(whole), rel=1e-12)


def test_epochs_of_balls_in_bins_beside_others():
    epoch = dp_accounting.SelfComposedDpEvent(RandomAllocationDpEvent(((0.9, 100),), 100), 10)
    alone = ours(epoch).get_epsilon(1e-6)
    assert alone == pytest.approx(2.51, abs=0.01)
    both = ours(dp_accounting.ComposedDpEvent([epoch, poisson(1.0, 0.01, 100)])).get_epsilon(1e-6)
    assert alone < both < alone + ours(poisson(1.0, 0.01, 100)).get_epsilon(1e-6)


# Budgets and plans.


@pytest.mark.representatives(9)
@pytest.mark.parametrize(
    ("sampling", "steps"),
    [
        (Sampling.poisson(6400, 64), 150),
        (Sampling.poisson(6400, 64, "replace_one"), 40),
        (Sampling.full(64), 7),
        (Sampling.shuffled(6400, 64), 200),
        (Sampling.without_replacement(6400, 64), 40),
        (Sampling.cyclic_poisson(6400, 16, 4, "zero_out"), 100),
    ],
)
@pytest.mark.parametrize("name", ["auto", "rdp", "pld"])
def test_a_calibrated_run_fits_its_budget_to_the_last_step(sampling, steps, name):
    if name in sampling.unpriced_by:
        pytest.skip("the accountant cannot price it")
    optimizer = optimizers.DPSGD(clip_norm=1.0, batch_size=sampling.batch_size)
    delta = 1e-3 if sampling.num_examples < 100 else 1e-6
    accounting.calibrate(optimizer, sampling, steps, 2.0, delta, name)
    assert accounting.epsilon(optimizer, sampling, steps, delta, name) <= 2.0
    ledger, budget = Ledger(), accounting.Budget(2.0, delta, name)
    ledger.begin(optimizer.releases, sampling)
    assert budget.limit(ledger) == -(-steps // sampling.period) * sampling.period
    ledger.reserve(steps // 3)
    ledger.settle(steps // 3, steps // 3)
    assert budget.affords(ledger, steps - steps // 3)


def test_a_budget_has_room_for_rounding():
    epsilon = spent(segment(CLOTHES, 90))
    current = segment(CLOTHES, 0)
    for less, steps in ((1e-9, 90), (1e-4, 89)):
        found = accountant.affordable_steps([], current, 2**40, epsilon * (1 - less), 1e-6)
        assert found == steps


@draws(5)
@given(st.floats(0.7, 3), st.floats(0.01, 3), st.sampled_from([1, 2**40]))
def test_affordable_steps_are_the_most(sigma, budget, limit):
    current = segment(CLOTHES, 5, sigma)
    found = accountant.affordable_steps([], current, limit, budget, 1e-6)
    assert 0 <= found <= limit
    if found:
        assert spent(segment(CLOTHES, 5 + found, sigma)) <= budget * (1 + 1e-6)
    if found < limit:
        assert spent(segment(CLOTHES, 6 + found, sigma)) > budget


def test_the_search_of_a_budget_is_short(monkeypatch):
    calls = []
    compose = accountant.compose
    monkeypatch.setattr(accountant, "compose", lambda *args: calls.append(args) or compose(*args))
    current = segment(CLOTHES, 0)
    assert accountant.affordable_steps([], current, 2**40, 3.0, 1e-6) > 9000
    assert len(calls) <= 25


def test_a_plan_of_before_keeps_rdp():
    plan = Plan(CLOTHES, 10, 1.0, 1e-6)
    config = {name: value for name, value in plan.get_config().items() if name != "accountant"}
    assert Plan.from_config(json.loads(json.dumps(config))).accountant == "rdp"
    said = plan.get_config() | {"accountant": "auto"}
    assert Plan.from_config(json.loads(json.dumps(said))).accountant == "auto"


def test_the_statement_says_who_gave_the_figure(make_optimizer):
    sampling = Sampling.poisson(N, 64)

    def said(delta, name="auto"):
        text = accounting.statement(make_optimizer(1.0), sampling, 100, delta, name)
        return " ".join(text.split())

    assert "Accounting: privacy loss distributions (PLD), dp-accounting" in said(1e-6)
    assert "It is the smallest of the bounds by PLD and RDP." in said(1e-6)
    assert "Accounting: Renyi differential privacy (RDP), dp-accounting" in said(1e-15)
    assert "smallest" in said(1e-15)
    assert "smallest" not in said(1e-6, "pld") + said(1e-6, "rdp")
