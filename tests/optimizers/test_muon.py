"""DP-Muon: against NumPy, against Keras's own, and how much of the noise's bias is left."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.optimizers import DPSGD, DPMuon, DPOptimizer
from tests.optimizers import test_private_optimizer as plain
from tests.optimizers.test_private_optimizer import (
    BATCH,
    FEATURES,
    OUTPUTS,
    KnownNoise,
    assert_same,
    batches,
    linear,
    orthogonalized,
    privatized,
    weights_of,
)

CLIP_NORM, SIGMA = 0.7, 1.3
PRIVATE = {"clip_norm": CLIP_NORM, "noise_multiplier": SIGMA, "batch_size": BATCH}


def probe(step, index, shape, jit_compile):
    """z of a step, as the docstring says: drawn from its number and that of the variable."""

    @tf.function(jit_compile=jit_compile)  # XLA makes other normals of the same bits
    def drawn(seed):
        return tf.random.stateless_normal(shape, seed, alg="philox")

    return drawn(tf.constant([step, index])).numpy().astype(float)


def corrected(matrix, power, z):
    shift = np.sqrt(power) * z
    both = orthogonalized(matrix + shift) + orthogonalized(matrix - shift)
    return 2 * orthogonalized(matrix) - both / 2


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("schedule", [None, [1.0, 0.5, 2.0, 0.25]], ids=["constant", "schedule"])
def test_the_corrected_step_is_the_formula(jit_compile, nesterov, schedule):
    """The variance of the noise in the momentum is summed over the steps, each with its own."""
    eta, mu = 0.05, 0.8
    optimizer = DPMuon(
        eta, mu, nesterov, True, rms_rate=None, noise=KnownNoise(), noise_schedule=schedule,
        weight_decay=0.1, **PRIVATE,
    )  # fmt: skip
    model = linear(optimizer, jit_compile=jit_compile)
    w = weights_of(model)
    momentum, m, v = 0 * w[0], 0 * w[1], 0 * w[1]
    taus = SIGMA * CLIP_NORM / BATCH * np.array(schedule or [1.0] * 4)
    for t, (x, y) in enumerate(batches(4), 1):
        kernel, bias = privatized(w, x, y, CLIP_NORM, SIGMA * (schedule or [1.0] * 4)[t - 1])
        momentum = mu * momentum + kernel
        matrix = kernel + mu * momentum if nesterov else momentum
        # How much of the noise of each step so far is in `matrix`.
        shares = mu ** np.arange(t)[::-1]
        if nesterov:
            shares = mu * shares
            shares[-1] += 1
        power = np.sum((shares * taus[:t]) ** 2)
        direction = corrected(matrix, power, probe(t - 1, 0, matrix.shape, jit_compile))
        m, v = 0.9 * m + 0.1 * bias, 0.999 * v + 0.001 * bias**2
        rate = eta * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        w = [
            w[0] - eta * 0.1 * w[0] - eta * direction,
            w[1] - eta * 0.1 * w[1] - rate * m / (np.sqrt(v) + 1e-7),
        ]
        model.train_on_batch(x, y)
        assert_same(weights_of(model), w, rtol=1e-4)
        w = weights_of(model)  # O has a slope of 480 at 0: rounding would grow from step to step


def mean_directions(matrix, noise, draws, seed=0):
    """(plain, corrected): the mean over noise of the two directions, in float64."""
    rng = np.random.default_rng(seed)
    sums = np.zeros((2, *matrix.shape))
    for _ in range(draws):
        half = noise * rng.normal(size=matrix.shape), noise**2
        for sign in (1, -1):  # antithetic: what is odd in the noise falls out
            noisy = matrix + sign * half[0]
            sums[0] += orthogonalized(noisy)
            sums[1] += corrected(noisy, half[1], rng.normal(size=matrix.shape))
    return sums / (2 * draws)


def test_the_correction_takes_off_the_first_term_of_the_bias():
    """At four times the variance the plain bias is four times as large; what is left is of higher
    order. Seeds are fixed; the error of the means is below a twentieth of the plain bias."""
    rng = np.random.default_rng(1)
    left, _, right = np.linalg.svd(rng.normal(size=(4, 6)), full_matrices=False)
    matrix = left @ np.diag([1.0, 0.8, 0.6, 0.5]) @ right
    biases = {}
    for noise in (0.005, 0.01):
        means = mean_directions(matrix, noise, 1000)
        biases[noise] = np.linalg.norm(means - orthogonalized(matrix), axis=(1, 2))
    (plain_small, left_small), (plain_large, left_large) = biases.values()
    assert 3.5 < plain_large / plain_small < 4.5
    assert left_small < plain_small / 8 and left_large < plain_large / 8


@pytest.mark.parametrize("nesterov", [False, True])
def test_without_correction_it_is_the_wrapped_muon_of_keras(nesterov):
    from keras.optimizers import Muon

    arguments = {"nesterov": nesterov, "momentum": 0.8}
    inner = Muon(0.05, weight_decay=0.1, adam_weight_decay=0.1, **arguments)
    models = [
        linear(DPMuon(0.05, weight_decay=0.1, noise=KnownNoise(), **arguments, **PRIVATE)),
        linear(DPOptimizer(inner, noise=KnownNoise(), **PRIVATE)),
    ]
    for x, y in batches(4):
        for model in models:
            model.train_on_batch(x, y)
        assert_same(*map(weights_of, models), rtol=1e-4)


def test_without_noise_there_is_nothing_to_correct():
    models = [linear(DPMuon(0.05, bias_correction=bc, **plain.NO_PRIVACY)) for bc in (False, True)]
    for x, y in batches(4):
        for model in models:
            model.train_on_batch(x, y)
        assert_same(*map(weights_of, models))


@pytest.mark.parametrize("settings", [
    {"normalize": True}, {"clipping": "per_layer"}, {"geometry": dp.geometries.Mean(0.5)},
    {"clip_norm": dp.clipping.Quantile(0.5, initial=0.7, count_noise=2.6)}, {"noise": "laplace"},
    {"geometry": dp.geometries.AdaClip()}, {"geometry": dp.geometries.GeoClip(2)},
], ids=str)  # fmt: skip
def test_the_power_is_that_of_the_noise(settings):
    """What it takes for the variance of the noise is what `Released` says of it."""
    optimizer = DPMuon(0.05, 0.5, False, True, seed=0, **PRIVATE | settings)
    model = linear(optimizer)
    stds = []
    original = optimizer._answer

    def seen(released):
        answer = original(released)
        std = answer.noise_std
        stds.append(np.asarray(std[0] if isinstance(std, list) else std, float))
        return answer

    optimizer._answer = seen
    model.run_eagerly = True
    power = 0.0
    for x, y in batches(3):
        model.train_on_batch(x, y)
        power = 0.25 * power + stds[-1] ** 2
        found = optimizer._noise_powers[0].numpy()
        assert found.shape in ((), (FEATURES, OUTPUTS)) and np.all(found > 0)
        np.testing.assert_allclose(found, np.broadcast_to(power, found.shape), rtol=1e-4)


def test_a_saved_optimizer_goes_on(tmp_path):
    models = [linear(DPMuon(0.05, bias_correction=True, seed=0, **PRIVATE)) for _ in range(2)]
    parts = list(batches(4))
    for x, y in parts[:2]:
        models[0].train_on_batch(x, y)
    models[0].save(tmp_path / "model.keras")
    loaded = plain.keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == models[0].optimizer.get_config()
    power = float(loaded.optimizer._noise_powers[0])
    assert power == float(models[0].optimizer._noise_powers[0]) > 0


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"noise": dp.noise.BandedMatrix(4, 2)}, "noise=BandedMatrix"),
        ({"gradient_filter": "f1"}, "gradient_filter=LowPass"),
    ],
    ids=["banded", "filter"],
)
def test_what_links_the_noise_of_steps_is_refused_beside_the_correction(settings, what):
    with pytest.raises(ValueError, match=f"independent from step to step.*{what}"):
        DPMuon(0.05, bias_correction=True, **settings, **PRIVATE)


def test_planned_noise_is_refused_where_it_comes_out_correlated():
    x, y = plain.data(60)
    optimizer = DPMuon(0.05, bias_correction=True, noise="planned", **PRIVATE)
    model = linear(optimizer)
    with pytest.raises(ValueError, match="independent from step to step"):
        model.fit(dp.data.cyclic_poisson((x, y), BATCH, groups=2), verbose=0)
    optimizer = DPMuon(0.05, bias_correction=True, noise="planned", **PRIVATE)
    linear(optimizer).fit(dp.data.poisson_batches((x, y), BATCH), verbose=0)
    assert isinstance(optimizer.noise, dp.noise.Gaussian)


def test_arguments():
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\)"):
        DPMuon(0.05, 1.0, **PRIVATE)
    assert DPMuon(**PRIVATE).has_momentum and not DPMuon(0.1, 0.0, **PRIVATE).has_momentum
    assert not DPSGD(**PRIVATE).has_momentum


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_half_precision_move_as_others(dtype, bias_correction):
    """Also by gradients whose squares half precision does not have."""
    moved = []
    for policy in ("float32", dtype):
        inputs = keras.Input((6,), dtype=policy)
        outputs = keras.layers.Dense(4, kernel_initializer="zeros", dtype=policy)(inputs)
        private = PRIVATE | {"clip_norm": 1e-4, "noise_multiplier": 0.0}
        model = dp.DPModel(inputs, outputs)
        model.compile(DPMuon(0.1, 0.5, True, bias_correction, **private), "mse", jit_compile=False)
        model.sampling = dp.accounting.Sampling.full(BATCH)
        rng = np.random.default_rng(0)
        model.train_on_batch(rng.normal(size=(BATCH, 6)), rng.normal(size=(BATCH, 4)))
        moved.append(np.asarray(tf.cast(model.trainable_variables[0].value, "float32")))
    np.testing.assert_allclose(moved[1], moved[0], atol=0.2 * np.abs(moved[0]).max())
