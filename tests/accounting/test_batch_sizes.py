"""Expected batch sizes that are a public function of the step, and what they cost."""

import collections
import json

import dp_accounting
import hypothesis
import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import tensorflow as tf
from dp_accounting import pld, rdp

import dp_keras_opt as dp
from dp_keras_opt.accounting import BatchSizes, Ledger, Sampling, epsilon
from dp_keras_opt.accounting.segment import Segment
from dp_keras_opt.noise import schedules

N, DELTA = 1000, 1e-5
STAGES = {0: 20, 30: 50, 45: 10}


def _optimizer(batch_size, **kwargs):
    given = {"clip_norm": 1.0, "batch_size": batch_size, "noise_multiplier": 1.0}
    return dp.optimizers.DPSGD(0.1, **given | kwargs)


def _by_hand(accountant, sizes, multipliers=None):
    """Each step with its own probability."""
    multipliers = [1.0] * len(sizes) if multipliers is None else np.asarray(multipliers).tolist()
    for (size, multiplier), count in collections.Counter(
        zip(sizes, multipliers, strict=True)
    ).items():
        gaussian = dp_accounting.GaussianDpEvent(multiplier)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(size / N, gaussian), count)
    return accountant.get_epsilon(DELTA)


@hypothesis.given(
    st.dictionaries(st.integers(1, 60), st.integers(1, 99)), st.integers(1, 99), st.integers(0, 40)
)
def test_each_step_has_the_size_of_the_last_stage_that_began(later, first, start):
    sizes = BatchSizes({0: first} | later)
    wanted, size = [], first
    for step in range(start + 50):
        size = later.get(step, size)
        wanted.append(size)
    assert sizes.sizes(start, 50).tolist() == wanted[start:]
    assert sizes.largest == max(first, *later.values(), first)
    assert BatchSizes(json.loads(json.dumps(sizes.stages))) == sizes


@pytest.mark.parametrize("jit_compile", [False, True])
def test_the_size_of_a_step_is_known_in_a_graph(jit_compile):
    optimizer = _optimizer(STAGES)
    at = tf.function(lambda: optimizer.expected_batch_size, jit_compile=jit_compile)
    found = []
    for step in (0, 29, 30, 44, 45, 10**9):
        optimizer.iterations.assign(step)
        found.append(float(at()))
    assert found == [20, 20, 50, 50, 10, 10]


def test_a_function_of_the_step_is_evaluated_at_once():
    growing = keras.optimizers.schedules.PolynomialDecay(10.0, 40, 100.4)
    sizes = BatchSizes.from_function(growing, 60)
    wanted = [round(10 + 90.4 * min(step, 40) / 40) for step in range(60)]
    assert sizes.sizes(0, 60).tolist() == wanted
    assert sizes.sizes(100, 2).tolist() == [wanted[-1]] * 2
    assert BatchSizes.from_function(lambda step: 8, 5).stages == ((0, 8),)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {1: 5},
        {0: 5, 3: 0},
        {0: 5, -1: 4},
        {0: 5, 2.5: 4},
        {0: 5.0},
        {0: True, 4: 2},
        [(0, 5), (0, 6)],
        [10, 20],
        [(0, 1, 2)],
        lambda step: 8,
        keras.optimizers.schedules.ExponentialDecay(8.0, 10, 2.0),
    ],
)
def test_what_is_no_batch_size_is_refused(wrong):
    with pytest.raises(ValueError, match="batch_size"):
        Sampling.poisson(N, wrong)
    with pytest.raises(ValueError, match="batch_size"):
        _optimizer(wrong)


def test_a_function_must_give_sizes():
    with pytest.raises(ValueError, match="nan at step 2"):
        BatchSizes.from_function(lambda step: [1, 2, np.nan][step], 3)
    with pytest.raises(ValueError, match="batch_size must be an integer >= 1"):
        BatchSizes.from_function(lambda step: step, 3)


def test_more_than_there_are_is_refused():
    with pytest.raises(ValueError, match="batch_size must be at most num_examples=1000"):
        Sampling.poisson(N, {0: 10, 5: 1001})


def test_one_stage_is_one_size():
    assert Sampling.poisson(N, {0: 16}) == Sampling.poisson(N, 16)
    assert Sampling.poisson(N, {0: 16, 9: 16}) == Sampling.poisson(N, 16)
    assert _optimizer({0: 16}).batch_size == 16


def test_settings_and_ledgers_carry_the_sizes():
    sampling = Sampling.poisson(N, STAGES, "zero_out", unit="user", examples_per_unit=3)
    config = json.loads(json.dumps(sampling.get_config()))
    assert Sampling.from_config(config) == sampling
    optimizer = _optimizer(STAGES)
    config = json.loads(json.dumps(optimizer.get_config()))
    again = dp.optimizers.DPSGD.from_config(config)
    assert again.batch_size == BatchSizes(STAGES) == optimizer.batch_size
    ledger = Ledger.of(_optimizer(STAGES), Sampling.poisson(N, STAGES), 60)
    read = Ledger.from_json(ledger.to_json())
    assert read.segments == ledger.segments
    assert read.epsilon(DELTA) == ledger.epsilon(DELTA)
    assert "20 from step 0 on, 50 from step 30 on, 10 from step 45 on" in " ".join(
        ledger.statement(DELTA).split()
    )


@pytest.mark.parametrize("name", ["rdp", "pld"])
@pytest.mark.parametrize("levels", [False, True])
def test_epsilon_is_that_of_each_step_with_its_own_probability(name, levels):
    steps = 50
    sizes = [STAGES[max(first for first in STAGES if first <= t)] for t in range(steps)]
    alphas = np.float32([1.0, 1.5] * (steps // 2)) if levels else None
    found = epsilon(
        _optimizer(STAGES, noise_schedule=alphas), Sampling.poisson(N, STAGES), steps, DELTA, name
    )
    accountant = {"rdp": rdp.RdpAccountant, "pld": pld.PLDAccountant}[name]()
    assert found == pytest.approx(_by_hand(accountant, sizes, alphas), rel=2e-3)


def test_pure_epsilons_are_of_each_step():
    sizes = BatchSizes(STAGES).sizes(0, 50)
    wanted = np.log1p(sizes / N * np.expm1(1 / 2.0)).sum()
    laplace = _optimizer(STAGES, noise="laplace", noise_multiplier=2.0)
    assert epsilon(laplace, Sampling.poisson(N, STAGES), 50, 0.0) == pytest.approx(wanted)


def test_a_segment_counts_from_its_first_step():
    """As after an interruption: the stages are of the training, not of the segment."""
    sampling = Sampling.poisson(N, STAGES)
    ledger = Ledger()
    ledger.begin(_optimizer(STAGES).releases, sampling, first_step=28)
    ledger.reserve(20)
    sizes = [20, 20, *[50] * 15, 10, 10, 10]
    assert ledger.epsilon(DELTA, "rdp") == pytest.approx(
        _by_hand(rdp.RdpAccountant(), sizes), rel=1e-6
    )


def test_a_calibrated_training_spends_its_budget_and_no_more():
    optimizer = _optimizer(STAGES, noise_multiplier=None)
    sampling = Sampling.poisson(N, STAGES)
    multiplier = dp.accounting.calibrate(optimizer, sampling, 60, 1.0, DELTA)
    assert epsilon(optimizer, sampling, 60, DELTA) <= 1.0
    less = _optimizer(STAGES, noise_multiplier=multiplier * (1 - 1e-3))
    assert epsilon(less, sampling, 60, DELTA) > 1.0
    largest = _optimizer(50, noise_multiplier=None)
    assert multiplier < dp.accounting.calibrate(largest, Sampling.poisson(N, 50), 60, 1.0, DELTA)


@pytest.mark.parametrize("with_levels", [False, True])
def test_many_sizes_are_rounded_to_where_they_cost_more(with_levels):
    """900 sizes, of which no more than 400 are priced apart; ε never falls with more steps."""
    orders = (2, 3, 4, 6, 8, 16, 32)
    ramp = BatchSizes.from_function(lambda step: 10 + step, 900)
    sampling = Sampling.poisson(N, ramp)
    releases = _optimizer(ramp).releases
    schedule = schedules.Fixed(np.linspace(1, 2, 900)) if with_levels else schedules.Constant()

    def segment(steps):
        return Segment("run", releases, schedule, sampling, steps=steps)

    def rdp_of(event):
        return rdp.RdpAccountant(orders).compose(event).get_epsilon(DELTA)

    whole = segment(900)
    assert whole.is_rounded and not segment(300).is_rounded
    for most in (50, 400):
        pessimistic, optimistic = whole.event(most), whole.event(most, optimistic=True)
        assert len(pessimistic.events) <= most and len(optimistic.events) <= most
        assert sum(event.count for event in pessimistic.events) == 900
    few = [rdp_of(segment(steps).event(16)) for steps in (100, 101, 200, 400, 401, 900)]
    assert few == sorted(few)
    multipliers = schedule.alphas(0, 900)
    exact = _by_hand(rdp.RdpAccountant(orders), ramp.sizes(0, 900), multipliers)
    assert rdp_of(whole.event(16, optimistic=True)) < exact < rdp_of(whole.event(16))
    assert rdp_of(whole.event(400)) == pytest.approx(exact, rel=0.05)
    assert rdp_of(whole.event(400)) >= exact * (1 - 1e-9)


def test_probabilities_end_at_1_when_they_are_rounded_up():
    sizes = BatchSizes.from_function(lambda step: N - step, N)
    segment = Segment(
        "run", _optimizer(sizes).releases, schedules.Constant(), Sampling.poisson(N, sizes), steps=N
    )
    chances = [each.event.sampling_probability for each in segment.event(8).events]
    assert max(chances) == 1.0 and min(chances) > 0


def test_optimizer_and_sampling_must_agree():
    staged = Sampling.poisson(N, STAGES)
    for other in (50, {0: 20, 31: 50, 45: 10}):
        with pytest.raises(ValueError, match="Give both the same expected batch size"):
            epsilon(_optimizer(other), staged, 10, DELTA)
    with pytest.raises(ValueError, match="Give both the same expected batch size"):
        epsilon(_optimizer(STAGES), Sampling.poisson(N, 50), 10, DELTA)


def test_what_needs_one_size_refuses_several():
    staged = Sampling.poisson(N, STAGES)
    banded = _optimizer(STAGES, noise=dp.noise.BandedMatrix(60, 4))
    with pytest.raises(ValueError, match="cyclic_poisson|separation|sampling"):
        epsilon(banded, staged, 60, DELTA)
    joint = dp.optimizers.moments.Joint(1.0, max_batch_size=100)
    adam = dp.optimizers.DPAdam(
        clip_norm=1.0, batch_size=STAGES, noise_multiplier=1.0, second_moment=joint
    )
    with pytest.raises(
        ValueError, match="for one batch_size; received batch_size=20 from step 0 on"
    ):
        epsilon(adam, staged, 60, DELTA)
    with pytest.raises(ValueError, match="pass a sampling of one"):
        dp.accounting.affordable_batch_size(_optimizer(8), staged, 1.0, DELTA, steps=10)
    with pytest.raises(ValueError, match="must be the largest"):
        Sampling.from_config(staged.get_config() | {"batch_size": 20})


def test_a_plan_knows_what_the_noise_of_each_step_does():
    """An error of the weights: √(mean_t Σ_{j≤t} (η_j·σ/B_j)²), in units of C/B of the largest."""
    rates = keras.optimizers.schedules.CosineDecay(1.0, 60)
    optimizer = dp.optimizers.DPSGD(rates, clip_norm=1.0)
    plan = dp.accounting.plan_noise(optimizer, Sampling.poisson(N, STAGES), 60, 1.0, DELTA)
    (choice,) = plan.choices
    sizes = np.repeat([20, 50, 10], [30, 15, 15])
    each = np.array([float(rates(t)) for t in range(60)]) * choice.noise_multiplier * 50 / sizes
    assert choice.error == pytest.approx(np.sqrt(np.mean(np.cumsum(each**2))), rel=1e-6)
    assert choice.sampling == Sampling.poisson(N, STAGES)
