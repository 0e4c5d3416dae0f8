"""Heads of many words: the shape of GPT-2 small, divided by 8."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dp_keras_opt.clipping import Batch, Query, checked_engines, clipped_sums
from tests.clipping.test_frozen_wrappers import computed
from tests.clipping.test_layer_rules import private
from tests.helpers.per_example import assert_close, clip_and_sum, one_at_a_time

layers = keras.layers
WORDS, LENGTH, WIDTH, HEADS, BLOCKS, ROWS = 6282, 16, 96, 12, 2, 4


def language_model(is_tied):
    inputs = keras.Input((LENGTH,), dtype="int32")
    if is_tied and not hasattr(layers, "ReversibleEmbedding"):
        pytest.skip("of later versions of Keras")
    table = (layers.ReversibleEmbedding if is_tied else layers.Embedding)(WORDS, WIDTH)
    hidden = table(inputs) + layers.Embedding(LENGTH, WIDTH)(keras.ops.arange(LENGTH))
    for _ in range(BLOCKS):
        normed = layers.LayerNormalization()(hidden)
        attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
        hidden = hidden + attention(normed, normed, use_causal_mask=True)
        normed = layers.LayerNormalization()(hidden)
        wide = layers.Dense(4 * WIDTH, activation="gelu")(normed)
        hidden = hidden + layers.Dense(WIDTH)(wide)
    hidden = layers.LayerNormalization()(hidden)
    return keras.Model(
        inputs, table(hidden, reverse=True) if is_tied else layers.Dense(WORDS)(hidden)
    )


def loss(y, y_pred):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, tf.cast(y_pred, tf.float32))
    return tf.reduce_mean(losses)


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "dense"])
def test_nothing_has_the_size_of_the_head_for_each_example(is_tied):
    model = private(
        language_model(is_tied), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, WORDS, (2, ROWS, LENGTH)).astype("int32")
    engines = checked_engines(model, Batch(tf.constant(x), tf.constant(y)))
    assert not engines.general
    query = Query(clip_norm=0.01)

    def sums(x, y):
        return clipped_sums(model, (x, y), (query,), engines).sums[0]

    traced = tf.function(sums).get_concrete_function(tf.constant(x), tf.constant(y))
    sizes = [t.shape.num_elements() or 0 for t in computed(traced.graph) if t.shape.rank]
    assert max(sizes) == max(ROWS * LENGTH, WIDTH) * WORDS  # of the outputs, or of the weights
    gradients = one_at_a_time(model, loss, x, y)
    assert_close(traced(tf.constant(x), tf.constant(y)), clip_and_sum(gradients, 0.01), rtol=1e-3)
