"""The private training step: every kind of model, every way to run it, saving and loading."""

import os
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.accounting import Sampling
from dp_keras_opt.training import step
from tests.helpers.per_example import assert_close, clip_and_sum, one_at_a_time

layers, ops = keras.layers, keras.ops
N, B, DELTA = 24, 8, 1e-3


def _rng():
    return np.random.default_rng(1)


X = _rng().normal(size=(N, 3)).astype("float32")
Y = _rng().normal(size=(N, 1)).astype("float32")


def _sgd(noise_multiplier=1.0, clip_norm=0.5, batch_size=B, learning_rate=0.1, **options):
    return dp.optimizers.DPSGD(
        learning_rate,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        batch_size=batch_size,
        **options,
    )


def _layers():
    return [layers.Dense(4, activation="tanh"), layers.Dense(1)]


@keras.saving.register_keras_serializable(package="tests")
class Plain(keras.Model):
    def __init__(self, units=4, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.hidden = layers.Dense(units, activation="tanh")
        self.head = layers.Dense(1)

    def call(self, inputs):
        return self.head(self.hidden(inputs))

    def get_config(self):
        return super().get_config() | {"units": self.units}


@keras.saving.register_keras_serializable(package="tests")
class Private(dp.DPModel):
    def __init__(self, units=4, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.hidden = layers.Dense(units, activation="tanh")
        self.head = layers.Dense(1)

    def call(self, inputs, training=None):
        return self.head(self.hidden(inputs))

    def get_config(self):
        return super().get_config() | {"units": self.units}


def functional():
    inputs = keras.Input((3,))
    hidden, head = _layers()
    return dp.DPModel(inputs, head(hidden(inputs)))


def functional_wrapped():
    inputs = keras.Input((3,))
    hidden, head = _layers()
    return dp.make_private(keras.Model(inputs, head(hidden(inputs))))


def sequential_built():
    return dp.make_private(keras.Sequential([keras.Input((3,)), *_layers()]))


def sequential_unbuilt():
    return dp.make_private(keras.Sequential(_layers()))


def subclass():
    return Private()


def subclass_wrapped():
    return dp.make_private(Plain())


KINDS = [
    functional, functional_wrapped, sequential_built, sequential_unbuilt, subclass,
    subclass_wrapped,
]  # fmt: skip


def _by_hand(model, x, y, clip_norm, learning_rate=0.1, steps=1, batch_size=B):
    """The weights after full-batch steps of clipped gradient descent, one example at a time."""
    reference = keras.models.clone_model(functional())
    reference.set_weights(model.get_weights())

    def loss(y, y_pred):
        return tf.reduce_mean(tf.square(y - y_pred))

    for _ in range(steps):
        total = clip_and_sum(one_at_a_time(reference, loss, x, y), clip_norm)
        reference.set_weights(
            [w - learning_rate * g / batch_size
             for w, g in zip(reference.get_weights(), total, strict=True)]
        )  # fmt: skip
    return reference.get_weights()


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_every_kind_of_model_takes_the_clipped_step(make):
    model = make()
    model.compile(_sgd(noise_multiplier=0.0), "mse", metrics=["mae"])
    model(X[:2])
    expected = _by_hand(model, X, Y, 0.5, batch_size=B)
    model.sampling = Sampling.poisson(10 * N, B)
    logs = model.train_on_batch(X, Y, return_dict=True)
    assert_close(model.get_weights(), expected)
    assert set(logs) == {"loss", "mae"}
    assert isinstance(model, dp.DPModel)
    assert model.predict(X, verbose=0).shape == (N, 1)
    np.testing.assert_allclose(
        model.evaluate(X, Y, verbose=0)[0],
        ((model.predict(X, verbose=0) - Y) ** 2).mean(),
        rtol=1e-5,
    )


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_every_kind_of_model_fits_from_scratch(make):
    """The model may be unbuilt when its first step is traced."""
    model = make()
    model.compile(_sgd(), "mse")
    history = model.fit(X, Y, epochs=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    assert model.ledger.steps == int(model.optimizer.iterations) == 6


def test_make_private_shares_the_weights():
    base = Plain()
    model = dp.make_private(base)
    model.compile(_sgd(), "mse")
    model.fit(X, Y, verbose=0)
    np.testing.assert_array_equal(base.predict(X, verbose=0), model.predict(X, verbose=0))
    assert dp.make_private(model) is model


def test_a_subclass_defined_after_a_functional_model_works():
    functional()

    class Later(dp.DPModel):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)

        def call(self, inputs):
            return self.dense(inputs)

    model = Later()
    model.compile(_sgd(), "mse")
    model.fit(X, Y, verbose=0)
    assert not isinstance(model, type(functional()))
    assert model.ledger.steps == 3


def test_a_subclass_that_passes_inputs_and_outputs_is_refused_with_the_fix():
    class Functionally(dp.DPModel):
        def __init__(self):
            inputs = keras.Input((3,))
            super().__init__(inputs, layers.Dense(1)(inputs))

    with pytest.raises(TypeError, match="dp_keras_opt.DPModel\\(inputs, outputs\\)"):
        Functionally()


def test_nested_inputs_and_outputs():
    inputs = {"a": keras.Input((3,), name="a"), "more": {"b": keras.Input((2,), name="b")}}
    joined = layers.Concatenate()([inputs["a"], inputs["more"]["b"]])
    outputs = {"p": layers.Dense(1, name="p")(joined), "q": layers.Dense(2, name="q")(joined)}
    model = dp.DPModel(inputs, outputs)
    model.compile(_sgd(), {"p": "mse", "q": "mae"}, metrics={"q": ["mse"]})
    x = {"a": X, "more": {"b": X[:, :2]}}
    history = model.fit(x, {"p": Y, "q": X[:, :2]}, verbose=0).history
    assert set(history) == {"loss", "p_loss", "q_loss", "q_mse"}
    np.testing.assert_allclose(
        history["loss"][0], history["p_loss"][0] + history["q_loss"][0], rtol=1e-5
    )
    assert set(model.predict(x, verbose=0)) == {"p", "q"}


# What enters the step.


def _one_step(model, x, y, **weights):
    model.sampling = Sampling.poisson(10 * N, model.optimizer.batch_size)
    model.train_on_batch(x, y, **weights)
    return model.get_weights()


def test_class_weight_multiplies_the_loss_before_clipping():
    x, y = X, _rng().integers(0, 3, N)
    results = []
    for weights in ({"class_weight": {0: 0.1, 1: 5.0, 2: 0.0}}, None):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((3,))
        model = dp.DPModel(inputs, layers.Dense(3, activation="softmax")(inputs))
        model.compile(_sgd(0.0), "sparse_categorical_crossentropy")
        weights = weights or {"sample_weight": np.array([0.1, 5.0, 0.0], "float32")[y]}
        results.append(_one_step(model, x, y, **weights))
    assert_close(*results, rtol=1e-6)


def test_fit_takes_sample_and_class_weights():
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, layers.Dense(3, activation="softmax")(inputs))
    model.compile(_sgd(0.0), "sparse_categorical_crossentropy")
    before = model.get_weights()
    y = _rng().integers(0, 3, N)
    model.fit(X, y, sample_weight=np.zeros(N), verbose=0)
    model.fit(X, y, class_weight={0: 0.0, 1: 0.0, 2: 0.0}, verbose=0)
    assert_close(model.get_weights(), before)
    model.fit(X, y, class_weight={0: 1.0, 1: 1.0, 2: 1.0}, verbose=0)
    assert np.abs(model.get_weights()[0] - before[0]).max() > 1e-3


def test_regularizers_are_neither_clipped_nor_noised():
    inputs = keras.Input((3,))
    dense = layers.Dense(1, kernel_regularizer=keras.regularizers.L2(100.0))
    model = dp.DPModel(inputs, dense(inputs))
    model.compile(_sgd(0.0, clip_norm=1e-6, learning_rate=1e-3), "mse")
    before = model.get_weights()[0]
    np.testing.assert_allclose(_one_step(model, X, Y)[0], before * (1 - 0.2), rtol=1e-4)


def test_dropout_draws_another_mask_each_step():
    inputs = keras.Input((50,))
    model = dp.DPModel(inputs, layers.Dense(1, use_bias=False)(layers.Dropout(0.5)(inputs)))
    model.compile(_sgd(0.0, clip_norm=np.inf, learning_rate=1.0, batch_size=1), "mse")
    model.sampling = Sampling.poisson(10, 1)
    touched = []
    for _ in range(3):
        before = model.get_weights()[0]
        model.train_on_batch(np.ones((1, 50), "float32"), np.full((1, 1), 9.0))
        touched.append((model.get_weights()[0] != before).ravel())
    assert 5 < touched[0].sum() < 45
    assert (touched[0] != touched[1]).any() and (touched[1] != touched[2]).any()


@pytest.mark.filterwarnings("ignore:.*examples had a NaN or infinite")
def test_non_finite_examples_are_counted_warned_of_and_kept_out_of_the_history():
    x = X.copy()
    x[3], x[5] = np.nan, np.inf
    model = functional()
    model.compile(_sgd(0.0), "mse")
    with pytest.warns(UserWarning, match="2 examples had a NaN or infinite.*do not publish"):
        history = model.fit(x, Y, verbose=0)
    assert set(history.history) == {"loss"}
    assert all(np.isfinite(w).all() for w in model.get_weights())
    assert model.non_finite_examples == 0  # reported, and counted afresh
    with pytest.raises(ValueError, match="How this batch is sampled is not known"):
        model.train_on_batch(x, Y)
    model.sampling = Sampling.poisson(N, B)
    model.train_on_batch(x, Y)
    assert model.non_finite_examples == 2


# Ways to run it.

WAYS = {
    "graph": {},
    "eager": {"run_eagerly": True},
    "xla": {"jit_compile": True},
    "three steps at once": {"steps_per_execution": 3},
    "two of three steps at once": {"steps_per_execution": 2},
    "chunks that divide": {"physical_batch_size": 4},
    "chunks that do not divide": {"physical_batch_size": 3},
    "chunks of one row": {"physical_batch_size": 1},
    "a chunk larger than the batch": {"physical_batch_size": 100},
    "chunks, eager": {"physical_batch_size": 3, "run_eagerly": True},
    "chunks, xla": {"physical_batch_size": 3, "jit_compile": True},
    "chunks, two steps": {"physical_batch_size": 3, "steps_per_execution": 2},
}


@pytest.mark.representatives(8)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    "way, dynamic",
    [(way, False) for way in WAYS]
    + [(way, True) for way in ("graph", "chunks that do not divide", "chunks, xla")],
)
def test_every_way_gives_the_same_update_and_figures(way, dynamic):
    model = functional()
    start = model.get_weights()
    expected = _by_hand(model, X[:B], Y[:B], 0.5, steps=3)
    model.compile(_sgd(0.0), "mse", metrics=["mae"], **WAYS[way])
    data = tf.data.Dataset.from_tensors((X[:B], Y[:B])).repeat(3)
    if dynamic:  # of unknown length, too
        spec = tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([None, 1], tf.float32)
        elements = [(X[:B], Y[:B])] * 3
        data = tf.data.Dataset.from_generator(lambda: iter(elements), output_signature=spec)
    batches = dp.data.assume_sampling(data, Sampling.full(B))
    logs = model.fit(batches, verbose=0).history
    assert_close(model.get_weights(), expected)
    assert model.ledger.steps == int(model.optimizer.iterations) == 3
    weights = [start]
    for steps in (1, 2):
        weights.append(_by_hand(_with(start), X[:B], Y[:B], 0.5, steps=steps))
    errors = [_with(w).predict(X[:B], verbose=0) - Y[:B] for w in weights]
    np.testing.assert_allclose(logs["loss"][0], np.mean(np.square(errors)), rtol=1e-4)
    np.testing.assert_allclose(logs["mae"][0], np.mean(np.abs(errors)), rtol=1e-4)


def _with(weights):
    model = functional()
    model.set_weights(weights)
    return model


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy):
    """Gradients in half precision, clipped and summed in float32; no loss-scaling optimizer."""
    reference = functional()
    keras.config.set_dtype_policy(policy)
    try:
        model = functional()
    finally:
        keras.config.set_dtype_policy("float32")
    model.set_weights(reference.get_weights())
    expected = _by_hand(reference, X, Y, 0.1)
    model.compile(_sgd(0.0, clip_norm=0.1), "mse")
    assert type(model.optimizer) is dp.optimizers.DPSGD
    step = [a - b for a, b in zip(_one_step(model, X, Y), reference.get_weights(), strict=True)]
    exact = [a - b for a, b in zip(expected, reference.get_weights(), strict=True)]
    assert_close(step, exact, rtol=3e-2)
    assert all(v.dtype == "float32" for v in model.trainable_variables)


def test_gradients_that_vanish_in_float16_survive_by_the_loss_scale():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        inputs = keras.Input((1,))
        model = dp.DPModel(inputs, layers.Dense(1, kernel_initializer="zeros")(inputs))
    finally:
        keras.config.set_dtype_policy("float32")
    model.compile(_sgd(0.0, clip_norm=1.0, batch_size=1, learning_rate=1.0), "mse")
    kernel, bias = _one_step(model, np.ones((1, 1)), np.full((1, 1), 1e-8))
    np.testing.assert_allclose([kernel[0, 0], bias[0]], 2e-8, rtol=1e-2)


@pytest.mark.parametrize("cell", [layers.LSTMCell(3), [layers.LSTMCell(3)]], ids=["rule", "none"])
def test_a_recurrent_layer_under_xla(cell):
    inputs = keras.Input((4, 3))
    model = dp.DPModel(inputs, layers.Dense(1)(layers.RNN(cell)(inputs)))
    model.compile(_sgd(), "mse", jit_compile=True)
    model.fit(_rng().normal(size=(N, 4, 3)), Y, verbose=0)
    assert model.ledger.steps == 3


def test_poisson_batches_of_all_sizes():
    model = functional()
    model.compile(_sgd(), "mse", metrics=["mae"])
    batches = dp.data.poisson_batches((X, Y), B, steps_per_epoch=12, physical_batch_size=4)
    model.fit(batches, epochs=2, verbose=0)
    assert model.ledger.steps == int(model.optimizer.iterations) == 24
    assert model.sampling == batches.sampling
    before = model.get_weights()
    empty = tf.data.Dataset.from_tensors((X[:4], Y[:4], dp.data.RowInfo(np.zeros(4, "float32"))))
    model.fit(dp.data.assume_sampling(empty, Sampling.poisson(N, B)), verbose=0)
    assert model.ledger.steps == 25
    assert np.abs(model.get_weights()[0] - before[0]).max() > 0  # a step of noise only


def test_the_step_is_noisy_and_never_the_same():
    results = []
    for _ in range(2):
        keras.utils.set_random_seed(5)
        model = functional()
        model.compile(_sgd(), "mse")
        results.append(_one_step(model, X, Y)[0])
    assert np.abs(results[0] - results[1]).max() > 1e-3


# Data and sampling.


@pytest.mark.parametrize(
    "data",
    [
        lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(B),
        lambda: ((X[:B], Y[:B]) for _ in range(3)),
    ],
    ids=["dataset", "generator"],
)
def test_data_without_declared_sampling_are_refused(data):
    model = functional()
    model.compile(_sgd(), "mse")
    with pytest.raises(ValueError, match="dp_keras_opt.data.assume_sampling"):
        model.fit(data(), verbose=0)
    model.fit(dp.data.assume_sampling(data(), Sampling.shuffled(N, B)), verbose=0)
    assert model.ledger.steps == 3


def test_steps_per_epoch_with_arrays_is_refused():
    model = functional()
    model.compile(_sgd(), "mse")
    with pytest.raises(ValueError, match="steps_per_epoch with arrays"):
        model.fit(X, Y, steps_per_epoch=2, verbose=0)


def test_that_shuffled_arrays_are_expensive_is_said_where_there_is_a_choice():
    model = dp.make_private(Plain())
    model.compile(_sgd(), "mse")
    with pytest.warns(UserWarning, match="shuffled epochs, with a much larger ε"):
        model.fit(X, Y, shuffle=False, verbose=0)
    calibrated = _sgd(noise_multiplier=None)
    dp.accounting.calibrate(calibrated, Sampling.shuffled(N, B), 3, epsilon=9.0, delta=DELTA)
    for optimizer in (
        _sgd(batch_size=N),
        calibrated,
    ):  # one example is in all steps, or it was planned so
        model.compile(optimizer, "mse")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.fit(X, Y, shuffle=False, verbose=0)


def test_batch_sizes_of_data_and_optimizer_must_agree():
    model = functional()
    model.compile(_sgd(), "mse")
    with pytest.raises(ValueError, match="batch_size=8.*batch_size=4"):
        model.fit(dp.data.poisson_batches((X, Y), 4), verbose=0)
    with pytest.raises(ValueError, match="batch_size=8.*batch_size=4"):
        model.fit(X, Y, batch_size=4, verbose=0)
    with pytest.raises(ValueError, match="batch_size=8.*batch_size=4"):
        model.sampling = Sampling.poisson(N, 4)


def test_batch_sizes_must_agree_where_the_noise_was_calibrated_too():
    """Larger batches make fewer steps an epoch than are accounted for it."""
    optimizer = _sgd(None)
    dp.accounting.calibrate(optimizer, Sampling.shuffled(N, B), 6, epsilon=20.0, delta=DELTA)
    model = functional()
    model.compile(optimizer, "mse")
    with pytest.raises(ValueError, match="batch_size=8.*batch_size=24"):
        model.fit(X, Y, batch_size=N, verbose=0)


def test_batch_sizes_are_compared_again_after_compiling_anew():
    batches = dp.data.poisson_batches((X, Y), B)
    model = functional()
    model.compile(_sgd(), "mse")
    model.fit(batches, verbose=0)
    model.compile(_sgd(batch_size=4), "mse")
    with pytest.raises(ValueError, match="batch_size=4.*batch_size=8"):
        model.sampling = batches.sampling
    with pytest.raises(ValueError, match="batch_size=4.*batch_size=8"):
        model.fit(batches, verbose=0)
    assert model.ledger.steps == 3


def test_sampling_other_than_calibrated_is_refused():
    optimizer = _sgd(None)
    dp.accounting.calibrate(optimizer, Sampling.poisson(N, B), 10, epsilon=5.0, delta=DELTA)
    model = functional()
    model.compile(optimizer, "mse")
    with pytest.raises(ValueError, match="calibrated for"):
        model.fit(X, Y, verbose=0)
    with pytest.raises(ValueError, match="calibrated for"):
        model.fit(dp.data.poisson_batches((X[:20], Y[:20]), B), verbose=0)
    model.fit(dp.data.poisson_batches((X, Y), B), verbose=0)
    assert model.ledger.steps == 3


def test_each_fit_of_shuffled_data_is_a_pass_of_its_own():
    """Two fits that stop after half an epoch may both have used the same example."""
    optimizer = _sgd(None, batch_size=N // 2)
    sampling = Sampling.shuffled(N, N // 2)
    dp.accounting.calibrate(optimizer, sampling, 2, epsilon=20.0, delta=DELTA)
    model = functional()
    model.compile(optimizer, "mse")
    one_epoch = dp.accounting.epsilon(optimizer, sampling, 2, DELTA)
    two_epochs = dp.accounting.epsilon(optimizer, sampling, 4, DELTA)

    def stop(batch, logs):
        model.stop_training = True

    for expected in (one_epoch, two_epochs):
        model.fit(X, Y, verbose=0, callbacks=[_on_batch_end(stop)])
        assert model.ledger.epsilon(DELTA) == pytest.approx(expected)
    assert model.ledger.steps == 2


def _on_batch_end(function):
    return keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: function(batch, logs)
    )


def test_train_on_batch_needs_the_sampling():
    model = functional()
    with pytest.raises(ValueError, match="compile"):
        model.sampling = Sampling.poisson(N, B)
    model.compile(_sgd(), "mse")
    with pytest.raises(ValueError, match="How batches are sampled is not known"):
        model.train_on_batch(X, Y)
    with pytest.raises(ValueError, match="must be a dp_keras_opt.accounting.Sampling"):
        model.sampling = "poisson"


# What must not be trained.


def test_arguments_of_compile():
    model = functional()
    with pytest.raises(ValueError, match="DPOptimizer\\(optimizer"):
        model.compile("adam", "mse")
    with pytest.raises(ValueError, match="auto_scale_loss"):
        model.compile(_sgd(), "mse", auto_scale_loss=True)
    for size in (0, -1, 2.5, True, "8"):
        with pytest.raises(ValueError, match="physical_batch_size must be an integer >= 1"):
            model.compile(_sgd(), "mse", physical_batch_size=size)


def test_a_plain_model_with_a_private_optimizer_raises_at_the_first_step():
    inputs = keras.Input((3,))
    model = keras.Model(inputs, layers.Dense(1)(inputs))
    model.compile(_sgd(), "mse")
    with pytest.raises(RuntimeError, match="make_private"):
        model.fit(X, Y, verbose=0)


@pytest.mark.parametrize("method", ["train_step", "compute_loss", "make_train_function"])
def test_overridden_training_is_refused(method):
    def override(self, *args, **kwargs):
        return None

    model = type("Custom", (Private,), {method: override})()
    with pytest.raises(TypeError, match=f"overrides `{method}`"):
        model.compile(_sgd(), "mse")


@pytest.mark.parametrize("method", ["train_step", "compute_loss"])
def test_overridden_training_of_a_wrapped_model_is_refused(method):
    def override(self, *args, **kwargs):
        return None

    with pytest.raises(TypeError, match=f"overrides `{method}`"):
        dp.make_private(type("Custom", (Plain,), {method: override})())
    with pytest.raises(TypeError, match="needs a keras.Model"):
        dp.make_private(layers.Dense(1))


def _run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"} | environment,
        capture_output=True,
        text=True,
        timeout=150,
    )


def test_another_backend_is_refused_at_import():
    # JAX need not be installed to be told: the name of the backend is what counts.
    result = _run("import keras; keras.backend.backend = lambda: 'jax'; import dp_keras_opt")
    assert result.returncode != 0
    assert "ImportError" in result.stderr and "it is 'jax'" in result.stderr
    assert "KERAS_BACKEND=tensorflow" in result.stderr


# Saving and loading.


def _trained(make):
    model = make()
    model.compile(_sgd(0.7), "mse", metrics=["mae"], physical_batch_size=5)
    model.fit(dp.data.poisson_batches((X, Y), B), verbose=0)
    return model


SAVED = [functional, sequential_unbuilt, subclass, subclass_wrapped]


@pytest.mark.parametrize("make", SAVED, ids=lambda make: make.__name__)
def test_saved_and_loaded_whole(make, tmp_path):
    model = _trained(make)
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    assert isinstance(loaded, dp.DPModel)
    np.testing.assert_array_equal(model.predict(X, verbose=0), loaded.predict(X, verbose=0))
    assert loaded.ledger.steps == 3
    assert loaded.ledger.epsilon(DELTA) == model.ledger.epsilon(DELTA) > 0
    assert loaded.optimizer.noise_multiplier == 0.7
    assert int(loaded.optimizer.iterations) == 3
    assert loaded.physical_batch_size == 5
    loaded.fit(dp.data.poisson_batches((X, Y), B), epochs=2, verbose=0)
    assert loaded.ledger.steps == 9
    expected = dp.accounting.epsilon(_sgd(0.7), Sampling.poisson(N, B), 9, DELTA)
    assert loaded.ledger.epsilon(DELTA) == pytest.approx(expected)
    assert model.ledger.steps == 3


@pytest.mark.parametrize("make", [functional, subclass_wrapped], ids=lambda make: make.__name__)
def test_saved_and_loaded_weights(make, tmp_path):
    model = _trained(make)
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    fresh = make()
    fresh.compile(_sgd(0.7), "mse")
    fresh(X[:2])
    fresh.load_weights(path)
    np.testing.assert_array_equal(model.predict(X, verbose=0), fresh.predict(X, verbose=0))
    assert fresh.ledger.steps == 3
    fresh.fit(dp.data.poisson_batches((X, Y), B), verbose=0)
    assert fresh.ledger.steps == 6
    expected = dp.accounting.epsilon(_sgd(0.7), Sampling.poisson(N, B), 6, DELTA)
    assert fresh.ledger.epsilon(DELTA) == pytest.approx(expected)


def test_going_back_to_a_checkpoint_gives_no_epsilon_back(tmp_path):
    model = _trained(functional)
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    model.fit(dp.data.poisson_batches((X, Y), B), verbose=0)
    model.load_weights(path)
    assert model.ledger.steps == 6
    model.fit(dp.data.poisson_batches((X, Y), B), verbose=0)
    assert model.ledger.steps == 9


def test_checkpoints_written_during_training_hold_the_ledger(tmp_path):
    model = functional()
    model.compile(_sgd(), "mse")
    path = tmp_path / "{epoch}-{batch}.keras"
    checkpoint = keras.callbacks.ModelCheckpoint(str(path), save_freq=2)
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[checkpoint])
    steps = {keras.models.load_model(p).ledger.steps for p in tmp_path.iterdir()}
    assert steps == {2, 4, 6}


LOAD = """
import sys, numpy as np, keras, dp_keras_opt as dp
model = keras.models.load_model(sys.argv[1])
assert model.ledger.steps == 3
print(model.ledger.epsilon(1e-3))
np.save(sys.argv[2], model.predict(np.ones((2, 3)), verbose=0))
"""


def test_loaded_in_another_process(tmp_path):
    model = _trained(functional)
    model.save(tmp_path / "model.keras")
    code = LOAD.replace("sys.argv[1]", repr(str(tmp_path / "model.keras")))
    result = _run(code.replace("sys.argv[2]", repr(str(tmp_path / "out.npy"))))
    assert result.returncode == 0, result.stderr
    assert float(result.stdout.split()[-1]) == pytest.approx(model.ledger.epsilon(DELTA))
    expected = model.predict(np.ones((2, 3)), verbose=0)
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, rtol=1e-5)


@pytest.mark.parametrize("make", [functional, subclass, subclass_wrapped])
def test_clone_and_config(make):
    model = _trained(make)
    clone = type(model).from_config(model.get_config())
    assert type(clone) is type(model)
    clone.compile(_sgd(), "mse")
    clone.fit(X, Y, verbose=0)
    assert clone.ledger.steps == 3
    if make is functional:
        clone = keras.models.clone_model(model)
        assert isinstance(clone, dp.DPModel)
    assert clone.ledger is not model.ledger
    assert model.ledger.steps == 3


def test_the_noise_is_in_no_saved_file_and_not_repeated(tmp_path):
    model = _trained(functional)
    path = tmp_path / "model.keras"
    model.save(path)
    results = []
    for _ in range(2):
        loaded = keras.models.load_model(path)
        loaded.sampling = Sampling.poisson(N, B)
        loaded.train_on_batch(X, Y)
        results.append(loaded.get_weights()[0])
    assert np.abs(results[0] - results[1]).max() > 1e-3


def test_optimizer_state_that_does_not_fit_raises():
    model = _trained(functional)
    store = {}
    model.optimizer.save_own_variables(store)
    other = dp.optimizers.DPAdam(clip_norm=1.0, noise_multiplier=1.0, batch_size=B)
    other.build(model.trainable_variables)
    with pytest.raises(ValueError, match="belongs to another optimizer"):
        other.load_own_variables(store)


def test_a_tensorflow_checkpoint_carries_the_ledger(tmp_path):
    model = functional()
    model.compile(_sgd(), "mse")
    model.fit(X, Y, verbose=0)
    steps = model.ledger.steps
    path = tf.train.Checkpoint(model).save(tmp_path / "checkpoint")
    other = functional()
    other.compile(_sgd(), "mse")
    tf.train.Checkpoint(other).restore(path)
    assert steps > 0 and other.ledger.steps == steps


def test_the_counterpart_of_a_sequential_goes_into_a_sequential():
    plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    whole = keras.Sequential([keras.Input((3,)), dp.make_private(plain), keras.layers.Dense(1)])
    assert whole.output_shape == (None, 1)


def test_make_private_gives_one_counterpart_with_one_ledger():
    base = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    assert dp.make_private(base) is dp.make_private(base)


def test_the_step_is_traced_once(monkeypatch):
    """Whatever the batches hold: later epochs, another fit and a chunked batch trace no more."""
    traces = []
    original = step.clipping.clipped_sums

    def counted(*args, **kwargs):
        traces.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(step.clipping, "clipped_sums", counted)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 3)).astype("float32"), rng.normal(size=(64, 1)).astype("float32")
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
    optimizer = dp.optimizers.DPAdam(clip_norm=1.0, noise_multiplier=1.0, batch_size=16)
    model.compile(optimizer, "mse", metrics=["mae"])
    train = dp.data.poisson_batches((x, y), 16, steps_per_epoch=6, physical_batch_size=8)
    model.fit(train, epochs=2, verbose=0)
    model.fit(train, epochs=1, verbose=0)
    assert len(traces) == 1
    model.compile(optimizer, "mse")
    model.sampling = Sampling.poisson(64, 16)
    for weights in (None, np.ones(16, "float32")):
        del traces[:]
        for _ in range(2):
            model.train_on_batch(x[:16], y[:16], weights)
        assert len(traces) == 1


def test_a_graph_grows_with_the_variables_and_not_with_their_square():
    """TensorFlow's optimizer of graphs takes its time for edges as for operations."""

    def operations_and_edges(number):
        inputs = keras.Input((3,))
        hidden = inputs
        for _ in range(number):
            hidden = layers.Dense(3, activation="tanh")(hidden)
        model = dp.DPModel(inputs, hidden)
        optimizer = dp.optimizers.DPAdam(clip_norm=1.0, noise_multiplier=1.0, batch_size=B)
        model.compile(optimizer, "mse")
        x = np.ones((B, 3), "float32")
        model.sampling = Sampling.poisson(64, B)
        model.train_on_batch(x, x)
        model._guard.is_stepping = True
        traced = tf.function(lambda: model.train_step((x, x))).get_concrete_function()
        found = traced.graph.get_operations()
        return len(found), sum(len(o.inputs) + len(o.control_inputs) for o in found)

    few, many = operations_and_edges(5), operations_and_edges(20)
    assert many[0] < 4 * few[0] and many[1] < 4 * few[1]


def _two_layers(clipping):
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4, activation="tanh", name="first")(inputs)
    model = dp.DPModel(inputs, keras.layers.Dense(1, name="last")(hidden))
    optimizer = dp.optimizers.DPSGD(
        1.0, clip_norm=0.3, noise_multiplier=0.0, batch_size=8, clipping=clipping
    )
    model.compile(optimizer, "mse", run_eagerly=True)
    model.sampling = Sampling.poisson(64, 8)
    return model


@pytest.mark.parametrize(
    "clipping, shares", [("per_layer", (1, 1)), ({"first": 3.0, "last": 1.0}, (3, 1))]
)
def test_per_layer_bounds_reach_the_training_step(clipping, shares):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 3)).astype("float32"), rng.normal(size=(8, 1)).astype("float32")
    model = _two_layers(clipping)
    before = [np.array(v) for v in model.trainable_variables]
    examples = one_at_a_time(model, lambda y, p: tf.reduce_mean(tf.square(y - p)), x, y)
    model.train_on_batch(x, y)
    bounds = 0.3 * np.array(shares) / np.linalg.norm(shares)
    halves = [[example[:2] for example in examples], [example[2:] for example in examples]]
    for half, bound in zip(halves, bounds, strict=True):
        norms = [np.sqrt(sum((g**2).sum() for g in example)) for example in half]
        assert np.mean(np.array(norms) > bound) >= 0.5  # the bound binds
    sums = [
        t for half, bound in zip(halves, bounds, strict=True) for t in clip_and_sum(half, bound)
    ]
    after = [b - s / 8 for b, s in zip(before, sums, strict=True)]
    assert_close([np.array(v) for v in model.trainable_variables], after)


def test_proportions_for_layers_that_are_not_there_are_refused():
    model = _two_layers({"first": 1.0, "lost": 1.0})
    with pytest.raises(ValueError, match="must name exactly.*first.*last"):
        model.train_on_batch(np.zeros((8, 3)), np.zeros((8, 1)))
    for clipping in [{}, {"first": -1.0}, {"first": np.inf}, "per_variable"]:
        with pytest.raises(ValueError, match="clipping"):
            _two_layers(clipping)


def test_proportions_are_saved_with_the_model(tmp_path):
    model = _two_layers({"first": 3.0, "last": 1.0})
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.clipping == {"first": 3.0, "last": 1.0}
