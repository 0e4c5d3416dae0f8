"""What mixes the rows of a batch for particular values alone; and conditions that mix none."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp

layers, ops = keras.layers, keras.ops
PRIVATE = {"clip_norm": 1.0, "noise_multiplier": 1.0}


def _fit(inputs, outputs, x, y, loss="mse"):
    model = dp.DPModel(inputs, outputs)
    model.compile(dp.optimizers.DPSGD(0.1, **PRIVATE), loss)
    return model.fit(dp.data.poisson_batches((x, y), batch_size=8), verbose=0)


# Words between separators of one's own, padded to the longest of the batch.


def _genres(split, masked=False, length=None):
    words = layers.TextVectorization(
        vocabulary=["drama", "comedy", "war"], split=split, standardize=None,
        output_sequence_length=length,
    )  # fmt: skip
    inputs = keras.Input((), dtype="string")
    embedded = layers.Embedding(5, 2, mask_zero=masked)(words(inputs))
    return inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(embedded))


FILMS = {
    "|": ["drama|war", "comedy", "comedy|war|drama", "war"] * 6,
    ", ": ["drama, war", "comedy", "comedy, war, drama", "war"] * 6,
    "§": ["drama§war", "comedy", "comedy§war§drama", "war"] * 6,
}
YEARS = np.float32([[1], [2], [3], [4]] * 6)


@pytest.mark.parametrize("separator", FILMS)
def test_genres_padded_to_the_most_of_a_film_are_refused(separator):
    """One film of 200 genres moved the sum by 146 clip norms."""

    def split(texts):
        return tf.strings.split(texts, separator)

    given = np.array(FILMS[separator], object), YEARS
    with pytest.raises(ValueError, match="mixes the examples of a batch"):
        _fit(*_genres(split), *given)
    _fit(*_genres(split, masked=True), *given)
    _fit(*_genres(split, length=3), *given)


class _Numbers(layers.Layer):
    def call(self, texts):
        return tf.strings.to_number(tf.strings.split(texts, ",")).to_tensor()

    def compute_output_shape(self, shape):
        return (*shape, None)


class _Mean(layers.Layer):
    def call(self, numbers):
        return ops.mean(numbers, axis=1, keepdims=True)

    def compute_output_shape(self, shape):
        return (shape[0], 1)


def test_numbers_in_texts_are_read_and_refused_for_their_padding():
    inputs = keras.Input((), dtype="string")
    outputs = layers.Dense(1)(_Mean()(_Numbers()(inputs)))
    with pytest.raises(ValueError, match="mixes the examples of a batch"):
        _fit(inputs, outputs, np.array(["1,2,3", "4", "5,6", "7"] * 6, object), YEARS)


# A word that the objective asks for, seldom among 30,000.

MASK, WORDS, LENGTH = 103, 30_522, 6
TOKENS = np.random.default_rng(0).integers(0, WORDS, (24, LENGTH)).astype("int32")
ANSWERS = np.random.default_rng(1).integers(0, 20, (24, LENGTH)).astype("int32")


def _of_masked(inputs, targets, outputs, count):
    """Losses at masked places, over what `count` says of where they are."""
    masked = tf.cast(inputs == MASK, tf.float32)
    losses = keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)
    return tf.reduce_sum(losses * masked, -1) / tf.maximum(count(masked), 1.0)


@pytest.mark.parametrize(
    ("count", "mixes"),
    [(tf.reduce_sum, True), (lambda masked: tf.reduce_sum(masked, -1), False)],
    ids=["of the batch", "of the row"],
)
@pytest.mark.parametrize("eager", [False, True])
def test_losses_over_the_masked_words_of_a_batch_are_refused(count, mixes, eager):
    """One row of masks moved the sum by 48 clip norms."""

    def objective(inputs, targets, outputs, intermediates):
        return _of_masked(inputs, targets, outputs, count)

    inputs = keras.Input((LENGTH,), dtype="int32")
    model = dp.DPModel(inputs, layers.Dense(20)(layers.Embedding(WORDS, 4)(inputs)))
    loss = dp.Objective(objective)
    model.compile(dp.optimizers.DPSGD(0.1, **PRIVATE), loss, run_eagerly=eager)
    batches = dp.data.poisson_batches((TOKENS, ANSWERS), batch_size=8)
    if not mixes:
        model.fit(batches, verbose=0)
        return
    with pytest.raises(ValueError, match="mixes the examples of a batch"):
        model.fit(batches, verbose=0)


class _WithoutReading(layers.Layer):
    """Replaces what was not measured, -77 by convention, by the mean of the batch."""

    def call(self, inputs):
        missing = inputs == -77.0
        return ops.where(missing, ops.mean(ops.where(missing, 0.0, inputs), axis=0), inputs)


def test_numbers_that_stand_for_none_filled_from_the_batch_are_refused():
    with pytest.raises(ValueError, match="mixes the examples of a batch"):
        _fit(*_classifier(_WithoutReading()), X, LABELS, _crossentropy)


# A batch that is left out where a number in it is missing: one example decides for all.

X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
LABELS = (X.sum(axis=1) > 0).astype("int32")


def _crossentropy(labels, logits):
    return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)


def _without_missing(labels, logits):
    losses = _crossentropy(labels, logits)
    return tf.where(tf.reduce_any(tf.math.is_nan(losses)), tf.zeros_like(losses), losses)


def _if_finite(labels, logits):
    losses = _crossentropy(labels, logits)
    return tf.where(tf.reduce_all(tf.math.is_finite(losses)), losses, tf.zeros_like(losses))


def _row_by_row(labels, logits):
    losses = _crossentropy(labels, logits)
    return tf.where(tf.math.is_nan(losses), tf.zeros_like(losses), losses)


class _Guard(layers.Layer):
    """Gives nothing of a batch in which a row is bad."""

    def __init__(self, is_bad):
        super().__init__()
        self.is_bad = is_bad

    def call(self, inputs):
        bad = tf.reduce_any(self.is_bad(inputs))
        return tf.cond(bad, lambda: tf.zeros_like(inputs), lambda: inputs)


BAD = {
    "missing": tf.math.is_nan,
    "infinite": tf.math.is_inf,
    "huge": lambda t: tf.abs(t) > 1e9,
    "blank": lambda t: tf.reduce_all(t == 0, axis=-1),
}


def _classifier(*stack):
    tensor = inputs = keras.Input((4,))
    for layer in stack:
        tensor = layer(tensor)
    return inputs, layers.Dense(2)(tensor)


@pytest.mark.parametrize("loss", [_without_missing, _if_finite])
def test_a_batch_left_out_for_one_missing_loss_is_refused(loss):
    """One row of NaN took all of a hundred others out of the sum."""
    with pytest.raises(ValueError, match="mixes the examples of a batch"):
        _fit(*_classifier(), X, LABELS, loss)


@pytest.mark.parametrize("is_bad", BAD.values(), ids=BAD)
def test_a_batch_left_out_for_one_bad_row_is_refused(is_bad):
    with pytest.raises(ValueError, match="mixes the examples of a batch"):
        _fit(*_classifier(_Guard(is_bad)), X, LABELS, _crossentropy)


def test_pictures_left_out_for_a_blank_one_are_refused():
    inputs = keras.Input((4, 4, 1))
    guarded = _Guard(lambda t: tf.reduce_max(t, axis=(1, 2, 3)) == 0)(inputs)
    pictures = np.random.default_rng(0).integers(1, 255, (24, 4, 4, 1)).astype("uint8")
    with pytest.raises(ValueError, match="mixes the examples of a batch"):
        _fit(inputs, layers.Dense(2)(layers.Flatten()(guarded)), pictures, LABELS, _crossentropy)


def test_rows_left_out_for_their_own_missing_numbers_train():
    _fit(*_classifier(), X, LABELS, _row_by_row)


# What begins with more rows than a small batch has.


def _hardest(labels, logits):
    losses = _crossentropy(labels, logits)
    threshold = tf.math.top_k(losses, tf.minimum(32, tf.shape(losses)[0])).values[-1]
    return tf.where(losses >= threshold, losses, 0.0)


class _InGroups(layers.Layer):
    """Centred in groups of 32; the rest as it is."""

    def call(self, inputs):
        in_groups = tf.shape(inputs)[0] // 32 * 32
        groups = tf.reshape(inputs[:in_groups], [-1, 32, inputs.shape[-1]])
        centred = groups - tf.reduce_mean(groups, axis=1, keepdims=True)
        return tf.concat([tf.reshape(centred, [-1, inputs.shape[-1]]), inputs[in_groups:]], 0)


@pytest.mark.parametrize(
    ("stack", "loss"), [((), _hardest), ((_InGroups(),), _crossentropy)], ids=["loss", "layer"]
)
@pytest.mark.parametrize("known", [False, True])
def test_what_mixes_large_batches_alone_is_refused(stack, loss, known):
    """One more hard example took 200 others out of the sum."""
    x = np.random.default_rng(0).normal(size=(200, 4)).astype("float32")
    model = dp.DPModel(*_classifier(*stack))
    size = {"physical_batch_size": 64} if known else {}
    model.compile(dp.optimizers.DPSGD(0.1, **PRIVATE), loss, **size)
    with pytest.raises(ValueError, match="mixes the examples of a batch"):
        labels = (x.sum(axis=1) > 0).astype("int32")
        model.fit(dp.data.poisson_batches((x, labels), batch_size=100), verbose=0)


# Conditions of TensorFlow that mix nothing: what their branches hand on are no variables.


class _OfWidth(layers.Layer):
    def call(self, inputs):
        wide = tf.shape(inputs)[1] > 2
        return tf.cond(wide, lambda: tf.tanh(inputs) * inputs, lambda: inputs)


class _OfRow(layers.Layer):
    def call(self, inputs):
        def one(row):
            return tf.cond(row[0] > 0, lambda: tf.tanh(row) * row, lambda: row)

        return tf.map_fn(one, inputs)


def _squared_in_large_batches(labels, logits):
    losses = _crossentropy(labels, logits)
    large = tf.shape(logits)[0] > 4
    return tf.cond(large, lambda: tf.square(losses), lambda: tf.square(losses))


@pytest.mark.parametrize(
    ("stack", "loss"),
    [
        ((_OfWidth(),), _crossentropy),
        ((_OfRow(),), _crossentropy),
        ((), _squared_in_large_batches),
    ],
    ids=["of the width", "of each row", "of the number of rows"],
)
def test_conditions_that_mix_nothing_train(stack, loss):
    _fit(*_classifier(*stack), X, LABELS, loss)
