"""Geometries that are learned, against transcriptions in float64."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.filters import DiSK, PerExampleMomentum
from dp_keras_opt.geometries import AdaClip, GeoClip, KroneckerFactored, Mean, pink_noise
from dp_keras_opt.optimizers import DPSGD, DPAdam, DPNesterov, DPOptimizer, DPRMSprop
from tests.helpers import linear_regression as lr

STEPS = 12


def contributions(x, centre=0.0, image=lambda v: v, clip_norm=lr.CLIP):
    """Σ clip(M(g_i − a); C) of the gradients at x, each clipped alone."""
    total = 0.0
    for gradient in lr.gradients(x):
        seen = image(gradient - centre)
        total = total + min(1, clip_norm / np.linalg.norm(seen)) * seen
    return total


class Centre:
    def __init__(self, beta):
        self.beta, self.m, self.weight = beta, np.zeros(lr.SIZE), 0.0

    @property
    def value(self):
        return self.m / self.weight if self.weight else self.m

    def update(self, g):
        self.m = self.beta * self.m + (1 - self.beta) * g
        self.weight = self.beta * self.weight + 1 - self.beta


def path_of(step, noise, steps=STEPS):
    x, path = lr.START, []
    for t in range(steps):
        x = step(x, noise.flat(t), t)
        path.append(x)
    return np.array(path)


@pytest.mark.parametrize("compiled", [False, True])
def test_around_the_mean_so_far(compiled):
    optimizer = DPSGD(0.5, geometry=Mean(0.7), **lr.PRIVATE)
    path, noise = lr.train(lr.build(optimizer, run_eagerly=not compiled), STEPS)
    centre = Centre(0.7)

    def step(x, z, t):
        a = centre.value
        g = (contributions(x, a) + lr.SIGMA * lr.CLIP * z) / lr.BATCH + a
        centre.update(g)
        return x - 0.5 * g

    np.testing.assert_allclose(path, path_of(step, noise), rtol=1e-4, atol=1e-6)


def weights_of_the_mean(beta, t):
    """Of each of t gradients in the mean of them."""
    return (1 - beta) * beta ** np.arange(t)[::-1] / (1 - beta**t)


class AdaClipped:
    """AdaClip as the docstring has it, in float64."""

    def __init__(self, beta, beta_2, low, high, shrinkage):
        self.beta, self.beta_2, self.shrinkage = beta, beta_2, shrinkage
        self.low, self.high = low, high
        self.centre, self.t = Centre(beta), 0
        self.s, self.b = np.ones(lr.SIZE) / lr.SIZE, np.ones(lr.SIZE)

    def gradient(self, x, z):
        a, b, self.t = self.centre.value, self.b, self.t + 1
        total = contributions(x, a, lambda v: v / b)
        noise_std = lr.SIGMA * lr.CLIP * b / lr.BATCH
        g = b * total / lr.BATCH + noise_std * z + a
        self.centre.update(g)
        if self.t > 1:
            spread = 1 + np.sum(weights_of_the_mean(self.beta, self.t - 1) ** 2)
            found = lr.BATCH * ((g - a) ** 2 / spread - noise_std**2)
            self.s = self.beta_2 * self.s + (1 - self.beta_2) * found
            variance = np.clip(self.s, self.low, self.high)
            variance = (1 - self.shrinkage) * variance + self.shrinkage * np.mean(variance)
            self.b = variance**0.25 * np.sqrt(np.sum(np.sqrt(variance)))
        return g


ADACLIP = {"beta": 0.8, "beta_2": 0.5, "low": 1e-8, "high": 1.0, "shrinkage": 0.1}


@pytest.mark.parametrize("compiled", [False, True])
def test_adaclip(compiled):
    optimizer = DPSGD(0.5, geometry=AdaClip(**ADACLIP), **lr.PRIVATE)
    path, noise = lr.train(lr.build(optimizer, run_eagerly=not compiled), STEPS)
    clipped = AdaClipped(**ADACLIP)
    expected = path_of(lambda x, z, t: x - 0.5 * clipped.gradient(x, z), noise)
    np.testing.assert_allclose(path, expected, rtol=1e-3, atol=1e-5)
    assert np.ptp(clipped.b) > 0.1 * np.max(clipped.b)  # coordinates have bounds of their own


def test_with_adam_it_is_dp_macadam():
    optimizer = DPAdam(0.05, beta_1=0.8, geometry=AdaClip(**ADACLIP), **lr.PRIVATE)
    path, noise = lr.train(lr.build(optimizer), STEPS)
    clipped, v = AdaClipped(**ADACLIP), np.zeros(lr.SIZE)

    def step(x, z, t):
        nonlocal v
        g = clipped.gradient(x, z)
        v = 0.999 * v + 0.001 * g**2
        mean = clipped.centre.value  # the centre and Adam's first moment are one
        return x - 0.05 * mean / (np.sqrt(v / (1 - 0.999 ** (t + 1))) + 1e-7)

    np.testing.assert_allclose(path, path_of(step, noise), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("noise_stds", [(0.0,), (0.5,), (0.2, 2.0)])
def test_variances_are_found_without_bias(noise_stds):
    """Of gradients with known variances around a mean, also where the noise is not that of the step
    before: within 5 standard errors."""
    rng, count, size = np.random.default_rng(0), 4000, 400
    true = np.array([0.1, 1.0, 3.0] * (size // 3) + [1.0]).astype("float32")
    optimizer = DPSGD(0.1, geometry=AdaClip(0.5, beta_2=0.5), **lr.PRIVATE)
    optimizer.build([keras.Variable(np.zeros(size, "float32"))])
    geometry, total, t_seen = optimizer.geometry, 0.0, 0
    for t in range(count // 10):
        noise_std = true * noise_stds[t % len(noise_stds)]
        g = true * rng.normal(size=size) + noise_std * rng.normal(size=size)
        answer = dp.noise.Released([tf.constant(g + 7.0, tf.float32)], [tf.constant(noise_std)])
        geometry.update(optimizer, answer, answer)
        if t > 20:
            total += np.asarray(geometry._variances[0]) / lr.BATCH
            t_seen += 1
    found = total / t_seen / true**2
    # Means of squares that are correlated over some 3 steps.
    error = (1 + max(noise_stds) ** 2) * np.sqrt(2 * 3 / (t_seen * size))
    assert abs(found.mean() - 1) < 5 * error


def test_bounds_do_not_feed_on_the_noise():
    """Gradients of 4,000 weights are 0; the noise in their mean is as long as the clip norm."""
    size, batch = 4_000, 256
    inputs = keras.Input((size,))
    model = dp.DPModel(inputs, keras.layers.Dense(1, use_bias=False)(inputs))
    optimizer = DPSGD(
        0.0, geometry=AdaClip(), clip_norm=1.0, batch_size=batch, noise_multiplier=4.0, seed=0
    )
    model.compile(optimizer, "mse")
    model.sampling = dp.accounting.Sampling.poisson(4_000, batch)
    x = np.zeros((batch, size), "float32")
    for _ in range(60):
        model.train_on_batch(x, x[:, :1])
    assert np.mean(np.asarray(optimizer.geometry.bounds[0]) ** 2) < 1.0


@pytest.mark.parametrize(("noise", "grow"), [(2.0, False), (3.0, True)])
def test_as_printed_they_grow_on_noise_alone(noise, grow):
    """DP-MacAdam's formulas for the spread, with B; `noise` is C²σ²d/B. From step to step they are
    longer and shorter."""
    rng, size, batch, beta = np.random.default_rng(0), 4_000, 1_000, 0.9
    b, m, s = np.ones(size), np.zeros(size), np.zeros(size)
    for t in range(1, 202):
        std = b * np.sqrt(noise / size / batch)
        g = std * rng.normal(size=size)
        m = beta * m + (1 - beta) * g
        s = beta * s + (1 - beta) * (g - m / (1 - beta**t)) ** 2
        if t > 1:
            kappa = 2 * (beta - beta**t) / (1 + beta)
            variance = np.clip(batch * (s / kappa - std**2), 1e-12, 1.0)
            b = variance**0.25 * np.sqrt(np.sum(np.sqrt(variance)))
    assert (np.mean(b**2) > 1.0) == grow


class GeoClipped:
    """The covariance as a matrix of all weights: leading directions, and one variance in others."""

    def __init__(self, rank, beta, beta_2, low, high):
        self.rank, self.beta_2, self.low, self.high = rank, beta_2, low, high
        self.centre, self.t = Centre(beta), 0
        self.basis = np.eye(lr.SIZE)[:, :rank]
        self.along, self.others = np.ones(rank) / lr.SIZE, 1 / lr.SIZE

    def gradient(self, x, z):
        along, others = (np.clip(v, self.low, self.high) for v in (self.along, self.others))
        total = np.sqrt(along).sum() + (lr.SIZE - self.rank) * np.sqrt(others)
        rest = np.eye(lr.SIZE) - self.basis @ self.basis.T
        m = self.basis @ np.diag(along**-0.25) @ self.basis.T + others**-0.25 * rest
        m = m / np.sqrt(total)
        inverse = np.linalg.inv(m)
        a = self.centre.value
        noisy = contributions(x, a, lambda v: m @ v) + lr.SIGMA * lr.CLIP * z
        g = inverse @ noisy / lr.BATCH + a
        around = g - a
        self.centre.update(g)
        self.t += 1
        if self.t == 1:
            return g
        noise = (lr.SIGMA * lr.CLIP / lr.BATCH) ** 2 * inverse @ inverse
        # Beside the directions there is the rest of x, of which the noise's share is in one number.
        length = np.linalg.norm(rest @ around)
        to = np.c_[self.basis, rest @ around / length]
        seen = np.outer(to.T @ around, to.T @ around)
        of_noise = np.append(np.diag(self.basis.T @ noise @ self.basis), np.trace(rest @ noise))
        c = self.beta_2 * np.diag(np.append(self.along, 0.0))
        c += (1 - self.beta_2) * lr.BATCH * (seen - np.diag(of_noise))
        values, vectors = np.linalg.eigh(c)
        self.basis, self.along = to @ vectors[:, 1:], values[1:]
        self.others = self.beta_2 * self.others + values[0] / (lr.SIZE - self.rank)
        return g


GEOCLIP = {"rank": 3, "beta": 0.7, "beta_2": 0.8, "low": 1e-4, "high": 1.0}


@pytest.mark.parametrize("compiled", [False, True])
def test_geoclip(compiled):
    """M up to a factor, which the bound makes up for."""
    optimizer = DPSGD(0.5, geometry=GeoClip(**GEOCLIP), **lr.PRIVATE)
    path, noise = lr.train(lr.build(optimizer, run_eagerly=not compiled), STEPS)
    clipped = GeoClipped(**GEOCLIP)
    expected = path_of(lambda x, z, t: x - 0.5 * clipped.gradient(x, z), noise)
    np.testing.assert_allclose(path, expected, rtol=2e-3, atol=1e-4)
    assert np.max(clipped.along) > 1.5 * clipped.others > clipped.low


def test_geoclip_leaves_the_directions_that_it_began_with():
    """As the published low-rank algorithm does not."""
    optimizer = DPSGD(0.1, geometry=GeoClip(2), **lr.PRIVATE)
    optimizer.build([keras.Variable(np.zeros(40, "float32"))])
    rng, far = np.random.default_rng(1), np.zeros(40)
    far[30:32] = 1.0
    for _ in range(30):
        g = tf.constant(far * rng.normal() * 3 + 0.01 * rng.normal(size=40), tf.float32)
        (query,) = optimizer.queries()
        released = dp.noise.Released([g], 0.01, geometry=query.geometry)
        optimizer.geometry.update(optimizer, released, dp.noise.Released([g], 0.01))
    leading = np.abs(np.asarray(optimizer.geometry._basis)[:, -1])
    assert leading[30:32] @ far[30:32] / np.sqrt(2) > 0.99
    gram = np.asarray(optimizer.geometry._basis).T @ np.asarray(optimizer.geometry._basis)
    np.testing.assert_allclose(gram, np.eye(2), atol=1e-5)


def probes(count=40):
    rng = np.random.default_rng(2)
    return (
        (rng.normal(size=(count, 4)) * [5, 1, 1, 0.1]).astype("float32"),
        rng.normal(size=(count, 3)).astype("float32"),
    )


def root_of(vectors, damping, power):
    second = vectors.T @ vectors / len(vectors)
    values, q = np.linalg.eigh(second / (np.trace(second) / len(second)))
    return q @ np.diag((values + damping) ** power) @ q.T


@pytest.mark.parametrize("take_back", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_kronecker_factored(take_back, compiled):
    geometry = KroneckerFactored(probes(), damping=0.2, take_back=take_back)
    optimizer = DPSGD(0.5, geometry=geometry, **lr.PRIVATE)
    path, noise = lr.train(lr.build(optimizer, run_eagerly=not compiled), STEPS)
    x, y = (part.astype(np.float64) for part in probes())
    kernel, bias = lr.split(lr.START)
    deltas = 2 / 3 * (x @ kernel + bias - y)

    def both(power):
        return root_of(x, 0.2, power), root_of(deltas, 0.2, power)

    def through(vector, left, right):
        kernel, bias = lr.split(vector)
        return np.concatenate([(left @ kernel @ right).ravel(), bias])

    def step(at, z, t):
        seen = contributions(at, image=lambda v: through(v, *both(-0.5)))
        g = (seen + lr.SIGMA * lr.CLIP * z) / lr.BATCH
        return at - 0.5 * (through(g, *both(0.5)) if take_back else g)

    np.testing.assert_allclose(path, path_of(step, noise), rtol=1e-3, atol=1e-5)


def test_the_statement_says_that_probes_were_declared_public():
    for geometry, says in ((KroneckerFactored(probes()), True), (AdaClip(), False)):
        for make in (DPSGD, DPAdam):
            model = lr.build(make(0.1, geometry=geometry, **lr.PRIVATE))
            model.train_on_batch(lr.X, lr.Y)
            statement = " ".join(model.statement(1e-5).split())
            assert ("or a geometry) that was given as public" in statement) == says


def test_probes_are_asked_again_where_the_weights_have_moved():
    optimizer = DPSGD(0.5, geometry=KroneckerFactored(probes()), **lr.PRIVATE)
    model = lr.build(optimizer)
    lr.train(model, 2)
    sides = optimizer.geometry._sides[0]
    before = [np.array(side[0]) for side in sides]
    optimizer.geometry.refresh(optimizer, model)
    after = [np.array(side[0]) for side in sides]
    np.testing.assert_allclose(before[0], after[0])  # what comes in is the same
    assert np.abs(before[1] - after[1]).max() > 1e-4


def test_geometry_of_a_convolution_and_of_what_has_none():
    inputs = keras.Input((12, 12, 2))
    hidden = keras.layers.Conv2D(5, 3, activation="tanh")(inputs)
    hidden = keras.layers.GlobalAveragePooling2D()(hidden)
    model = dp.DPModel(inputs, keras.layers.Dense(3)(hidden))
    x = pink_noise(32, (12, 12, 2), seed=0)
    y = np.random.default_rng(0).integers(0, 3, 32)
    geometry = KroneckerFactored((x, y), largest=17)  # of the convolution, 18 rows are too many
    optimizer = DPSGD(0.1, geometry=geometry, **lr.PRIVATE | {"batch_size": 8})
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    model.fit(dp.data.poisson_batches((x, y), 8, 3), epochs=1, verbose=0)
    (query,) = optimizer.queries()
    left, right = query.geometry.left, query.geometry.right
    assert [m is None for m in left] == [True, True, False, True]
    assert [m is None for m in right] == [False, True, False, True]
    assert all(np.isfinite(m).all() for m in (*left, *right) if m is not None)


def test_geometry_of_a_convolution_is_that_of_its_patches():
    inputs = keras.Input((6, 6, 2))
    hidden = keras.layers.Conv2D(4, 3, activation="tanh")(inputs)
    model = dp.DPModel(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(hidden)))
    x = pink_noise(20, (6, 6, 2), seed=0)
    y = np.random.default_rng(0).normal(size=(20, 3)).astype("float32")
    geometry = KroneckerFactored((x, y), damping=0.2)
    model.compile(DPSGD(0.1, geometry=geometry, **lr.PRIVATE | {"batch_size": 20}), "mse")
    kernel, bias, dense, offset = (w.astype(np.float64) for w in model.get_weights())
    model.fit(dp.data.poisson_batches((x, y), 20, 1), epochs=1, verbose=0)

    patches = np.array(
        [x[:, i : i + 3, j : j + 3].reshape(20, -1) for i in range(4) for j in range(4)], np.float64
    )
    out = np.tanh(patches @ kernel.reshape(18, 4) + bias)  # (positions, rows, filters)
    flat = out.transpose(1, 0, 2).reshape(20, -1)
    error = 2 / 3 * (flat @ dense + offset - y)
    deltas = (error @ dense.T).reshape(20, 16, 4).transpose(1, 0, 2) * (1 - out**2)
    (query,) = model.optimizer.queries()
    for found, vectors in (
        (query.geometry.left[0], patches),
        (query.geometry.right[0], deltas),
    ):
        expected = root_of(vectors.reshape(-1, vectors.shape[-1]), 0.2, -0.5)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_what_is_no_kernel_has_no_matrix(tmp_path):
    """Products with an identity would cost a gradient of the table for each row of the batch."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 30, (32, 5)), rng.integers(0, 3, 32)
    inputs = keras.Input((5,), dtype="int32")
    hidden = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(30, 4)(inputs))
    model = dp.DPModel(inputs, keras.layers.Dense(3)(hidden))
    optimizer = DPSGD(0.1, geometry=KroneckerFactored((x, y)), **lr.PRIVATE | {"batch_size": 8})
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    batches = dp.data.poisson_batches((x, y), 8, 3)
    model.fit(batches, epochs=1, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    loaded.fit(batches, epochs=1, verbose=0)
    for each in (model, loaded):
        (query,) = each.optimizer.queries()
        for side in (query.geometry.left, query.geometry.right):
            assert [m is None for m in side] == [True, False, True]


def test_probes_are_asked_however_training_begins():
    """Also where the optimizer was built, or the model looked at, before."""

    def model_with(geometry):
        inputs = keras.Input((4,))
        model = dp.DPModel(inputs, keras.layers.Dense(3)(inputs))
        model.compile(DPSGD(0.5, **lr.PRIVATE), "mse")
        model.sampling = dp.accounting.Sampling.poisson(100, lr.BATCH)
        model.train_on_batch(lr.X, lr.Y)
        optimizer = DPSGD(0.5, geometry=geometry, **lr.PRIVATE)
        optimizer.build(model.trainable_variables)
        model.compile(optimizer, "mse")
        assert model.known_engines() is not None
        return model

    for options in ({}, {"class_weight": {0: 1.0}}):
        model = model_with(KroneckerFactored(probes()))
        model.train_on_batch(lr.X, lr.Y, **options)
        left = np.array(model.optimizer.queries()[0].geometry.left[0])
        assert np.abs(left - np.eye(len(left))).max() > 0.1
    with pytest.raises(ValueError, match="has no probes"):
        model_with(KroneckerFactored()).train_on_batch(lr.X, lr.Y)

    class Later(dp.DPModel):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, inputs):
            return self.dense(inputs)

    for geometry in (None, KroneckerFactored(probes())):  # with class weights, rows are not seen
        model = Later()
        model.compile(DPSGD(0.5, geometry=geometry, **lr.PRIVATE), "mse")
        model.sampling = dp.accounting.Sampling.poisson(100, lr.BATCH)
        if geometry is None:
            model.train_on_batch(lr.X, lr.Y, class_weight={0: 1.0})
            assert len(model.trainable_variables) == 2
        else:
            with pytest.raises(ValueError, match="Build the model"):
                model.train_on_batch(lr.X, lr.Y, class_weight={0: 1.0})


def test_the_optimizer_is_told_of_its_first_step_once(monkeypatch):
    """Not of each: what it does then would be in the way of all steps."""
    told = []
    monkeypatch.setattr(DPSGD, "begin", lambda self, model: told.append(model))
    model = lr.build(DPSGD(0.5, **lr.PRIVATE), sampling=lr.SAMPLING)
    for _ in range(3):
        model.train_on_batch(lr.X, lr.Y)
    assert told == [model]


def test_the_bound_in_the_geometry_is_one_that_float32_can_square():
    geometry = GeoClip(2, low=1e-20)
    optimizer = DPSGD(0.1, geometry=geometry, **lr.PRIVATE | {"clip_norm": 1e-12})
    optimizer.build([keras.Variable(np.zeros(40, "float32"))])
    optimizer.geometry._others.assign(0.0)
    optimizer.geometry._variances.assign([0.0, 0.0])
    (query,) = optimizer.queries()
    assert float(query.clip_norm) >= np.float32(1e-12)


def test_pink_noise_has_power_that_falls_with_frequency():
    pictures = pink_noise(200, (32, 32, 1), seed=0)
    power = (np.abs(np.fft.rfft2(pictures[..., 0])) ** 2).mean(axis=0)
    ratio = power[0, 2] / power[0, 8]
    assert 12 < ratio < 20  # (8/2)² = 16, within 7 standard errors
    assert abs(pictures.std() - 1) < 1e-3 and pictures.shape == (200, 32, 32, 1)


@pytest.mark.parametrize("then", [None, "momentum"])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_momentum_of_each_example(length, then):
    smoother = PerExampleMomentum(length, 0.6, then)
    optimizer = DPSGD(0.5, gradient_filter=smoother, **lr.PRIVATE)
    path, noise = lr.train(lr.build(optimizer), STEPS)
    past, mean = [], 0.0

    def step(x, z, t):
        nonlocal mean
        past.insert(0, x)
        weights = 0.6 ** np.arange(min(length, len(past)))
        each = sum(w * lr.gradients(p) for w, p in zip(weights / weights.sum(), past, strict=False))
        norms = np.linalg.norm(each, axis=1)
        total = (np.minimum(1, lr.CLIP / norms)[:, None] * each).sum(axis=0)
        g = (total + lr.SIGMA * lr.CLIP * z) / lr.BATCH
        mean = 0.9 * mean + 0.1 * g
        return x - 0.5 * (g if then is None else mean / (1 - 0.9 ** (t + 1)))

    np.testing.assert_allclose(path, path_of(step, noise), rtol=1e-4, atol=1e-6)


# Composition.


GEOMETRIES = {
    "Mean": lambda: Mean(0.9),
    "AdaClip": lambda: AdaClip(0.9),
    "GeoClip": lambda: GeoClip(3),
    "KroneckerFactored": lambda: KroneckerFactored(probes(), take_back=True),
}


@pytest.mark.representatives(10)
@pytest.mark.parametrize("kind", GEOMETRIES)
@pytest.mark.parametrize(
    "make",
    [
        lambda **k: DPSGD(0.1, momentum=0.9, noise=dp.noise.BandedMatrix(20, 4), **k),
        lambda **k: DPSGD(0.1, noise_schedule=[1.0, 0.5] * 10, clipping="per_layer", **k),
        lambda **k: DPSGD(0.1, gradient_filter=DiSK(0.5), **k),
        lambda **k: DPSGD(0.1, gradient_filter="f6", normalize=True, **k),
        lambda **k: DPSGD(0.1, noise="laplace", **k),
        lambda **k: DPAdam(0.1, second_moment="bias_corrected", **k),
        lambda **k: DPRMSprop(0.1, gradient_filter=dp.filters.OptimalFIR(3), **k),
        lambda **k: DPNesterov(0.1, **k),
        lambda **k: DPOptimizer("lion", **k),
        lambda **k: DPSGD(0.1, **k | {"clip_norm": dp.clipping.Quantile(0.5, count_noise=3.0)}),
    ],
    ids=["banded", "schedule", "DiSK", "filter", "laplace", "bias-corrected", "OptimalFIR",
         "Nesterov", "wrapped", "quantile"],
)  # fmt: skip
def test_geometries_go_with(kind, make, tmp_path):
    """Trained, saved and trained on; what a batch without an example adds is within the bound."""
    if make(**lr.PRIVATE).noise.is_correlated and not GEOMETRIES[kind]().takes_correlated_noise:
        with pytest.raises(ValueError, match="feed on"):
            make(geometry=GEOMETRIES[kind](), **lr.PRIVATE)
        return
    optimizer = make(geometry=GEOMETRIES[kind](), **lr.PRIVATE)
    sampling = dp.accounting.Sampling.cyclic_poisson(100, lr.BATCH, 4)
    batches = tf.data.Dataset.from_tensors((lr.X, lr.Y)).repeat(4)
    model = lr.build(optimizer, sampling=sampling)
    seen = []
    model.observe_releases(lambda queries, released: seen.append((queries, released)))
    model.fit(dp.data.assume_sampling(batches, sampling), verbose=0)
    (query,), _ = seen[-1]
    assert np.isfinite(lr.flat(model.trainable_variables)).all()
    found, plain = model.get_weights(), query._replace(centre=None, scale=None, geometry=None)
    model.set_weights(lr.split(lr.START))
    of_geometry, without = (
        lr.flat(dp.clipping.clipped_sums(model, (lr.X, lr.Y), [each]).sums[0][:2])
        for each in (query, plain)
    )
    model.set_weights(found)
    assert np.linalg.norm(of_geometry - without) > 1e-3 * np.linalg.norm(without)
    both = [
        dp.clipping.clipped_sums(model, (lr.X[rows], lr.Y[rows]), [query]).sums[0][:2]
        for rows in (slice(0, 6), slice(1, 6))
    ]
    moved = lr.flat(both[0]) - lr.flat(both[1])
    order = 1 if query.norm == "l1" else 2
    length = np.linalg.norm(moved, order)
    assert length <= float(query.sensitivity) * (1 + 1e-3)
    assert length > 0.5 * float(query.sensitivity) or query.counts or kind != "Mean"
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert repr(loaded.optimizer.geometry) == repr(optimizer.geometry)
    for one, other in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one, other)


def test_bias_correction_takes_off_the_noise_of_each_coordinate():
    optimizer = DPAdam(
        0.05, beta_1=0.8, beta_2=0.9, second_moment="bias_corrected",
        geometry=AdaClip(**ADACLIP), **lr.PRIVATE,
    )  # fmt: skip
    path, noise = lr.train(lr.build(optimizer), STEPS)
    clipped, v = AdaClipped(**ADACLIP), np.zeros(lr.SIZE)

    def step(x, z, t):
        nonlocal v
        std = lr.SIGMA * lr.CLIP * clipped.b / lr.BATCH
        g = clipped.gradient(x, z)
        v = 0.9 * v + 0.1 * (g**2 - std**2)
        root = np.sqrt(np.maximum(v / (1 - 0.9 ** (t + 1)), 1e-7**2))
        return x - 0.05 * clipped.centre.value / root

    # Divided by next to nothing where noise is all there is: steps are compared while they agree.
    np.testing.assert_allclose(path[:3], path_of(step, noise, 3), rtol=2e-2, atol=1e-2)


def test_each_optimizer_has_a_geometry_of_its_own():
    geometry, paths = AdaClip(0.8), []
    models = [lr.build(DPSGD(0.5, geometry=geometry, **lr.PRIVATE)) for _ in range(2)]
    for model in models:
        model.optimizer.build(model.trainable_variables)
    for model in reversed(models):
        paths.append(lr.train(model, STEPS)[0])
    np.testing.assert_array_equal(*paths)


# What is refused.


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda **k: DPAdam(second_moment="scale_then_privatize", **k), "cannot be joined"),
        (lambda **k: DPAdam(second_moment="independent", **k), "cannot be joined"),
        (lambda **k: DPAdam(second_moment="noiseless", **k), "cannot be joined"),
        (
            lambda **k: DPAdam(
                second_moment=dp.optimizers.moments.BiasCorrected(floor=1.0), **k
            ),
            "Leave the floor out",
        ),
        (
            lambda **k: dp.optimizers.DP2RMSprop(0.1, 0.1, delay=1, adaptive_clip_norm=1.0, **k),
            "does not take geometry",
        ),
        (lambda **k: DPSGD(0.1, noise=dp.noise.BandedMatrix(8, 2), **k), r"BandedMatrix: .*Mean"),
        (lambda **k: DPOptimizer("lion", noise=dp.noise.TreeAggregation(8), **k), "feed on"),
        (lambda **k: dp.optimizers.DPGaLore(0.1, rank=2, **k), "noisiest"),
        (lambda **k: DPSGD(0.1, projection=dp.optimizers.GaLore(1), **k), "noisiest"),
    ],
    ids=["scaled", "independent", "noiseless", "floor", "DP2", "banded", "tree", "GaLore",
         "projection"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:second_moment='noiseless'")
def test_combinations_without_a_proof_are_refused_when_made(make, match):
    with pytest.raises(ValueError, match=match):
        make(geometry=AdaClip(), **lr.PRIVATE)


def test_planned_noise_is_refused_where_it_is_correlated():
    for geometry in (AdaClip(), GeoClip(2)):
        optimizer = DPSGD(0.1, noise="planned", geometry=geometry, **lr.PRIVATE)
        with pytest.raises(ValueError, match="feed on the noise"):
            optimizer.settle(dp.accounting.Sampling.cyclic_poisson(100, lr.BATCH, 4), 20)
    optimizer = DPSGD(0.1, noise="planned", geometry=AdaClip(), **lr.PRIVATE)
    optimizer.settle(lr.SAMPLING, 20)
    assert isinstance(optimizer.noise, dp.noise.Gaussian)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Mean(1.0), "beta"),
        (lambda: AdaClip(1.0), "beta"),
        (lambda: AdaClip(low=0.0), "low"),
        (lambda: AdaClip(low=1.0, high=0.1), "low"),
        (lambda: AdaClip(beta_2=1.0), "beta_2"),
        (lambda: AdaClip(shrinkage=1.5), "shrinkage"),
        (lambda: AdaClip(shrinkage=np.nan), "shrinkage"),
        (lambda: GeoClip(0), "rank"),
        (lambda: GeoClip(2, beta_2=1.0), "beta_2"),
        (lambda: GeoClip(2, low=-1.0), "low"),
        (lambda: KroneckerFactored(damping=0.0), "damping"),
        (lambda: KroneckerFactored(largest=0), "largest"),
        (lambda: PerExampleMomentum(0), "length"),
        (lambda: PerExampleMomentum(2, 0.0), "beta"),
        (lambda: PerExampleMomentum(2, then=DiSK(0.5)), "wants it elsewhere"),
        (lambda: DPSGD(0.1, geometry="adaclip", **lr.PRIVATE), "dp_keras_opt.geometries"),
    ],
)
def test_arguments_out_of_range(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_a_rank_of_all_weights_and_missing_probes_are_refused():
    model = lr.build(DPSGD(0.1, geometry=GeoClip(15), **lr.PRIVATE))
    with pytest.raises(ValueError, match="more weights than directions"):
        model.train_on_batch(lr.X, lr.Y)
    model = lr.build(DPSGD(0.1, geometry=KroneckerFactored(), **lr.PRIVATE))
    with pytest.raises(ValueError, match="no probes"):
        model.train_on_batch(lr.X, lr.Y)
