"""Filters whose gradients are taken at other points, against transcriptions in float64."""

import keras
import numpy as np
import pytest

import dp_keras_opt as dp
from dp_keras_opt.filters import FFTKF, DiSK, LowPass, SharpnessAware
from dp_keras_opt.optimizers import DPSGD, DPAdam, DPNesterov, DPOptimizer
from tests.helpers import linear_regression as lr

STEPS = 12


def noisy_mean(gradients, z):
    """(Σ clip(g_i; C) + σCz)/B of the gradients that the examples contribute, (rows, 15)."""
    norms = np.linalg.norm(gradients, axis=1)
    assert np.mean(norms > lr.CLIP) > 0.5  # it binds
    total = (np.minimum(1, lr.CLIP / norms)[:, None] * gradients).sum(axis=0)
    return (total + lr.SIGMA * lr.CLIP * z) / lr.BATCH


def disk(noise, kappa, gamma, move, mask=lambda g: g):
    """The published update around any rule; `move(x, g, t)` gives the next weights, `mask` what is
    made of a noisy mean before it is averaged."""
    x, previous, estimate, path = lr.START, lr.START, None, []
    gamma = (1 - kappa) / kappa if gamma is None else gamma
    weight = (1 - kappa) / (kappa * gamma)
    for t in range(STEPS):
        ahead = lr.gradients(x + gamma * (x - previous))
        g = mask(noisy_mean((1 - weight) * lr.gradients(x) + weight * ahead, noise.flat(t)))
        estimate = g if estimate is None else (1 - kappa) * estimate + kappa * g
        previous, x = x, move(x, estimate, t)
        path.append(x)
    return np.array(path)


@pytest.mark.parametrize(("kappa", "gamma"), [(0.7, 0.5), (0.3, 2.0), (0.4, None), (1.0, 0.5)])
@pytest.mark.parametrize("compiled", [False, True])
def test_disk_is_the_published_update(kappa, gamma, compiled):
    optimizer = DPSGD(0.5, gradient_filter=DiSK(kappa, gamma), **lr.PRIVATE)
    model = lr.build(optimizer, run_eagerly=not compiled)
    path, noise = lr.train(model, STEPS)
    expected = disk(noise, kappa, gamma, lambda x, g, t: x - 0.5 * g)
    np.testing.assert_allclose(path, expected, rtol=1e-4, atol=1e-6)


def test_disk_around_adam_gives_it_the_estimate_alone():
    """As published: both moments of the rule that is wrapped are those of the estimate."""
    adam = keras.optimizers.Adam(0.05, epsilon=1e-8)
    model = lr.build(DPOptimizer(adam, gradient_filter=DiSK(0.6, 0.8), **lr.PRIVATE))
    path, noise = lr.train(model, STEPS)
    moments = {"m": 0.0, "v": 0.0}

    def move(x, g, t):
        moments["m"] = 0.9 * moments["m"] + 0.1 * g
        moments["v"] = 0.999 * moments["v"] + 0.001 * g**2
        rate = 0.05 * np.sqrt(1 - 0.999 ** (t + 1)) / (1 - 0.9 ** (t + 1))
        return x - rate * moments["m"] / (np.sqrt(moments["v"]) + 1e-8)

    np.testing.assert_allclose(path, disk(noise, 0.6, 0.8, move), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("kappa", "gamma", "pivot", "suppression", "decay"),
    [
        (0.7, 0.5, 0.5, 0.5, 1.0),
        (0.3, 2.0, 0.0, 0.9, 0.0),
        (0.4, None, 0.25, 0.8, 5.0),
        (1.0, 0.5, 0.9, 0.99, 0.0),
    ],
)
@pytest.mark.parametrize(
    "options", [{}, {"run_eagerly": False}, {"run_eagerly": False, "jit_compile": True}],
    ids=["eager", "graph", "xla"],
)  # fmt: skip
def test_fftkf_is_disk_behind_a_mask(kappa, gamma, pivot, suppression, decay, options):
    """Which is written here on all 15 complex frequencies, that of k and 15 − k the same."""
    smoother = FFTKF(kappa, gamma, pivot, suppression, decay)
    model = lr.build(DPSGD(0.5, gradient_filter=smoother, **lr.PRIVATE), **options)
    path, noise = lr.train(model, STEPS)
    k = np.abs(np.fft.fftfreq(lr.SIZE, 1 / lr.SIZE))  # 0 to 7, and 7 to 1
    first = np.floor(8 * pivot)
    taken = suppression * np.exp(-decay * (k - first) / max(7 - first, 1))
    phi = np.where(k < first, 1.0, 1 - taken)

    def mask(g):
        masked = np.fft.ifft(phi * np.fft.fft(g))
        assert np.abs(masked.imag).max() < 1e-12
        return masked.real

    expected = disk(noise, kappa, gamma, lambda x, g, t: x - 0.5 * g, mask)
    np.testing.assert_allclose(path, expected, rtol=1e-4, atol=1e-6)
    assert not np.allclose(path, disk(noise, kappa, gamma, lambda x, g, t: x - 0.5 * g), 1e-3)


def test_one_point_where_the_weights_fall_out():
    optimizer = DPSGD(0.5, gradient_filter=DiSK(0.4, None), **lr.PRIVATE)
    optimizer.build([keras.Variable(np.zeros(3, "float32"))])
    (query,) = optimizer.queries()
    assert [point.coefficient for point in query.points] == [1.0]
    plain = DPSGD(0.5, gradient_filter=DiSK(1.0), **lr.PRIVATE)
    plain.build([keras.Variable(np.zeros(3, "float32"))])
    assert plain.queries()[0].points is None


def test_in_a_new_subspace_the_estimate_begins_anew():
    """Of a kernel that is projected; the bias beside it goes on."""
    projection = dp.optimizers.GaLore(rank=1, update_gap=2, reset=True)
    smoother = DiSK(0.3, 0.5)
    optimizer = DPSGD(0.5, gradient_filter=smoother, projection=projection, **lr.PRIVATE)
    model = lr.build(optimizer)
    path, noise = lr.train(model, 3)  # the third step is the first in a new subspace
    kernel = optimizer.gradient_filter._estimates[0]
    assert min(kernel.shape) == 1
    ahead = path[1] + 0.5 * (path[1] - path[0])
    weight = 0.7 / (0.3 * 0.5)
    g = noisy_mean(
        (1 - weight) * lr.gradients(path[1]) + weight * lr.gradients(ahead), noise.flat(2)
    )
    matrix = g[:12].reshape(4, 3)
    expected = matrix @ np.linalg.svd(matrix)[2][0]  # along the first of the shorter side's vectors
    np.testing.assert_allclose(
        np.abs(np.asarray(kernel).ravel()), np.abs(expected), rtol=1e-3, atol=1e-5
    )


@pytest.mark.parametrize("then", [None, "momentum"])
def test_sharpness_aware_steps_are_those_of_the_paper(then):
    optimizer = DPSGD(0.5, gradient_filter=SharpnessAware(0.7, then), **lr.PRIVATE)
    path, noise = lr.train(lr.build(optimizer), STEPS)
    x, last, mean, expected = lr.START, np.zeros(lr.SIZE), 0.0, []
    for t in range(STEPS):
        length = np.linalg.norm(last)
        uphill = x + (0.7 * last / length if length else 0.0)
        last = noisy_mean(lr.gradients(uphill), noise.flat(t))
        mean = 0.9 * mean + 0.1 * last
        x = x - 0.5 * (last if then is None else mean / (1 - 0.9 ** (t + 1)))
        expected.append(x)
    np.testing.assert_allclose(path, expected, rtol=1e-4, atol=1e-6)


def test_optimizers_of_one_sharpness_filter_have_buffers_of_their_own():
    smoother = SharpnessAware(0.7, "momentum")
    models = []
    for used in (smoother, smoother, SharpnessAware(0.7, "momentum")):
        model = lr.build(DPSGD(0.5, gradient_filter=used, **lr.PRIVATE))
        model.optimizer.build(model.trainable_variables)
        models.append(model)
    second, first, alone = (
        lr.train(model, STEPS)[0] for model in (models[1], models[0], models[2])
    )
    np.testing.assert_array_equal(first, alone)
    np.testing.assert_array_equal(second, alone)


def test_sharpness_with_a_projection_is_refused():
    projection = dp.optimizers.GaLore(rank=1)
    optimizer = DPSGD(0.5, gradient_filter=SharpnessAware(0.7), projection=projection, **lr.PRIVATE)
    with pytest.raises(ValueError, match="a projection keeps a part"):
        optimizer.build([keras.Variable(np.zeros((4, 3), "float32"))])


@pytest.mark.parametrize(
    "optimizer",
    [
        DPAdam(0.01, second_moment="scale_then_privatize", epsilon=1e-2, **lr.PRIVATE),
        DPAdam(0.01, second_moment="bias_corrected", **lr.PRIVATE),
        DPNesterov(0.1, **lr.PRIVATE),
        DPSGD(0.1, noise=dp.noise.BandedMatrix(20, 4), **lr.PRIVATE),
        DPSGD(0.1, noise_schedule=dp.noise.schedules.allocate(np.linspace(1, 3, 20)), **lr.PRIVATE),
        DPSGD(0.1, clipping="per_layer", normalize=True, **lr.PRIVATE),
    ],
    ids=["scale first", "bias-corrected", "nesterov", "banded", "schedule", "normalized"],
)
@pytest.mark.parametrize(
    "smoother", [DiSK(0.6, 0.5), SharpnessAware(0.1, LowPass([0.5], [-0.5])), FFTKF(0.6, 0.5)]
)
def test_goes_with_geometries_noises_and_schedules(optimizer, smoother, tmp_path):
    """Trains within its ledger, and goes on after it was saved."""
    config = keras.saving.serialize_keras_object(optimizer)
    optimizer = keras.saving.deserialize_keras_object(config)
    optimizer.gradient_filter = smoother
    inputs = keras.Input((4,))
    model = dp.DPModel(inputs, keras.layers.Dense(3)(inputs))
    model.compile(optimizer=optimizer, loss="mse")
    rng = np.random.default_rng(0)
    x, y = np.float32(rng.normal(size=(320, 4))), np.float32(rng.normal(size=(320, 3)))
    if optimizer.noise.is_correlated:
        data = dp.data.cyclic_poisson((x, y), 8, 4, 8)
    else:
        data = dp.data.poisson_batches((x, y), 8, 8)
    model.fit(data, epochs=1, verbose=0)
    assert np.isfinite(model.ledger.epsilon(1e-5))
    assert all(np.isfinite(w).all() for w in model.get_weights())
    if not optimizer.noise.is_correlated:
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        again = loaded.optimizer.gradient_filter
        assert again.get_config() == smoother.get_config()
        for one, other in zip(loaded.optimizer.variables, optimizer.variables, strict=True):
            np.testing.assert_array_equal(one, other)
        loaded.fit(data, epochs=1, verbose=0)


@pytest.mark.parametrize("smoother", [DiSK(), FFTKF(), SharpnessAware(0.1)])
def test_rows_of_a_user_are_refused(smoother):
    inputs = keras.Input((4,))
    model = dp.DPModel(inputs, keras.layers.Dense(3)(inputs))
    model.compile(optimizer=DPSGD(0.1, gradient_filter=smoother, **lr.PRIVATE), loss="mse")
    users = np.repeat(np.arange(40), 8)
    x, y = np.zeros((320, 4), "float32"), np.zeros((320, 3), "float32")
    data = dp.data.poisson_users((x, y), users, 8, 8, examples_per_user=4)
    with pytest.raises(ValueError, match="not proved for several rows"):
        model.fit(data, verbose=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DiSK(0.0), "kappa must be in"),
        (lambda: DiSK(1.5), "kappa must be in"),
        (lambda: DiSK(0.5, 0.0), "gamma must be positive"),
        (lambda: FFTKF(0.0), "kappa must be in"),
        (lambda: FFTKF(gamma=-1.0), "gamma must be positive"),
        (lambda: FFTKF(pivot=1.0), "pivot must be in"),
        (lambda: FFTKF(pivot=True), "pivot must be in"),
        (lambda: FFTKF(suppression=1.0), "suppression must be in"),
        (lambda: FFTKF(suppression=-0.1), "suppression must be in"),
        (lambda: FFTKF(decay=-1.0), "decay must be at least 0"),
        (lambda: FFTKF(decay=float("nan")), "decay must be at least 0"),
        (lambda: FFTKF(decay=float("inf")), "decay must be at least 0"),
        (lambda: SharpnessAware(-1.0), "radius must be positive"),
        (lambda: SharpnessAware(1.0, DiSK()), "wants it elsewhere"),
        (lambda: SharpnessAware(1.0, FFTKF()), "wants it elsewhere"),
        (lambda: SharpnessAware(1.0, "no such filter"), "There is no filter"),
    ],
)
def test_arguments_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()
