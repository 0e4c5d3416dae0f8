"""Models that once got past the check before the first step, and their sound relatives."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.clipping import Batch
from dp_keras_opt.clipping.self_check import checked_engines, independence
from dp_keras_opt.clipping.self_check.passes import Pass

layers, ops = keras.layers, keras.ops
pytestmark = pytest.mark.filterwarnings("ignore:Arrays given to fit", "ignore:Your input ran out")
WORDS = ["anna", "bela", "carl", "dora"]
B = 4


def _compiled(model, loss="mse", **kwargs):
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=B)
    model.compile(optimizer, loss, **kwargs)
    return model


def _form(*shape, dtype="float32"):
    return tf.zeros((B, *shape), dtype)


def _check(model, x, y=None, words=None):
    """Checks a compiled model on data of this form; it must be refused in these words, if any."""
    batch = Batch(x, _form(1) if y is None else y)
    if words is None:
        return checked_engines(model, batch)
    with pytest.raises(ValueError, match=words):
        checked_engines(model, batch)


# What is fed: words, ids, booleans.


def _centred(tensor):
    return tensor - ops.stop_gradient(ops.mean(tensor, axis=0, keepdims=True))


def _ids(dtype):
    """(an input of ids, the same as numbers below 6)."""
    inputs = keras.Input((), dtype=dtype)
    return inputs, layers.StringLookup(vocabulary=WORDS)(inputs) if dtype == "string" else inputs


@pytest.mark.parametrize("dtype", ["string", "int32"])
@pytest.mark.parametrize("mixes", [True, False])
def test_centring_behind_a_lookup(dtype, mixes):
    inputs, ids = _ids(dtype)
    hidden = layers.Embedding(6, 4)(ids)
    hidden = layers.Lambda(_centred, name="centre")(hidden) if mixes else hidden
    model = _compiled(dp.DPModel(inputs, layers.Dense(1)(hidden)))
    _check(model, _form(dtype=dtype), words="'centre'.*mixes" if mixes else None)


def _negatives_of_the_batch(y, y_pred):
    logits = ops.matmul(y_pred, ops.transpose(y_pred))
    return ops.sparse_categorical_crossentropy(ops.arange(ops.shape(y)[0]), logits, True)


def _recommender(recurrent, dtype):
    inputs = keras.Input((3,), dtype=dtype)
    ids = layers.StringLookup(vocabulary=WORDS)(inputs) if dtype == "string" else inputs
    return dp.DPModel(inputs, recurrent(layers.Embedding(6, 4)(ids)))


RECURRENT = {
    "GRU": lambda: layers.GRU(4),
    "LSTM": lambda: layers.LSTM(4),
    "GRU with dropout": lambda: layers.GRU(4, dropout=0.5),
}


@pytest.mark.representatives(4)
@pytest.mark.parametrize("dtype", ["string", "int32"])
@pytest.mark.parametrize("recurrent", RECURRENT)
def test_negatives_of_the_batch_behind_recurrent_layers(recurrent, dtype):
    model = _compiled(_recommender(RECURRENT[recurrent](), dtype), _negatives_of_the_batch)
    _check(model, _form(3, dtype=dtype), _form(4), "The loss mixes")


@pytest.mark.filterwarnings("error:The per-layer engines")
@pytest.mark.parametrize(
    "recurrent, dtype", [("GRU", "string"), ("LSTM", "int32"), ("GRU with dropout", "int32")]
)
def test_recurrent_layers_without_them(recurrent, dtype):
    model = _compiled(_recommender(RECURRENT[recurrent](), dtype))
    _check(model, _form(3, dtype=dtype), _form(4))


class _BatchSize(layers.Layer):
    """Divides by the number of rows: rows change together, and none by another's values."""

    def call(self, inputs):
        return inputs / ops.cast(ops.shape(inputs)[0], inputs.dtype)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_row_alone_is_compared_behind_recurrent_layers(dropout):
    inputs = keras.Input((3, 2))
    hidden = layers.GRU(2, dropout=dropout)(inputs)
    model = _compiled(dp.DPModel(inputs, layers.Dense(1)(_BatchSize(name="divides")(hidden))))
    _check(model, _form(3, 2), words="'divides'.*mixes")


class _Experts(layers.Layer):
    """A mixture of experts, whose tensors have the experts first; or their capacity is shared."""

    def __init__(self, number, capacity=None, **kwargs):
        super().__init__(**kwargs)
        self.number, self.capacity = number, capacity
        self.router = layers.Dense(number, activation="softmax")
        self.experts = layers.EinsumDense("ebd,edh->ebh", (None, 4), name="experts")

    def build(self, shape):
        self.router.build(shape)
        self.experts.build((self.number, *shape))

    def call(self, inputs):
        shares = ops.transpose(self.router(inputs))  # experts, rows
        if self.capacity is not None:
            shares = ops.where(ops.cumsum(ops.ones_like(shares), 1) > self.capacity, 0.0, shares)
        each = self.experts(ops.repeat(inputs[None], self.number, axis=0))
        return ops.sum(each * shares[..., None], axis=0)


@pytest.mark.parametrize("number", [2, 3, 17])
@pytest.mark.parametrize("capacity", [None, 2])
def test_experts_as_many_as_the_check_has_rows(number, capacity):
    inputs = keras.Input((2,))
    hidden = _Experts(number, capacity)(inputs)
    model = _compiled(dp.DPModel(inputs, layers.Dense(1)(hidden)))
    _check(model, _form(2), words="mixes" if capacity else None)


@pytest.mark.parametrize("mixes", [True, False])
def test_two_towers(mixes):
    users, of_users = _ids("string")
    items, of_items = _ids("string")
    users_at, items_at = (layers.Embedding(6, 4)(t) for t in (of_users, of_items))
    scores = layers.Lambda(
        (lambda t: ops.matmul(t[0], ops.transpose(t[1])))
        if mixes
        else (lambda t: ops.sum(t[0] * t[1], axis=-1, keepdims=True))
    )([users_at, items_at])
    model = _compiled(dp.DPModel([users, items], scores))
    x = [_form(dtype="string"), _form(dtype="string")]
    _check(model, x, words="mixes|cannot be computed" if mixes else None)


class _MixesWhere(layers.Layer):
    """Centres the batch if the condition holds for some row."""

    def __init__(self, condition, **kwargs):
        super().__init__(**kwargs)
        self.condition = condition

    def call(self, inputs):
        raw, hidden = inputs
        return ops.where(ops.any(self.condition(raw)), _centred(hidden), hidden)


SPECIAL = {
    "ids from 2 on": ("int32", lambda t: t >= 2, layers.Embedding(6, 4)),
    "the largest id": ("int32", lambda t: t == 36, layers.Embedding(37, 4)),
    "large bytes": ("uint8", lambda t: t > 200, layers.Embedding(256, 4)),
    "ids to be hashed": (
        "int64",
        lambda t: t > 1000,
        keras.Sequential([layers.Hashing(7), layers.Embedding(7, 4)]),
    ),
    "True": ("bool", lambda t: t, layers.Lambda(lambda t: ops.cast(t, "float32")[:, None])),
    "words that are known": (
        "string",
        lambda t: tf.reduce_any(t[:, None] == WORDS, axis=1),
        keras.Sequential([layers.StringLookup(vocabulary=WORDS), layers.Embedding(6, 4)]),
    ),
    "words that are not": (
        "string",
        lambda t: ~tf.reduce_any(t[:, None] == ["", *WORDS], axis=1),
        keras.Sequential([layers.StringLookup(vocabulary=WORDS), layers.Embedding(6, 4)]),
    ),
    "ids that are known": (
        "int64",
        lambda t: t == 70_123,
        keras.Sequential([layers.IntegerLookup(vocabulary=[70_123, 8]), layers.Embedding(4, 4)]),
    ),
    "words of a text": (
        "string",
        lambda t: tf.strings.regex_full_match(t, ".*anna.* .*"),
        keras.Sequential(
            [
                layers.TextVectorization(vocabulary=WORDS, output_sequence_length=3),
                layers.Embedding(6, 4),
                layers.Flatten(),
            ]
        ),
    ),
}


@pytest.mark.parametrize("case", SPECIAL)
def test_mixing_for_particular_values(case):
    dtype, condition, body = SPECIAL[case]
    inputs = keras.Input((), dtype=dtype)
    hidden = _MixesWhere(condition, name="special")([inputs, body(inputs)])
    model = _compiled(dp.DPModel(inputs, layers.Dense(1)(hidden)))
    _check(model, _form(dtype=dtype), words="'special'.*mixes")


def test_words_that_a_model_knows_are_all_that_some_take():
    """Of several vocabularies each input takes its own, and labels are below the outputs."""
    inputs = [keras.Input((), dtype=dtype) for dtype in ("string", "int64")]
    lookups = [
        layers.StringLookup(vocabulary=WORDS, num_oov_indices=0),
        layers.IntegerLookup(vocabulary=[70_123, 8], num_oov_indices=0),
    ]
    tables = [layers.Embedding(5, 2)(lookup(t)) for lookup, t in zip(lookups, inputs, strict=True)]
    outputs = layers.Dense(3, "softmax")(layers.Concatenate()(tables))
    model = _compiled(dp.DPModel(inputs, outputs), "sparse_categorical_crossentropy")
    x = [_form(dtype="string"), _form(dtype="int64")]
    _check(model, x, _form(dtype="int32"))


def test_a_loss_that_mixes_for_one_class_only():
    def loss(y, y_pred):
        own = ops.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        return ops.where(ops.any(ops.equal(y, 5)), own * ops.mean(own), own)

    inputs = keras.Input((3,))
    model = _compiled(dp.DPModel(inputs, layers.Dense(6)(inputs)), loss)
    _check(model, _form(3), _form(dtype="int32"), "The loss mixes")


# Padding to the longest row of a batch.

LENGTHS = (2, 5, 3, 9, 4, 4, 6, 1)


def _padded(of_label=lambda tokens: np.float32([tokens.sum()]), fixed=None):
    """Batches of token ids below 20, as long as their longest row."""

    def examples():
        for length in LENGTHS:
            tokens = np.arange(1, 1 + length)
            yield tokens, of_label(tokens)

    label = of_label(np.arange(3))
    shape = (1,) if label.shape == (1,) else (None,)
    signature = (tf.TensorSpec([None], tf.int64), tf.TensorSpec(shape, label.dtype))
    data = tf.data.Dataset.from_generator(examples, output_signature=signature)
    shapes = None if fixed is None else ((fixed,), shape)
    data = data.padded_batch(B, padded_shapes=shapes, drop_remainder=True)
    sampling = dp.accounting.Sampling.shuffled(len(LENGTHS), B)
    return dp.data.assume_sampling(data, sampling)


def _text(*stack, masked=False, length=None):
    tensor = inputs = keras.Input((length,), dtype="int64")
    tensor = layers.Embedding(20, 4, mask_zero=masked)(tensor)
    for layer in stack:
        tensor = layer(tensor)
    return dp.DPModel(inputs, tensor)


def _pooled():
    return layers.GlobalAveragePooling1D(), layers.Dense(1)


class _Positions(layers.Layer):
    def build(self, shape):
        self.table = self.add_weight(shape=(10, shape[-1]))

    def call(self, inputs):
        return inputs + self.table


UNMASKED = {
    "pooling": _pooled,
    "pooling behind zeros": lambda: (
        layers.GlobalAveragePooling1D(),
        layers.Dense(1, kernel_initializer="zeros"),
    ),
    "convolution": lambda: (layers.Conv1D(4, 3), *_pooled()),
    "strides": lambda: (layers.Conv1D(4, 3, strides=3), layers.MaxPooling1D(4), *_pooled()),
    "recurrence": lambda: (layers.LSTM(3), layers.Dense(1)),
    "dropout": lambda: (layers.Dropout(0.5), *_pooled()),
}


@pytest.mark.parametrize("case", UNMASKED)
def test_padding_that_is_not_masked_is_refused(case):
    model = _compiled(_text(*UNMASKED[case]()))
    before = model.get_weights()
    with pytest.raises(ValueError, match="sizes of x open.*gets longer.*mask_zero=True"):
        model.fit(_padded(), verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_padding_that_is_masked_trains():
    model = _compiled(_text(*_pooled(), masked=True))
    model.fit(_padded(), verbose=0)
    assert model.ledger.steps == len(LENGTHS) // B


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recurrence_that_is_masked_is_no_mixing(dropout):
    model = _compiled(_text(layers.LSTM(3, dropout=dropout), layers.Dense(1), masked=True))
    _check(model, tf.TensorSpec([None, None], tf.int64), tf.TensorSpec([None, 1]))


@pytest.mark.parametrize("eager", [False, True])
def test_rows_of_a_fixed_length_train(eager):
    model = _compiled(_text(*_pooled()), run_eagerly=eager)
    model.fit(_padded(fixed=12), verbose=0)
    assert model.ledger.steps == len(LENGTHS) // B


@pytest.mark.parametrize("masked", [True, False])
def test_labels_of_positions(masked):
    data = _padded(lambda tokens: np.int64(tokens % 3))
    model = _text(layers.Dense(3, "softmax"), masked=masked)
    _compiled(model, "sparse_categorical_crossentropy")
    if masked:
        model.fit(data, verbose=0)
        assert model.ledger.steps == len(LENGTHS) // B
    else:
        with pytest.raises(ValueError, match="sizes of x, y open"):
            model.fit(data, verbose=0)


def test_weights_of_positions_do_not_mask():
    """The mean is over all positions, as Keras takes it."""
    inputs = keras.Input((None, 2))
    model = _compiled(dp.DPModel(inputs, layers.Dense(1)(inputs)))
    spec = tf.TensorSpec([None, None, 2]), tf.TensorSpec([None, None, 1])
    batch = Batch(*spec, tf.TensorSpec([None, None]))
    with pytest.raises(ValueError, match="sizes of x, y, sample_weight open.*not enough"):
        checked_engines(model, batch)


def test_padding_of_targets_alone_is_refused():
    data = _padded(lambda tokens: np.float32(tokens), fixed=9)
    with pytest.raises(ValueError, match="sizes of y open.*gets longer"):
        _compiled(_text(*_pooled())).fit(data, verbose=0)


def test_positions_of_a_fixed_number_are_refused_with_what_to_do():
    model = _compiled(_text(_Positions(), *_pooled(), masked=True))
    with pytest.raises(ValueError, match=r"one length only.*\(10\).*tf.ensure_shape"):
        model.fit(_padded(), verbose=0)


def test_a_model_that_runs_with_no_length_is_refused_with_the_reason():
    model = _compiled(_text(layers.Flatten(), layers.Dense(1), length=1_077))
    with pytest.raises(ValueError, match=r"(?s)none that was tried \(.*tf.ensure_shape"):
        model.fit(_padded(), verbose=0)


def _batches_of_two_lengths():
    for length in (4, 7):
        yield np.ones((B, length), np.int64), np.ones((B, 1), np.float32)


@pytest.mark.representatives(3)
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_single_steps_with_batches_of_several_lengths(masked, eager):
    model = _compiled(_text(*_pooled(), masked=masked), run_eagerly=eager)
    model.sampling = dp.accounting.Sampling.poisson(8, B)
    first, second = _batches_of_two_lengths()
    model.train_on_batch(*first)
    if masked:
        model.train_on_batch(*second)
        assert model.ledger.steps == 2
    else:
        with pytest.raises(ValueError, match="gets longer"):
            model.train_on_batch(*second)


def test_generators_of_batches_of_several_lengths():
    data = dp.data.assume_sampling(_batches_of_two_lengths(), dp.accounting.Sampling.shuffled(8, B))
    with pytest.raises(ValueError, match="gets longer"):
        _compiled(_text(*_pooled())).fit(data, verbose=0)


# State that takes in the data.


class _Average(layers.Layer):
    """Its moving average starts late."""

    def build(self, shape):
        options = {"shape": (), "initializer": "zeros", "trainable": False}
        self.calls = self.add_weight(**options, name="calls")
        self.average = self.add_weight(**options, name="average")

    def call(self, inputs, training=None):
        if training:
            self.calls.assign_add(1.0)
            late = ops.cast(self.calls > 1000, "float32")
            self.average.assign(self.average + late * 0.01 * ops.mean(inputs))
        return inputs


class _AverageInPython(layers.Layer):
    """What no graph of the check shows."""

    def build(self, shape):
        self.calls = 0
        self.average = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs, training=None):
        self.calls += 1
        if self.calls > 1000:
            self.average.assign(self.average + 0.01 * ops.mean(inputs))
        return inputs


class _AverageByValue(_AverageInPython):
    """Which cannot be traced."""

    def call(self, inputs, training=None):
        return super().call(inputs) + 0 * float(inputs[0, 0].numpy())

    def compute_output_shape(self, shape):
        return shape


class _AverageInPyFunction(_Average):
    def call(self, inputs, training=None):
        def remember(values):
            self.calls.assign_add(1.0)
            if self.calls.numpy() > 1000:
                self.average.assign(ops.mean(values))
            return values

        return ops.reshape(tf.py_function(remember, [inputs], tf.float32), ops.shape(inputs))


X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def _dense(*stack, loss="mse", **kwargs):
    tensor = inputs = keras.Input((3,))
    for layer in stack:
        tensor = layer(tensor)
    return _compiled(dp.DPModel(inputs, layers.Dense(1)(tensor)), loss, **kwargs)


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"jit_compile": True}])
def test_a_moving_average_that_starts_late_is_refused(options):
    model = _dense(_Average(name="late"), **options)
    before = model.get_weights()
    with pytest.raises(ValueError, match="late/average' is updated from the data"):
        model.fit(X, Y, verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (_AverageInPython, "is updated from the data"),  # by the check, which the count calls again
        (_AverageByValue, "was changed by a training step"),
    ],
)
def test_a_moving_average_that_no_graph_shows_is_noticed(layer, message):
    model = _dense(layer(name="hidden"), run_eagerly=True)
    model.fit(X, Y, verbose=0)
    model.layers[1].calls = 1000
    with pytest.raises(ValueError, match=f"hidden/.*{message}"):
        model.fit(X, Y, verbose=0)


def test_a_moving_average_in_a_py_function_is_noticed():
    model = _dense(_AverageInPyFunction(name="hidden"), jit_compile=False)
    with pytest.raises(ValueError, match="hidden/calls' was changed by a training step"):
        model.fit(X, Y, verbose=0)


def _assigning(change):
    """A loss that calls `change(variable, table, y)`, and the variable."""
    prior = tf.Variable([0.5, 0.5], name="prior", trainable=False)
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    def loss(y, y_pred):
        change(prior, table, y)
        return ops.mean(ops.square(y - y_pred), axis=-1)

    return loss


def _moving(momentum):
    def change(prior, table, y):
        prior.assign(momentum * prior + (1 - momentum) * tf.reduce_mean(y, axis=0))

    return change


_PLAIN = _moving(0.999)
CHANGES = {
    "momentum 0.9": _moving(0.9),
    "momentum 0.9999": _moving(0.9999),
    "cond": lambda v, t, y: tf.cond(v[0] > -1.0, lambda: [_PLAIN(v, t, y), 1][1], lambda: 0),
    "cond on the data": lambda v, t, y: tf.cond(
        tf.reduce_any(y > 0), lambda: v.assign_add([1.0, 1.0]), lambda: v.read_value()
    ),
    "while_loop": lambda v, t, y: tf.while_loop(
        lambda i: i < 2, lambda i: [_PLAIN(v, t, y), (i + 1,)][1], (0,)
    ),
    "as often as the data says": lambda v, t, y: tf.while_loop(
        lambda i: i < tf.cast(tf.reduce_max(y), tf.int32),
        lambda i: [v.assign_add([1.0, 1.0]), (i + 1,)][1],
        (0,),
    ),
    "switch_case": lambda v, t, y: tf.switch_case(
        tf.cast(y[0, 0] > 0, tf.int32), [lambda: v.assign_add([1.0, 1.0]), v.read_value]
    ),
    "tf.function": lambda v, t, y: tf.function(lambda: _PLAIN(v, t, y))(),
    "map_fn": lambda v, t, y: tf.map_fn(lambda row: v.assign_add([row[0], 1.0]), y),
    "scatter": lambda v, t, y: v.scatter_nd_update([[0]], y[0, :1]),
    "slice": lambda v, t, y: v[:1].assign(y[0, :1]),
    "number of rows": lambda v, t, y: v.assign_add(
        tf.fill([2], tf.cast(tf.shape(y)[0], tf.float32))
    ),
    "table": lambda v, t, y: t.insert(tf.constant([1], tf.int64), tf.reduce_max(y)[None]),
}


@pytest.mark.parametrize("case", CHANGES)
def test_state_of_a_loss_that_takes_in_the_data_is_refused(case):
    model = _dense(loss=_assigning(CHANGES[case]))
    words = "'.*lookup_table" if case == "table" else "Variable 'prior"
    spec = tf.TensorSpec([None, 1])
    with pytest.raises(ValueError, match=words + ".*updated from the data"):
        checked_engines(model, Batch(tf.TensorSpec([None, 3]), spec))


def test_state_that_a_gradient_written_by_hand_keeps_is_refused():
    scale = tf.Variable(1.0, name="scale")

    @tf.custom_gradient
    def measured(inputs):
        def backward(upstream):
            scale.assign(0.99 * scale + 0.01 * tf.reduce_mean(tf.abs(upstream)))
            return upstream

        return tf.identity(inputs), backward

    model = _dense(layers.Lambda(measured), layers.Dense(3), layers.Lambda(measured))
    _check(model, _form(3), words="scale.* is updated from the data")


def test_what_was_assigned_from_the_data_counts_as_the_data():
    """One variable takes in the batch, a metric, and another what the first holds."""

    class Chain(layers.Layer):
        def build(self, shape):
            self.mean = keras.metrics.Mean()
            self.copy = self.add_weight(shape=(), name="copy", trainable=False)

        def call(self, inputs):
            self.copy.assign(self.mean.total * 2.0)
            self.mean.update_state(inputs)
            return inputs

    _check(_dense(Chain()), _form(3), words="copy' is updated from the data")


# State that does not.


class _Annealed(layers.Layer):
    """A penalty in the output, whose weight grows with the number of steps."""

    def build(self, shape):
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs, training=None):
        if training:
            self.steps.assign_add(1.0)
        return inputs * ops.minimum(1.0, self.steps / 10.0)


class _Measured(layers.Layer):
    def build(self, shape):
        self.mean = keras.metrics.Mean()

    def call(self, inputs):
        self.mean.update_state(inputs)
        return inputs


@pytest.mark.representatives(4)
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    "layer",
    [lambda: layers.SpectralNormalization(layers.Dense(3)), _Annealed, _Measured],
    ids=["spectral normalization", "annealed", "metric"],
)
def test_state_that_depends_on_weights_and_steps_trains(layer, eager):
    model = _dense(layer(), layers.Dropout(0.1), run_eagerly=eager)
    before = [np.copy(v) for v in model.variables]
    checked_engines(model, Batch(tf.constant(X), tf.constant(Y)))
    for old, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, variable)
    model.fit(X, Y, batch_size=B, verbose=0)
    assert model.ledger.steps == 2
    if isinstance(model.layers[1], _Annealed):
        assert float(model.layers[1].steps) == 2


def test_a_counter_of_a_loss_is_left_as_it_was():
    steps = tf.Variable(0.0)

    def loss(y, y_pred):
        steps.assign_add(1.0)
        return ops.mean(ops.square(y - y_pred), axis=-1) * (1.0 + 1.0 / steps)

    model = _dense(loss=loss)
    model.fit(X, Y, batch_size=B, verbose=0)
    assert steps == 2.0


def test_a_frozen_normalization_trains_eagerly():
    model = _dense(layers.BatchNormalization(trainable=False), run_eagerly=True)
    model.fit(X, Y, batch_size=B, verbose=0)
    assert model.ledger.steps == 2


# Floats that stand for labels, ids or missing values; other weights; other random numbers.


def _linear(*stack, units=1, shape=(4,), **options):
    tensor = inputs = keras.Input(shape)
    for layer in stack:
        tensor = layer(tensor)
    return dp.DPModel(inputs, layers.Dense(units, **options)(tensor))


def _ranking(y, p):
    """Pairs of one query, whose id is a float: another row's score is in the loss."""
    same, better = y[:, :1] == y[None, :, 0], y[:, 1:] > y[None, :, 1]
    pair = tf.cast(same & better, p.dtype)
    return tf.reduce_sum(pair * tf.nn.softplus(tf.transpose(p) - p), axis=1)


def _balanced(y, p):
    positive = tf.cast(y == 1.0, p.dtype)
    weight = tf.where(y == 1.0, 1.0, tf.reduce_mean(positive))
    return tf.reduce_mean(weight * tf.square(y - p), axis=-1)


def _imputed(missing):
    def impute(t):
        there = ops.where(missing(t), 0.0, t)
        number = ops.sum(ops.cast(ops.logical_not(missing(t)), t.dtype), axis=0)
        return ops.where(missing(t), ops.sum(there, axis=0) / ops.maximum(number, 1.0), t)

    return layers.Lambda(impute)


def _decorrelated(y, p):
    c = p - tf.reduce_mean(p, axis=0)
    covariance = tf.matmul(c, c, transpose_a=True)
    penalty = tf.reduce_sum(tf.square(tf.linalg.set_diag(covariance, tf.zeros(3))))
    return tf.reduce_mean(tf.square(y - p), axis=-1) + penalty


def _annealed():
    beta = tf.Variable(0.0)

    def loss(y, p):
        return tf.reduce_mean(tf.square(y - p), axis=-1) + beta * tf.reduce_mean(tf.square(p))

    loss.beta = beta  # kept
    return loss


FLOATS = {
    "ranking by a float id": lambda: (_linear(), _ranking, (2,)),
    "balanced by float labels": lambda: (_linear(), _balanced, (1,)),
    "NaN by the mean": lambda: (_linear(_imputed(ops.isnan)), "mse", (1,)),
    "0 by the mean": lambda: (_linear(_imputed(lambda t: t == 0.0)), "mse", (1,)),
    "a head of zeros": lambda: (_linear(units=3, kernel_initializer="zeros"), _decorrelated, (3,)),
    "a penalty that begins at 0": lambda: (_linear(), _annealed(), (1,)),
}


@pytest.mark.parametrize("case", FLOATS)
def test_mixing_by_floats_or_at_later_weights_is_refused(case):
    """Each moved the sum by 7 to 22 C."""
    model, loss, of_y = FLOATS[case]()
    start = model.get_weights()
    _check(_compiled(model, loss), _form(4), _form(*of_y), words="mixes")
    assert all(map(np.array_equal, start, model.get_weights()))


class _Switched(layers.Layer):
    """Centres on the batch once its state says so."""

    def __init__(self, shape, dtype, start, is_on, then=lambda v: v, mixes=True, **kwargs):
        super().__init__(**kwargs)
        self.form, self.start, self.is_on, self.then = (shape, dtype), start, is_on, then
        self.mixes = mixes

    def build(self, shape):
        shape, dtype = self.form
        start = keras.initializers.Constant(self.start)
        self.switch = self.add_weight(shape, start, dtype, trainable=False, name="switch")

    def call(self, inputs, training=False):
        share = ops.cast(self.is_on(self.switch), inputs.dtype)
        if training:
            self.switch.assign(self.then(self.switch.value))
        return inputs * (1 + share) - share * (ops.mean(inputs, axis=0) if self.mixes else 1.0)


class _Latched(layers.Layer):
    """Three steps open what begins to mix, with a strength for each column."""

    def build(self, shape):
        self.steps = self.add_weight((), "zeros", "int32", trainable=False)
        self.gates = self.add_weight(shape[-1:], "zeros", trainable=False)

    def call(self, inputs, training=False):
        centred = inputs - self.gates * ops.mean(inputs, axis=0)
        if training:
            self.steps.assign_add(1)
            self.gates.assign(ops.cast(self.steps >= 3, "float32") * ops.ones_like(self.gates))
        return centred


def _down(value):
    return ops.maximum(value - 1, 0)


SWITCHES = {
    "a countdown": ((), "int32", 3, lambda v: v <= 0, _down),
    "a countdown by floats": ((), "float32", 3.0, lambda v: v <= 0, _down),
    "a share that grows as one ends": ((), "float32", 6.0, lambda v: ops.relu(1 - v / 3), _down),
    "a count with an axis": ((1,), "int32", 0, lambda v: v >= 3, lambda v: v + 1),
    "a stage of several": ((), "int32", 0, lambda v: ops.equal(v, 4)),
    "the second stage": ((), "int32", 0, lambda v: ops.switch(v, [lambda: 0.0, lambda: 1.0])),
    "a flag": ((), "bool", False, lambda v: v),
    "a flag that ends": ((), "bool", True, ops.logical_not),
    "flags": ((4,), "bool", False, lambda v: v),
    "floats that come down": ((4,), "float32", 6.0, lambda v: ops.relu(1 - v / 3), _down),
    "below 0": ((), "int32", 5, lambda v: v < 0, lambda v: v - 1),
    "the last of many": (
        (), "int32", 0, lambda v: ops.where(v == 12, 1.0, sum(0.0 * ops.cast(v == n, "float32")
                                                              for n in range(12))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [*SWITCHES, "a latch", "a frozen layer"])
def test_what_mixes_at_another_state_than_the_first_is_refused(case):
    """Each moved the sum by 28 to 32 C, where a row was replaced."""
    if case == "a latch":
        layer = _Latched()
    elif case == "a frozen layer":
        layer = _Switched((1,), "float32", 0.0, lambda v: v >= 3, trainable=False)
    else:
        layer = _Switched(*SWITCHES[case])
    model = _compiled(_linear(layer))
    start = [np.copy(v) for v in model.variables]
    _check(model, _form(4), _form(1), words="mixes")
    assert all(map(np.array_equal, start, model.variables))


@pytest.mark.parametrize("case", SWITCHES)
def test_states_that_change_each_row_by_itself_train(case):
    model = _compiled(_linear(_Switched(*SWITCHES[case], mixes=False)))
    start = [np.copy(v) for v in model.variables]
    _check(model, _form(4), _form(1), words=None)
    assert all(map(np.array_equal, start, model.variables))


@pytest.mark.parametrize("both", [
    lambda flag, count: flag & (count <= 0),
    lambda flag, count: ops.logical_not(flag) & (count >= 9),
    lambda flag, count: flag & ops.equal(count, 7),
])  # fmt: skip
def test_what_mixes_by_two_switches_is_refused(both):
    class Layer(layers.Layer):
        def build(self, shape):
            self.flag = self.add_weight((), "zeros", "bool", trainable=False)
            start = keras.initializers.Constant(4)
            self.count = self.add_weight((), start, "int32", trainable=False)

        def call(self, x):
            return ops.where(both(self.flag, self.count), _centred(x), x)

    _check(_compiled(_linear(Layer())), _form(4), _form(1), words="mixes")


def test_a_frozen_vector_that_opens_is_refused():
    class Layer(layers.Layer):
        def build(self, shape):
            self.gate = self.add_weight(shape[-1:], "zeros", trainable=False)

        def call(self, x):
            return x - self.gate * ops.mean(x, axis=0)

    _check(_compiled(_linear(Layer(trainable=False))), _form(4), _form(1), words="mixes")


@pytest.mark.parametrize("start", [False, 3.0])
def test_a_loss_that_mixes_once_a_variable_of_its_own_has_changed_is_refused(start):
    """As a callback may change it: both moved the sum by 32 C."""
    state = keras.Variable(start, trainable=False, dtype="bool" if start is False else "float32")

    def loss(y, p):
        errors = ops.mean(ops.abs(y - p), axis=-1)
        begun = state if start is False else state <= 0
        return ops.where(begun, errors * ops.mean(errors), errors)

    _check(_compiled(_linear(), loss), _form(4), _form(1), words="mixes")
    assert state.numpy() == start


class _SumOfUnits(layers.Layer):
    """Deep sets: padding gives 0 only as long as the bias is 0."""

    def build(self, shape):
        self.dense = layers.Dense(8, activation="relu")

    def call(self, inputs):
        return ops.sum(self.dense(inputs), axis=1)


@pytest.mark.parametrize("layer", [_SumOfUnits, layers.GlobalMaxPooling1D])
def test_padding_that_shows_later_or_in_negative_numbers_is_refused(layer):
    model = _compiled(_linear(layer(), shape=(None, 4)))
    open_size = tf.TensorSpec((None, None, 4))
    _check(model, open_size, tf.TensorSpec((None, 1)), words="gets longer")


class _MixesSometimes(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, inputs, training=None):
        if not training:
            return inputs
        mixed = inputs + ops.mean(inputs, axis=0, keepdims=True)
        return ops.where(keras.random.uniform((), seed=self.seeds) < 0.3, mixed, inputs)


def test_mixing_that_a_coin_decides_is_refused():
    """All draws of the check had the same random numbers: 10 of 15 such models were accepted."""
    for _seed in range(5):
        _check(_compiled(_linear(_MixesSometimes())), _form(4), words="mixes")


# Metrics that are read back; layers that draw in inference, too; what TensorFlow hides.


class _AgainstTheMean(layers.Layer):
    def __init__(self):
        super().__init__()
        self.mean = keras.metrics.Mean()

    def call(self, inputs):
        self.mean.update_state(inputs)
        return inputs - self.mean.result()


def test_a_metric_that_is_read_back_is_refused():
    """It held what earlier batches were: 17 C."""
    _check(_compiled(_linear(_AgainstTheMean())), _form(4), words="value of a metric")


def test_a_metric_of_compile_that_the_loss_reads_is_refused():
    metric = keras.metrics.MeanAbsoluteError()

    def loss(y, p):
        return tf.reduce_mean(tf.square(y - p), axis=-1) / (1 + metric.result())

    model = _compiled(_linear(), loss, metrics=[metric])
    _check(model, _form(4), words="value of a metric")


class _Paced(layers.Layer):
    """Keeps in a state of its own what a metric says of earlier batches."""

    def __init__(self, metric, value):
        super().__init__()
        self.metric, self.value = metric, value
        self.level = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.level.assign(self.value(self.metric.result()))
        return inputs * (1 - 2 * ops.convert_to_tensor(self.level))


@pytest.mark.parametrize(
    "value",
    [
        lambda figure: figure,
        lambda figure: ops.where(figure > 2, 1.0, 0.0),
        lambda figure: ops.cond(figure > 2, lambda: 1.0, lambda: 0.0),
    ],
)
def test_a_metric_that_a_state_takes_in_is_refused(value):
    """One target moved the sum of the next step by 100 C, and a raw figure was saved."""
    metric = keras.metrics.MeanAbsoluteError()
    model = _compiled(_linear(_Paced(metric, value)), metrics=[metric])
    _check(model, _form(4), words="updated from the data")


class _Sampling(layers.Layer):
    """Of a variational autoencoder: random in inference, too."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(3)

    def call(self, inputs):
        noise = keras.random.normal(ops.shape(inputs), seed=self.seed_generator)
        return inputs + 0.1 * noise


@pytest.mark.parametrize("mixes", [False, True])
def test_layers_that_are_random_in_inference(mixes):
    stack = [_Sampling(), layers.Lambda(_centred)] if mixes else [_Sampling()]
    _check(_compiled(_linear(*stack)), _form(4), words="mixes" if mixes else None)


class _ScaledNoise(layers.Layer):
    """Random in inference, too, which shows only where the scale is no longer 0."""

    def build(self, shape):
        self.seed_generator = keras.random.SeedGenerator(3)
        self.scale = self.add_weight(shape=(), initializer="zeros")

    def call(self, inputs):
        noise = keras.random.normal(ops.shape(inputs), seed=self.seed_generator)
        return inputs + self.scale * noise


@pytest.mark.parametrize("mixes", [False, True])
def test_noise_that_a_weight_of_zero_hides(mixes):
    """It was said to mix examples."""
    stack = [_ScaledNoise(), layers.Lambda(_centred)] if mixes else [_ScaledNoise()]
    _check(_compiled(_linear(*stack)), _form(4), words="mixes" if mixes else None)


def test_ctc_trains():
    inputs = keras.Input((6, 3))
    model = _compiled(dp.DPModel(inputs, layers.Dense(5)(inputs)), keras.losses.CTC())
    _check(model, _form(6, 3), _form(2, dtype="int32"))


def test_float_ids_of_an_embedding():
    inputs = keras.Input((2,))
    hidden = layers.Flatten()(layers.Embedding(30, 3)(inputs))
    _check(_compiled(dp.DPModel(inputs, layers.Dense(1)(hidden))), _form(2))


@pytest.mark.parametrize("seed", [6, 149, 311])
def test_a_sum_that_cancels_is_no_mixing(seed):
    """Of 3,000 terms that nearly cancel, a row alone leaves other rounding than in a batch.

    Relative to what is left that was more than 1 in 1,000, on some machines with these weights.
    """
    inputs = keras.Input((3000,))
    model = _compiled(dp.DPModel(inputs, layers.Dense(1, use_bias=False)(inputs)))
    model.set_weights([0.1 * np.random.default_rng(seed).normal(size=(3000, 1))])
    _check(model, _form(3000))


@pytest.mark.parametrize("share", [1e-2, 1e-3])
def test_slight_mixing_is_seen_beside_rounding(share):
    """A wide sum to which a little of the mean over the batch is added."""
    inputs = keras.Input((3000,))
    hidden = layers.Dense(1, use_bias=False)(inputs)
    outputs = layers.Lambda(lambda t: t + share * ops.mean(t, axis=0, keepdims=True))(hidden)
    _check(_compiled(dp.DPModel(inputs, outputs)), _form(3000), words="mixes the examples")


# What depends on a row's place, on time, or shows in gradients only.


def _regression():
    inputs = keras.Input((4,))
    return dp.DPModel(inputs, layers.Dense(1)(layers.Dense(3, "tanh")(inputs)))


class _SlightlyRandom(layers.Layer):
    """Draws random numbers in inference, too."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(1)

    def call(self, x):
        return x + 1e-3 * keras.random.normal(ops.shape(x), seed=self.seed)


def _sampled():
    inputs = keras.Input((4,))
    return dp.DPModel(inputs, layers.Dense(1)(_SlightlyRandom()(layers.Dense(3)(inputs))))


def _squares(targets, outputs):
    return ops.mean(ops.square(targets - outputs), axis=-1)


def _by_place(inputs, targets, outputs, intermediates):
    """Each row has the next of three public negatives: without a row, the others have others."""
    negatives = ops.convert_to_tensor([[-1.0], [0.0], [1.0]])
    mine = ops.take(negatives, ops.arange(ops.shape(outputs)[0]) % 3, axis=0)
    return ops.relu(20 - _squares(mine, outputs))


def _in_turns(inputs, targets, outputs, intermediates):
    signs = 1 - 2 * ops.cast(ops.arange(ops.shape(outputs)[0]) % 2, "float32")
    return signs * _squares(targets, outputs)


def _pairs_of_even_batches(inputs, targets, outputs, intermediates):
    losses, count = _squares(targets, outputs), outputs.shape[0]
    if count is None or count % 2:
        return losses
    return losses * ops.reshape(ops.flip(ops.reshape(losses, (-1, 2)), 1), (-1,))


def _by_number(inputs, targets, outputs, intermediates):
    return _squares(targets, outputs) * ops.cast(ops.shape(outputs)[0], "float32")


def _gradient_alone(inputs, targets, outputs, intermediates):
    """The value is that of the row; a gradient is weighted by what the others are."""
    losses = _squares(targets, outputs)
    ones = ops.exp(losses - ops.stop_gradient(losses))
    return ops.stop_gradient(losses) * ones + (1 - ones) * ops.stop_gradient(ops.mean(losses))


@pytest.mark.parametrize("open_rows", [True, False])
@pytest.mark.parametrize("make", [_regression, _sampled])
@pytest.mark.parametrize(
    "objective",
    [_by_place, _in_turns, _pairs_of_even_batches, _by_number, _gradient_alone],
)
def test_an_objective_that_depends_on_more_than_its_row(objective, make, open_rows):
    if objective is _pairs_of_even_batches and (open_rows or make is _sampled):
        pytest.skip("where rows are open, it is of each row; a pair is seen in the same pass")
    model = _compiled(make(), dp.Objective(objective))
    rows = None if open_rows else 32
    batch = Batch(tf.TensorSpec([rows, 4]), tf.TensorSpec([rows, 1]))
    with pytest.raises(ValueError, match=f"objective '{objective.__name__}'.* mixes"):
        checked_engines(model, batch)


@pytest.mark.parametrize("make", [_regression, _sampled])
def test_an_objective_of_each_row_passes(make):
    def sound(inputs, targets, outputs, intermediates):
        return _squares(targets, outputs) + 0.1 * ops.sum(ops.abs(inputs), axis=-1)

    _check(_compiled(make(), dp.Objective(sound)), _form(4))


@pytest.mark.parametrize("dtype, begins", [("int64", 50), ("int32", 5000), ("float32", 1000)])
@pytest.mark.parametrize("mixes", [True, False])
def test_what_begins_after_many_steps(dtype, begins, mixes):
    steps = tf.Variable(0, dtype=dtype, trainable=False)

    def warmed_up(inputs, targets, outputs, intermediates):
        losses = _squares(targets, outputs)
        share = tf.clip_by_value((tf.cast(steps, "float32") - begins) / 100, 0, 1)
        return losses + share * (ops.square(losses - ops.mean(losses)) if mixes else losses)

    model = _compiled(_regression(), dp.Objective(warmed_up))
    _check(model, _form(4), words="'warmed_up' mixes" if mixes else None)
    assert steps.numpy() == 0


def test_what_follows_the_count_of_the_optimizers_steps():
    model = _regression()

    def warmed_up(inputs, targets, outputs, intermediates):
        losses = _squares(targets, outputs)
        share = ops.minimum(1.0, ops.cast(model.optimizer.iterations, "float32") / 1000)
        return losses + share * ops.square(losses - ops.mean(losses))

    _check(_compiled(model, dp.Objective(warmed_up)), _form(4), words="'warmed_up' mixes")


class _Phases:
    """Mixes in its second phase."""

    __name__ = "phases"

    def __init__(self):
        self.second = False

    def __call__(self, inputs, targets, outputs, intermediates):
        losses = _squares(targets, outputs)
        return losses + ops.square(losses - ops.mean(losses)) if self.second else losses


class _PhasesOfALayer(layers.Layer):
    def __init__(self):
        super().__init__()
        self.state = {"second": False}

    def call(self, x):
        return _centred(x) if self.state["second"] else x


@pytest.mark.parametrize("what", ["objective", "layer"])
def test_code_of_others_is_checked_anew_when_it_is_compiled_again(what):
    phases, layer = _Phases(), _PhasesOfALayer()
    inputs = keras.Input((4,))
    hidden = layer(layers.Dense(3)(inputs)) if what == "layer" else layers.Dense(3)(inputs)
    model = dp.DPModel(inputs, layers.Dense(1)(hidden))
    loss = dp.Objective(phases) if what == "objective" else "mse"
    x, y = np.random.default_rng(0).normal(size=(40, 4)).astype("float32"), np.ones((40, 1))
    train = dp.data.poisson_batches((x, y), B, steps_per_epoch=1)
    _compiled(model, loss).fit(train, verbose=0)
    phases.second = layer.state["second"] = True
    with pytest.raises(ValueError, match="mixes"):
        _compiled(model, loss).fit(train, verbose=0)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("given", ["largest", "missing", "ordinary"])
def test_behind_what_kernels_differ_in_a_difference_tells_nothing(dtype, given):
    """Max pooling and activations of missing numbers: no layer mixes anything there."""
    number = {"largest": -np.finfo(dtype).max, "missing": np.nan, "ordinary": 1.0}[given]

    def made(after):
        before = np.full((len(after), 4), number, dtype)
        seen = [("before", before), ("dense", np.array(after, dtype))]
        return Pass(np.ones(len(after), dtype), seen, False)

    first, alone = made([[1.0], [2.0]]), made([[np.nan], [np.nan], [np.nan]])
    places = [(slice(0, 1), slice(place, place + 1)) for place in range(3)]
    if given == "ordinary":
        with pytest.raises(ValueError, match="'dense'"):
            independence._compare("The loss", first, alone, places, other_kernels=True)
    else:
        independence._compare("The loss", first, alone, places, other_kernels=True)
    with pytest.raises(ValueError, match="'dense'"):  # the same kernels have no excuse
        independence._compare("The loss", first, alone, places)


@pytest.mark.parametrize(
    ("before", "after", "mixes"),
    [(2e-3, 2e-3, False), (0.0, 2e-3, True), (2e-3, 6e-3, True), (1e-2, 1.5e-2, True)],
    ids=["handed on", "out of nothing", "more than is handed on", "more than rounding"],
)
def test_what_layers_hand_on_of_rounding_is_no_mixing(before, after, mixes):
    """A squashing layer behind numbers of 12, of which 1e-4 is rounding."""

    def made(rows, before, after):
        seen = [
            ("pooling", np.full((rows, 3), 12.0) + before),
            ("tanh", np.ones((rows, 3)) + after),
        ]
        return Pass(np.ones(rows), seen, False)

    first, alone = made(2, 0.0, 0.0), made(1, before, after)
    places = [(slice(0, 1), slice(0, 1))]
    if not mixes:
        independence._compare("The loss", first, alone, places, other_kernels=True)
        return
    with pytest.raises(ValueError, match="Layer 'tanh'"):
        independence._compare("The loss", first, alone, places, other_kernels=True)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_a_convolution_of_missing_numbers_is_taken(activation):
    layers = keras.layers
    inputs = keras.Input((12, 12, 2))
    hidden = layers.Conv2D(6, 3, strides=2, activation=activation)(inputs)
    model = dp.DPModel(inputs, layers.Dense(5)(layers.Flatten()(hidden)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=8), loss)
    model.sampling = dp.accounting.Sampling.poisson(100, 8)
    model.train_on_batch(np.zeros((8, 12, 12, 2), "float32"), np.zeros(8, "int32"))
    assert model.ledger.steps == 1


def test_a_small_network_with_average_and_max_pooling_is_taken():
    layers = keras.layers
    model = dp.make_private(
        keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                layers.AveragePooling2D(2),
                layers.Conv2D(8, 5, strides=2, padding="same", activation="tanh"),
                layers.Conv2D(16, 5, strides=2, padding="same", activation="tanh"),
                layers.MaxPool2D(2),
                layers.Flatten(),
                layers.Dense(32, activation="tanh"),
                layers.Dense(10),
            ]
        )
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0), loss)
    x, y = np.zeros((64, 28, 28, 1), "float32"), np.zeros(64, "int32")
    model.fit(dp.data.poisson_batches((x, y), 16), epochs=1, verbose=0)
    assert model.ledger.steps == 4


# A row that differs from all others as a whole, or whose label is not there.


def _by_extreme(extreme):
    """Pictures, over the brightest point of all, or above the darkest."""
    inputs = keras.Input((32, 32, 3), dtype="uint8")
    hidden = ops.cast(inputs, "float32")
    hidden = hidden / (ops.max(hidden) + 1) if extreme == "max" else hidden - ops.min(hidden)
    hidden = layers.Conv2D(2, 3, strides=4, activation="relu")(hidden)
    return dp.DPModel(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(hidden)))


@pytest.mark.parametrize("extreme", ["max", "min"])
def test_extremes_of_all_pictures_are_refused(extreme):
    _check(_compiled(_by_extreme(extreme)), _form(32, 32, 3, dtype="uint8"), words="mixes")


def test_pictures_over_their_own_extreme_train():
    inputs = keras.Input((32, 32, 3), dtype="uint8")
    hidden = ops.cast(inputs, "float32")
    hidden = hidden / (ops.max(hidden, axis=(1, 2, 3), keepdims=True) + 1)
    hidden = layers.GlobalAveragePooling2D()(layers.Conv2D(2, 3, strides=4)(hidden))
    model = _compiled(dp.DPModel(inputs, layers.Dense(1)(hidden)))
    _check(model, _form(32, 32, 3, dtype="uint8"))


def _decibels(bounded, axes):
    """A made-up spectrogram, which ends 30 dB below the loudest: of all, or of its row."""
    inputs = keras.Input((64,))
    power = ops.square(bounded(inputs))
    level = 10 * ops.log10(ops.maximum(power, 1e-10))
    level = ops.maximum(level, ops.max(level, axis=axes, keepdims=True) - 30)
    return _compiled(dp.DPModel(inputs, layers.Dense(1)(layers.Rescaling(1 / 40)(level))))


@pytest.mark.parametrize("bounded", [ops.tanh, lambda x: ops.clip(x, -1, 1)], ids=["tanh", "clip"])
def test_decibels_below_the_loudest_of_all_are_refused(bounded):
    _check(_decibels(bounded, None), _form(64), words="mixes")
    _check(_decibels(bounded, 1), _form(64))


def test_spectrograms_of_keras_are_refused_by_name():
    def model(**kwargs):
        inputs = keras.Input((512,))
        spectrogram = layers.MelSpectrogram(128, 64, num_mel_bins=8, name="mel", **kwargs)
        hidden = layers.Flatten()(spectrogram(inputs))
        return dp.DPModel(inputs, layers.Dense(1)(hidden))

    with pytest.raises(
        ValueError, match="MelSpectrogram layer 'mel' mixes.*each sound alone.*power_to_db=False"
    ):
        _compiled(model())
    _check(_compiled(model(power_to_db=False)), _form(512))


def _labelled(is_there, loss):
    """A loss of the rows that have a label, over their share: it mixes where one has none."""

    def over_share(y, y_pred):
        there = ops.cast(is_there(y), "float32")
        return loss(y, y_pred, there) * there[:, 0] / ops.mean(there)

    return over_share


def _crossentropy_of_labelled(y, y_pred, there):
    y = ops.cast(ops.cast(y, "float32") * there, "int32")[:, 0]
    return ops.sparse_categorical_crossentropy(ops.clip(y, 0, 2), y_pred, from_logits=True)


def _squares_of_labelled(y, y_pred, there):
    y = ops.where(ops.isnan(y), 0.0, y)
    return ops.mean(ops.square((y - y_pred) * there), axis=-1)


UNLABELLED = {
    "-1": ("int32", _labelled(lambda y: y >= 0, _crossentropy_of_labelled)),
    "255": ("uint8", _labelled(lambda y: y != 255, _crossentropy_of_labelled)),
    "the number of classes": ("int32", _labelled(lambda y: y != 3, _crossentropy_of_labelled)),
    "-999": ("float32", _labelled(lambda y: y > -900, _squares_of_labelled)),
    "nan": ("float32", _labelled(lambda y: ops.logical_not(ops.isnan(y)), _squares_of_labelled)),
    "hinge": ("int32", "hinge"),
    "squared hinge": ("int32", "squared_hinge"),
}


@pytest.mark.parametrize("case", UNLABELLED)
def test_losses_over_the_share_of_labelled_rows_are_refused(case):
    dtype, loss = UNLABELLED[case]
    inputs = keras.Input((2,))
    units = 1 if isinstance(loss, str) or dtype == "float32" else 3
    model = _compiled(dp.DPModel(inputs, layers.Dense(units)(inputs)), loss)
    _check(model, _form(2), _form(1, dtype=dtype), "The loss mixes")


@pytest.mark.parametrize("mark", [-1, 255, 3])
def test_rows_without_a_label_train(mark):
    inputs = keras.Input((2,))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=mark)
    model = _compiled(dp.DPModel(inputs, layers.Dense(3)(inputs)), loss)
    _check(model, _form(2), _form(dtype="int32"))


# Gradients, behind code of others in layers of Keras.


def _equalized(h):
    """The same values; gradients are divided by how large the features of the batch are."""
    s = 1 / ops.stop_gradient(ops.mean(ops.abs(h), axis=0, keepdims=True) + 1e-3)
    return h * s + ops.stop_gradient(h - h * s)


@pytest.mark.parametrize("where", ["operations", "activation", "inner model"])
def test_gradients_that_mix_under_equal_values_are_refused(where):
    inputs = keras.Input((8,))
    if where == "activation":
        hidden = layers.Dense(4, activation=_equalized)(inputs)
    else:
        hidden = _equalized(layers.Dense(4)(inputs))
    if where == "inner model":
        hidden = keras.Model(inputs, hidden)(outer := keras.Input((8,)))
        inputs = outer
    model = _compiled(dp.DPModel(inputs, layers.Dense(1)(layers.ReLU()(hidden))))
    _check(model, _form(8), words="in its gradient, mixes")


# Where rows begin and end; signs; ids of which not all go together.


class _Trimmed(layers.Layer):
    """Skips the steps in front, or behind, that are padding in all rows."""

    def __init__(self, in_front, **kwargs):
        super().__init__(**kwargs)
        self.in_front = in_front

    def call(self, x):
        is_none = x == ("" if x.dtype == tf.string else tf.zeros((), x.dtype))
        steps = tf.cast(tf.reduce_any(~is_none, -1) if x.shape.rank == 3 else ~is_none, tf.int32)
        if self.in_front:
            return x[:, tf.reduce_min(tf.argmax(steps, axis=1)) :]
        places = tf.range(1, tf.shape(x)[1] + 1)
        return x[:, : tf.maximum(tf.reduce_max(steps * places), 1)]


class _Sampled(layers.Layer):
    """Random in inference, too: copies of a row are not compared with it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x):
        return x + 0.1 * keras.random.normal(ops.shape(x), seed=self.seeds)


@pytest.mark.representatives(6)
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("in_front", [True, False])
@pytest.mark.parametrize("kind", ["float32", "int32", "string"])
@pytest.mark.parametrize("pool", [layers.GlobalAveragePooling1D, lambda: layers.GRU(8)])
def test_padding_that_is_trimmed_for_the_batch_is_refused(kind, in_front, sampled, pool):
    """One row moved the sum by 9 to 40 C, by where it begins or ends."""
    shape = (12, 4) if kind == "float32" else (12,)
    inputs = keras.Input(shape, dtype=kind)
    hidden = _Trimmed(in_front)(inputs)
    if kind == "float32":
        hidden = layers.Dense(8, activation="tanh")(hidden)
    else:
        ids = layers.StringLookup(vocabulary=WORDS)(hidden) if kind == "string" else hidden
        hidden = layers.Embedding(500, 8)(ids)
    hidden = pool()(hidden)
    hidden = _Sampled()(hidden) if sampled else hidden
    model = _compiled(dp.DPModel(inputs, layers.Dense(1)(hidden)))
    _check(model, _form(*shape, dtype=kind), words="mixes|length")


def _of_both_signs(x):
    return tf.where(tf.reduce_any(x < 0), (x + 1) / 2, x)


def _of_both_signs_in_a_branch(x):
    return tf.cond(tf.reduce_min(x) < 0, lambda: (x + 1) / 2, lambda: tf.identity(x))


@pytest.mark.parametrize("scaled", [_of_both_signs, _of_both_signs_in_a_branch])
def test_a_range_that_is_looked_for_in_the_batch_is_refused(scaled):
    """One picture with negative points moved the sum by 43 C."""
    inputs = keras.Input((8, 8, 3))
    hidden = layers.Lambda(scaled, output_shape=(8, 8, 3))(inputs)
    hidden = layers.Flatten()(layers.Conv2D(4, 3, activation="relu")(hidden))
    _check(_compiled(dp.DPModel(inputs, layers.Dense(1)(hidden))), _form(8, 8, 3), words="mixes")


def _since_the_first(t):
    return t - tf.reduce_min(t, 1, keepdims=True)


@pytest.mark.parametrize("mixes", [True, False])
def test_ids_that_do_not_all_go_together_still_differ(mixes):
    """Beside -1 the largest id fails: each row was all zeros, and whatever came behind passed."""
    inputs = keras.Input((8,), dtype="int32")
    hidden = layers.Lambda(_since_the_first, output_shape=(8,))(inputs)
    hidden = layers.GlobalAveragePooling1D()(layers.Embedding(100, 8)(hidden))
    if mixes:
        hidden = layers.Lambda(lambda t: t / tf.reduce_max(tf.abs(t)))(hidden)
    model = _compiled(dp.DPModel(inputs, layers.Dense(1)(hidden)))
    _check(model, _form(8, dtype="int32"), words="mixes" if mixes else None)
