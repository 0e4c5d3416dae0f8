"""Noise schedules: allocations against numerical optimisers, accounting, ADP-SGD."""

import math

import dp_accounting
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

import dp_keras_opt as dp
from dp_keras_opt.accounting import Sampling, composition
from dp_keras_opt.noise import schedules
from dp_keras_opt.optimizers import ADPSGD, DPSGD, ADPAdagradNorm
from tests.helpers import linear_regression as lr

weights = st.lists(st.floats(0.01, 100.0), min_size=2, max_size=6)


@keras.saving.register_keras_serializable(package="tests")
class InverseRoot(keras.optimizers.schedules.LearningRateSchedule):
    """η_t = 1/√(20 + t)."""

    def __call__(self, step):
        return 1 / keras.ops.sqrt(20.0 + keras.ops.cast(step, "float32"))

    def get_config(self):
        return {}


@keras.saving.register_keras_serializable(package="tests")
class Falling(keras.optimizers.schedules.LearningRateSchedule):
    """Linear, reaching 0 at step 10."""

    def __call__(self, step):
        return 1 - keras.ops.cast(step, "float32") / 10

    def get_config(self):
        return {}


# Allocation.


@settings(max_examples=30, deadline=None)
@given(weights, st.sampled_from(["gaussian", "laplace"]))
def test_allocation_equals_a_numerical_optimum(w, mechanism):
    """Minimise Σ w_t s_t² with Σ s_t^(−p) = T, over s = e^u."""
    w, power = np.array(w), {"gaussian": 2, "laplace": 1}[mechanism]
    alphas = schedules.allocate(w, mechanism).alphas(0, len(w))
    assert np.sum(alphas**-power) == pytest.approx(len(w), rel=1e-5)

    found = optimize.minimize(
        lambda u: np.log(w @ np.exp(2 * u)),
        np.zeros(len(w)),
        constraints={"type": "eq", "fun": lambda u: np.mean(np.exp(-power * u)) - 1},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert w @ alphas**2 <= np.exp(found.fun) * (1 + 1e-5)
    np.testing.assert_allclose(alphas, np.exp(found.x), rtol=0.02)


def test_constant_weights_are_constant_noise():
    np.testing.assert_allclose(schedules.allocate([3.0] * 5).alphas(0, 5), 1.0, rtol=1e-6)


def test_an_allocation_spends_what_constant_noise_spends():
    w, sampling = np.geomspace(1, 100, 20), Sampling.full(50)
    private = {"clip_norm": 1.0, "batch_size": 50, "noise_multiplier": 7.0}
    for noise, delta in (("gaussian", 1e-5), ("laplace", 0)):
        uneven = DPSGD(noise=noise, noise_schedule=schedules.allocate(w, noise), **private)
        even = DPSGD(noise=noise, **private)
        spent = [dp.accounting.epsilon(o, sampling, 20, delta) for o in (uneven, even)]
        assert spent[0] == pytest.approx(spent[1], rel=1e-4)


def test_adp_is_the_inverse_root_of_the_step_size():
    alphas = schedules.inverse_root_step_size(InverseRoot(), 100).alphas(0, 100)
    np.testing.assert_allclose(alphas / alphas[0], (1 + np.arange(100) / 20) ** 0.25, rtol=1e-5)
    laplace = schedules.inverse_root_step_size(InverseRoot(), 100, "laplace").alphas(0, 100)
    np.testing.assert_allclose(
        laplace / laplace[0], (1 + np.arange(100) / 20) ** (1 / 3), rtol=1e-5
    )


def test_functions_are_evaluated_in_advance():
    schedule = schedules.from_function(lambda t: t**0.5, 4)
    np.testing.assert_allclose(schedule.alphas(0, 4), np.sqrt([1, 2, 3, 4]), rtol=1e-6)
    assert schedule.length == 4


NESTEROV = {"strong_convexity": 0.02, "smoothness": 5.1, "learning_rate": 1 / 5.1}


def nesterov_weights(steps, mu=0.02, big=5.1, alpha=1 / 5.1):
    t = np.arange(1, steps + 1)
    return (1 - math.sqrt(mu * alpha)) ** (steps - t) * alpha * (1 + alpha * big)


def test_nesterov_optimal_is_the_allocation_of_its_weights():
    w = nesterov_weights(50)
    for mechanism in ("gaussian", "laplace"):
        actual = schedules.nesterov_optimal(**NESTEROV, steps=50, mechanism=mechanism)
        expected = schedules.allocate(w, mechanism)
        np.testing.assert_allclose(actual.values, expected.values, rtol=1e-5)
        assert np.all(np.diff(actual.values) < 0)  # the budget goes to late steps


def test_nesterov_optimal_chooses_the_number_of_steps_of_the_specification():
    """numbers.md: from the formula 100/106/106/106, as in the authors' code 100/136/136/136."""
    kwargs = {"mechanism": "laplace", "initial_error": 10.0, "noise_cost": 20 * 40**2 / 1e10}
    mu, big = 0.02, 5.1001
    for authors, expected in ((False, [100, 106, 106, 106]), (True, [100, 136, 136, 136])):
        found = [
            schedules.nesterov_optimal(mu, big, 1 / big, T, authors=authors, **kwargs).length
            for T in (100, 200, 500, 1000)
        ]
        assert found == expected


def test_multistage_optimal_gives_more_to_late_steps_of_a_stage_and_less_at_its_change():
    schedule = schedules.multistage_optimal(0.02, 5.1, 400, mechanism="laplace")
    rises = np.flatnonzero(np.diff(schedule.values) > 0)
    np.testing.assert_array_equal(rises, [88, 224])  # stages of 89 and 4·⌈√255·ln 8⌉ = 136 steps
    assert schedule.length == 400


def test_shares_of_epsilon_go_through_the_amplification():
    q, epsilon, steps = 0.01, 1.0, 50
    schedule = schedules.nesterov_optimal(
        **NESTEROV, steps=steps, mechanism="laplace", epsilon=epsilon, sampling_probability=q
    )
    sampling = Sampling.without_replacement(1000, 10)
    optimizer = DPSGD(clip_norm=1.0, batch_size=10, noise="laplace", noise_schedule=schedule)
    multiplier = dp.accounting.calibrate(optimizer, sampling, steps, epsilon, 0)
    per_step = np.log1p(q * np.expm1(2 / (multiplier * schedule.values.astype(float))))
    w = nesterov_weights(steps)
    np.testing.assert_allclose(per_step, epsilon * w ** (1 / 3) / np.sum(w ** (1 / 3)), rtol=1e-3)


# Accounting.


@pytest.mark.parametrize(
    ("sampling", "event"),
    [
        (
            Sampling.poisson(1000, 10),
            lambda s: dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(s)),
        ),
        (Sampling.full(10), dp_accounting.GaussianDpEvent),
    ],
)
def test_unequal_steps_are_composed_one_by_one(sampling, event):
    schedule = schedules.inverse_root_step_size(InverseRoot(), 30)
    optimizer = DPSGD(clip_norm=1.0, batch_size=10, noise_multiplier=1.3, noise_schedule=schedule)
    accountant = dp_accounting.rdp.RdpAccountant()
    for alpha in schedule.values:
        accountant.compose(event(1.3 * float(alpha)))
    actual = dp.accounting.epsilon(optimizer, sampling, 30, 1e-5, "rdp")
    assert actual == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)


def test_thousands_of_distinct_steps_are_bracketed():
    schedule = schedules.inverse_root_step_size(InverseRoot(), 3000)
    optimizer = DPSGD(clip_norm=1.0, batch_size=256, noise_multiplier=40.0, noise_schedule=schedule)
    sampling = Sampling.full(256)  # quick to price
    ledger = dp.accounting.Ledger.of(optimizer, sampling, 3000)
    lower, upper = ledger.epsilon_bracket(1e-5)
    exact = dp.accounting.epsilon(optimizer, sampling, 3000, 1e-5, exact=True)
    assert lower < exact < upper
    assert upper / lower < 1.02
    assert upper == ledger.epsilon(1e-5)
    assert "epsilon would lie between" in " ".join(ledger.statement(1e-5).split())
    few = dp.accounting.Ledger.of(optimizer, sampling, 300)
    assert few.epsilon_bracket(1e-5) == (few.epsilon(1e-5),) * 2
    assert "would lie between" not in few.statement(1e-5)


@pytest.mark.representatives(0)
def test_39200_distinct_poisson_steps():
    schedule = schedules.inverse_root_step_size(InverseRoot(), 39_200)
    optimizer = DPSGD(clip_norm=1.0, batch_size=256, noise_multiplier=4.0, noise_schedule=schedule)
    ledger = dp.accounting.Ledger.of(optimizer, Sampling.poisson(50_000, 256), 39_200)
    lower, upper = ledger.epsilon_bracket(1e-5)
    assert 0 < lower < upper < 1.02 * lower


@pytest.mark.parametrize(
    ("noise", "sampling", "delta", "accountant"),
    [
        ("gaussian", Sampling.poisson(50_000, 256), 1e-5, "rdp"),
        ("gaussian", Sampling.full(256), 1e-5, "pld"),
        ("laplace", Sampling.without_replacement(50_000, 256), 0, "rdp"),
    ],
)
def test_calibrates_the_overall_scale(noise, sampling, delta, accountant):
    schedule = schedules.inverse_root_step_size(InverseRoot(), 40, noise)

    def optimizer(multiplier=None):
        return DPSGD(
            clip_norm=1.0, batch_size=256, noise_multiplier=multiplier, noise=noise,
            noise_schedule=schedule,
        )  # fmt: skip

    def spent(multiplier):
        return dp.accounting.epsilon(optimizer(multiplier), sampling, 40, delta, accountant)

    found = dp.accounting.calibrate(optimizer(), sampling, 40, 1.0, delta, accountant)
    assert spent(found) <= 1.0 < spent(found * (1 - 1.5e-4))


# ADP-SGD.


def test_adp_sgd_equals_its_transcription():
    optimizer = ADPSGD(InverseRoot(), 6, **lr.PRIVATE)
    trained, noise = lr.train(lr.build(optimizer), 6)
    rates = 1 / np.sqrt(20 + np.arange(6))
    alphas = rates**-0.5
    alphas *= np.sqrt(np.mean(alphas**-2))
    w = lr.START
    for t in range(6):
        w = w - rates[t] * lr.privatized(w, noise.flat(t), sigma=lr.SIGMA * alphas[t])
        np.testing.assert_allclose(trained[t], w, atol=1e-5)


def test_adp_adagrad_norm_equals_its_transcription():
    private = lr.PRIVATE | {"noise_multiplier": 5.0}
    optimizer = ADPAdagradNorm(0.5, steps=8, growth=0.1, initial=2.0, floor=1e-4, **private)
    trained, noise = lr.train(lr.build(optimizer), 8)
    alphas = (2.0 + 0.1 * np.arange(1, 9)) ** 0.25
    alphas *= np.sqrt(np.mean(alphas**-2))
    w, square, floored = lr.START, 2.0, 0
    for t in range(8):
        sigma = 5.0 * alphas[t]
        g = lr.privatized(w, noise.flat(t), sigma=sigma)
        excess = g @ g - lr.SIZE * (sigma * lr.CLIP / lr.BATCH) ** 2
        floored += excess < 1e-4
        square += max(excess, 1e-4)
        w = w - 0.5 * g / math.sqrt(square)
        np.testing.assert_allclose(trained[t], w, atol=1e-5)
    assert 0 < floored < 8  # both cases came up


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_adp_optimizers_save_and_load(noise, tmp_path):
    for optimizer in (
        ADPSGD(InverseRoot(), 10, noise=noise, momentum=0.5, **lr.PRIVATE),
        ADPAdagradNorm(steps=10, noise=noise, **lr.PRIVATE),
    ):
        model = lr.build(optimizer)
        model.train_on_batch(lr.X, lr.Y)
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras").optimizer
        assert type(loaded) is type(optimizer)
        assert loaded.noise_schedule == optimizer.noise_schedule
        assert int(loaded.iterations) == 1 and loaded.steps == 10


def test_training_past_the_schedule_is_refused():
    model = lr.build(ADPSGD(InverseRoot(), 2, **lr.PRIVATE))
    lr.train(model, 2)
    with pytest.raises(ValueError, match="end of the noise schedule"):
        model.train_on_batch(lr.X, lr.Y)


def test_theorem_4_1_and_advanced_composition():
    for epsilon, expected in ((0.8, 8.50), (1.2, 5.66), (1.6, 4.25)):  # numbers.md
        found = composition.adp_noise_multiplier(16 * epsilon, 1e-5, 50_000, 256, np.ones(11_700))
        assert found == pytest.approx(expected, abs=0.005)
    epsilon, delta = composition.advanced_composition([0.1, 0.2], [1e-6, 2e-6], 1e-5)
    expected = math.sqrt(2 * math.log(1e5) * 0.05)
    expected += sum(e * (math.exp(e) - 1) / (math.exp(e) + 1) for e in (0.1, 0.2))
    assert epsilon == pytest.approx(expected)
    assert delta == pytest.approx(1 - (1 - 1e-6) * (1 - 2e-6) + 1e-5)
    with pytest.warns(FutureWarning, match="accounting.composition.adp_noise_multiplier"):
        assert dp.accounting.adp_noise_multiplier is composition.adp_noise_multiplier


# Errors.


def test_step_sizes_must_stay_above_zero():
    assert ADPSGD(Falling(), 10, **lr.PRIVATE).noise_schedule.length == 10
    with pytest.raises(ValueError, match="step size is 0 at step 10"):
        ADPSGD(Falling(), 11, **lr.PRIVATE)
    with pytest.raises(ValueError, match="step size is -"):
        schedules.inverse_root_step_size(-0.1, 3)


@pytest.mark.parametrize("w", [[], [1.0, 0.0], [1.0, -1.0], [1.0, np.inf], [[1.0]]])
def test_weights_must_be_positive(w):
    with pytest.raises(ValueError):
        schedules.allocate(w)


def test_what_is_not_fixed_in_advance_is_refused():
    with pytest.raises(ValueError, match="from_function"):
        DPSGD(noise_schedule=lambda t: 1.0, **lr.PRIVATE)
    with pytest.raises(ValueError, match="known in advance"):
        ADPSGD(lambda: 0.1, 5, **lr.PRIVATE)
    with pytest.raises(ValueError, match="its own noise schedule"):
        ADPSGD(0.1, 5, noise_schedule=[1.0] * 5, **lr.PRIVATE)
    with pytest.raises(ValueError, match="floor must be positive"):
        ADPAdagradNorm(steps=3, floor=0.0, **lr.PRIVATE)


def test_smoothness_is_at_least_strong_convexity():
    with pytest.raises(ValueError):
        schedules.nesterov_optimal(2.0, 1.0, 0.1, 10)
    with pytest.raises(ValueError):
        schedules.multistage_optimal(2.0, 1.0, 10)


def test_the_number_of_steps_needs_both_guesses():
    with pytest.raises(ValueError, match="both"):
        schedules.nesterov_optimal(**NESTEROV, steps=10, initial_error=1.0)
    with pytest.raises(ValueError, match="Laplace"):
        schedules.nesterov_optimal(**NESTEROV, steps=10, epsilon=1.0, sampling_probability=0.1)
