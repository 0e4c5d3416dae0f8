"""Rules of packages that are never imported: by name, for exactly that class, and held to account.

The classes here bear the names of keras_hub's; `tests/hub` has the real ones.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from keras.src.applications.convnext import LayerScale

import dp_keras_opt as dp
from dp_keras_opt.clipping import Batch, Query, clipped_sums
from dp_keras_opt.clipping.engines import engines_for
from dp_keras_opt.clipping.factors import Lookup
from dp_keras_opt.clipping.layer_rules import rule_for
from dp_keras_opt.clipping.self_check import checked_engines
from tests.clipping.test_layer_rules import around, check, headed, ids, mse, normal, private
from tests.helpers.per_example import assert_close, clip_and_sum, one_at_a_time

layers = keras.layers
MODELS, MODELING = "keras_hub.src.models", "keras_hub.src.layers.modeling"


def named(path):
    """A decorator that has a class be the one of this module and name."""

    def rename(kind):
        kind.__module__, _, kind.__qualname__ = path.rpartition(".")
        return kind

    return rename


class Norm(layers.Layer):
    """A root mean square norm of the last axis, as `scaled` lays the scale on it."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        x32 = ops.cast(x, "float32")
        x32 = x32 * ops.rsqrt(ops.mean(ops.square(x32), axis=-1, keepdims=True) + 1e-3)
        return ops.cast(self.scaled(x32), self.compute_dtype)

    def scaled(self, x):
        return x * ops.cast(self.scale, "float32")


@named(f"{MODELS}.llama.llama_layernorm.LlamaLayerNorm")
class Llama(Norm):
    pass


@named(f"{MODELS}.gemma.rms_normalization.RMSNormalization")
class Gemma(Norm):
    def scaled(self, x):
        return x * (1 + ops.cast(self.scale, "float32"))


@named(f"{MODELS}.video_prism.video_prism_layers.VideoPrismPerDimScale")
class Softplus(Norm):
    def scaled(self, x):
        return x * ops.softplus(ops.cast(self.scale, "float32"))


@named(f"{MODELS}.qwen.qwen_layernorm.QwenLayerNorm")
class Reversed(Norm):
    """One whose call a later version has changed: copies would be turned row for row."""

    def scaled(self, x):
        return x * ops.flip(ops.cast(self.scale, "float32"), axis=0)


@named(f"{MODELS}.phi3.phi3_layernorm.Phi3LayerNorm")
class Reshaped(Norm):
    """Another, which has no place for copies."""

    def scaled(self, x):
        return x * ops.reshape(ops.cast(self.scale, "float32"), (1, 1, x.shape[-1]))


@named(f"{MODELS}.hgnetv2.hgnetv2_layers.HGNetV2LearnableAffineBlock")
class Affine(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.bias = self.add_weight(shape=(), initializer="zeros")

    def call(self, x):
        return self.scale * x + self.bias


@named(f"{MODELING}.position_embedding.PositionEmbedding")
class Positions(layers.Layer):
    sequence_length = 7

    def build(self, shape):
        self.position_embeddings = self.add_weight(shape=(self.sequence_length, shape[-1]))

    def call(self, inputs, start_index=0, positions=None):
        table = ops.convert_to_tensor(self.position_embeddings)
        if positions is None:
            rows = ops.slice(table, (start_index, 0), inputs.shape[-2:])
        else:
            rows = ops.take(table, positions, axis=0)
        return ops.broadcast_to(rows, ops.shape(inputs))


# Which class has a rule.


def test_only_the_class_of_that_module_and_name_has_a_rule():
    class Subclass(Llama):
        pass

    namesake = type("LlamaLayerNorm", (Norm,), {"__module__": "mine.llama_layernorm"})
    elsewhere = named("keras_hub.src.models.llama.other.LlamaLayerNorm")(type("L", (Norm,), {}))
    assert rule_for(Llama()) is not None
    for kind in (Subclass, namesake, elsewhere, Norm):
        assert rule_for(kind()) is None, kind


def test_a_class_that_is_registered_by_name_has_a_rule_only_without_rematerialization():
    layer = Llama()
    layer._remat_mode = "full"
    assert rule_for(layer) is None


# That the rules are right.


@pytest.mark.parametrize("shape", [(4,), (5, 4), (3, 2, 4)], ids=str)
@pytest.mark.parametrize("kind", [Llama, Gemma, Softplus, Affine], ids=lambda kind: kind.__name__)
def test_weights_that_act_coordinate_by_coordinate(kind, shape):
    x = normal(*shape)
    check(around(kind(), x), x, checked=len(shape) == 2)


@pytest.mark.parametrize("shape", [(4,), (3, 3, 4)], ids=str)
def test_layer_scale_of_keras_applications(shape):
    x = normal(*shape)
    check(around(LayerScale(0.1, 4), x), x)


def test_a_scale_that_is_used_twice():
    layer, inputs = Llama(), keras.Input((5, 4))
    base = keras.Model(inputs, headed(layer(layers.Dense(4)(layer(inputs)))))
    check(base, normal(5, 4))


@pytest.mark.parametrize("policy, rtol", [("mixed_bfloat16", 0.1), ("mixed_float16", 0.02)])
@pytest.mark.parametrize("kind", [Llama, Gemma], ids=lambda kind: kind.__name__)
def test_half_precision(kind, policy, rtol):
    x = normal(5, 4)
    check(around(kind(dtype=policy), x), x, rtol=rtol)


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 3)], ids=str)
def test_position_embedding(shape, start):
    x, layer = normal(*shape), Positions()
    inputs = keras.Input(x.shape[1:])
    check(keras.Model(inputs, headed(inputs * layer(inputs, start_index=start))), x)


def test_position_embedding_of_given_positions():
    x, layer = normal(5, 3), Positions()
    inputs, places = keras.Input((5, 3)), keras.Input((5,), dtype="int32")
    base = keras.Model([inputs, places], headed(inputs * layer(inputs, positions=places)))
    check(base, [x, ids(5, below=4)])  # some twice


def test_positions_that_are_distinct_until_they_are_joined():
    table, deltas = (4, 2), tf.ones((1, 2, 2))
    one = Lookup(tf.constant([[0, 1]]), deltas, table, distinct=True)
    both = Lookup(tf.constant([[0, 1], [1, 2]]), tf.ones((2, 2, 2)), table, distinct=True)
    assert one.squared_norm().numpy() == 4
    np.testing.assert_allclose(both.grouped(2).squared_norm(), [2 * (1 + 4 + 1)], rtol=1e-5)
    np.testing.assert_allclose(both.grouped(2).l1_norm(), [8], rtol=1e-5)


@pytest.mark.parametrize("kind", [Llama, Gemma, Positions], ids=lambda kind: kind.__name__)
def test_users_are_clipped_as_one(kind):
    users, rows = 3, 2
    rng = np.random.default_rng(7)
    x = rng.normal(size=(users * rows, 5, 4)).astype("float32")
    y = rng.normal(size=(users * rows, 2)).astype("float32")
    inputs = keras.Input((5, 4))
    base = keras.Model(inputs, headed(inputs * kind()(inputs)))
    model = private(base)
    mask = tf.ones((users, rows), bool)
    batch = Batch(tf.constant(x), tf.constant(y), mask=mask)
    gradients = one_at_a_time(base, mse, x, y)
    of_users = [
        [
            np.mean([g[i] for g in gradients[start : start + rows]], axis=0)
            for i in range(len(gradients[0]))
        ]
        for start in range(0, users * rows, rows)
    ]
    norms = [np.sqrt(sum((g**2).sum() for g in one)) for one in of_users]
    query = Query(clip_norm=float(np.median(norms)))
    sums = clipped_sums(model, batch, (query,), engines_for(model)).sums
    assert_close(sums[0], clip_and_sum(of_users, query.clip_norm))


# That a rule which no longer holds is found out.


@pytest.mark.parametrize("kind", [Reversed, Reshaped], ids=lambda kind: kind.__name__)
def test_a_rule_that_no_longer_holds_is_demoted_by_name(kind):
    x, layer = normal(5, 4), kind(name="changed")
    base = around(layer, x)
    layer.scale.assign([0.5, 1.0, 2.0, 3.0])
    y = normal(2, seed=5)
    model = private(base)
    assert layer in engines_for(model).ruled
    with pytest.warns(UserWarning, match=r"rule for .* 'changed' does not hold"):
        engines = checked_engines(model, Batch(tf.constant(x), tf.constant(y)))
    assert layer in engines.general
    assert [demoted for demoted, _ in engines.demoted] == [layer]
    gradients = one_at_a_time(base, mse, x, y)
    norms = [np.sqrt(sum((g**2).sum() for g in one)) for one in gradients]
    query = Query(clip_norm=float(np.median(norms)))
    sums = clipped_sums(model, (x, y), (query,), engines).sums
    assert_close(sums[0], clip_and_sum(gradients, query.clip_norm))


# Embeddings of positions, which know of no batch.


class TokensAndPositions(layers.Layer):
    """As tutorials write it."""

    def __init__(self, leading=()):
        super().__init__()
        self.tokens, self.places = layers.Embedding(9, 4), layers.Embedding(6, 4)
        self.leading = leading

    def call(self, x):
        places = ops.reshape(ops.arange(x.shape[1]), (*self.leading, -1))
        return self.tokens(x) + self.places(places)


class Expanded(TokensAndPositions):
    """One that has no place for rows of its own."""

    def call(self, x):
        places = ops.expand_dims(self.places(ops.arange(x.shape[1])), 0)
        return self.tokens(x) + ops.reshape(places, (1, x.shape[1], 4))


@pytest.mark.parametrize("leading", [(), (1,)], ids=str)
def test_an_embedding_of_positions_keeps_its_rule(leading):
    x, layer = ids(6, below=9), TokensAndPositions(leading)
    base = around(layer, x)
    check(base, x)
    engines = checked_engines(private(base), Batch(tf.constant(x), tf.zeros((len(x), 2))))
    assert not engines.general


def test_positions_that_take_no_rows_send_the_layer_to_the_general_engine():
    x, layer = ids(6, below=9), Expanded()
    base = around(layer, x)
    engines = checked_engines(private(base), Batch(tf.constant(x), tf.zeros((len(x), 2))))
    assert engines.general == (layer,)
    check(base, x, checked=True)


def test_as_many_rows_as_positions():
    """What the check has found out holds for batches of any size."""
    x, layer = ids(6, below=9), TokensAndPositions()
    base = around(layer, x)
    model = private(base)
    engines = checked_engines(model, Batch(tf.constant(x), tf.zeros((len(x), 2))))
    x = np.random.default_rng(8).integers(0, 9, (6, 6)).astype("int32")
    y = np.random.default_rng(9).normal(size=(6, 2)).astype("float32")
    gradients = one_at_a_time(base, mse, x, y)
    norms = [np.sqrt(sum((g**2).sum() for g in one)) for one in gradients]
    query = Query(clip_norm=float(np.median(norms)))
    sums = clipped_sums(model, (x, y), (query,), engines).sums
    assert_close(sums[0], clip_and_sum(gradients, query.clip_norm))


def test_a_fit_with_positions():
    x = ids(6, below=9)
    model = dp.make_private(around(TokensAndPositions(), x))
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=2)
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(x, normal(2), epochs=1, verbose=0)
    assert {served.engine for served in dp.clipping.explain(model)} == {"rule"}
