"""User-level privacy: all rows of a user are clipped as one, whatever they hold.

The oracle takes one user at a time: `tf.GradientTape` of the mean loss of that user's own rows,
then clipping in float64. Rows of padding hold NaN in these tests, so that none may count.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.clipping import Batch, Query, clipped_sums
from dp_keras_opt.clipping.book_keeping import Plan, plan
from tests.conftest import assert_close, clip_and_sum

layers = keras.layers


# Models, each with a function of a generator and a number that draws so many inputs.


def dense():
    inputs = keras.Input((6,))
    hidden = layers.Dense(7, activation="tanh")(inputs)
    return keras.Model(inputs, layers.Dense(2)(hidden)), lambda rng, n: rng.normal(size=(n, 6))


def wide_dense_on_sequence():  # the norm is that of a Gram matrix
    inputs = keras.Input((2, 40))
    hidden = layers.Dense(40, activation="tanh", use_bias=False)(inputs)
    outputs = layers.Dense(2)(layers.Flatten()(hidden))
    return keras.Model(inputs, outputs), lambda rng, n: rng.normal(size=(n, 2, 40))


def attention():
    inputs = keras.Input((3, 4))
    attended = layers.MultiHeadAttention(2, 3)(inputs, inputs)
    hidden = layers.Flatten()(layers.LayerNormalization()(attended))
    return keras.Model(inputs, layers.Dense(2)(hidden)), lambda rng, n: rng.normal(size=(n, 3, 4))


class Tied(layers.Layer):
    """An embedding whose table is also the output projection."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = layers.ReversibleEmbedding(5, 3)

    def call(self, ids):
        return self.table(keras.ops.mean(self.table(ids), axis=1), reverse=True)


def tied_embedding():
    ids = keras.Input((3,), dtype="int32")
    outputs = layers.Dense(2)(Tied()(ids))
    return keras.Model(ids, outputs), lambda rng, n: rng.integers(0, 5, (n, 3)).astype("int32")


def embedding():
    ids = keras.Input((), dtype="int32")
    outputs = layers.Dense(2)(layers.Embedding(4, 3)(ids))
    return keras.Model(ids, outputs), lambda rng, n: rng.integers(0, 4, n).astype("int32")


def convolution():
    inputs = keras.Input((5, 4, 2))
    hidden = layers.Conv2D(4, 2, groups=2, activation="tanh")(inputs)
    outputs = layers.Dense(2)(layers.Flatten()(hidden))
    return keras.Model(inputs, outputs), lambda rng, n: rng.normal(size=(n, 5, 4, 2))


def lstm():
    inputs = keras.Input((3, 2))
    return (
        keras.Model(inputs, layers.Dense(2)(layers.LSTM(4)(inputs))),
        lambda rng, n: rng.normal(size=(n, 3, 2)),
    )


MODELS = [
    dense, wide_dense_on_sequence, attention, embedding, convolution, lstm,
    *([tied_embedding] if hasattr(layers, "ReversibleEmbedding") else []),
]  # fmt: skip


def compiled(base, **kwargs):
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=4)
    model = dp.make_private(base)
    model.compile(optimizer=optimizer, loss="mse", **kwargs)
    return model


def people(draw_x, counts, weighted=False, seed=0):
    """For each user a tuple (x, y, weight) of so many rows; the gradients of users are alike."""
    rng, users = np.random.default_rng(seed), []
    for count in counts:
        x, y = draw_x(rng, count), rng.normal(size=2) + rng.normal(size=(count, 2)) / 3
        x = x.astype("float32") if x.dtype.kind == "f" else x
        weight = rng.uniform(0.2, 2, count) if weighted else np.ones(count)
        users.append((x, y.astype("float32"), weight.astype("float32")))
    return users


def blocks(users, size, empty=()):
    """The `Batch` of these users, K = `size`; padding is NaN, the `empty` users are all padding."""

    def block(part):
        parts = [user[part] for user in users]
        filler = np.nan if parts[0].dtype.kind == "f" else 0
        full = np.full((len(users), size, *parts[0].shape[1:]), filler, parts[0].dtype)
        for rows, own in zip(full, parts, strict=True):
            rows[: len(own)] = own
        return tf.constant(full.reshape(-1, *full.shape[2:]))

    mask = np.arange(size) < np.array([[len(user[1])] for user in users])
    mask[list(empty)] = False
    return Batch(block(0), block(1), block(2), tf.constant(mask))


def one_user_at_a_time(model, users):
    """float64 gradients of each user's mean weighted loss, None for nobody's."""
    gradients = []
    for x, y, weight in users:
        with tf.GradientTape() as tape:
            errors = tf.square(y - model(tf.constant(x), training=True))
            loss = tf.reduce_mean(tf.reduce_mean(errors, axis=1) * weight)
        found = tape.gradient(loss, [v.value for v in model.trainable_variables])
        gradients.append([np.array(tf.convert_to_tensor(g), np.float64) for g in found])
    return gradients


def whole(gradients):
    return [np.sqrt(sum((g**2).sum() for g in user)) for user in gradients]


# Gradients, norms and sums.


@pytest.mark.parametrize("whole_model", [False, True], ids=["per layer", "whole model"])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_clipped_sum_is_that_of_one_user_at_a_time(make, whole_model):
    base, draw_x = make()
    model, users = compiled(base), people(draw_x, (3, 1, 4, 2), weighted=True)
    gradients = one_user_at_a_time(base, users)
    median = float(np.median(whole(gradients)))  # binds for half of the users
    rng = np.random.default_rng(3)
    scale = [rng.uniform(0.2, 2.0, v.shape).astype("float32") for v in model.trainable_variables]
    scaled = [tf.constant(s) for s in scale]
    queries = (
        Query(clip_norm=np.inf),
        Query(clip_norm=median),
        Query(clip_norm=median, normalize=True),
        Query(clip_norm=median, scale=scaled),
        Query(clip_norm=median, scale=scaled, square=True),
    )
    engines = Plan((), (model,)) if whole_model else plan(model)
    result = clipped_sums(model, blocks(users, 4), queries, engines)
    assert_close(result.sums[0], clip_and_sum(gradients, np.inf))
    assert_close(result.sums[1], clip_and_sum(gradients, median))
    assert_close(result.sums[2], clip_and_sum(gradients, median, normalize=True))
    assert_close(result.sums[3], clip_and_sum(gradients, median, scale=scale))
    assert_close(result.sums[4], clip_and_sum(gradients, median, scale=scale, square=True))
    assert int(result.non_finite) == 0
