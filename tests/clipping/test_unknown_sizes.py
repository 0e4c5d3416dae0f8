"""Batches, and parts of models, whose number of rows is not known when a step is traced."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import dp_keras_opt as dp
from dp_keras_opt.clipping import Batch, Query, clipped_sums
from dp_keras_opt.clipping.self_check import checked_engines
from dp_keras_opt.training import step
from tests.helpers.per_example import assert_close, clip_and_sum, one_at_a_time

B = 8


def compiled(model, loss="mse", **kwargs):
    private = dp.make_private(model)
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=B)
    private.compile(optimizer, loss, **kwargs)
    return private


@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    ("physical_batch_size", "jit_compile"), [(None, False), (None, True), (3, False), (100, False)]
)
def test_a_batch_is_never_padded_beyond_itself(physical_batch_size, jit_compile):
    """A cell of 4 units padded 8 rows to 524,288, as many as its memory would hold."""
    inputs = keras.Input((5, 2))
    model = keras.Model(inputs, layers.Dense(1)(layers.RNN([layers.LSTMCell(4)])(inputs)))
    traced = []

    def loss(y, y_pred):
        traced.append(y_pred.shape[0])
        return tf.reduce_mean(tf.square(y - y_pred), axis=-1)

    private = compiled(
        model, loss, physical_batch_size=physical_batch_size, jit_compile=jit_compile
    )
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(B, 5, 2)).astype("float32"), np.ones((B, 1), "float32")
    spec = tf.TensorSpec([None, 5, 2]), tf.TensorSpec([None, 1])
    data = tf.data.Dataset.from_generator(lambda: iter([(x, y)]), output_signature=spec)
    private.fit(dp.data.assume_sampling(data, dp.accounting.Sampling.full(B)), verbose=0)
    assert all(rows is None or rows <= B for rows in traced[-3:])
    # And what is summed is the same, whatever the chunks.
    gradients = one_at_a_time(model, lambda t, p: tf.reduce_mean(tf.square(t - p)), x, y)
    query = Query(clip_norm=0.05)
    plan = checked_engines(private, Batch(tf.constant(x), tf.constant(y)))

    state = step.StepState(physical_batch_size, non_finite=tf.Variable(0, dtype=tf.int64))

    @tf.function(input_signature=spec, autograph=False)
    def sums(x, y):
        return step.sums_in_chunks(private, state, [Batch(x, y)], (query,), plan)[0]

    assert_close(sums(x, y), clip_and_sum(gradients, 0.05))


class Block(layers.Layer):
    """Layers of one name and one path, as in many a subclassed model."""

    def __init__(self):
        super().__init__(name="block")
        self.dense = layers.Dense(3, name="dense")

    def call(self, inputs):
        return self.dense(inputs)


class Tower(keras.Model):
    def __init__(self):
        super().__init__(name="tower")
        self.blocks = [Block() for _ in range(4)]

    def call(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def test_per_layer_clipping_of_layers_with_equal_names():
    model = Tower()
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(B, 3)).astype("float32") for _ in range(2))
    model(x)
    private = compiled(model)
    query = Query(clip_norm=0.05, style="per_layer")
    sums = clipped_sums(private, (x, y), (query,)).sums[0]
    gradients = one_at_a_time(model, lambda t, p: tf.reduce_mean(tf.square(t - p)), x, y)
    expected = []
    for place in range(0, 8, 2):  # kernel and bias of each of four layers
        part = [example[place : place + 2] for example in gradients]
        expected += clip_and_sum(part, 0.05 / 2)
    assert_close(sums, expected)


@pytest.mark.parametrize("mask", [False, True])
def test_text_vectorization_in_a_model(mask):
    """It loses the number of rows on the way."""
    words = layers.TextVectorization(output_sequence_length=6)
    words.adapt(["a b c d e f g"])
    inputs = keras.Input((), dtype="string")
    hidden = layers.Embedding(12, 4, mask_zero=mask)(words(inputs))
    model = keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(hidden)))
    x = tf.constant(["a b", "c d e", "what", "f"] * 2)
    y = np.ones((B, 1), "float32")
    private = compiled(model)
    batch = Batch(x, tf.constant(y))
    sums = clipped_sums(private, batch, (Query(clip_norm=0.05),), checked_engines(private, batch))
    gradients = one_at_a_time(model, lambda t, p: tf.reduce_mean(tf.square(t - p)), x, y)
    assert_close(sums.sums[0], clip_and_sum(gradients, 0.05))
    train = dp.data.poisson_batches((x.numpy(), y), B, steps_per_epoch=2)
    private.fit(train, verbose=0)
    assert private.ledger.steps == 2
