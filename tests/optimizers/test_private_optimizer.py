"""What the optimizers do with privatized gradients, against Keras and against NumPy.

The NumPy oracle is a linear model in float64, written from the formulas of the docstrings:
gradients by hand, clipping, a noise that is known, and the update.
"""

import copy
import io
import json
import math
import warnings
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.optimizers import DPSGD, DPAdam, DPOptimizer

BATCH, FEATURES, OUTPUTS = 6, 4, 3
PRIVATE = {"clip_norm": 1.0, "noise_multiplier": 1.0, "batch_size": BATCH}
NO_PRIVACY = {"clip_norm": math.inf, "noise_multiplier": 0.0, "batch_size": BATCH}


@keras.saving.register_keras_serializable(package="tests")
class KnownNoise(dp.noise.Gaussian):
    """Stands in for the Gaussian: each draw is the same known array."""

    def unit_noise(self, shapes, source, stream=0):
        return [tf.constant(known_noise(shape), tf.float32) for shape in shapes]


def known_noise(shape):
    return np.cos(1.0 + np.arange(np.prod(shape))).reshape(shape)


def data(rows=BATCH, scale=1.0):
    generator = np.random.default_rng(rows)
    x, y = generator.normal(size=(rows, FEATURES)), generator.normal(size=(rows, OUTPUTS))
    return x.astype("float32"), (scale * y).astype("float32")


def batches(steps, rows=BATCH):
    x, y = data(rows * steps)
    return [(x[i * rows : (i + 1) * rows], y[i * rows : (i + 1) * rows]) for i in range(steps)]


def linear(optimizer, private=True, layer=None, **compiled):
    """One Dense layer with fixed initial weights, and a squared loss."""
    inputs = keras.Input((FEATURES,))
    layer = layer or keras.layers.Dense(OUTPUTS)
    model = (dp.DPModel if private else keras.Model)(inputs, layer(inputs))
    kernel = np.random.default_rng(7).normal(size=(FEATURES, OUTPUTS))
    model.set_weights([kernel, np.linspace(-0.5, 0.5, OUTPUTS)])
    model.compile(optimizer=optimizer, loss="mse", **{"jit_compile": False} | compiled)
    if private:
        model.sampling = dp.accounting.Sampling.poisson(1000, BATCH)
    return model


def mlp(optimizer, private=True, **options):
    inputs = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(5, activation="tanh", **options)(inputs)
    model = (dp.DPModel if private else keras.Model)(inputs, keras.layers.Dense(OUTPUTS)(hidden))
    model.set_weights(
        [np.random.default_rng(i).normal(size=v.shape) for i, v in enumerate(model.weights)]
    )
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    if private:
        model.sampling = dp.accounting.Sampling.poisson(1000, BATCH)
    return model


def weights_of(model):
    return [w.astype(np.float64) for w in model.get_weights()]


def assert_same(actual, expected, rtol=2e-5):
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=rtol, atol=rtol)


def gradients_at(weights, x, y):
    """Per-example gradients of mean((xW + b − y)²) with respect to W and b, by hand."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    residual = 2 / OUTPUTS * (x @ weights[0] + weights[1] - y)
    return [[np.outer(a, r), r] for a, r in zip(x, residual, strict=True)]


def privatized(weights, x, y, clip_norm, sigma, normalize=False):
    """g̃ = (Σ clip(g_i; C) + σ·C·z)/B, with the known z."""
    total = [sigma * clip_norm * known_noise(w.shape) if sigma else 0 * w for w in weights]
    for example in gradients_at(weights, x, y):
        norm = math.sqrt(sum((g**2).sum() for g in example))
        factor = clip_norm / (norm + 0.01) if normalize else min(1.0, clip_norm / norm)
        total = [t + factor * g for t, g in zip(total, example, strict=True)]
    return [t / BATCH for t in total]


# --- without noise and clipping: Keras's own update


def decayed():
    return keras.optimizers.schedules.ExponentialDecay(0.3, decay_steps=1, decay_rate=0.5)


def stepwise():
    return keras.optimizers.schedules.PiecewiseConstantDecay([1, 3], [0.3, 0.05, 0.2])


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"weight_decay": 0.1},
        {"momentum": 0.5, "use_ema": True, "ema_momentum": 0.7, "ema_overwrite_frequency": 2},
        {"learning_rate": decayed},
        {"learning_rate": stepwise, "momentum": 0.9, "weight_decay": 0.02},
    ],
    ids=lambda a: " ".join(a) or "plain",
)
def test_sgd_without_noise_is_that_of_keras(arguments):
    def build():
        rate = arguments.get("learning_rate", lambda: 0.1)()
        return arguments | {"learning_rate": rate}

    ours = mlp(DPSGD(**build(), **NO_PRIVACY))
    keras_own = mlp(keras.optimizers.SGD(**build()), private=False)
    for x, y in batches(5):
        ours.train_on_batch(x, y)
        keras_own.train_on_batch(x, y)
        assert_same(weights_of(ours), weights_of(keras_own))
    for optimizer_weights in zip(
        ours.optimizer.variables, keras_own.optimizer.variables, strict=True
    ):
        assert_same(*([v.numpy()] for v in optimizer_weights))


@pytest.mark.parametrize("wrapped", [False, True])
def test_moving_average_of_the_weights_is_what_fit_leaves(wrapped):
    """Keras swaps it in at the end of `fit`; without the swap, the last weights would remain."""
    ema = {"momentum": 0.5, "use_ema": True, "ema_momentum": 0.8}
    keras_own = keras.optimizers.SGD(0.2, **ema)
    ours = (
        DPOptimizer(keras.optimizers.SGD(0.2, **ema), **NO_PRIVACY)
        if wrapped
        else DPSGD(0.2, **ema, **NO_PRIVACY)
    )
    x, y = data(3 * BATCH)
    models = mlp(ours), mlp(keras_own, private=False)
    for model in models:
        model.fit(x, y, batch_size=BATCH, shuffle=False, epochs=2, verbose=0)
    assert_same(*map(weights_of, models))


@pytest.mark.parametrize("amsgrad", [False, True])
def test_adam_without_noise_is_that_of_keras_where_epsilon_is_negligible(amsgrad):
    arguments = {"learning_rate": 0.05, "beta_2": 0.9, "epsilon": 1e-12, "amsgrad": amsgrad}
    ours = mlp(DPAdam(**arguments, weight_decay=0.01, **NO_PRIVACY))
    keras_own = mlp(keras.optimizers.Adam(**arguments, weight_decay=0.01), private=False)
    for x, y in batches(5):
        ours.train_on_batch(x, y)
        keras_own.train_on_batch(x, y)
        assert_same(weights_of(ours), weights_of(keras_own), rtol=1e-4)


INNER = {
    "Lion": lambda: keras.optimizers.Lion(0.01),
    "Nadam": lambda: keras.optimizers.Nadam(0.01),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, centered=True, momentum=0.5),
    "Muon": lambda: keras.optimizers.Muon(0.01, weight_decay=0.1),
    "SGD decayed": lambda: keras.optimizers.SGD(decayed(), momentum=0.9),
    "Adam EMA": lambda: keras.optimizers.Adam(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
}


@pytest.mark.parametrize("name", INNER)
def test_wrapped_optimizer_without_noise_is_the_bare_one(name):
    ours, bare = DPOptimizer(INNER[name](), **NO_PRIVACY), INNER[name]()
    models = mlp(ours), mlp(bare, private=False)
    for x, y in batches(5):
        for model in models:
            model.train_on_batch(x, y)
        assert_same(*map(weights_of, models), rtol=1e-4)
    assert ours.iterations.numpy() == ours.inner.iterations.numpy() == 5
    np.testing.assert_allclose(float(ours.learning_rate), float(bare.learning_rate), rtol=1e-6)


def test_learning_rate_of_the_wrapper_is_that_of_the_inner_optimizer():
    optimizer = DPOptimizer(keras.optimizers.SGD(0.1), **NO_PRIVACY)
    model = linear(optimizer)
    optimizer.learning_rate = 0.0
    before = weights_of(model)
    model.train_on_batch(*data())
    assert_same(weights_of(model), before)
    assert float(optimizer.inner.learning_rate) == 0.0


# --- with clipping and noise: float64 transcriptions


@pytest.mark.parametrize("normalize", [False, True], ids=["clip", "normalize"])
@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_sgd_is_the_formula(jit_compile, normalize):
    eta, beta, clip_norm, sigma = 0.3, 0.9, 0.7, 1.3
    model = linear(
        DPSGD(eta, beta, clip_norm=clip_norm, noise_multiplier=sigma, batch_size=BATCH,
              noise=KnownNoise(), normalize=normalize),
        jit_compile=jit_compile,
    )  # fmt: skip
    w = weights_of(model)
    velocity = [0 * a for a in w]
    for x, y in [*batches(2, rows=9), *batches(2, rows=2)]:  # B is not the realised batch size
        g = privatized(w, x, y, clip_norm, sigma, normalize)
        velocity = [beta * m - eta * a for m, a in zip(velocity, g, strict=True)]
        w = [a + m for a, m in zip(w, velocity, strict=True)]
        model.train_on_batch(x, y)
        assert_same(weights_of(model), w)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("epsilon", [1e-7, 0.3], ids=["small ε", "large ε"])
def test_adam_is_the_formula(amsgrad, epsilon):
    """Post-processing: η·μ̂/(√v̂ + ε), with ε outside of the bias correction."""
    eta, beta_1, beta_2, clip_norm, sigma = 0.1, 0.8, 0.95, 0.7, 1.3
    model = linear(
        DPAdam(eta, beta_1, beta_2, epsilon, amsgrad, clip_norm=clip_norm,
               noise_multiplier=sigma, batch_size=BATCH, noise=KnownNoise())
    )  # fmt: skip
    w = weights_of(model)
    mu, v, largest = ([0 * a for a in w] for _ in range(3))
    for t, (x, y) in enumerate(batches(6), start=1):
        g = privatized(w, x, y, clip_norm, sigma)
        for i, gradient in enumerate(g):
            mu[i] = beta_1 * mu[i] + (1 - beta_1) * gradient
            v[i] = beta_2 * v[i] + (1 - beta_2) * gradient**2
            largest[i] = np.maximum(largest[i], v[i])
            v_hat = (largest if amsgrad else v)[i] / (1 - beta_2**t)
            w[i] = w[i] - eta * mu[i] / (1 - beta_1**t) / (np.sqrt(v_hat) + epsilon)
        model.train_on_batch(x, y)
        assert_same(weights_of(model), w)


def test_wrapped_lion_is_the_formula():
    eta, beta_1, beta_2, clip_norm, sigma = 0.01, 0.9, 0.99, 0.7, 1.3
    model = linear(
        DPOptimizer(keras.optimizers.Lion(eta, beta_1, beta_2), clip_norm=clip_norm,
                    noise_multiplier=sigma, batch_size=BATCH, noise=KnownNoise())
    )  # fmt: skip
    w = weights_of(model)
    m = [0 * a for a in w]
    for x, y in batches(4):
        g = privatized(w, x, y, clip_norm, sigma)
        for i, gradient in enumerate(g):
            w[i] = w[i] - eta * np.sign(beta_1 * m[i] + (1 - beta_1) * gradient)
            m[i] = beta_2 * m[i] + (1 - beta_2) * gradient
        model.train_on_batch(x, y)
        assert_same(weights_of(model), w)


def orthogonalized(matrix):
    """Five steps of Muon's Newton-Schulz iteration, on the wide side."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / np.linalg.norm(x)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_wrapped_muon_is_the_formula(jit_compile):
    eta, beta, clip_norm, sigma = 0.05, 0.8, 0.7, 1.3
    inner = keras.optimizers.Muon(
        eta, momentum=beta, nesterov=False, rms_rate=None, weight_decay=0.1, adam_weight_decay=None
    )
    optimizer = DPOptimizer(
        inner, clip_norm=clip_norm, noise_multiplier=sigma, batch_size=BATCH, noise=KnownNoise()
    )
    model = linear(optimizer, jit_compile=jit_compile)
    w = weights_of(model)
    momentum, m, v = 0 * w[0], 0 * w[1], 0 * w[1]
    for t, (x, y) in enumerate(batches(4), 1):
        kernel, bias = privatized(w, x, y, clip_norm, sigma)
        momentum = beta * momentum + kernel
        m, v = 0.9 * m + 0.1 * bias, 0.999 * v + 0.001 * bias**2
        rate = eta * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)  # biases are for its Adam
        w = [
            w[0] - eta * 0.1 * w[0] - eta * orthogonalized(momentum),
            w[1] - rate * m / (np.sqrt(v) + 1e-7),
        ]
        model.train_on_batch(x, y)
        assert_same(weights_of(model), w, rtol=1e-4)


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "ScheduleFreeAdamW"), reason="this Keras has none"
)
def test_wrapped_schedule_free_trains_the_average_of_its_steps():
    """With TensorFlow Keras's own takes gradients at the average itself, whatever beta_1 is."""
    eta, beta_2, clip_norm, sigma = 0.05, 0.9, 0.7, 1.3
    model = linear(
        DPOptimizer(keras.optimizers.ScheduleFreeAdamW(eta, beta_1=0.8, beta_2=beta_2),
                    clip_norm=clip_norm, noise_multiplier=sigma, batch_size=BATCH,
                    noise=KnownNoise())
    )  # fmt: skip
    average = z = weights_of(model)
    v = [0 * a for a in z]
    for t, (x, y) in enumerate(batches(5), 1):
        g = privatized(average, x, y, clip_norm, sigma)
        for i, gradient in enumerate(g):
            v[i] = beta_2 * v[i] + (1 - beta_2) * gradient**2
            step = eta * gradient / (np.sqrt(v[i] / (1 - beta_2**t)) + 1e-8)
            z = [*z[:i], z[i] - step, *z[i + 1 :]]
        average = [a + (b - a) / t for a, b in zip(average, z, strict=True)]
        model.train_on_batch(x, y)
        assert_same(weights_of(model), average, rtol=1e-4)
    for variable, expected in zip(model.optimizer.inner._momentums, z, strict=True):
        np.testing.assert_allclose(variable, expected, rtol=1e-4, atol=1e-4)


# --- the clip bound, as it shows in the update


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("rows", [1, 11])
def test_an_update_is_at_most_what_the_clip_norm_allows(rows, wrapped):
    clip_norm = 1e-3
    arguments = {"clip_norm": clip_norm, "noise_multiplier": 0.0, "batch_size": BATCH}
    optimizer = (
        DPOptimizer(keras.optimizers.SGD(1.0), **arguments) if wrapped else DPSGD(1.0, **arguments)
    )
    model = linear(optimizer)
    before = weights_of(model)
    x, y = data(1, scale=1e6)  # all push in one direction, so that the bound is reached
    model.train_on_batch(np.repeat(x, rows, 0), np.repeat(y, rows, 0))
    moved = [b - a for b, a in zip(before, weights_of(model), strict=True)]
    length = math.sqrt(sum((m**2).sum() for m in moved))
    assert length == pytest.approx(rows * clip_norm / BATCH, rel=2e-2)  # float32 weights of size 1


# --- regularisers and constraints: post-processing


def wrapped_sgd(rate, **kwargs):
    return DPOptimizer(keras.optimizers.SGD(rate), **kwargs)


@pytest.mark.parametrize("make", [DPSGD, wrapped_sgd], ids=["DPSGD", "DPOptimizer"])
def test_regularisers_are_added_after_clipping_and_noise(make):
    """θ ← θ − η(g̃ + ∇R), with ∇R far above the clip norm and not divided by B."""
    eta, clip_norm, sigma = 0.1, 1e-3, 2.0
    layer = keras.layers.Dense(
        OUTPUTS,
        kernel_regularizer=keras.regularizers.L2(0.5),
        bias_regularizer=keras.regularizers.L1(0.25),
    )
    optimizer = make(
        eta, clip_norm=clip_norm, noise_multiplier=sigma, batch_size=BATCH, noise=KnownNoise()
    )
    model = linear(optimizer, layer=layer)
    w = weights_of(model)
    w[1] = np.array([-0.5, 0.3, 0.5])
    model.set_weights(w)
    for x, y in batches(3):
        g = privatized(w, x, y, clip_norm, sigma)
        w = [w[0] - eta * (g[0] + 2 * 0.5 * w[0]), w[1] - eta * (g[1] + 0.25 * np.sign(w[1]))]
        model.train_on_batch(x, y)
        assert_same(weights_of(model), w)


def test_regularised_training_without_noise_is_that_of_keras():
    options = {"kernel_regularizer": keras.regularizers.L1L2(0.01, 0.1)}
    models = [
        mlp(DPSGD(0.1, **NO_PRIVACY), **options),
        mlp(keras.optimizers.SGD(0.1), private=False, **options),
    ]
    for x, y in batches(4):
        for model in models:
            model.train_on_batch(x, y)
        assert_same(*map(weights_of, models))


@pytest.mark.parametrize("make", [DPSGD, wrapped_sgd], ids=["DPSGD", "DPOptimizer"])
def test_constraints_hold_after_the_noise(make):
    eta, clip_norm, sigma = 0.5, 0.7, 3.0
    layer = keras.layers.Dense(OUTPUTS, kernel_constraint="non_neg")
    optimizer = make(
        eta, clip_norm=clip_norm, noise_multiplier=sigma, batch_size=BATCH, noise=KnownNoise()
    )
    model = linear(optimizer, layer=layer)
    w = weights_of(model)
    for x, y in batches(3):
        g = privatized(w, x, y, clip_norm, sigma)
        w = [np.maximum(w[0] - eta * g[0], 0), w[1] - eta * g[1]]
        model.train_on_batch(x, y)
        assert_same(weights_of(model), w)
    assert (w[0] == 0).any() and (w[0] > 0).any()


# --- arguments

MAKERS = {
    "DPSGD": lambda **kwargs: DPSGD(0.1, **kwargs),
    "DPAdam": lambda **kwargs: DPAdam(0.1, **kwargs),
    "DPOptimizer": lambda **kwargs: DPOptimizer("lion", **kwargs),
}


def test_arguments_that_would_mean_something_else_are_refused():
    for name, value, instead in [
        ("clipnorm", 1.0, "clip_norm"),
        ("global_clipnorm", 1.0, "clip_norm"),
        ("clipvalue", 0.5, "clip_norm"),
        ("loss_scale_factor", 8.0, "leave it out"),
        ("gradient_accumulation_steps", 4, "physical_batch_size"),
    ]:
        for make in MAKERS.values():
            with pytest.raises(ValueError, match=f"{name}.*{instead}"):
                make(**PRIVATE, **{name: value})
            make(**PRIVATE, **{name: None})
        inner = keras.optimizers.SGD(0.1, **{name: value})
        with pytest.raises(ValueError, match=f"{name}.*{instead}"):
            DPOptimizer(inner, **PRIVATE)


@pytest.mark.parametrize(
    "name, values",
    [
        ("clip_norm", [math.nan, True, "1", None, 0, 0.0, -1.0, -math.inf, [1.0]]),
        ("noise_multiplier", [math.nan, False, "1", -1e-9, math.inf, [1.0]]),
        ("batch_size", [math.nan, True, "8", 0, -4, 8.0, math.inf, [8]]),
        ("noise", ["gauss", None, 1.0, dp.noise.Gaussian]),
        ("noise_schedule", ["constant", 1.0, True, [], [0.0], [-1.0], [math.nan], [math.inf]]),
        ("clipping", ["perlayer", None, 1, True]),
        ("normalize", [None, 1, "True", math.nan]),
    ],
)
def test_values_out_of_range_are_refused_by_name(name, values):
    for make in MAKERS.values():
        for value in values:
            with pytest.raises(ValueError, match=name.replace("_", ".")):
                make(**PRIVATE | {name: value})


def test_numbers_of_numpy_are_accepted():
    optimizer = DPSGD(
        clip_norm=np.float32(0.5), noise_multiplier=np.int64(1), batch_size=np.int32(8)
    )
    assert (optimizer.clip_norm, optimizer.noise_multiplier, optimizer.batch_size) == (0.5, 1.0, 8)
    json.dumps(optimizer.get_config())


def test_what_has_no_default_must_be_given():
    for make in MAKERS.values():
        with pytest.raises(TypeError, match="clip_norm"):
            make(**{name: value for name, value in PRIVATE.items() if name != "clip_norm"})


def test_a_batch_size_may_come_later_but_before_it_is_needed():
    for make in MAKERS.values():
        optimizer = make(clip_norm=1.0, noise_multiplier=1.0)
        assert optimizer.batch_size is None
        for use in (
            lambda o: o.releases,
            lambda o: o.build([keras.Variable(np.zeros(3))]),
            lambda o: dp.accounting.epsilon(
                o, dp.accounting.Sampling.poisson(1000, BATCH), 10, 1e-5
            ),
        ):
            with pytest.raises(ValueError, match="batch_size"):
                use(optimizer)
        assert not optimizer.built
        again = type(optimizer).from_config(optimizer.get_config())
        assert again.batch_size is None
        optimizer.batch_size = BATCH
        optimizer.build([keras.Variable(np.zeros(3))])
        with pytest.raises(ValueError, match="batch_size is fixed"):
            optimizer.batch_size = 2 * BATCH


def test_names_of_before_work_and_warn():
    optimizer = DPSGD(0.1, momentum=0.9, **PRIVATE)
    with pytest.warns(FutureWarning, match="has_momentum"):
        assert optimizer.smooths
    variable = keras.Variable(np.zeros(3))
    with pytest.warns(FutureWarning, match="ensure_built"):
        optimizer.serve([variable])
    assert optimizer.built
    with pytest.warns(FutureWarning, match="to_subspace"):
        assert optimizer.in_subspace(0, 5.0) == 5.0
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = optimizer.nothing_of_the_kind


def test_saving_reads_no_name_of_before(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        saved(DPAdam(0.1, **PRIVATE), tmp_path / "model.keras", steps=1)
        keras.models.load_model(tmp_path / "model.keras")


@pytest.mark.parametrize(
    "name, value",
    [
        ("clip_norm", 2.0), ("noise_multiplier", 0.0), ("batch_size", 7), ("noise", "gaussian"),
        ("noise_schedule", [1.0]), ("normalize", True),
    ],
)  # fmt: skip
def test_what_the_noise_depends_on_is_fixed_at_build(name, value):
    for make in MAKERS.values():
        optimizer = make(**PRIVATE)
        setattr(optimizer, name, value)  # before, it may change
        setattr(optimizer, name, getattr(make(**PRIVATE), name))
        optimizer.build([keras.Variable(np.zeros(3))])
        before = getattr(optimizer, name)
        with pytest.raises(ValueError, match=f"{name} is fixed"):
            setattr(optimizer, name, value)
        assert getattr(optimizer, name) is before


def test_calibration_comes_before_build():
    optimizer = DPSGD(**PRIVATE)
    optimizer.build([keras.Variable(np.zeros(3))])
    with pytest.raises(ValueError, match="noise_multiplier is fixed"):
        dp.accounting.calibrate(
            optimizer, dp.accounting.Sampling.poisson(1000, BATCH), 10, 1.0, 1e-5
        )


def test_noise_multiplier_that_is_not_set_names_calibrate():
    optimizer = DPSGD(clip_norm=1.0, batch_size=BATCH)
    with pytest.raises(ValueError, match="accounting.calibrate"):
        _ = optimizer.releases
    model = linear(optimizer)
    before = weights_of(model)
    with pytest.raises(ValueError, match="accounting.calibrate"):
        model.train_on_batch(*data())
    assert_same(weights_of(model), before)


@pytest.mark.parametrize("changes", [{"noise_multiplier": 1.0}, {"normalize": True}])
def test_infinite_clip_norm_needs_multiplier_zero(changes):
    model = linear(DPSGD(**NO_PRIVACY | changes))
    before = weights_of(model)
    with pytest.raises(ValueError, match="infinite clip_norm"):
        model.train_on_batch(*data())
    assert_same(weights_of(model), before)


def test_wrapper_refuses_what_it_cannot_wrap():
    used = keras.optimizers.SGD()
    used.build([keras.Variable(np.zeros(2))])
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    for wrong, message in [
        (DPSGD(**PRIVATE), "DPSGD cannot be wrapped"),
        (scaled, "LossScaleOptimizer cannot be wrapped"),
        (used, "used before"),
    ]:
        with pytest.raises(ValueError, match=message):
            DPOptimizer(wrong, **PRIVATE)


@pytest.mark.parametrize(
    "arguments", [{"weight_decay": 0.1}, {"use_ema": True}, {"ema_overwrite_frequency": 2}]
)
def test_wrapper_does_not_ignore_what_belongs_to_the_inner_optimizer(arguments):
    """All that updates the weights happens in the inner optimizer."""
    with pytest.raises((TypeError, ValueError), match=next(iter(arguments))):
        DPOptimizer("sgd", **PRIVATE, **arguments)


def test_wrapper_passes_on_which_variables_do_not_decay():
    inner, bare = (keras.optimizers.AdamW(0.1, weight_decay=0.5) for _ in range(2))
    ours = DPOptimizer(inner, **NO_PRIVACY)
    models = mlp(ours), mlp(bare, private=False)
    for optimizer, model in zip((ours, bare), models, strict=True):
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        model.train_on_batch(*data())
    assert_same(*map(weights_of, models), rtol=1e-4)


# --- what could train without privacy raises


@pytest.mark.parametrize(
    "name, options",
    [
        ("DPSGD", {}), ("DPSGD", {"jit_compile": True}), ("DPSGD", {"run_eagerly": True}),
        ("DPAdam", {}), ("DPOptimizer", {}),
    ],
)  # fmt: skip
def test_plain_keras_model_cannot_be_trained(name, options):
    make = MAKERS[name]
    model = linear(make(**PRIVATE), private=False, **options)
    before = weights_of(model)
    with pytest.raises(RuntimeError, match="raw batch gradient"):
        model.train_on_batch(*data())
    with pytest.raises(RuntimeError, match="raw batch gradient"):
        model.fit(*data(), verbose=0)
    assert_same(weights_of(model), before)


def test_loss_scaling_does_not_hide_the_raw_gradient():
    model = linear(keras.optimizers.LossScaleOptimizer(DPSGD(**PRIVATE)), private=False)
    before = weights_of(model)
    with pytest.raises(RuntimeError, match="raw batch gradient"):
        model.train_on_batch(*data())
    assert_same(weights_of(model), before)


def test_apply_is_refused():
    for make in MAKERS.values():
        variable, gradient = keras.Variable(np.ones(3)), tf.ones(3)
        optimizer = make(**PRIVATE)
        optimizer.build([variable])
        for method, arguments in [
            (optimizer.apply, ([gradient],)),
            (optimizer.apply, ([gradient], [variable])),
            (optimizer.apply_gradients, ([(gradient, variable)],)),
            (optimizer.stateless_apply, (optimizer.variables, [gradient], [variable])),
        ]:
            with pytest.raises((RuntimeError, ValueError)):
                method(*arguments)
        np.testing.assert_array_equal(variable.numpy(), np.ones(3))


def test_an_optimizer_serves_one_model():
    """Else the data of the second model would move the weights of the first, unaccounted there."""
    for make in MAKERS.values():
        optimizer = make(**PRIVATE)
        first, second = linear(optimizer), linear(optimizer)
        first.train_on_batch(*data())
        before = weights_of(first)
        with pytest.raises(ValueError):
            second.train_on_batch(*data())
        assert_same(weights_of(first), before)


def test_freezing_a_layer_does_not_mix_up_the_variables():
    """Either the step is refused, or it moves what is trainable and leaves what is frozen."""
    inputs = keras.Input((3,))
    layers = [keras.layers.Dense(3), keras.layers.Dense(3)]  # of equal shapes
    model = dp.DPModel(inputs, layers[1](layers[0](inputs)))
    optimizer = DPSGD(0.1, **PRIVATE)
    x = np.ones((BATCH, 3), "float32")

    def train():
        model.compile(optimizer=optimizer, loss="mse")
        model.sampling = dp.accounting.Sampling.poisson(1000, BATCH)
        model.train_on_batch(x, x)

    train()
    layers[0].trainable = False
    frozen, trained = (layer.kernel.numpy() for layer in layers)
    refused = False
    try:
        train()
    except ValueError:
        refused = True
    np.testing.assert_array_equal(layers[0].kernel.numpy(), frozen)
    assert refused or (layers[1].kernel.numpy() != trained).any()


# --- configurations


def all_optimizers():
    everything = {
        "clip_norm": 0.5, "batch_size": BATCH, "noise_multiplier": 1.25,
        "noise_schedule": [1.0, 0.5, 2.0], "normalize": True, "name": "mine",
    }  # fmt: skip
    return {
        "DPSGD": DPSGD(
            0.25, 0.9, True, weight_decay=0.5, use_ema=True, ema_momentum=0.75, **everything
        ),
        "DPSGD scheduled": DPSGD(decayed(), **PRIVATE),
        "DPSGD uncalibrated": DPSGD(clip_norm=math.inf, batch_size=BATCH),
        "DPAdam": DPAdam(0.25, 0.5, 0.75, 0.125, True, weight_decay=0.5, **everything),
        "DPAdam scheduled": DPAdam(stepwise(), **PRIVATE),
        "DPOptimizer": DPOptimizer(
            keras.optimizers.Lion(0.25, beta_1=0.5, weight_decay=0.5), **everything
        ),
        "DPOptimizer scheduled": DPOptimizer(keras.optimizers.Nadam(decayed()), **PRIVATE),
    }


def test_configuration_round_trips():
    for optimizer in all_optimizers().values():
        assert_round_trips(optimizer)


def assert_round_trips(optimizer):
    config = optimizer.get_config()
    serialised = keras.saving.serialize_keras_object(optimizer)
    assert serialised["registered_name"] == "dp_keras_opt>" + type(optimizer).__name__
    through_json = json.loads(json.dumps(serialised))
    for again in (
        type(optimizer).from_config(copy.deepcopy(config)),
        keras.saving.deserialize_keras_object(through_json),
        keras.optimizers.get(copy.deepcopy(serialised)),
        dp.optimizers.get(copy.deepcopy(serialised)),
    ):
        assert type(again) is type(optimizer)
        assert again.get_config() == config
        if again.noise_multiplier is not None:
            assert again.releases == optimizer.releases
        rates = []
        for each in (optimizer, again):
            if not each.built:
                each.build([keras.Variable(np.zeros(2))])
            rates.append(float(each.learning_rate))
        assert rates[0] == pytest.approx(rates[1])


def test_saving_gives_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for optimizer in all_optimizers().values():
            optimizer.get_config()


def test_configuration_holds_what_was_given():
    config = all_optimizers()["DPAdam"].get_config()
    expected = {
        "learning_rate": 0.25, "beta_1": 0.5, "beta_2": 0.75, "epsilon": 0.125, "amsgrad": True,
        "weight_decay": 0.5, "clip_norm": 0.5, "batch_size": BATCH, "noise_multiplier": 1.25,
        "normalize": True, "clipping": "flat", "seed": None, "name": "mine",
    }  # fmt: skip
    assert {name: config[name] for name in expected} == expected
    assert not {"clipnorm", "clipvalue", "global_clipnorm", "loss_scale_factor"} & set(config)
    assert config["noise_schedule"]["config"] == {"values": [1.0, 0.5, 2.0]}


def test_get():
    for name, cls in (("DPSGD", DPSGD), ("dpadam", DPAdam)):
        optimizer = dp.optimizers.get(name, **PRIVATE, learning_rate=0.5)
        assert type(optimizer) is cls and optimizer.clip_norm == 1.0
        assert float(optimizer.learning_rate) == 0.5
        assert dp.optimizers.get(optimizer) is optimizer
    wrapped = dp.optimizers.get("DPOptimizer", optimizer="lion", **PRIVATE)
    assert isinstance(wrapped.inner, keras.optimizers.Lion)
    with pytest.raises(ValueError, match="'sgd' is not known; use one of .*'dpsgd'"):
        dp.optimizers.get("sgd")
    plain = keras.optimizers.SGD()
    for wrong in (plain, keras.saving.serialize_keras_object(plain), None, 1, DPSGD):
        with pytest.raises(ValueError, match="private optimizer"):
            dp.optimizers.get(wrong)


# --- saving and loading


def saved(optimizer, path, steps=2):
    model = linear(optimizer)
    for x, y in batches(steps):
        model.train_on_batch(x, y)
    model.save(path)
    return model


SAVED = {
    "DPSGD": lambda **private: DPSGD(decayed(), momentum=0.9, **private),
    "DPAdam": lambda **private: DPAdam(0.1, amsgrad=True, **private),
    "DPOptimizer": lambda **private: DPOptimizer(keras.optimizers.Lion(decayed()), **private),
}


@pytest.mark.parametrize("make", SAVED.values(), ids=SAVED)
def test_a_loaded_model_goes_on_where_it_stopped(make, tmp_path):
    path = tmp_path / "model.keras"
    model = saved(make(**PRIVATE, noise=KnownNoise()), path)
    loaded = keras.models.load_model(path)
    assert type(loaded.optimizer) is type(model.optimizer)
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    for a, b in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert loaded.optimizer.iterations.numpy() == 2
    loaded.sampling = model.sampling
    for x, y in batches(3):
        for each in (model, loaded):
            each.train_on_batch(x, y)
        assert_same(weights_of(model), weights_of(loaded), rtol=1e-6)
    assert loaded.ledger.steps == 5


@pytest.mark.parametrize("make", SAVED.values(), ids=SAVED)
def test_two_resumed_runs_have_different_noise(make, tmp_path):
    path = tmp_path / "model.keras"
    model = saved(make(**PRIVATE), path)
    runs = [model]
    for _ in range(2):
        runs.append(keras.models.load_model(path))
        runs[-1].sampling = model.sampling
    for _ in range(4):  # Lion's update is a sign, so one step might agree by chance
        for run in runs:
            run.train_on_batch(*data())
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert (runs[first].get_weights()[0] != runs[second].get_weights()[0]).any()


def with_optimizer(path, optimizer):
    """The saved model with another optimizer in its configuration."""
    source = zipfile.ZipFile(io.BytesIO(path.read_bytes()))
    changed = path.with_name("changed.keras")
    with zipfile.ZipFile(changed, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name == "config.json":
                config = json.loads(content)
                serialised = keras.saving.serialize_keras_object(optimizer)
                config["compile_config"]["optimizer"] = serialised
                content = json.dumps(config)
            target.writestr(name, content)
    return changed


@pytest.mark.parametrize(
    "other",
    [
        lambda: DPSGD(0.1, **PRIVATE),
        lambda: DPAdam(0.1, amsgrad=True, **PRIVATE),
        lambda: DPOptimizer("adam", **PRIVATE),
    ],
    ids=["DPSGD", "DPAdam amsgrad", "DPOptimizer"],
)
def test_state_of_another_optimizer_is_not_dropped_silently(other, tmp_path):
    """Keras itself would warn, and go on at step 0."""
    path = tmp_path / "model.keras"
    saved(DPAdam(0.1, **PRIVATE), path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        changed = with_optimizer(path, other())
        with pytest.raises(ValueError, match="belongs to another optimizer"):
            keras.models.load_model(changed)
        loaded = keras.models.load_model(changed, compile=False)  # what the message advises
    loaded.compile(optimizer=other(), loss="mse")
    loaded.sampling = dp.accounting.Sampling.poisson(1000, BATCH)
    loaded.train_on_batch(*data())
    assert loaded.ledger.steps == 3


def test_mismatched_state_raises_directly():
    first, second = (linear(o) for o in (DPAdam(0.1, **PRIVATE), DPSGD(0.1, **PRIVATE)))
    for model in (first, second):
        model.train_on_batch(*data())
    store = {}
    first.optimizer.save_own_variables(store)
    with pytest.raises(ValueError, match="belongs to another optimizer"):
        second.optimizer.load_own_variables(store)
    assert second.optimizer.iterations.numpy() == 1


def test_checkpoint_restores_the_state_and_not_the_noise(tmp_path):
    model = linear(DPAdam(0.1, **PRIVATE))
    model.train_on_batch(*data())
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.write(str(tmp_path / "checkpoint"))
    results = []
    for _ in range(2):
        checkpoint.restore(path)
        assert model.optimizer.iterations.numpy() == 1
        model.train_on_batch(*data())
        results.append(model.get_weights()[0])
    assert (results[0] != results[1]).any()


@pytest.mark.parametrize("optimizer", [DPSGD, dp.optimizers.DPAdam, dp.optimizers.DPGaLore])
@pytest.mark.parametrize(
    "arguments, hints",
    [
        (
            {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "num_microbatches": 8},
            ["l2_norm_clip: it is called clip_norm", "num_microbatches: every example is clipped"],
        ),
        ({"unroll_microbatches": True, "clip_norm": 1.0, "batch_size": 8}, ["physical_batch_size"]),
        ({"max_grad_norm": 1.0, "batch_size": 8}, ["max_grad_norm: it is called clip_norm"]),
        ({"l2_clip_norm": 1.0}, ["l2_clip_norm: it is called clip_norm"]),
        ({"clip_norm": 1.0, "expected_batch_size": 8}, ["is called batch_size"]),
        ({"clip_norm": 1.0, "batch_size": 8, "target_epsilon": 1.0}, ["calibrate"]),
    ],
)
def test_names_of_other_libraries_are_translated(optimizer, arguments, hints):
    with pytest.raises(TypeError, match=f"{optimizer.__name__} does not take") as caught:
        optimizer(0.1, **arguments)
    assert all(hint in str(caught.value) for hint in hints)
    assert "It needs clip_norm; batch_size" in str(caught.value)


def test_names_of_other_libraries_are_translated_around_a_keras_optimizer():
    with pytest.raises(TypeError, match="DPOptimizer does not take l2_norm_clip: it is called"):
        dp.optimizers.DPOptimizer("adam", l2_norm_clip=1.0)
