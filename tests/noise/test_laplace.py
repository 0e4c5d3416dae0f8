"""Laplace noise and pure epsilons: the draws, the L1 bound, the sums, and PLD."""

import math

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import dp_keras_opt as dp
from dp_keras_opt.accounting import Ledger, Sampling
from dp_keras_opt.noise import Gaussian, Laplace, Release
from dp_keras_opt.noise.laplace import LAPLACE as LAPLACE_DRAWS
from dp_keras_opt.noise.source import NoiseSource
from dp_keras_opt.optimizers import DPSGD, DPAdam
from tests.helpers import linear_regression as lr

LAPLACE = lr.PRIVATE | {"noise": "laplace"}


def sgd(multiplier=1.0, batch_size=10, **kwargs):
    return DPSGD(
        0.1, clip_norm=1.0, batch_size=batch_size, noise_multiplier=multiplier, noise="laplace",
        **kwargs,
    )  # fmt: skip


# The noise.


def test_draws_are_laplace():
    draws = NoiseSource().draw(LAPLACE_DRAWS, (200_000,)).numpy()
    # Kolmogorov's distance exceeds this once in a million runs.
    assert stats.kstest(draws, "laplace").statistic < 1.95 * math.sqrt(2) / math.sqrt(200_000)
    assert np.isfinite(draws).all()
    assert np.abs(draws).max() > 9  # of 200,000, the largest is beyond 9 but once in e^{24} runs


@pytest.mark.parametrize("jit_compile", [False, True])
def test_draws_in_graphs_are_fresh(jit_compile):
    source = NoiseSource()
    draw = tf.function(lambda: source.draw(LAPLACE_DRAWS, (1000,)), jit_compile=jit_compile)
    first, second = draw().numpy(), draw().numpy()
    assert not np.any(first == second)
    assert np.mean(np.abs(first)) == pytest.approx(1.0, abs=0.2)  # six standard errors


def test_the_tail_goes_beyond_that_of_single_precision():
    source = NoiseSource()
    source.words = lambda *shape: tf.fill(shape, tf.constant(-1, tf.int64))
    assert abs(float(source.draw(LAPLACE_DRAWS, ())) - 64 * math.log(2)) < 1e-5


def noise_scale(optimizer, dimension=3000, steps=12):
    """Scale of the noise in the sum, measured: the mean magnitude of updates without gradients."""
    inputs = keras.Input((dimension,))
    model = dp.DPModel(inputs, keras.layers.Dense(1, use_bias=False)(inputs))
    model.compile(optimizer, "mse")
    model.sampling = Sampling.poisson(1000, optimizer.batch_size)
    x, y = np.zeros((4, dimension), "float32"), np.zeros((4, 1), "float32")
    before, moves = model.get_weights()[0], []
    for _ in range(steps):
        model.train_on_batch(x, y)
        moves.append(model.get_weights()[0] - before)
        before = model.get_weights()[0]
    return np.mean(np.abs(moves)) * optimizer.batch_size / 0.1


def test_the_noise_that_is_added_has_the_scale_that_is_accounted():
    """36,000 draws: the standard error of the mean magnitude is 0.5%."""
    measured = noise_scale(
        DPSGD(0.1, clip_norm=0.3, batch_size=10, noise_multiplier=2.0, noise="laplace")
    )
    for factor, matches in ((1.0, True), (2 / 3, False), (1.5, False)):
        assert bool(abs(measured / (2.0 * 0.3 * factor) - 1) < 0.05) is matches


def test_examples_are_bounded_in_l1():
    sizes = []
    for rows in (lr.X, lr.X[1:]):
        optimizer = sgd(0.0, lr.BATCH)
        model = lr.build(optimizer)
        batch = rows, lr.Y[-len(rows) :]
        sums = dp.clipping.clipped_sums(model, batch, optimizer.queries()).sums[0]
        sizes.append(lr.flat(sums))
    gradient = lr.gradients(lr.START)[0]
    bound = min(1.0, 1.0 / np.abs(gradient).sum())
    np.testing.assert_allclose(sizes[0] - sizes[1], bound * gradient, atol=1e-5)
    assert np.abs(sizes[0] - sizes[1]).sum() <= 1 + 1e-5 and bound < 1


def test_the_step_equals_its_transcription():
    optimizer = DPSGD(0.1, **LAPLACE)
    model = lr.build(optimizer)
    noise = lr.FixedNoise(optimizer, 3)
    object.__setattr__(optimizer, "noise_source", noise)
    w = lr.START
    for t in range(3):
        model.train_on_batch(lr.X, lr.Y)
        gradients = lr.gradients(w)
        factors = np.minimum(1, lr.CLIP / np.abs(gradients).sum(axis=1))
        total = (factors[:, None] * gradients).sum(axis=0)
        w = w - 0.1 * (total + lr.SIGMA * lr.CLIP * noise.flat(t)) / lr.BATCH
    np.testing.assert_allclose(lr.flat(model.trainable_variables), w, atol=1e-5)


def test_bias_correction_takes_off_the_variance_of_laplace_noise():
    optimizer = DPAdam(second_moment="bias_corrected", **LAPLACE)
    model = lr.build(optimizer)
    model.train_on_batch(lr.X, lr.Y)
    variance = 2 * (lr.SIGMA * lr.CLIP / lr.BATCH) ** 2
    assert float(optimizer.second_moment._power) == pytest.approx(0.001 * variance, rel=1e-4)


# Epsilon.


def test_full_batches_add_up():
    sampling = Sampling.full(100)
    optimizer = sgd(4.0, batch_size=100)
    assert dp.accounting.epsilon(optimizer, sampling, 10, delta=0) == pytest.approx(10 / 4)
    assert dp.accounting.epsilon(optimizer, sampling, 10, 1e-5, "rdp") == pytest.approx(10 / 4)


def test_amplification_by_sampling():
    """ln(1 + q(e^{ε₀} − 1)); a replaced example moves the sum by 2C."""
    q, steps = 10 / 1000, 50
    poisson = Sampling.poisson(1000, 10)
    subsets = Sampling.without_replacement(1000, 10)
    replaced = Sampling.poisson(1000, 10, "replace_one")
    for sampling, factor in ((poisson, 1), (subsets, 2), (replaced, 2)):
        expected = steps * math.log(1 + q * (math.exp(factor / 2.0) - 1))
        actual = dp.accounting.epsilon(sgd(2.0), sampling, steps, delta=0)
        assert actual == pytest.approx(expected), sampling


def test_tiny_noise_does_not_overflow():
    actual = dp.accounting.epsilon(sgd(1e-4), Sampling.poisson(1000, 10), 1, delta=0)
    assert actual == pytest.approx(1e4 + math.log(0.01))


def test_amplification_bounds_what_a_sample_reveals():
    """An adversary's likelihood ratio in one dimension, over a fine grid of outputs."""
    q, scale = 0.2, 0.7
    outputs = np.linspace(-20, 20, 4001)
    density = stats.laplace(scale=scale)
    without = density.pdf(outputs)
    sampled = (1 - q) * without + q * density.pdf(outputs - 1)
    ratio = np.max(np.abs(np.log(sampled / without)))
    claimed = dp.accounting.epsilon(sgd(scale), Sampling.poisson(50, 10), 1, delta=0)
    assert ratio <= claimed + 1e-9
    assert claimed == pytest.approx(math.log(1 + q * (math.exp(1 / scale) - 1)))
    assert ratio == pytest.approx(claimed, rel=1e-6)  # and it is attained


def test_shuffled_epochs_cost_one_release_each():
    sampling = Sampling.shuffled(100, 10)
    assert dp.accounting.epsilon(sgd(4.0), sampling, 25, delta=0) == pytest.approx(3 * 2 / 4)


def test_pld_equals_dp_accounting_and_is_tighter():
    sampling = Sampling.poisson(1000, 10)
    accountant = dp_accounting.pld.PLDAccountant()
    event = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.LaplaceDpEvent(2.0))
    expected = accountant.compose(event, 300).get_epsilon(1e-5)
    actual = dp.accounting.epsilon(sgd(2.0), sampling, 300, delta=1e-5, accountant="pld")
    assert actual == pytest.approx(expected, rel=1e-5)
    assert actual < dp.accounting.epsilon(sgd(2.0), sampling, 300, 1e-5, "pure")


@settings(max_examples=20, deadline=None)
@given(st.floats(0.05, 0.95), st.floats(0.3, 3.0), st.floats(0.0, 2.0))
def test_one_coordinate_is_the_worst_case_in_l1(share, scale, threshold):
    """δ(ε) of a shift shared by two coordinates is at most that of all of it in one."""

    def shifted(shift):  # values of the privacy loss and their probabilities, finely binned
        edges = np.linspace(-40, 40, 8001)
        middles = (edges[1:] + edges[:-1]) / 2
        weights = np.diff(stats.laplace.cdf(edges, loc=0, scale=scale))
        loss = (np.abs(middles - shift) - np.abs(middles)) / scale
        return loss, weights

    def delta(loss, weights):
        return np.sum(weights * np.maximum(0, 1 - np.exp(threshold - loss)))

    whole = delta(*shifted(1.0))
    (a, p), (b, q) = (
        np.histogram(loss, 400, weights=weights)[::-1]
        for loss, weights in (shifted(share), shifted(1 - share))
    )
    a, b = (a[1:] + a[:-1]) / 2, (b[1:] + b[:-1]) / 2
    both = delta((a[:, None] + b).ravel(), (p[:, None] * q).ravel())
    assert both <= whole + 0.01 / scale


def test_unequal_noise_is_composed_step_by_step():
    alphas = [1.0, 2.0, 0.5, 4.0]
    sampling = Sampling.poisson(1000, 10)
    expected = sum(math.log(1 + 0.01 * (math.exp(1 / (1.5 * a)) - 1)) for a in alphas)
    optimizer = sgd(1.5, noise_schedule=alphas)
    assert dp.accounting.epsilon(optimizer, sampling, 4, delta=0) == pytest.approx(expected)


def test_laplace_and_gaussian_segments_are_added():
    sampling = Sampling.poisson(1000, 10)

    def ledger(*mechanisms):
        result = Ledger()
        for mechanism in mechanisms:
            result.begin((Release(0, "mean", 2.0, mechanism),), sampling)
            result.reserve(20)
        return result

    both = ledger(Laplace(), Gaussian()).epsilon(1e-5, "rdp")
    parts = ledger(Laplace()).epsilon(0), ledger(Gaussian()).epsilon(1e-5, "rdp")
    assert both == pytest.approx(sum(parts))
    with pytest.raises(ValueError, match="all have Laplace noise"):
        ledger(Laplace(), Gaussian()).epsilon(0)


@pytest.mark.parametrize("sampling", [Sampling.full(10), Sampling.without_replacement(1000, 10)])
def test_calibrates_to_delta_zero(sampling):
    optimizer = sgd(None)
    multiplier = dp.accounting.calibrate(optimizer, sampling, 30, epsilon=1.0, delta=0)
    spent = dp.accounting.epsilon(optimizer, sampling, 30, delta=0)
    assert 0.999 < spent <= 1.0
    optimizer = sgd(multiplier * 0.99)
    assert dp.accounting.epsilon(optimizer, sampling, 30, delta=0) > 1.0


def test_calibrates_by_pld():
    optimizer, sampling = sgd(None), Sampling.poisson(1000, 10)
    multiplier = dp.accounting.calibrate(optimizer, sampling, 200, 1.0, 1e-5, accountant="pld")
    spent = dp.accounting.epsilon(optimizer, sampling, 200, 1e-5, accountant="pld")
    assert 0.999 < spent <= 1.0
    assert multiplier < dp.accounting.calibrate(sgd(None), sampling, 200, 1.0, 1e-5, "pure")


def test_training_reports_pure_epsilons(tmp_path):
    model = lr.build(DPSGD(0.1, **LAPLACE), run_eagerly=False)
    for _ in range(3):
        model.train_on_batch(lr.X, lr.Y)
    q = lr.BATCH / 100
    expected = 3 * math.log(1 + q * (math.exp(1 / lr.SIGMA) - 1))
    assert model.ledger.epsilon(0) == pytest.approx(expected)
    text = " ".join(model.ledger.statement(delta=0).split())
    assert "delta = 0." in text and "sums of pure epsilons" in text and "Laplace noise" in text
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.ledger.epsilon(0) == pytest.approx(expected)
    assert isinstance(loaded.optimizer.noise, Laplace)


# Errors.


def test_delta_zero_needs_laplace():
    gaussian = DPSGD(clip_norm=1.0, batch_size=10, noise_multiplier=1.0)
    sampling = Sampling.poisson(1000, 10)
    with pytest.raises(ValueError, match="all have Laplace noise"):
        dp.accounting.epsilon(gaussian, sampling, 1, delta=0)
    with pytest.raises(ValueError, match="all have Laplace noise"):
        dp.accounting.calibrate(gaussian, sampling, 1, epsilon=1.0, delta=0)
    with pytest.raises(ValueError, match="'pure' cannot price"):
        dp.accounting.epsilon(gaussian, sampling, 1, delta=1e-5, accountant="pure")
    with pytest.raises(ValueError, match="number in"):
        dp.accounting.epsilon(sgd(), sampling, 1, delta=0, accountant="pld")


def test_pld_does_not_price_subsets():
    with pytest.raises(ValueError, match="cannot price 'without_replacement' sampling"):
        dp.accounting.epsilon(
            sgd(), Sampling.without_replacement(1000, 10), 1, 1e-5, accountant="pld"
        )


@pytest.mark.parametrize(
    "second_moment", ["independent", dp.optimizers.moments.Joint(1.0, max_batch_size=20)]
)
def test_joint_moments_need_gaussian_noise(second_moment):
    with pytest.raises(ValueError, match="Gaussian"):
        DPAdam(second_moment=second_moment, **LAPLACE)


def test_adding_examples_to_subsets_is_refused():
    with pytest.raises(ValueError, match="displaces another"):
        Sampling.without_replacement(1000, 10, "add_or_remove_one")


def test_data_that_are_not_sampled_as_calibrated_are_refused():
    optimizer = DPSGD(0.1, clip_norm=1.0, batch_size=lr.BATCH, noise="laplace")
    subsets = Sampling.without_replacement(100, lr.BATCH)
    dp.accounting.calibrate(optimizer, subsets, 10, epsilon=1.0, delta=0)
    model = lr.build(DPSGD(0.1, **LAPLACE))
    model.compile(optimizer, "mse")
    with pytest.raises(ValueError, match="calibrated for"):
        model.fit(dp.data.poisson_batches((lr.X.repeat(20, 0)[:100], lr.Y.repeat(20, 0)[:100]),
                                          lr.BATCH, steps_per_epoch=2))  # fmt: skip
