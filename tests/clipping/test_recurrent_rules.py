"""The rules of recurrent layers against one-example-at-a-time gradients, over their options.

Keras's own model is the oracle: it multiplies in each step of its loop what the rules multiply
before theirs.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import assume
from hypothesis import strategies as st

from dp_keras_opt.clipping import Batch, Query, clipped_sums, explain, recurrent_rules
from dp_keras_opt.clipping.book_keeping import per_example_gradients
from dp_keras_opt.clipping.engines import engines_for
from dp_keras_opt.clipping.layer_rules import rule_for
from dp_keras_opt.clipping.self_check import checked_engines
from tests.clipping.test_layer_rules import (
    ROWS,
    agree,
    around,
    bounded_sum,
    check,
    drawn,
    headed,
    ids,
    mse,
    normal,
    parts,
    private,
    randomized,
)
from tests.helpers.per_example import one_at_a_time

layers = keras.layers
STEPS = 4
BOOLEANS = st.booleans()

KINDS = {
    "simple": layers.SimpleRNN,
    "lstm": layers.LSTM,
    "gru": layers.GRU,
    "gru, reset before": lambda *a, **k: layers.GRU(*a, reset_after=False, **k),
}
CELLS = {
    "simple": layers.SimpleRNNCell,
    "lstm": layers.LSTMCell,
    "gru": layers.GRUCell,
    "gru, reset before": lambda *a, **k: layers.GRUCell(*a, reset_after=False, **k),
}

#: Which of the steps of each of the rows are there.
MASKS = {
    "none": np.ones((ROWS, STEPS)),
    "right": [[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]],
    "left": [[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]],
    "within": [[1, 0, 1, 1], [0, 1, 0, 1], [1, 0, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]],
}


def recurrent_in(model):
    """The recurrent layers of a model, and whatever else owns weights."""
    found = [each for each in model._flatten_layers() if isinstance(each, layers.RNN)]
    cells = {id(part) for layer in found for part in parts(layer)}
    return [*found, *(part for part in parts(model) if id(part) not in cells)]


def check_recurrent(model, x, path="as chosen", **options):
    check(model, x, path, ruled=recurrent_in(model), **options)


def masked(mask, *shape):
    """Sequences whose missing steps are zeros, which `Masking` leaves out."""
    present = np.reshape(MASKS[mask], (ROWS, STEPS, *(1,) * len(shape)))
    return normal(STEPS, *shape) * present.astype("float32")


def with_mask(layer, x, mask):
    inputs = keras.Input(x.shape[1:])
    hidden = layers.Masking()(inputs) if mask != "none" else inputs
    return keras.Model(inputs, headed(layer(hidden)))


@pytest.mark.parametrize("kind", KINDS)
@drawn(
    10,
    mask=st.sampled_from(list(MASKS)),
    units=st.integers(1, 3),
    activation=st.sampled_from(["tanh", "relu", None]),
    use_bias=BOOLEANS,
    return_sequences=BOOLEANS,
    go_backwards=BOOLEANS,
    unroll=BOOLEANS,
)
def test_layers(path, kind, mask, units, **options):
    layer, x = KINDS[kind](units, **options), masked(mask, 2)
    check_recurrent(with_mask(layer, x, mask), x, path)


@drawn(
    8,
    kind=st.sampled_from(list(KINDS)),
    mask=st.sampled_from(list(MASKS)),
    zero_output_for_mask=BOOLEANS,
    return_sequences=BOOLEANS,
    go_backwards=BOOLEANS,
    unroll=BOOLEANS,
)
def test_cells_in_a_loop(path, kind, mask, **options):
    assume(not all(options[name] for name in ("unroll", "go_backwards", "zero_output_for_mask")))
    layer, x = layers.RNN(CELLS[kind](2), **options), masked(mask, 2)
    check_recurrent(with_mask(layer, x, mask), x, path)


@drawn(
    8,
    rank=st.integers(1, 3),
    channels=st.integers(1, 2),
    mask=st.sampled_from(list(MASKS)),
    size=st.integers(1, 3),
    strides=st.integers(1, 2),
    dilation_rate=st.integers(1, 2),
    padding=st.sampled_from(["valid", "same"]),
    use_bias=BOOLEANS,
    return_sequences=BOOLEANS,
    go_backwards=BOOLEANS,
)
def test_convolutions(path, rank, channels, mask, size, **options):
    lengths = ((6,), (5, 4), (3, 3, 2))[rank - 1]
    assume(options["strides"] == 1 or options["dilation_rate"] == 1)
    assume((size - 1) * options["dilation_rate"] < min(lengths))
    kind = (layers.ConvLSTM1D, layers.ConvLSTM2D, layers.ConvLSTM3D)[rank - 1]
    x = masked(mask, *lengths, channels)
    inputs = keras.Input(x.shape[1:])
    present = keras.ops.any(keras.ops.not_equal(inputs, 0), axis=list(range(2, rank + 3)))
    hidden = kind(2, size, **options)(inputs, mask=None if mask == "none" else present)
    check_recurrent(keras.Model(inputs, headed(hidden)), x, path)


def test_convolutions_with_channels_first():
    x = normal(3, 2, 6)
    layer = layers.ConvLSTM1D(2, 3, data_format="channels_first", return_sequences=True)
    try:
        layer(x)
    except Exception as error:  # not all of TensorFlow's kernels are there for the CPU
        pytest.skip(str(error)[:80])
    check_recurrent(around(layer, x), x)


@drawn(
    6,
    kind=st.sampled_from(list(KINDS)),
    merge_mode=st.sampled_from(["sum", "mul", "ave", "concat", None]),
    mask=st.sampled_from(list(MASKS)),
    return_sequences=BOOLEANS,
)
def test_both_directions(path, kind, merge_mode, mask, return_sequences):
    layer = KINDS[kind](2, return_sequences=return_sequences)
    both, x = layers.Bidirectional(layer, merge_mode=merge_mode), masked(mask, 2)
    inputs = keras.Input(x.shape[1:])
    hidden = both(layers.Masking()(inputs) if mask != "none" else inputs)
    hidden = layers.Concatenate()(hidden) if merge_mode is None else hidden
    check_recurrent(keras.Model(inputs, headed(hidden)), x, path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_that_begins_where_the_encoder_ends(kind):
    source, target = keras.Input((STEPS, 2)), keras.Input((None, 3))
    _, *states = KINDS[kind](2, return_state=True)(source)
    decoder = KINDS[kind](2, return_sequences=True, return_state=True)
    read, *ends = decoder(target, initial_state=states)
    hidden = layers.Concatenate()([layers.GlobalAveragePooling1D()(read), *ends])
    check_recurrent(keras.Model([source, target], headed(hidden)), [normal(STEPS, 2), normal(3, 3)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_used_twice(kind):
    layer = KINDS[kind](2, return_sequences=True)
    inputs = keras.Input((STEPS, 2))
    check_recurrent(keras.Model(inputs, headed(layer(layer(inputs)))), normal(STEPS, 2))


def test_words_with_a_mask():
    inputs = keras.Input((STEPS,), dtype="int32")
    hidden = layers.Embedding(5, 3, mask_zero=True)(inputs)
    hidden = layers.LSTM(2, return_sequences=True)(hidden)
    hidden = layers.Bidirectional(layers.GRU(2))(hidden)
    check_recurrent(keras.Model(inputs, headed(hidden)), ids(STEPS, below=5))


def test_sequences_of_integers():
    inputs = keras.Input((STEPS, 2), dtype="int32")
    check_recurrent(keras.Model(inputs, headed(layers.GRU(2)(inputs))), ids(STEPS, 2, below=3))


def test_sequences_of_any_length():
    inputs = keras.Input((None, 2))
    hidden = layers.GRU(2)(layers.LSTM(2, return_sequences=True)(inputs))
    check_recurrent(keras.Model(inputs, headed(hidden)), normal(STEPS, 2))


@pytest.mark.parametrize("frozen", ["kernel", "recurrent_kernel", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_variables(kind, frozen):
    layer = KINDS[kind](2)
    model = around(layer, normal(STEPS, 2))
    getattr(layer.cell, frozen).trainable = False
    check_recurrent(model, normal(STEPS, 2))


def test_a_frozen_layer_below_one_that_is_trained():
    below, above = layers.LSTM(2, return_sequences=True), layers.GRU(2)
    inputs = keras.Input((STEPS, 2))
    model = keras.Model(inputs, headed(above(below(inputs))))
    below.trainable = False
    check(model, normal(STEPS, 2), ruled=[above, model.get_layer("head")])


def test_constraints_and_regularizers():
    options = {"kernel_constraint": "max_norm", "recurrent_regularizer": "l2"}
    x = normal(STEPS, 2)
    check_recurrent(around(layers.LSTM(2, unit_forget_bias=False, **options), x), x)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("kind", [*KINDS, "convolution"])
def test_half_precision(kind, policy):
    if kind == "convolution":
        layer, x = layers.ConvLSTM1D(2, 2, dtype=policy), normal(STEPS, 4, 2)
    else:
        layer, x = KINDS[kind](2, dtype=policy), normal(STEPS, 2)
    check_recurrent(around(layer, x), x, rtol=0.1)


# Dropout: the masks are those that Keras draws for the batch.


def seeded(layer, number):
    for part in layer._flatten_layers():
        for generator in getattr(part, "_seed_generators", ()):
            generator.state.assign([number, 0])


@drawn(
    12,
    kind=st.sampled_from([*KINDS, "convolution", "both directions", "cell"]),
    dropout=st.sampled_from([0.0, 0.5]),
    recurrent_dropout=st.sampled_from([0.0, 0.5]),
    implementation=st.sampled_from([1, 2]),
    go_backwards=BOOLEANS,
)
def test_dropout(path, kind, implementation, go_backwards, **rates):
    assume(any(rates.values()))
    x = normal(STEPS, 3)
    if kind == "convolution":
        x, layer = normal(STEPS, 4, 2), layers.ConvLSTM1D(2, 2, **rates, go_backwards=go_backwards)
    elif kind == "both directions":
        layer = layers.Bidirectional(layers.LSTM(2, **rates))
    elif kind == "cell":
        layer = layers.RNN(layers.GRUCell(2, **rates), go_backwards=go_backwards)
    else:
        # Of the first implementation Keras's layers try to feed cuDNN with the masks of all gates.
        extra = {"implementation": implementation, "use_cudnn": False} if kind != "simple" else {}
        layer = KINDS[kind](2, **rates, **extra, go_backwards=go_backwards)
    base = randomized(around(layer, x))
    model, y = private(base), normal(2, seed=5)
    engines = engines_for(model)
    assert not engines.general
    seeded(base, 7)
    with tf.GradientTape(persistent=True) as tape:
        rows = tf.unstack(tf.reduce_mean(tf.square(y - base(x, training=True)), axis=1))
    seeded(base, 7)
    batch = Batch(tf.constant(x), tf.constant(y))
    losses, _, found = per_example_gradients(model, batch, model.per_example_losses, engines)
    np.testing.assert_allclose(losses, rows, rtol=1e-5)
    for number, row in enumerate(rows):
        expected = tape.gradient(row, [v.value for v in model.trainable_variables])
        agree([factor.materialize()[number] for factor in found], [np.array(g) for g in expected])
    checked = checked_engines(model, batch)
    assert [each.name for each in checked.general] == []


class Quiet(layers.Layer):
    """Another layer without its dropout."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, inputs):
        return self.layer(inputs, training=False)


@pytest.mark.parametrize("kind", KINDS)
def test_no_dropout_out_of_training(kind):
    layer, x = KINDS[kind](2, dropout=0.5, recurrent_dropout=0.5), normal(STEPS, 2)
    check_recurrent(around(Quiet(layer), x), x)


# Under XLA, and as a step.


@pytest.mark.parametrize("kind", [*KINDS, "convolution", "both directions"])
def test_compiled_by_xla(kind):
    x, y = masked("within", 2), normal(2, seed=5)
    if kind == "convolution":
        x, layer = normal(STEPS, 4, 4, 1), layers.ConvLSTM2D(2, 2, padding="same")
    elif kind == "both directions":
        layer = layers.Bidirectional(layers.GRU(2, return_sequences=True))
    else:
        layer = KINDS[kind](2, go_backwards=True)
    base = randomized(around(layer, x) if kind == "convolution" else with_mask(layer, x, "within"))
    model, engines = private(base), None
    gradients = one_at_a_time(base, mse, x, y)
    query, engines = Query(clip_norm=0.3), engines_for(model)
    assert not engines.general

    @tf.function(jit_compile=True, autograph=False)
    def sums(x, y):
        return clipped_sums(model, (x, y), (query,), engines).sums[0]

    agree(sums(tf.constant(x), tf.constant(y)), bounded_sum(gradients, query, model))


# What has no rule, and what loses it.


class Mine(layers.LSTM):
    pass


class MyCell(layers.LSTMCell):
    pass


def trained_activation():
    activation = layers.PReLU()
    activation.build((None, 2))
    return activation


WITHOUT = {
    "a subclass": lambda: Mine(2),
    "a cell of a subclass": lambda: layers.RNN(MyCell(2)),
    "an activation that trains": lambda: layers.LSTM(2, activation=trained_activation()),
    "a cell of another precision": lambda: layers.RNN(layers.LSTMCell(2, dtype="float64")),
    "masks that Keras does not turn round": lambda: layers.RNN(
        layers.LSTMCell(2), unroll=True, go_backwards=True, zero_output_for_mask=True
    ),
    "all dropped": lambda: layers.SimpleRNN(2, dropout=1.0),
}


@pytest.mark.parametrize("which", WITHOUT)
def test_without_a_rule(which):
    assert rule_for(WITHOUT[which]()) is None


@pytest.mark.parametrize("which", ["a subclass", "a cell of a subclass"])
def test_what_has_no_rule_is_run_one_example_at_a_time(which):
    layer, x = WITHOUT[which](), normal(STEPS, 2)
    model = around(layer, x)
    check(model, x, ruled=[model.get_layer("head")], general=[layer])


def test_a_layer_for_each_of_many_sequences():
    layer, x = layers.TimeDistributed(layers.GRU(2)), normal(2, STEPS, 2)
    model = around(layer, x)
    check(model, x, ruled=[layer.layer, model.get_layer("head")])


WRONG = {
    "the state after": lambda seen: [tf.roll(one, -1, axis=1) for one in seen],
    "too small": lambda seen: [0.9 * one for one in seen],
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_rule_is_found_by_the_check(fault, monkeypatch):
    right = recurrent_rules._gradient
    monkeypatch.setattr(
        recurrent_rules,
        "_gradient",
        lambda cell, seen, *others: right(cell, WRONG[fault](seen), *others),
    )
    layer = layers.LSTM(2, name="reader")
    base, x, y = around(layer, normal(STEPS, 2)), normal(STEPS, 2), normal(2, seed=5)
    model = private(base)
    engines = checked_engines(model, Batch(tf.constant(x), tf.constant(y)))
    assert engines.general == (layer,)
    ((demoted, reason),) = engines.demoted
    assert demoted is layer and "layer 'reader'" in reason


def test_each_is_shown_as_one_layer():
    both = layers.Bidirectional(layers.LSTM(2), name="both")
    shown = explain(around(both, normal(STEPS, 2)))
    weights = 4 * 2 * (2 + 2 + 1)
    assert [(each.layer, each.kind, each.weights, each.engine) for each in shown[:2]] == [
        (f"both/{layer.name}", "LSTM", weights, "rule")
        for layer in (both.forward_layer, both.backward_layer)
    ]
