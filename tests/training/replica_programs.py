"""What test_replicas.py runs in processes of its own, each program with its own checks.

Devices must be split, and clusters named, before TensorFlow starts:
    python -m tests.training.replica_programs mirrored 3
    TF_CONFIG=... python -m tests.training.replica_programs worker <folder> <run>
"""

import itertools
import os
import pathlib
import sys
import tempfile
import warnings

import keras
import numpy as np
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.noise import numbers
from dp_keras_opt.workers import gathered
from tests.helpers.datasets import numpy_elements
from tests.helpers.normals import assert_exactly

SIGMA, CLIP, BATCH, DIM = 1.5, 0.4, 8, 20
STD = SIGMA * CLIP / BATCH
rng = np.random.default_rng(0)
X = rng.normal(size=(60, DIM)).astype("float32")
Y = rng.normal(size=(60, 1)).astype("float32")


class Weights(keras.callbacks.Callback):
    """Keeps the weights after each step, and has a worker die after so many."""

    def __init__(self, die_after=None):
        super().__init__()
        self.die_after = die_after

    def on_train_begin(self, logs=None):
        self.seen = [self.model.get_weights()]

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(self.model.get_weights())
        if len(self.seen) == self.die_after:
            os._exit(9)

    @property
    def steps(self):
        """What each step took away from the weights, in one vector."""
        flat = [np.concatenate([w.ravel() for w in weights]) for weights in self.seen]
        return -np.diff(flat, axis=0).ravel()


def make(optimizer, units=1, **compiled):
    inputs = keras.Input((DIM,))
    dense = keras.layers.Dense(units, kernel_regularizer=compiled.pop("regularizer", None))
    model = dp.DPModel(inputs, dense(inputs))
    model.set_weights([np.full(w.shape, 0.1, "float32") for w in model.get_weights()])
    compiled = {"loss": "mse", "metrics": ["mae"], "jit_compile": False} | compiled
    model.compile(optimizer(), **compiled)
    return model


def optimizer(kind=dp.optimizers.DPSGD, rate=1.0, **arguments):
    private = {"clip_norm": CLIP, "batch_size": BATCH, "noise_multiplier": SIGMA}
    return lambda: kind(rate, **(private | arguments))


def unweighted(steps, batch_size=BATCH):
    """Batches in which nothing has weight: what a step does is its noise."""
    targets = np.zeros((60, DIM), "float32")
    return dp.data.poisson_batches((X, targets, np.zeros(60)), batch_size, steps)


def of_sizes(*sizes):
    """Batches of so many examples, said to be Poisson draws."""

    def draws():
        for size in sizes:
            rows = np.arange(size + 1)  # the last one is padding
            yield X[rows], Y[rows], (rows < size).astype("float32")

    signature = tuple(tf.TensorSpec((None, *shape)) for shape in ((DIM,), (1,), ()))
    dataset = tf.data.Dataset.from_generator(draws, output_signature=signature)
    dataset = dataset.map(lambda x, y, mask: (x, y, dp.data.RowInfo(mask)))
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(len(sizes)))
    return dp.data.assume_sampling(dataset, dp.accounting.Sampling.poisson(60, 2))


def assert_same_on_all(strategy, model):
    for variable in (*model.variables, *model.optimizer.variables):
        first, *others = strategy.experimental_local_results(variable.value)
        for other in others:
            np.testing.assert_array_equal(first.numpy(), other.numpy(), err_msg=variable.path)


def mirrored(count):
    devices = [tf.config.LogicalDeviceConfiguration()] * count
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(count)])
    for check in MIRRORED[count]:
        keras.backend.clear_session()
        check(strategy)
        print("ok", check.__name__, flush=True)


def noise_has_its_scale(strategy):
    with strategy.scope():
        model = make(optimizer(), units=DIM)
    weights = Weights()
    model.fit(unweighted(4), verbose=0, callbacks=[weights, dp.callbacks.OptimizerReport()])
    assert_exactly(weights.steps, STD)
    assert model.ledger.steps == int(model.optimizer.iterations.numpy()) == 4
    assert_same_on_all(strategy, model)


def steps_are_those_of_one_device(strategy):
    """Batches of fewer rows than replicas, of none, of several blocks; regularised; filtered."""
    arguments = {
        "noise_multiplier": 0.0, "second_moment": "scale_then_privatize", "weight_decay": 0.01,
        "gradient_filter": "first_order_v1", "use_ema": True, "ema_overwrite_frequency": 3,
    }  # fmt: skip
    rule = optimizer(dp.optimizers.DPAdam, 0.1, **arguments, batch_size=2)
    histories, weights = [], []
    for scope in (strategy.scope, tf.distribute.get_strategy().scope):
        with scope():
            model = make(rule, regularizer="l2", physical_batch_size=1)
        batches = of_sizes(1, 0, 9, 2, 3)
        histories.append(model.fit(batches, epochs=2, verbose=0, validation_data=(X, Y)).history)
        weights.append(model.get_weights())
        assert model.ledger.steps == 10
    for ours, theirs in zip(*weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    for name, values in histories[0].items():  # also of the training data, over all replicas
        np.testing.assert_allclose(values, histories[1][name], rtol=1e-4, err_msg=name)


def points_are_those_of_one_device(strategy):
    """Gradients ahead of the weights and at them, in blocks of one row, with rows on some only."""
    for smoother in (dp.filters.DiSK(0.5, 2.0), dp.filters.FFTKF(0.5, 2.0, suppression=0.9)):
        assert_those_of_one_device(strategy, gradient_filter=smoother)


def geometries_are_those_of_one_device(strategy):
    for geometry in (
        dp.geometries.AdaClip(), dp.geometries.GeoClip(2),
        dp.geometries.KroneckerFactored((X, Y)),
    ):  # fmt: skip
        assert_those_of_one_device(strategy, geometry=geometry)


def probes_of_noise_are_the_same_on_all(strategy):
    rule = optimizer(dp.optimizers.DPMuon, 0.1, bias_correction=True)
    with strategy.scope():
        model = make(rule, units=3)
    model.fit(dp.data.poisson_batches((X, np.repeat(Y, 3, axis=1)), BATCH, 3), verbose=0)
    assert model.optimizer._noise_powers[0].numpy() > 0
    assert_same_on_all(strategy, model)


def assert_those_of_one_device(strategy, **settings):
    rule = optimizer(rate=0.5, noise_multiplier=0.0, batch_size=2, **settings)
    weights = []
    for scope in (strategy.scope, tf.distribute.get_strategy().scope):
        with scope():
            model = make(rule, physical_batch_size=1)
        model.fit(of_sizes(4, 0, 9, 2, 3), epochs=2, verbose=0)
        weights.append(model.get_weights())
    for ours, theirs in zip(*weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def tables(rule, **compiled):
    """Two tables of which some rows are looked up, by each example in ten places."""
    inputs = keras.Input((10,), dtype="int32")
    rows = keras.layers.Embedding(50, 4, name="words")(inputs)
    others = keras.layers.Embedding(9, 2, name="kinds")(inputs % 9)
    pool = keras.layers.GlobalAveragePooling1D()
    both = keras.layers.Concatenate()([pool(rows), pool(others)])
    model = dp.DPModel(inputs, keras.layers.Dense(1)(both))
    model.set_weights([np.cos(np.arange(w.size)).reshape(w.shape) for w in model.get_weights()])
    model.compile(rule(), **{"loss": "mse", "jit_compile": False} | compiled)
    return model


def rows_of_tables_are_those_of_one_device(strategy):
    """Without noise the rows that are touched are moved; with noise, the same on all."""
    ids = np.random.default_rng(0).zipf(1.5, (60, 10)).clip(max=50).astype("int32") - 1
    for kind, settings in ((dp.optimizers.DPSGD, {}), (dp.optimizers.DPAdam, {"epsilon": 1e-2})):
        for given in (None, {"words": [0, 1, 2, 7], "kinds": range(9)}):
            sparse = dp.optimizers.SparseEmbeddings(1.0 if given is None else None, rows=given)
            rule = optimizer(
                kind, 0.5, noise_multiplier=0.0, sparse_embeddings=sparse, batch_size=20, **settings
            )
            weights = []
            for scope in (strategy.scope, tf.distribute.get_strategy().scope):
                with scope():
                    model = tables(rule)
                before = model.get_weights()[0]
                batches = dp.data.poisson_batches((ids, Y), 20, 4, seed=5)
                model.fit(batches, epochs=2, verbose=0)
                weights.append(model.get_weights())
                moved = np.any(model.get_weights()[0] != before, axis=1)
                assert moved[:3].all() and not moved.all()
            for ours, theirs in zip(*weights, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    with strategy.scope():
        sparse = dp.optimizers.SparseEmbeddings(1.0)
        model = tables(optimizer(sparse_embeddings=sparse, noise_multiplier=0.5, batch_size=20))
    model.fit(dp.data.poisson_batches((ids, Y), 20, 4), epochs=2, verbose=0)
    assert_same_on_all(strategy, model)


def noise_on_rows_that_nobody_touches_has_its_scale(strategy):
    """Of no table a replica has a row, of which TensorFlow would make a crash."""
    ids = np.zeros((60, 10), "int32")
    sparse = dp.optimizers.SparseEmbeddings(None, rows={"words": range(50), "kinds": range(9)})
    with strategy.scope():
        model = tables(optimizer(sparse_embeddings=sparse))
    weights = Weights()
    batches = dp.data.poisson_batches((ids, Y, np.zeros(60)), BATCH, 8)
    model.fit(batches, verbose=0, callbacks=[weights])
    assert_exactly(weights.steps, STD)
    assert_same_on_all(strategy, model)


def tables_alone_are_trained(strategy):
    """Beside rows that are given there is nothing to be added up."""
    ids = np.random.default_rng(0).integers(0, 50, (60, 10)).astype("int32")
    sparse = dp.optimizers.SparseEmbeddings(None, rows={"words": range(50), "kinds": range(9)})
    rule = optimizer(sparse_embeddings=sparse, noise_multiplier=0.0)
    weights = []
    for scope in (strategy.scope, tf.distribute.get_strategy().scope):
        with scope():
            model = tables(rule)
            model.layers[-1].trainable = False
            model.compile(rule(), "mse", jit_compile=False)
        model.fit(dp.data.poisson_batches((ids, Y), BATCH, 3, seed=5), verbose=0)
        weights.append(model.get_weights())
    for ours, theirs in zip(*weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def public_rows_are_averaged_once(strategy):
    rule = optimizer(dp.optimizers.PDADPMD, 0.1, noise_multiplier=0.0, steps=10)
    weights = []
    for scope in (strategy.scope, tf.distribute.get_strategy().scope):
        with scope():
            model = make(rule)
        batches = dp.data.poisson_batches((X, Y), BATCH, 3, seed=3)
        model.fit(dp.data.with_public(batches, (X[:7], Y[:7])), verbose=0)
        weights.append(model.get_weights())
    np.testing.assert_allclose(*(w[0] for w in weights), rtol=1e-5, atol=1e-6)


def users_are_clipped_whole(strategy):
    """All examples of 12 users, 2 to 18 each, beside public rows: the users' rows stay together."""
    users = np.arange(60) ** 2 // 300
    weights = []
    for scope in (strategy.scope, tf.distribute.get_strategy().scope):
        with scope():
            rule = {"noise_multiplier": 0.0, "clip_norm": 0.05, "batch_size": 12, "steps": 10}
            model = make(optimizer(dp.optimizers.PDADPMD, 0.1, **rule), physical_batch_size=20)
            batches = dp.data.poisson_users((X, Y), users, 12, 3, examples_per_user=18)
        model.fit(dp.data.with_public(batches, (X[:7], Y[:7])), verbose=0)
        weights.append(np.concatenate([w.ravel() for w in model.get_weights()]))
    np.testing.assert_allclose(*weights, rtol=1e-5, atol=1e-6)


def buckets_are_those_of_one_device(strategy):
    """Texts of 1 to 20 words in three buckets, of which some are empty on some replicas."""
    sizes = rng.geometric(0.2, 60).clip(1, 20)
    texts = tf.RaggedTensor.from_row_lengths(rng.integers(1, 9, sizes.sum()), sizes)
    weights = []
    for scope in (strategy.scope, tf.distribute.get_strategy().scope):
        with scope(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*got seed=")
            inputs = keras.Input((None,), dtype="int64")
            hidden = keras.layers.Embedding(9, 4, mask_zero=True)(inputs)
            hidden = keras.layers.GlobalAveragePooling1D()(hidden)
            model = dp.DPModel(inputs, keras.layers.Dense(1)(hidden))
            model.set_weights(
                [np.sin(np.arange(w.size)).reshape(w.shape) for w in model.get_weights()]
            )
            private = optimizer(noise_multiplier=1e-9, clip_norm=0.1)()
            model.compile(private, "mse", metrics=["mae"], jit_compile=False)
            batches = dp.data.poisson_batches(
                (texts, Y), BATCH, 3, buckets=dp.data.Buckets([2, 5, 20]), seed=1
            )
        history = model.fit(batches, verbose=0).history
        assert np.isfinite([*history["loss"], *history["mae"]]).all()
        weights.append(np.concatenate([w.ravel() for w in model.get_weights()]))
    np.testing.assert_allclose(*weights, rtol=1e-5, atol=1e-6)


def objectives_are_those_of_one_device(strategy):
    """An objective of an intermediate, beside a loss that a layer adds; also in evaluation."""

    class Adds(keras.layers.Layer):
        def call(self, inputs):
            self.add_loss(tf.reduce_sum(inputs**2, axis=-1) / DIM)
            return inputs

    def objective(inputs, targets, outputs, intermediates):
        hidden = intermediates["hidden"]
        return tf.reduce_mean((targets - outputs) ** 2, -1) + tf.reduce_sum(tf.abs(hidden), -1)

    rule = optimizer(dp.optimizers.DPAdam, 0.1, noise_multiplier=0.0, clip_norm=0.05)
    weights, losses = [], []
    for scope in (strategy.scope, tf.distribute.get_strategy().scope):
        with scope():
            inputs = keras.Input((DIM,))
            hidden = keras.layers.Dense(3, name="hidden")(Adds()(inputs))
            model = dp.DPModel(inputs, keras.layers.Dense(1)(hidden))
            model.set_weights(
                [np.sin(np.arange(w.size)).reshape(w.shape) for w in model.get_weights()]
            )
            loss = dp.Objective(objective, ["hidden"])
            model.compile(rule(), loss, physical_batch_size=2, jit_compile=False)
            batches = dp.data.fixed_order_epochs((X, Y), BATCH, order_seed=7)
        model.fit(batches, verbose=0)
        weights.append(np.concatenate([w.ravel() for w in model.get_weights()]))
        losses.append(model.evaluate(X, Y, verbose=0))
    np.testing.assert_allclose(*weights, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(*losses, rtol=1e-4)


def rows_without_a_mask_are_padded(strategy):
    """Four rows for three replicas: two are padding, which must count in nothing."""
    rule = optimizer(noise_multiplier=0.0, clip_norm=1e-3, batch_size=4)
    weights = []
    for scope in (strategy.scope, tf.distribute.get_strategy().scope):
        with scope():
            model = make(rule)
        dataset = tf.data.Dataset.from_tensor_slices((X[:8], Y[:8])).batch(4, drop_remainder=True)
        sampling = dp.accounting.Sampling.shuffled(8, 4)
        model.fit(dp.data.assume_sampling(dataset, sampling), verbose=0)
        weights.append(np.concatenate([w.ravel() for w in model.get_weights()]))
    np.testing.assert_allclose(*weights, rtol=1e-6, atol=1e-7)


def every_rule_keeps_replicas_equal(strategy):
    bands = dp.noise.BandedMatrix(steps=12, bands=3)
    for rule in (
        optimizer(dp.optimizers.DP2RMSprop, 0.1, adaptive_clip_norm=1.0, delay=1),
        optimizer(dp.optimizers.DPNesterov, 0.1),
        optimizer(dp.optimizers.DPGaLore, 0.1, rank=1, gradient_filter=dp.filters.OptimalFIR(3)),
        optimizer(dp.optimizers.DPOptimizer, "nadam", noise=bands),
    ):
        with strategy.scope():
            model = make(rule, units=2, loss="mse")
        data = (X, np.repeat(Y, 2, 1))
        if model.optimizer.noise.is_correlated:
            batches = dp.data.fixed_order_epochs(data, BATCH)
        else:
            batches = dp.data.poisson_batches(data, BATCH, 4)
        before = model.get_weights()
        model.fit(batches, verbose=0)
        assert_same_on_all(strategy, model)
        assert not np.array_equal(model.get_weights()[0], before[0])
        config = model.optimizer.get_config()  # of a wrapped one: as it was given
        assert type(model.optimizer).from_config(config).get_config() == config


def correlated_noise_has_its_scale(strategy):
    """All steps of a run, C·(noise of the steps)/std, are independent again."""
    bands = dp.noise.BandedMatrix(steps=8, bands=3)
    with strategy.scope():
        model = make(optimizer(noise=bands), units=DIM)
    weights = Weights()
    targets = np.zeros((60, DIM), "float32")
    batches = dp.data.fixed_order_epochs((X, targets, np.zeros(60)), BATCH)
    model.fit(batches, verbose=0, callbacks=[weights])
    noise = weights.steps.reshape(len(batches), -1)
    assert_exactly(correlation_matrix(bands, len(noise)) @ noise, STD)


def runs_of_correlated_noise_go_on(strategy):
    """What is kept of them, and planned for them, is read from variables that replicas mirror."""
    with strategy.scope():
        model = make(optimizer(noise="planned", weight_decay=1e-3))
    model.fit(dp.data.fixed_order_epochs((X, Y), BATCH), verbose=0)
    assert model.ledger.steps == 8
    with strategy.scope():
        model = make(optimizer(noise=dp.noise.BandedMatrix(steps=16, bands=3)))
    model.fit(dp.data.fixed_order_epochs((X, Y), BATCH), verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "run.secret.npz")
        model.save_run(path)
        seed = model.resume_run(path)
    model.fit(dp.data.fixed_order_epochs((X, Y), BATCH, order_seed=seed), verbose=0)
    assert [segment.steps for segment in model.ledger.segments] == [16]


def correlation_matrix(bands, steps):
    """C of a banded Toeplitz matrix, (steps, steps)."""
    matrix = np.zeros((steps, steps))
    for lag, coefficient in enumerate(bands.coefficients):
        matrix += coefficient * np.eye(steps, k=-lag)
    return matrix


def what_cannot_be_is_refused(strategy):
    def refused(words, call):
        try:
            call()
        except ValueError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"not refused: {words}")

    outside = optimizer()()
    with strategy.scope():
        model = make(optimizer())
        refused("Make both within", lambda: make(lambda: outside))
        refused("Leave jit_compile out", lambda: make(optimizer(), jit_compile=True))
    refused("Several replicas need Batches", lambda: model.fit(X, Y, shuffle=False, verbose=0))
    sizes = {0: BATCH, 3: 2 * BATCH}
    with strategy.scope():
        staged = make(optimizer(batch_size=sizes))
    growing = dp.data.poisson_batches((X, Y), sizes)
    refused("their expected size cannot change", lambda: staged.fit(growing, verbose=0))
    refused("same batch to every replica", lambda: model.train_on_batch(X, Y))
    assert model.ledger.steps == 0


def arrays_are_balls_in_bins(strategy):
    """Without noise, an epoch at weights that hardly move has each example's gradient once."""
    rate, weights = 1e-4, Weights()
    with strategy.scope():
        model = make(optimizer(rate=rate, noise_multiplier=0.0))
    history = model.fit(X, Y, epochs=2, verbose=0, callbacks=[weights])
    sampling = dp.accounting.Sampling.balls_in_bins(len(X), BATCH, "zero_out")
    assert model.sampling == sampling and sampling.steps_per_epoch == history.params["steps"] == 8
    inputs = np.hstack([X, np.ones((60, 1))])
    gradients = 2 * (0.1 * inputs.sum(axis=1, keepdims=True) - Y) * inputs
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    whole = np.sum(gradients * np.minimum(1, CLIP / norms), axis=0)
    for epoch in weights.steps.reshape(2, 8, DIM + 1).sum(axis=1):
        np.testing.assert_allclose(epoch, rate / BATCH * whole, rtol=0.02, atol=1e-6)
    assert_same_on_all(strategy, model)


def clip_norms_follow_the_step(strategy):
    """Without noise, at targets that clip every gradient: a step has norm (examples)·C_t/B."""
    weights = Weights()
    schedule = keras.optimizers.schedules.ExponentialDecay(CLIP, 1, 0.5)
    with strategy.scope():
        model = make(optimizer(clip_norm=schedule, noise_multiplier=0.0, batch_size=60))
    ones, far = np.ones_like(X), np.full_like(Y, 1e4)
    model.fit(dp.data.poisson_batches((ones, far), 60, 4), verbose=0, callbacks=[weights])
    norms = np.linalg.norm(weights.steps.reshape(4, -1), axis=1)
    np.testing.assert_allclose(norms, CLIP * 0.5 ** np.arange(4), rtol=1e-4)
    assert_same_on_all(strategy, model)


def clip_norms_find_themselves(strategy):
    """All 60 gradients are longer than C, which grows by exp(η_C·γ) with a share of 0."""
    weights, rate = Weights(), 0.5
    found = dp.clipping.Quantile(0.4, initial=CLIP, learning_rate=rate)
    with strategy.scope():
        model = make(optimizer(clip_norm=found, noise_multiplier=0.0, batch_size=60))
    ones, far = np.ones_like(X), np.full_like(Y, 1e4)
    model.fit(dp.data.poisson_batches((ones, far), 60, 4), verbose=0, callbacks=[weights])
    norms = np.linalg.norm(weights.steps.reshape(4, -1), axis=1)
    np.testing.assert_allclose(norms, CLIP * np.exp(0.4 * rate * np.arange(4)), rtol=1e-4)
    assert_same_on_all(strategy, model)


class Average(keras.layers.Layer):
    def build(self, shape):
        self.average = self.add_weight(shape=(), name="average", trainable=False)

    def call(self, inputs):
        self.average.assign(0.9999 * self.average + 1e-4 * keras.ops.mean(inputs))
        return inputs


def passes_of_unknown_length_are_refused(strategy):
    """The data are repeated, so that the end of a pass would not be seen: two batches for three."""

    def two():
        yield from ((X[i : i + BATCH], Y[i : i + BATCH]) for i in (0, BATCH))

    signature = tf.TensorSpec((BATCH, DIM)), tf.TensorSpec((BATCH, 1))
    data = tf.data.Dataset.from_generator(two, output_signature=signature)
    with strategy.scope():
        model = make(optimizer())
    for kind in ("shuffled", "fixed_order"):
        sampling = getattr(dp.accounting.Sampling, kind)(3 * BATCH, BATCH)
        try:
            model.fit(dp.data.assume_sampling(data, sampling), steps_per_epoch=3, verbose=0)
        except ValueError as error:
            assert "assert_cardinality" in str(error)
        else:
            raise AssertionError("not refused")
    known = data.apply(tf.data.experimental.assert_cardinality(2))
    sampling = dp.accounting.Sampling.shuffled(2 * BATCH, BATCH)
    model.fit(dp.data.assume_sampling(known, sampling), steps_per_epoch=2, epochs=2, verbose=0)
    assert model.ledger.steps == 4


def models_are_checked(strategy):
    """Padding to the longest row, and state that takes in the data; or that does not."""
    rows = [(X[: 1 + i % 3], Y[i]) for i in range(2 * BATCH)]
    signature = tf.TensorSpec([None, DIM]), tf.TensorSpec([1])
    texts = tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=signature)
    texts = texts.padded_batch(BATCH, drop_remainder=True)
    texts = texts.apply(tf.data.experimental.assert_cardinality(2))
    padded = dp.data.assume_sampling(texts, dp.accounting.Sampling.shuffled(2 * BATCH, BATCH))
    normalized = keras.layers.SpectralNormalization
    for data, shape, layer, words in (
        (padded, (None, DIM), keras.layers.GlobalAveragePooling1D, "sizes of x open"),
        (None, (DIM,), Average, "average' is updated from the data"),
        (None, (DIM,), lambda: normalized(keras.layers.Dense(2)), None),
    ):
        with strategy.scope():
            inputs = keras.Input(shape)
            model = dp.DPModel(inputs, keras.layers.Dense(1)(layer()(inputs)))
            model.compile(optimizer()(), "mse", jit_compile=False)
        data = data or dp.data.poisson_batches((X, Y), BATCH, 2)
        try:
            model.fit(data, steps_per_epoch=2, verbose=0)
        except ValueError as error:
            assert words and words in str(error), error
        else:
            assert words is None, f"not refused: {words}"
            assert_same_on_all(strategy, model)


def scores_are_released_once(strategy):
    drawn, honest = [], numbers.released
    metric = dp.statistics.metrics.Mean(keras.metrics.mean_absolute_error, (0, 2), "mae")
    validation = dp.callbacks.PrivateValidation((X, Y), metric, 0.5, 1e-3)
    numbers.released = lambda total, *terms: drawn.append(total) or honest(total, *terms)
    try:
        with strategy.scope():
            model = make(optimizer())
            model.fit(unweighted(4), epochs=2, verbose=0, callbacks=[validation])
    finally:
        numbers.released = honest
    assert len(drawn) == len(validation.history["mae"]) == 2
    errors = np.minimum(np.abs(model(X).numpy() - Y), 2)
    np.testing.assert_allclose(drawn[1], np.sum(errors - 1), rtol=1e-4, atol=1e-3)
    assert [segment.steps for segment in model.ledger.segments] == [2, 8]


def masks_come_once(strategy):
    """On each replica, for each block of rows and in each step others are drawn."""
    with strategy.scope():
        inputs = keras.Input((DIM,))
        dense = keras.layers.Dense(1000, kernel_initializer="zeros")
        model = dp.DPModel(inputs, keras.layers.Dropout(0.5, seed=1)(dense(inputs)))
        model.compile(
            dp.optimizers.DPSGD(1.0, clip_norm=1e9, batch_size=6, noise_multiplier=0.0),
            lambda y, y_pred: y[:, 0] * tf.reduce_sum(y_pred, axis=-1),
            physical_batch_size=1, jit_compile=False,
        )  # fmt: skip
        powers = 10.0 ** np.arange(6, dtype="float32")[:, None]
        batches = dp.data.poisson_batches((np.zeros((6, DIM), "float32"), powers), 6, 1)  # all
    biases = [np.zeros(1000)]
    keep = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: biases.append(dense.get_weights()[1])
    )
    model.fit(batches, epochs=3, verbose=0, callbacks=[keep])
    kept = np.round(-np.diff(biases, axis=0) * 6 / 2).astype(int)  # the sum of them, times y
    masks = [step // 10**power % 10 for step in kept for power in range(6)]
    assert set(np.concatenate(masks)) == {0, 1}
    alike = [np.mean(one == other) for one, other in itertools.combinations(masks, 2)]
    assert min(alike) > 0.4 and max(alike) < 0.6, alike
    (state,) = (layer.seed_generator.state for layer in model.layers if "dropout" in layer.name)
    first, *others = strategy.experimental_local_results(state.value)
    for other in others:
        np.testing.assert_array_equal(first.numpy(), other.numpy())


MIRRORED = {
    2: [
        noise_has_its_scale,
        noise_on_rows_that_nobody_touches_has_its_scale,
        tables_alone_are_trained,
        scores_are_released_once,
        every_rule_keeps_replicas_equal,
        what_cannot_be_is_refused,
        models_are_checked,
        passes_of_unknown_length_are_refused,
        arrays_are_balls_in_bins,
        clip_norms_follow_the_step,
        clip_norms_find_themselves,
    ],
    3: [
        steps_are_those_of_one_device,
        points_are_those_of_one_device,
        geometries_are_those_of_one_device,
        probes_of_noise_are_the_same_on_all,
        rows_of_tables_are_those_of_one_device,
        public_rows_are_averaged_once,
        users_are_clipped_whole,
        buckets_are_those_of_one_device,
        objectives_are_those_of_one_device,
        rows_without_a_mask_are_padded,
    ],
    4: [correlated_noise_has_its_scale, runs_of_correlated_noise_go_on, masks_come_once],
}


def worker(folder, run):
    """One of two workers. In the run "killed", the second one dies after three steps."""
    folder = pathlib.Path(folder)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    task = strategy.cluster_resolver.task_id
    with strategy.scope():
        model = make(optimizer(), units=DIM)
        batches = unweighted(4, batch_size=BATCH)
    weights = Weights(die_after=3 if (run, task) == ("killed", 1) else None)
    if task == 0:
        model.ledger = dp.accounting.Ledger(folder / f"{run}.jsonl")
    try:
        history = model.fit(batches, epochs=1 if run == "whole" else 10**6, verbose=0,
                            callbacks=[weights], validation_data=(X, X)).history  # fmt: skip
    except RuntimeError as error:
        assert type(error).__name__ == "WorkerLostError", error
        np.save(folder / f"{run}{task}.npy", weights.steps[: 2 * (DIM + 1) * DIM])
        print("refused to go on:", error, flush=True)
        os._exit(3)  # nothing is left to shut down properly with
    assert_exactly(weights.steps, STD)
    assert model.ledger.steps == 4
    assert set(history) == {"loss", "mae", "val_loss", "val_mae"}
    np.save(folder / f"{run}{task}.npy", weights.steps)
    if task == 0:
        model.save(folder / "model.keras")
    check_budget(strategy)
    check_data(strategy, task)
    check_steps(strategy)
    check_alike(strategy, task)
    check_arrays(strategy)
    check_tables(strategy)
    print("ok", flush=True)


def check_tables(strategy):
    """Both workers move the same rows by the same noise, though each has looked others up."""
    ids = np.random.default_rng(0).zipf(1.5, (60, 10)).clip(max=50).astype("int32") - 1
    sparse = dp.optimizers.SparseEmbeddings(1.0)
    with strategy.scope():
        model = tables(optimizer(sparse_embeddings=sparse, noise_multiplier=0.5))
        batches = dp.data.poisson_batches((ids, Y), BATCH, 4)
    before = model.get_weights()[0]
    model.fit(batches, verbose=0)
    after = model.get_weights()
    assert 0 < np.sum(np.any(after[0] != before, axis=1)) < 50
    flat = np.concatenate([w.ravel() for w in after])
    first, second = gathered(flat.tobytes(), strategy)
    assert first == second


def check_budget(strategy):
    """All workers stop at the same step, also where a ledger file of the first one has a past."""
    with strategy.scope():
        model = make(optimizer(), units=DIM)
        batches = unweighted(8)
    if strategy.cluster_resolver.task_id == 0:
        past = dp.accounting.Ledger()
        past.begin(model.optimizer.releases, batches.sampling, clip_norm=CLIP)
        past.reserve(3)
        model.ledger = past
    whole = dp.accounting.epsilon(model.optimizer, batches.sampling, steps=8, delta=1e-3)
    model.fit(batches, verbose=0, callbacks=[dp.callbacks.PrivacyBudget(whole, 1e-3)])
    assert (model.ledger.steps, int(model.optimizer.iterations.numpy())) == (8, 5)


def check_data(strategy, task):
    """No example comes to two workers, and in an epoch each comes to one."""
    ids = (np.arange(60, dtype="int64"), np.arange(60, dtype="int64"))
    with strategy.scope():
        poisson = dp.data.poisson_batches(ids, 30, 40)
        users = dp.data.poisson_users(ids, np.arange(60) // 4, 15, 1, examples_per_user=4)
        ordered = dp.data.fixed_order_epochs(ids, 7)
        in_bins = dp.data.balls_in_bins(ids, 7)
        try:
            dp.data.poisson_batches((X + task, Y), 8)
        except ValueError as error:
            assert "different data" in str(error)
        else:
            raise AssertionError("Different data were not noticed.")

    def drawn(batches):
        return np.concatenate(
            [x[rows.mask.ravel() > 0] for x, _, rows in numpy_elements(batches.dataset)]
        )

    parts = (poisson, ordered, users, in_bins)
    counts = np.stack([np.bincount(drawn(each), minlength=60) for each in parts])
    workers = gathered(counts.astype(np.uint8).tobytes(), strategy)
    counts = np.stack([np.frombuffer(each, np.uint8).reshape(4, 60) for each in workers])
    np.testing.assert_array_equal(np.sum(counts > 0, axis=0), 1)  # missing one: 5 in 10^11
    np.testing.assert_array_equal(np.sum(counts[:, 1:], axis=0), 1)
    assert (np.ptp(counts[:, 2].reshape(2, 15, 4), axis=2) == 0).all()  # a user is at one worker
    assert abs(int(counts[:, 0].sum()) - 1200) < 6.2 * (60 * 40 / 4) ** 0.5  # binomial; 6 in 10^10


def check_alike(strategy, task):
    """A worker with another clip norm, with which a row of its moved the sum by 100 C, or noise."""
    sampling = dp.accounting.Sampling.poisson
    for theirs, size in (
        ({"clip_norm": 100.0}, 60), ({"noise_multiplier": 0.1}, 60), ({}, 90),
        ({"geometry": dp.geometries.Mean()}, 60), ({"clipping": "per_layer"}, 60),
    ):  # fmt: skip
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH, drop_remainder=True)
        with strategy.scope():
            model = make(optimizer(**(theirs if task else {})))
            batches = dp.data.assume_sampling(data, sampling(size if task else 60, BATCH))
        before = model.get_weights()[0]
        try:
            model.fit(batches, verbose=0)
        except ValueError as error:
            named = next(iter(theirs), "sampling")
            assert "train in different ways" in str(error), error
            assert f"differ in {named}" in str(error) or f", {named}" in str(error), error
        else:
            raise AssertionError(f"{theirs} was not noticed.")
        assert model.ledger.steps == 0
        np.testing.assert_array_equal(model.get_weights()[0], before)


def check_arrays(strategy):
    """Each worker assigns its own examples, and an epoch has as many steps at all of them."""
    with strategy.scope():
        model = make(optimizer())
    model.fit(X, Y, epochs=2, verbose=0)
    assert model.sampling == dp.accounting.Sampling.balls_in_bins(len(X), BATCH, "zero_out")
    assert model.ledger.steps == 2 * model.sampling.steps_per_epoch


def check_steps(strategy):
    """An epoch without noise gives the weights that one device gives."""
    rule = optimizer(dp.optimizers.DPAdam, 0.1, noise_multiplier=0.0)
    weights = []
    for scope in (strategy.scope, tf.distribute.get_strategy().scope):
        with scope():
            model = make(rule)
            batches = dp.data.fixed_order_epochs((X, Y), BATCH, order_seed=7)
        model.fit(batches, epochs=2, verbose=0)
        weights.append(model.get_weights()[0])
    np.testing.assert_allclose(*weights, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    program, *arguments = sys.argv[1:]
    if program == "mirrored":
        mirrored(int(arguments[0]))
    else:
        worker(*arguments)
