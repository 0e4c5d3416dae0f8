"""What must not train, found by name or by the check on synthetic data before the first step."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.clipping import Batch, Query, clipped_sums
from dp_keras_opt.clipping.self_check import checked_engines
from tests.helpers.per_example import assert_close, clip_and_sum, one_at_a_time

layers, ops = keras.layers, keras.ops
N, B = 16, 4
X = np.random.default_rng(1).normal(size=(N, 3)).astype("float32")
Y = np.random.default_rng(2).normal(size=(N, 1)).astype("float32")


def _compile(model, clip_norm=0.5, noise_multiplier=1.0, **kwargs):
    optimizer = dp.optimizers.DPSGD(
        0.1, clip_norm=clip_norm, noise_multiplier=noise_multiplier, batch_size=B
    )
    model.compile(optimizer, "mse", **kwargs)
    return model


def _model(*stack, shape=(3,), **kwargs):
    tensor = inputs = keras.Input(shape, **kwargs)
    for layer in stack:
        tensor = layer(tensor)
    return dp.DPModel(inputs, tensor)


def _assert_refused(model, words, x=X):
    """At compile or at the first step, before the data had any influence."""
    before = model.get_weights()
    with pytest.raises(ValueError, match=words):
        _compile(model).fit(x, Y, verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


# BatchNormalization.


@pytest.mark.parametrize("nested", [False, True])
def test_batch_normalization_is_refused_by_name_with_the_fix(nested):
    norm = layers.BatchNormalization(name="my_norm")
    stack = [keras.Sequential([keras.Input((3,)), norm])] if nested else [norm]
    model = _model(*stack, layers.Dense(1))
    with pytest.raises(ValueError, match="'my_norm'.*GroupNormalization.*trainable = False"):
        _compile(model)
    norm.trainable = False
    _compile(model).fit(X, Y, verbose=0)
    norm.trainable = True
    with pytest.raises(ValueError, match="my_norm"):  # thawed after compiling
        model.make_train_function(force=True)
        model.fit(X, Y, verbose=0)


def test_batch_normalization_made_while_building_is_refused():
    class Late(keras.Model):
        def build(self, shape):
            self.norm, self.dense = layers.BatchNormalization(), layers.Dense(1)

        def call(self, inputs, training=None):
            return self.dense(self.norm(inputs, training=training))

    model = _compile(dp.make_private(Late()))
    with pytest.raises(ValueError, match="BatchNormalization"):
        model.fit(X, Y, verbose=0)


# Layers and losses that mix examples.


class BatchMean(layers.Layer):
    def call(self, inputs):
        return inputs - ops.mean(inputs, axis=0, keepdims=True)


class SoftmaxOverTheBatch(layers.Layer):
    def call(self, inputs):
        return ops.softmax(inputs, axis=0)


class ScaledByTheBatch(layers.Layer):
    """Its effect starts at zero, so that only its gradient gives it away."""

    def build(self, shape):
        self.gain = self.add_weight(shape=(), initializer="zeros")

    def call(self, inputs):
        return inputs + self.gain * ops.mean(inputs, axis=0, keepdims=True)


class Reversed(layers.Layer):
    def call(self, inputs):
        return ops.flip(inputs, axis=0)


class MovingAverage(layers.Layer):
    """Passes its input on, and remembers a little of it."""

    def build(self, shape):
        self.average = self.add_weight(shape=shape[1:], initializer="ones", trainable=False)

    def call(self, inputs, training=None):
        if training:
            self.average.assign(0.9999 * self.average + 0.0001 * ops.mean(inputs, axis=0))
        return inputs


class AddsLoss(layers.Layer):
    def call(self, inputs):
        self.add_loss(ops.mean(ops.square(inputs)))
        return inputs


@pytest.mark.parametrize("head", ["glorot_uniform", "zeros"])
@pytest.mark.parametrize(
    "layer",
    [
        BatchMean,
        SoftmaxOverTheBatch,
        Reversed,
        lambda name: layers.Lambda(lambda t: t - ops.mean(t, axis=0, keepdims=True), name=name),
        lambda name: layers.Lambda(lambda t: t / ops.max(ops.abs(t)), name=name),
    ],
    ids=["mean", "softmax", "reversed", "lambda", "lambda of all"],
)
def test_layers_that_mix_examples_are_refused_by_name(layer, head):
    """Also where a zero kernel behind them hides it from the outputs."""
    model = _model(layer(name="the_culprit"), layers.Dense(1, kernel_initializer=head))
    _assert_refused(model, "'the_culprit'.*mixes")


@pytest.mark.parametrize("head", ["glorot_uniform", "zeros"])
def test_operations_that_mix_examples_are_refused(head):
    inputs = keras.Input((3,))
    centred = inputs - ops.mean(inputs, axis=0, keepdims=True)
    outputs = layers.Dense(1, kernel_initializer=head, name="after")(centred)
    _assert_refused(dp.DPModel(inputs, outputs), "'after'.*operation just before it.*mixes")


def test_mixing_in_a_subclassed_model_is_refused():
    class Mixing(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)

        def call(self, inputs):
            outputs = self.dense(inputs)
            return outputs - ops.mean(outputs)

    model = _compile(dp.make_private(Mixing()))
    with pytest.raises(ValueError, match="mixes the examples"):
        model.fit(X, Y, verbose=0)


@pytest.mark.filterwarnings("ignore:The per-layer engines")
def test_mixing_that_starts_at_zero_is_refused():
    _assert_refused(_model(ScaledByTheBatch(), layers.Dense(1)), "cannot be computed|mixes")


def test_state_that_remembers_the_data_is_refused():
    _assert_refused(_model(MovingAverage(), layers.Dense(1)), "average|updated from the data")


def test_stateful_recurrence_is_refused_by_name():
    inputs = keras.Input(batch_shape=(B, 4, 3))
    model = dp.DPModel(inputs, layers.Dense(1)(layers.LSTM(2, stateful=True, name="mine")(inputs)))
    with pytest.raises(ValueError, match="'mine'.*stateful=False"):
        _compile(model)


def test_activity_regularizers_are_refused_by_name():
    model = _model(layers.Dense(1, activity_regularizer="l2", name="mine"))
    with pytest.raises(ValueError, match="activity_regularizer of layer 'mine'"):
        _compile(model)


def test_add_loss_is_refused_by_name():
    _assert_refused(_model(AddsLoss(name="mine"), layers.Dense(1)), "'mine' calls add_loss")


def test_all_problems_are_told_at_once():
    model = _model(
        layers.BatchNormalization(name="one"),
        layers.Dense(1, activity_regularizer="l2", name="two"),
    )
    with pytest.raises(ValueError, match="(?s)'one'.*'two'"):
        _compile(model)
    mixing, penalty = dp.clipping.problems(model)
    assert (mixing.layers, penalty.layers) == (("one",), ("two",))
    assert "mixes the examples" in mixing.reason and "GroupNormalization" in mixing.fix
    assert "a loss over the whole batch" in penalty.reason and "per-example loss" in penalty.fix
    with pytest.raises(ValueError) as refused:
        dp.clipping.validate(model)
    assert str(refused.value).endswith(f":\n- {mixing}\n- {penalty}")
    assert dp.clipping.problems(_model(layers.Dense(1))) == []


@pytest.mark.parametrize("built", [False, True])
def test_random_layers_are_no_mixing(built):
    class Random(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = [layers.Dropout(0.5), layers.GaussianNoise(1.0), layers.Dense(1)]

        def call(self, inputs, training=None):
            for part in self.parts:
                inputs = part(inputs, training=training)
            return inputs

    base = Random()
    if built:
        base(X[:2])
    model = _compile(dp.make_private(base))
    model.fit(X, Y, verbose=0)
    assert model.ledger.steps == N // B


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "units, activation, loss",
    [(1, "sigmoid", "binary_crossentropy"), (3, "softmax", "sparse_categorical_crossentropy")],
)
def test_probabilities_that_saturate_are_no_mixing(units, activation, loss, seed):
    """Of whole numbers as tables have them, with Dropout: a loss is of the logits of its row."""
    keras.utils.set_random_seed(seed)
    rng = np.random.default_rng(seed)
    x, y = rng.integers(0, 90, (40, 8)), rng.integers(0, max(2, units), 40)
    stack = layers.Dense(32, activation="relu"), layers.Dropout(0.2)
    model = _model(*stack, layers.Dense(units, activation=activation), shape=(8,))
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=0.5, noise_multiplier=1.0, batch_size=20)
    model.compile(optimizer, loss)
    model.fit(x, y if units > 1 else np.float32(y), verbose=0)
    assert model.ledger.steps == 2


def test_the_check_leaves_the_model_as_it_was():
    model = _compile(_model(layers.Dropout(0.5), layers.Dense(1)))
    before = model.get_weights()
    checked_engines(model, Batch(tf.constant(X[:B]), tf.constant(Y[:B])))
    for old, variable in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(old, variable)


# Variables that are used outside of the layer that owns them.


class Tied(keras.Model):
    """Embedding and softmax share a table: the second use is no call of the layer."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(5, 4)
        self.dense = layers.Dense(4, activation="tanh")

    def call(self, ids):
        hidden = self.dense(self.table(ids))
        return ops.matmul(hidden, ops.transpose(self.table.embeddings))


class Positions(keras.Model):
    """Looks up positions, which have one row per position and not per example."""

    def __init__(self, length):
        super().__init__()
        self.length = length
        self.tokens, self.positions = layers.Embedding(5, 2), layers.Embedding(length, 2)
        self.dense = layers.Dense(2, activation="tanh")

    def call(self, ids):
        return self.dense(self.tokens(ids) + self.positions(ops.arange(self.length)))


class CallsItsCell(keras.Model):
    """Runs a layer by its weights, in a loop of its own."""

    def __init__(self):
        super().__init__()
        self.cell = layers.SimpleRNNCell(2)
        self.table = layers.Embedding(5, 3)

    def call(self, ids):
        state = [ops.zeros((ops.shape(ids)[0], 2))]
        sequence = self.table(ids)
        for t in range(3):
            output, state = self.cell(sequence[:, t], state)
        return output


def _mse(y, y_pred):
    return tf.reduce_mean(tf.square(y - y_pred))


def _positions(length):
    return lambda: Positions(length)


class _Renamed(layers.RandAugment if hasattr(layers, "RandAugment") else layers.Layer):
    """A subclass mixes as the class does."""


@pytest.mark.parametrize("name", ["MixUp", "CutMix", "Equalization", "RandAugment", "AugMix", None])
def test_layers_that_mix_pictures_in_some_draws_are_refused_by_name(name):
    kind = getattr(layers, name or "RandAugment", None)
    if kind is None:
        pytest.skip("of later versions of Keras")
    layer = (_Renamed if name is None else kind)(name="the_culprit")

    class Model(dp.DPModel):  # in which Keras can call all of them
        def __init__(self):
            super().__init__()
            self.augment, self.head = layer, layers.Dense(1)

        def call(self, x):
            return self.head(ops.mean(self.augment(x), axis=(1, 2)))

    model = Model()
    with pytest.raises(ValueError, match=f"(?s){name or 'RandAugment'} layer 'the_culprit' mixes"):
        _compile(model)
    assert ("map=" in str(dp.clipping.problems(model)[0])) == (name not in ("MixUp", "CutMix"))


def test_random_augmentation_is_of_each_picture_alone_in_map():
    augment = layers.RandAugment(value_range=(0, 1))
    x = np.random.default_rng(0).uniform(size=(12, 8, 8, 3)).astype("float32")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = dp.data.poisson_batches(
            (x, np.zeros(12)), 12, 3, map=lambda x, y: (augment(x, training=True), y)
        )
    drawn = [np.asarray(batch[0]) for batch in batches]
    assert all(each.shape[1:] == x.shape[1:] for each in drawn)
    assert not np.array_equal(drawn[0][:8], drawn[1][:8])


FALLBACKS = {
    "tied": (Tied, 3, (3, 5), "embeddings"),
    "as many positions as rows of the check": (_positions(3), 3, (3, 2), "embeddings"),
    "as many positions as rows of the batch": (_positions(B), B, (B, 2), None),
    "more positions": (_positions(6), 6, (6, 2), None),
}


@pytest.mark.representatives(4)
@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", FALLBACKS)
def test_the_fallback_is_named_and_exact(case, static):
    """Asked where it counts: in `fit`, while the step is traced. None: no fallback is needed."""
    make, length, y_shape, words = FALLBACKS[case]
    rng = np.random.default_rng(4)
    ids = rng.integers(0, 5, (B, length)).astype("int32")
    y = rng.normal(size=(B, *y_shape)).astype("float32")
    base = make()
    base(ids)
    gradients = one_at_a_time(base, _mse, ids, y)
    norms = [np.sqrt(sum((g**2).sum() for g in example)) for example in gradients]
    median = float(np.median(norms))
    expected = [
        w - 0.1 * g / B
        for w, g in zip(base.get_weights(), clip_and_sum(gradients, median), strict=True)
    ]
    model = _compile(dp.make_private(base), clip_norm=median, noise_multiplier=0.0)
    data = tf.data.Dataset.from_tensors((ids, y))
    if not static:
        spec = tf.TensorSpec([None, length], tf.int32), tf.TensorSpec([None, *y_shape])
        data = tf.data.Dataset.from_generator(lambda: iter([(ids, y)]), output_signature=spec)
    batches = dp.data.assume_sampling(data, dp.accounting.Sampling.full(B))
    falls_back = pytest.warns(UserWarning, match=f"(?s){words}.*one example at a time instead")
    with falls_back if words else contextlib.nullcontext():
        model.fit(batches, verbose=0)
    assert_close(model.get_weights(), expected)
    assert words or {each.engine for each in dp.clipping.explain(model)} == {"rule"}


def test_a_cell_that_is_called_by_hand_is_exact():
    rng = np.random.default_rng(4)
    ids = rng.integers(0, 5, (B, 3)).astype("int32")
    y = rng.normal(size=(B, 2)).astype("float32")
    base = CallsItsCell()
    base(ids)
    gradients = one_at_a_time(base, _mse, ids, y)
    model = _compile(dp.make_private(base))
    batch = Batch(tf.constant(ids), tf.constant(y))
    plan = checked_engines(model, batch)
    sums = clipped_sums(model, batch, (Query(clip_norm=0.05),), plan).sums[0]
    assert_close(sums, clip_and_sum(gradients, 0.05))


def test_a_layer_with_a_second_argument_without_rows():
    """The check has 3 rows; a batch of as many rows as positions must not be taken for them."""

    class Shifted(layers.Layer):
        def build(self, shape, *others):
            self.scale = self.add_weight(shape=(), initializer="ones")

        def call(self, inputs, positions):
            return inputs + self.scale * ops.reshape(ops.cast(positions, "float32"), (1, -1))

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.shift, self.dense = Shifted(), layers.Dense(1)

        def call(self, inputs):
            return self.dense(self.shift(inputs, ops.arange(B)))

    x = np.random.default_rng(5).normal(size=(B, B)).astype("float32")
    base = Own()
    base(x)
    gradients = one_at_a_time(base, _mse, x, Y[:B])
    model = _compile(dp.make_private(base))
    batch = Batch(tf.constant(x), tf.constant(Y[:B]))
    plan = checked_engines(model, batch)
    result = clipped_sums(model, batch, (Query(clip_norm=0.05),), plan)
    np.testing.assert_allclose(result.y_pred, base(x), rtol=1e-5)
    assert_close(result.sums[0], clip_and_sum(gradients, 0.05))


def test_a_loss_without_trainable_variables_is_refused():
    model = _model(layers.Dense(1))
    frozen = layers.Lambda(lambda t: ops.stop_gradient(t))
    model = dp.DPModel(model.inputs, frozen(model.outputs[0]))
    _assert_refused(model, "no trainable variable")


# Mixing that shows in some batches only.


def _over_the_largest(inputs):
    return layers.Dense(1)(inputs / ops.max(inputs))


def _reverse_cumulative(inputs):
    return layers.Dense(1)(ops.flip(ops.cumsum(ops.flip(inputs, 0), 0), 0))


def _weak_mean(inputs):
    return layers.Dense(1)(inputs - 1e-4 * ops.mean(inputs, axis=0, keepdims=True))


@tf.custom_gradient
def _bounded_backward(x):
    return tf.identity(x), lambda dy: tf.clip_by_norm(dy, 5.0)


class _BoundedBackward(layers.Layer):
    def call(self, inputs):
        return _bounded_backward(inputs)


def _bounded(inputs):
    return _BoundedBackward()(layers.Dense(1)(inputs))


@pytest.mark.parametrize("make", [_over_the_largest, _reverse_cumulative, _weak_mean, _bounded])
def test_mixing_that_shows_in_some_batches_only_is_refused(make):
    inputs = keras.Input((4,))
    model = _compile(dp.DPModel(inputs, make(inputs)))
    batch = Batch(tf.ones((B, 4)), tf.ones((B, 1)))
    with pytest.raises(ValueError, match="mixes the examples|cannot be computed"):
        checked_engines(model, batch)


def _over_the_batch_size(y, y_pred):
    return ops.mean(ops.square(y - y_pred), axis=-1) / ops.cast(ops.shape(y)[0], "float32")


def _hardest_four(y, y_pred):
    loss = ops.mean(ops.square(y - y_pred), axis=-1)
    largest = ops.top_k(loss, min(4, loss.shape[0]))[0][-1]
    return ops.where(loss >= largest, loss, 0.0)


@pytest.mark.parametrize("loss", [_over_the_batch_size, _hardest_four])
def test_losses_that_depend_on_the_batch_are_refused(loss):
    inputs = keras.Input((4,))
    model = dp.DPModel(inputs, layers.Dense(1)(inputs))
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=B)
    model.compile(optimizer, loss)
    batch = Batch(tf.ones((B, 4)), tf.ones((B, 1)))
    with pytest.raises(ValueError, match="The loss mixes"):
        checked_engines(model, batch)
