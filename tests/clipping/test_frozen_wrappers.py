"""Weights that are trained inside of frozen layers, as KerasHub's `enable_lora` leaves them.

Keras asks each variable whether it trains, past the layers around it: so do the engines.
"""

import math
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.clipping import Batch, Query, checked_engines, clipped_sums, explain
from dp_keras_opt.clipping.graphs import functions
from tests.clipping.test_layer_rules import (
    bounded_sum,
    ids,
    mse,
    normal,
    private,
    queries_for,
    randomized,
)
from tests.helpers.per_example import assert_close, one_at_a_time

layers = keras.layers
WORDS, LENGTH, WIDTH = 23, 5, 12


class Block(layers.Layer):
    """Attention, and two dense layers, each in a layer of their own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = layers.LayerNormalization(name="norm")
        self.attention = layers.MultiHeadAttention(2, WIDTH // 2, name="attention")
        self.wide = layers.Dense(2 * WIDTH, activation="tanh", name="wide")
        self.narrow = layers.Dense(WIDTH, name="narrow")

    def build(self, shape):
        self.norm.build(shape)
        self.attention.build(shape, shape)
        self.wide.build(shape)
        self.narrow.build((*shape[:-1], 2 * WIDTH))

    def call(self, inputs):
        normed = self.norm(inputs)
        hidden = inputs + self.attention(normed, normed, use_causal_mask=True)
        return hidden + self.narrow(self.wide(hidden))


def backbone(number=2):
    inputs = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(WORDS, WIDTH, name="table")(inputs)
    for _ in range(number):
        hidden = Block()(hidden)
    return keras.Model(inputs, hidden, name="backbone")


def enable_lora(model, rank, names=("query", "value")):
    """As `keras_hub.models.Backbone.enable_lora` does it."""
    model.trainable = True
    parts = list(model._flatten_layers(include_self=False))
    for part in parts:
        part.trainable = False
    for part in parts:
        if part.name in names:
            part.trainable = True
            part.enable_lora(rank)


def language_model(mode=None, number=2):
    """A classifier on an adapted backbone, which is a model in the model."""
    base = backbone(number)
    if mode is not None:
        for part in base._flatten_layers(include_self=False):
            if isinstance(part, layers.Dense | layers.EinsumDense | layers.Embedding):
                part.quantize(mode)
    enable_lora(base, 2)
    inputs = keras.Input((LENGTH,), dtype="int32")
    pooled = layers.GlobalAveragePooling1D()(base(inputs))
    return keras.Model(inputs, layers.Dense(2, name="head")(pooled))


def vector_model():
    """A wrapper that is frozen but for a layer in it; in a Sequential that is frozen as well."""
    block = keras.Sequential([layers.Dense(6, activation="tanh"), layers.Dense(4, name="part")])
    inputs = keras.Input((5,))
    model = keras.Model(inputs, layers.Dense(2, name="head")(block(inputs)))
    block.trainable = False
    block.layers[1].trainable = True
    return model


@pytest.mark.parametrize("mode", [None, "int8", "int4"])
def test_every_query_is_answered_right(mode):
    base, x, y = randomized(language_model(mode)), ids(LENGTH, below=WORDS), normal(2, seed=5)
    assert len(base.trainable_variables) == 2 * 2 * 3 + 2  # A, B and bias; and the head's
    model = private(base)
    gradients = one_at_a_time(base, mse, x, y)
    queries = queries_for(model, gradients)
    batch = tf.constant(x), tf.constant(y)
    sums = clipped_sums(model, batch, queries).sums
    for query, total in zip(queries, sums, strict=True):
        # On one kind of processor the entries differ by 2e-4, through attention in float32.
        assert_close(total, bounded_sum(gradients, query, model), rtol=5e-4)
    assert {row.engine for row in explain(model)} == {"rule", "frozen"}


@pytest.mark.parametrize("mode", [None, "int8"])
def test_users_are_clipped_as_one(mode):
    base, x, y = randomized(language_model(mode)), ids(LENGTH, below=WORDS), normal(2, seed=5)
    x, y = np.repeat(x, 2, 0)[:6], np.concatenate([y, y])[:6]
    model = private(base)
    mask = tf.constant([[True, True], [True, False], [True, True]])
    users = [[0, 1], [2], [4, 5]]
    gradients = one_at_a_time(base, mse, x, y)
    means = [[sum(each) / len(rows) for each in zip(*(gradients[r] for r in rows), strict=True)]
             for rows in users]  # fmt: skip
    norms = [math.sqrt(sum((g**2).sum() for g in one)) for one in means]
    query = Query(clip_norm=float(np.median(norms)))
    batch = Batch(tf.constant(x), tf.constant(y), mask=mask)
    (total,) = clipped_sums(model, batch, (query,)).sums
    assert_close(total, bounded_sum(means, query, model))


def test_what_a_model_trains_is_what_is_clipped():
    """Also where models in between are frozen; nothing is updated that no group bounds."""
    model = vector_model()
    assert [v.path.split("/")[-2] for v in model.trainable_variables] == ["part"] * 2 + ["head"] * 2
    randomized(model)
    x, y = normal(5), normal(2, seed=5)
    gradients = one_at_a_time(model, mse, x, y)
    query = Query(clip_norm=0.3, style="per_layer")
    wrapped = private(model)
    (total,) = clipped_sums(wrapped, (tf.constant(x), tf.constant(y)), (query,)).sums
    assert_close(total, bounded_sum(gradients, query, wrapped))
    assert all(np.any(part) for part in total)


def test_each_adapted_layer_is_a_group_of_its_own():
    model = private(language_model())
    found = [owned for owned, _ in dp.clipping.clip_groups(model, Query(style="per_layer"))]
    assert [len(indices) for indices in found].count(3) == 4 and len(found) == 5
    assert sorted(i for indices in found for i in indices) == list(range(14))


@pytest.mark.filterwarnings("error:The per-layer engines")
@pytest.mark.parametrize("mode", [None, "int8"])
def test_the_check_leaves_the_rules_as_they_are(mode):
    model = private(language_model(mode))
    batch = Batch(tf.constant(ids(LENGTH, below=WORDS)), tf.constant(normal(2)))
    engines = checked_engines(model, batch)
    assert not engines.general and len(engines.ruled) == 5


def computed(graph):
    """The tensors that the outputs of a graph, and of the branches in it, are computed from."""
    found, waiting = {}, [tensor.op for tensor in graph.outputs]
    while waiting:
        operation = waiting.pop()
        if operation.name in found:
            continue
        found[operation.name] = operation
        waiting += [tensor.op for tensor in operation.inputs]
        for name in functions(operation):
            inner = getattr(graph._get_function(name), "graph", None)
            yield from computed(inner) if inner is not None else ()
    for operation in found.values():
        yield from operation.outputs


@pytest.mark.parametrize("mode", [None, "int8", "int4"])
@pytest.mark.parametrize(
    "query", [Query(), Query(norm="l1"), Query(style="per_layer", square=True)], ids=str
)
def test_nothing_of_an_example_has_the_size_of_a_frozen_weight(query, mode):
    model, rows = private(language_model(mode, number=1)), 7
    least = WIDTH * WIDTH  # of the kernels in the attention
    assert least > LENGTH * 2 * WIDTH  # activations of the widest layer, which a forward pass has
    batch = (tf.zeros((rows, LENGTH), tf.int32), tf.zeros((rows, 2)))
    traced = tf.function(lambda x, y: clipped_sums(model, (x, y), (query,)).sums)
    graph = traced.get_concrete_function(*batch).graph
    sizes = [tensor.shape.num_elements() or 0 for tensor in computed(graph) if tensor.shape.rank]
    assert max(sizes) < rows * least
    assert len(sizes) > 100


class OwnScale(keras.Model):
    """A model that owns a weight, beside the layers in it."""

    def __init__(self):
        super().__init__(name="scaled")
        self.dense = layers.Dense(2)
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, inputs):
        return self.scale * self.dense(inputs)


class Twice(layers.Layer):
    """Uses a table of its own layer past that layer, so that its rule misses one use."""

    def __init__(self):
        super().__init__(name="twice")
        self.dense = layers.Dense(4, name="blamed")

    def call(self, inputs):
        return keras.ops.matmul(self.dense(inputs), self.dense.kernel)


def outermost():
    class Past(keras.Model):
        """Uses the kernel of a layer in it, past that layer."""

        def __init__(self):
            super().__init__(name="past")
            self.dense = layers.Dense(4, name="blamed")

        def call(self, inputs):
            return keras.ops.matmul(self.dense(inputs), self.dense.kernel)[:, :2]

    return Past()


@pytest.mark.parametrize(
    "make, words",
    [(OwnScale, "'scaled/scale'.*'scaled' owns them itself"), (outermost, "layer 'blamed'")],
)
def test_a_model_that_runs_as_a_whole_says_so_once(make, words):
    base, x, y = make(), normal(4), normal(2)
    base(x)
    model = private(base)
    model.sampling = dp.accounting.Sampling.poisson(100, 4)
    with pytest.warns(UserWarning, match=f"{words}.*whole model.*a copy of .* weights") as caught:
        model.train_on_batch(x, y)
    assert {row.engine for row in explain(model)} == {"whole model, one example at a time"}
    assert "a copy for each example" in str(explain(model))
    assert sum("whole model" in str(each.message) for each in caught) == 1


def test_a_layer_that_runs_alone_does_not_warn():
    inputs = keras.Input((4,))
    model = private(keras.Model(inputs, layers.Dense(2)(Twice()(inputs))))
    batch = Batch(tf.constant(normal(4)), tf.constant(normal(2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engines = checked_engines(model, batch)
    assert [layer.name for layer in engines.general] == ["twice"]
    ((_, reason),) = [(u, r) for u, r in engines.demoted if u.name == "twice"]
    assert "sum of the gradients" in reason
    served = {row.layer: row for row in explain(model)}
    assert served["head" if "head" in served else list(served)[-1]].engine == "rule"
