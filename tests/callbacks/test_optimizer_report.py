"""What `OptimizerReport` writes: figures computed from released values alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.callbacks import OptimizerReport
from dp_keras_opt.optimizers import DPSGD, AdaDPS, DP2RMSprop, DPAdam, SubspaceAdagrad, moments
from tests.helpers import linear_regression as linear
from tests.helpers.linear_regression import BATCH, CLIP, PRIVATE, SAMPLING, SIGMA, SIZE, X, Y

STEPS = 5


def report_of(optimizer, steps=STEPS, draws=1, epochs=1, fixed=True, **options):
    """The logs of an epoch on the oracle's batch, and the noise that was fed."""
    model = linear.build(optimizer, **options)
    fed = linear.FixedNoise(optimizer, 400, draws)
    if fixed:
        object.__setattr__(optimizer, "noise_source", fed)
    data = dp.data.assume_sampling(tf.data.Dataset.from_tensors((X, Y)).repeat(steps), SAMPLING)
    history = model.fit(data, epochs=epochs, verbose=0, callbacks=[OptimizerReport()])
    return history.history, fed, model


@pytest.mark.parametrize("options", [{}, {"run_eagerly": False, "jit_compile": True}])
def test_gradient_norm_is_the_root_of_the_mean_square_less_the_noise(options):
    logs, fed, _ = report_of(DPSGD(0.0, **PRIVATE), **options)
    squares = [
        np.sum(linear.privatized(linear.START, fed.flat(t)) ** 2)
        - SIZE * (SIGMA * CLIP / BATCH) ** 2
        for t in range(STEPS)
    ]
    expected = np.sqrt(max(0.0, np.mean(squares))) / CLIP
    np.testing.assert_allclose(logs["gradient_norm"], [expected], rtol=1e-4)
    assert set(logs) == {"loss", "gradient_norm", "noise_to_signal"}


@pytest.mark.parametrize("sigma", [0.05, SIGMA, 50.0])
def test_noise_to_signal_is_the_norm_of_the_noise_over_the_estimate(sigma):
    """From hardly any noise to so much that the estimated norm is 0."""
    logs, fed, _ = report_of(DPSGD(0.0, **PRIVATE | {"noise_multiplier": sigma}))
    noise = SIZE * (sigma * CLIP / BATCH) ** 2
    mean = linear.clipped_sum(linear.START, CLIP) / BATCH
    released = [mean + sigma * CLIP / BATCH * fed.flat(t) for t in range(STEPS)]
    signal = np.mean([np.sum(g**2) for g in released]) - noise
    assert (signal < 0) == (sigma == 50.0)
    expected = np.inf if signal < 0 else np.sqrt(noise / signal)
    np.testing.assert_allclose(logs["noise_to_signal"], [expected], rtol=1e-3)


def test_without_noise_there_is_none_beside_the_signal():
    logs, _, _ = report_of(DPSGD(0.0, **PRIVATE | {"noise_multiplier": 0.0}))
    assert logs["noise_to_signal"] == [0.0]
    assert logs["gradient_norm"][0] > 0


def test_gradient_norm_estimates_that_of_the_clipped_mean():
    """Over 300 steps at a fixed point; six standard errors, so a false alarm in 5e8 runs."""
    logs, _, _ = report_of(DPSGD(0.0, **PRIVATE), steps=300, fixed=False)
    exact = np.sum((linear.clipped_sum(linear.START, CLIP) / BATCH) ** 2)
    variance = (SIGMA * CLIP / BATCH) ** 2
    error = np.sqrt((2 * SIZE * variance**2 + 4 * exact * variance) / 300)
    assert abs((logs["gradient_norm"][0] * CLIP) ** 2 - exact) < 6 * error
    assert exact > 12 * error  # the estimate says something


def test_negative_shares_and_quantiles_are_those_of_the_corrected_second_moment():
    beta = 0.9
    optimizer = DPAdam(0.0, 0.8, beta, 1e-3, second_moment="bias_corrected", **PRIVATE)
    logs, fed, _ = report_of(optimizer, draws=1)
    v = np.zeros(SIZE)
    for t in range(STEPS):
        v = beta * v + (1 - beta) * linear.privatized(linear.START, fed.flat(t)) ** 2
    estimate = v / (1 - beta**STEPS) - (SIGMA * CLIP / BATCH) ** 2
    assert 0 < np.mean(estimate < 0) < 1
    assert logs["negative_v"] == [np.mean(estimate < 0)]
    for name, q in [("v_q05", 0.05), ("v_q50", 0.5), ("v_q95", 0.95)]:
        np.testing.assert_allclose(logs[name], [np.quantile(estimate, q)], rtol=1e-4, atol=1e-8)


def test_joint_moments_show_negative_coordinates_and_post_processing_none():
    source = moments.Independent(max_batch_size=BATCH)
    logs, _, _ = report_of(DPAdam(0.01, second_moment=source, **PRIVATE), draws=2)
    assert logs["negative_v"][0] > 0
    logs, _, _ = report_of(DPAdam(0.01, **PRIVATE))
    assert logs["negative_v"] == [0.0]
    assert logs["v_q05"][0] > 0


def test_every_kind_of_second_moment_is_reported():
    delayed = DP2RMSprop(0.1, 0.1, delay=2, adaptive_clip_norm=1.0, **PRIVATE)
    logs, _, model = report_of(delayed)
    held = np.concatenate([np.ravel(v) for v in model.optimizer.second_moment_estimates])
    np.testing.assert_allclose(logs["v_q95"], [np.quantile(held, 0.95)], rtol=1e-6)
    assert held.max() > 0
    subspace = SubspaceAdagrad(0.1, rank=2, **PRIVATE)
    subspace.build(model.trainable_variables)
    assert [v.shape for v in subspace.second_moment_estimates] == [(4, 3), (3,)]


def test_each_epoch_is_reported_on_its_own_and_a_later_fit_once():
    logs, fed, model = report_of(DPSGD(0.0, **PRIVATE), epochs=2)
    assert len(logs["gradient_norm"]) == 2
    assert logs["gradient_norm"][0] != logs["gradient_norm"][1]
    report = OptimizerReport()
    data = dp.data.assume_sampling(tf.data.Dataset.from_tensors((X, Y)).repeat(2), SAMPLING)
    for _ in range(2):
        model.fit(data, verbose=0, callbacks=[report])
    assert len(model.release_observers) == 2  # the first report's, and this one's
    model.compile(DPSGD(0.0, **PRIVATE), "mse")
    assert model.release_observers == ()


def test_only_released_values_are_seen():
    seen = []
    model = linear.build(DPSGD(0.1, **PRIVATE))
    model.observe_releases(lambda queries, released: seen.append((queries, released)))
    model.train_on_batch(X, Y)
    ((queries, released),) = seen
    assert [type(part).__name__ for part in released] == ["Released"]
    assert [type(query).__name__ for query in queries] == ["Query"]


@pytest.mark.parametrize("optimizer", [DPSGD, DPAdam, AdaDPS])
def test_the_clip_fraction_is_that_of_the_public_examples(optimizer):
    """In the geometry, and at the weights, of the epoch's end; the raw examples do not show."""
    public = X[:3], Y[:3], np.float32([1.0, 0.02, 0.02])  # weights make short gradients
    model = linear.build(optimizer(0.1, **PRIVATE))
    batches = tf.data.Dataset.from_tensors((X, Y)).repeat(2)
    data = dp.data.assume_sampling(batches, SAMPLING)
    if optimizer is AdaDPS:
        data = dp.data.with_public(data, (X, Y))
    report = OptimizerReport(public=public)
    logs = model.fit(data, epochs=2, verbose=0, callbacks=[report]).history
    (scale,) = (q.scale for q in model.optimizer.queries() if q.population == "private")
    norms = dp.clipping.per_example_norms(model, public, scale=scale)
    assert (scale is None) == (optimizer is not AdaDPS)
    assert logs["public_clip_fraction"][-1] == np.mean(norms > CLIP)
    assert norms.min() < CLIP < norms.max()


def test_errors():
    with pytest.raises(ValueError, match="public must be None or a tuple"):
        OptimizerReport(public=[X, Y])
    with pytest.raises(ValueError, match="quantiles"):
        OptimizerReport(quantiles=(0.5, 2.0))
    plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    plain.compile("sgd", "mse")
    with pytest.raises(TypeError, match="DPModel"):
        plain.fit(X, Y, verbose=0, callbacks=[OptimizerReport()])
