"""Models as people build them: the engines serve them, exactly, and they train."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import dp_keras_opt as dp
from dp_keras_opt.clipping import Query, clipped_sums
from tests.helpers.per_example import assert_close, clip_and_sum, one_at_a_time

ROWS = 6
CLASSES = 5
FROM_LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _images(size):
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 255, (ROWS, size, size, 3)).astype("float32")
    return x, rng.integers(0, CLASSES, ROWS)


def _tokens(length, vocabulary):
    tokens = np.random.default_rng(0).integers(1, vocabulary, (ROWS, length + 1))
    return tokens[:, :-1].astype("int32"), tokens[:, 1:].astype("int32")


def mobilenet():
    """MobileNetV3 from keras.applications, its batch normalization replaced."""
    base = keras.applications.MobileNetV3Small(
        (32, 32, 3), weights=None, classes=CLASSES, dropout_rate=0.0, classifier_activation=None
    )
    return dp.clipping.fix(base), *_images(32), set()


def vision_transformer():
    """Patches by a convolution, learned positions in a layer of their own, two blocks."""
    inputs = keras.Input((16, 16, 3))
    hidden = layers.Conv2D(12, 4, strides=4)(layers.Rescaling(1 / 255)(inputs))
    hidden = Positions()(layers.Reshape((16, 12))(hidden))
    for _ in range(2):
        normed = layers.LayerNormalization()(hidden)
        hidden = hidden + layers.MultiHeadAttention(2, 6)(normed, normed)
        normed = layers.LayerNormalization()(hidden)
        hidden = hidden + layers.Dense(12)(layers.Dense(24, activation="gelu")(normed))
    hidden = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(hidden))
    outputs = layers.Dense(CLASSES)(hidden)
    return keras.Model(inputs, outputs), *_images(16), {"Positions"}


@keras.saving.register_keras_serializable(package="test")
class Positions(layers.Layer):
    """Adds a weight of its own to every example: a raw `add_weight`."""

    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], initializer="random_normal")

    def call(self, inputs):
        return inputs + self.table


def gpt():
    """A causal decoder whose output projection is its embedding."""
    tokens = keras.Input((8,), dtype="int32")
    table = layers.ReversibleEmbedding(11, 12)
    hidden = Positions()(table(tokens))
    for _ in range(2):
        normed = layers.RMSNormalization()(hidden)
        attention = layers.GroupQueryAttention(6, 2, 1)
        hidden = hidden + attention(normed, normed, use_causal_mask=True)
        normed = layers.RMSNormalization()(hidden)
        hidden = hidden + layers.Dense(12)(layers.Dense(24, activation="gelu")(normed))
    outputs = table(layers.LayerNormalization()(hidden), reverse=True)
    return keras.Model(tokens, outputs), *_tokens(8, 11), {"Positions"}


def masked_lstm():
    """Texts of different lengths, padded with 0, through an LSTM that stops at the padding."""
    tokens = keras.Input((7,), dtype="int32")
    hidden = layers.Embedding(11, 6, mask_zero=True)(tokens)
    hidden = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(hidden)
    outputs = layers.Dense(CLASSES)(layers.LSTM(5)(hidden))
    x, _ = _tokens(7, 11)
    for row, length in enumerate([7, 3, 5, 1, 7, 4]):
        x[row, length:] = 0
    return keras.Model(tokens, outputs), x, np.arange(ROWS) % CLASSES, set()


def two_towers():
    """A recommender: users and items meet in a dot product."""
    user, item = keras.Input((), dtype="int32", name="user"), keras.Input((3,), dtype="int32",
                                                                          name="item")  # fmt: skip

    def tower(hidden):
        return layers.UnitNormalization()(layers.Dense(4)(layers.Dense(8, "relu")(hidden)))

    items = layers.GlobalAveragePooling1D()(layers.Embedding(9, 6)(item))
    score = layers.Dot(-1)([tower(layers.Embedding(7, 6)(user)), tower(items)])
    rng = np.random.default_rng(0)
    x = {"user": rng.integers(0, 7, ROWS), "item": rng.integers(0, 9, (ROWS, 3))}
    y = rng.normal(size=(ROWS, 1)).astype("float32")
    return keras.Model({"user": user, "item": item}, score), x, y, set()


MODELS = [two_towers, vision_transformer, gpt, masked_lstm, mobilenet]


def _loss(y):
    return "mse" if y.dtype == np.float32 else FROM_LOGITS


def _compiled(base, y, batch_size, **options):
    model = dp.make_private(base)
    optimizer = dp.optimizers.DPAdam(clip_norm=1.0, noise_multiplier=1.0, batch_size=batch_size)
    model.compile(optimizer, _loss(y), **options)
    return model


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_clipped_sums_are_those_of_one_at_a_time_gradients(make):
    base, x, y, general = make()
    model = _compiled(base, y, ROWS)
    x, y = tf.nest.map_structure(lambda t: tf.constant(t[:3]), (x, y))
    plan = dp.clipping.checked_engines(model, dp.clipping.Batch(x, y))
    assert {type(layer).__name__ for layer in plan.general} == general
    losses = keras.losses.get(_loss(y.numpy()))
    gradients = one_at_a_time(base, lambda y, p: tf.reduce_mean(losses(y, p)), x, y)
    norms = [np.sqrt(sum((g**2).sum() for g in example)) for example in gradients]
    clip_norm = float(np.median(norms))
    rng = np.random.default_rng(1)
    scale = [rng.uniform(0.5, 2, v.shape).astype("float32") for v in model.trainable_variables]
    queries = (Query(clip_norm=clip_norm), Query(clip_norm=clip_norm, scale=scale))
    traced = tf.function(
        lambda x, y: clipped_sums(model, (x, y), queries, plan).sums, autograph=False
    )
    sums = traced(x, y)
    assert_close(sums[0], clip_and_sum(gradients, clip_norm), rtol=1e-3)
    assert_close(sums[1], clip_and_sum(gradients, clip_norm, scale), rtol=1e-3)


@pytest.mark.representatives(2)
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_they_train(make):
    base, x, y, general = make()
    model = _compiled(base, y, 3)
    before = [np.array(v) for v in model.trainable_variables]
    train = dp.data.poisson_batches((x, y), 3, steps_per_epoch=2)
    model.fit(train, verbose=0)
    assert all(np.isfinite(v).all() for v in model.get_weights())
    assert all(np.any(a != b) for a, b in zip(before, model.trainable_variables, strict=True))
    served = dp.clipping.explain(model)
    assert {s.kind for s in served if s.engine != "rule"} <= general
    assert sum(s.weights for s in served) == model.count_params()
    assert served[0].layer in str(served)


def test_lora_trains_nothing_but_its_own_weights():
    base, x, y, _ = vision_transformer()
    dense = next(layer for layer in base.layers if type(layer).__name__ == "Dense")
    attention = next(layer for layer in base.layers if "Attention" in type(layer).__name__)
    for layer in base.layers:
        layer.trainable = layer in (dense, attention)
    dense.enable_lora(2)
    for part in attention._flatten_layers(include_self=False):
        if hasattr(part, "enable_lora"):
            part.enable_lora(2)
    frozen = {v.path: np.array(v) for v in base.non_trainable_variables}
    model = _compiled(base, y, 3)
    model.fit(dp.data.poisson_batches((x, y), 3, steps_per_epoch=2), verbose=0)
    for variable in base.non_trainable_variables:
        if variable.path in frozen:
            np.testing.assert_array_equal(variable, frozen[variable.path])
    engines = {s.engine for s in dp.clipping.explain(model)}
    assert engines == {"rule", "frozen"}


def test_layers_may_be_frozen_between_two_fits():
    base, x, y, _ = two_towers()
    model = _compiled(base, y, 3)
    train = dp.data.poisson_batches((x, y), 3, steps_per_epoch=2)
    model.fit(train, verbose=0)
    layer = base.layers[2] if base.layers[2].trainable_variables else base.layers[3]
    layer.trainable = False
    optimizer = dp.optimizers.DPAdam(clip_norm=1.0, noise_multiplier=1.0, batch_size=3)
    model.compile(optimizer, "mse")
    held = [np.array(v) for v in layer.weights]
    model.fit(train, verbose=0)
    for before, after in zip(held, layer.weights, strict=True):
        np.testing.assert_array_equal(before, after)
    assert model.ledger.steps == 4
