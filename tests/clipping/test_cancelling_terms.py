"""Rows of somebody who knows the order of sums: what one adds to a sum is within C all the same.

Each moves a sum by many C if that of `factors` which is named beside it is taken away.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.clipping import Batch, Query, clipped_sums
from dp_keras_opt.clipping.factors import OuterProducts

layers = keras.layers
MODES = pytest.mark.parametrize("compiled", [False, True], ids=["graph", "xla"])
V, D = 50, 20


def private(inputs, outputs):
    model = dp.make_private(keras.Model(inputs, outputs))
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=4)
    model.compile(optimizer, loss="mae")
    return model


def moved(model, x, y, query, compiled, row=0):
    """‖the sum with a row, less that without it‖ / C."""

    @tf.function(jit_compile=compiled, autograph=False)
    def total(x, y, mask):
        return clipped_sums(model, Batch(x, y, None, mask), (query,)).sums[0]

    x, y = tf.nest.map_structure(tf.convert_to_tensor, (x, y))
    one = np.ones(len(y), bool)
    other = one.copy()
    other[row] = False
    sums = [
        np.concatenate([np.float64(t).ravel() for t in total(x, y, tf.constant(mask))])
        for mask in (one, other)
    ]
    return np.linalg.norm(sums[0] - sums[1]) / query.clip_norm


def summed(tensors):
    return layers.Lambda(lambda a: tf.reduce_sum(a, axis=[1, 2])[:, None])(
        layers.Multiply()(tensors)
    )


def gated(inputs, outputs, positions=None):
    """Σ_t gate_t · Dense(x_t): inputs and deltas of each term are an example's own."""
    x, gate = keras.Input((positions, inputs), name="x"), keras.Input((positions, 1), name="gate")
    dense = layers.Dense(outputs, use_bias=False, kernel_initializer="zeros")
    return private({"x": x, "gate": gate}, summed([dense(x), gate]))


def tied():
    """A look-up times p, and logits of the same table times q."""
    shapes = {"p": (1, D), "h": (1, D), "q": (1, V)}
    inputs = {name: keras.Input(shape, name=name) for name, shape in shapes.items()}
    inputs["ids"] = keras.Input((1,), dtype="int32", name="ids")
    table = layers.ReversibleEmbedding(V, D)
    looked_up, logits = table(inputs["ids"]), table(inputs["h"], reverse=True)
    outputs = summed([looked_up, inputs["p"]]) + summed([logits, inputs["q"]])
    return private(inputs, outputs)


@MODES
@pytest.mark.parametrize("clip_norm", [1.0, 1e-3])
@pytest.mark.parametrize("kind", ["flushed", "cut off"])
@pytest.mark.parametrize("sizes", [(30, 30), (600, 8)])
def test_a_weight_takes_both_of_two_terms_to_zero_or_none(sizes, kind, clip_norm, compiled):
    """`OuterProducts.weighted_sum`, its units: two terms that cancel but for a part of them."""
    model, query = gated(*sizes, positions=2), Query(clip_norm=clip_norm)
    for ratio in (0.55, 20.0, 1000.0):  # a term over what is left of both
        if kind == "flushed":
            left, input_, delta = 1e16, 3e38, 1e4
            term = ratio * left / sizes[1] ** 0.5
            first, second = (input_, term / input_), (term * (1 + 1 / ratio) / delta, delta)
        else:
            query = query._replace(normalize=True)
            first = 1.3e-38, 3e38
            term = first[0] * first[1]
            second = term - term / ratio / sizes[1] ** 0.5, 1.0
        x, gate = np.zeros((2, 2, sizes[0]), "float32"), np.zeros((2, 2, 1), "float32")
        x[0, :, 0], gate[0, :, 0] = (first[0], -second[0]), (first[1], second[1])
        y = np.full((2, 1), -1e30, "float32")
        assert moved(model, {"x": x, "gate": gate}, y, query, compiled) <= 1 + 1e-5


@MODES
def test_terms_that_cancel_do_not_take_the_contributions_of_others_away(compiled):
    """`raised`, its 2⁻⁸: beside two huge terms the others are less than half a unit."""
    rows, size, positions, row, place = 512, 64, 5, *((51, 0) if compiled else (76, 3))
    model, large = gated(size, size), 2.0**22 / size**0.5
    weight = 1 / ((2.0**-21 + 2.0**-27 * positions) * 2 * large * size**0.5)
    half = 2.0 ** np.floor(np.log2(weight * large)) * 2.0**-24
    x, gate = np.zeros((rows, positions, size), "float32"), np.ones((rows, positions, 1), "float32")
    x[:, :, 0] = 0.97 * half
    x[row] = 0
    x[row, place : place + 2, 0] = large, -large
    signature = {
        "x": tf.TensorSpec((rows, None, size)), "gate": tf.TensorSpec((rows, None, 1)),
    }  # fmt: skip

    @tf.function(
        jit_compile=compiled, autograph=False,
        input_signature=[signature, tf.TensorSpec((rows, 1)), tf.TensorSpec((rows,), tf.bool)],
    )  # fmt: skip
    def total(x, y, mask):
        return clipped_sums(model, Batch(x, y, None, mask), (Query(clip_norm=1.0),)).sums[0]

    y, mask = np.full((rows, 1), -1e30, "float32"), np.ones(rows, bool)
    one = total({"x": x, "gate": gate}, y, mask)
    mask[row] = False
    other = total({"x": x, "gate": gate}, y, mask)
    assert np.linalg.norm(np.float64(one[0]) - np.float64(other[0])) <= 1.01


@MODES
@pytest.mark.parametrize("inputs", [600, 4000])
def test_half_bits_that_add_up(inputs, compiled):
    """`in_parts` and its count: p and q as one Dense sees them, of which p - q is left."""
    p, q = keras.Input((inputs,), name="p"), keras.Input((inputs,), name="q")
    dense = layers.Dense(8, use_bias=False, kernel_initializer="zeros")
    model = private({"p": p, "q": q}, layers.Subtract()([dense(p), dense(q)]))
    least = 2.0**-12  # p·p is rounded down in each step of a sum, p·q and q·q are rounded up
    x = {
        "p": np.full((2, inputs), least * (1 - 2e-4)),
        "q": np.full((2, inputs), least * (1 + 4e-4)),
    }
    x["p"][:, 0] = x["q"][:, 0] = 1
    x["p"][:, -1], x["q"][:, -1] = 0, 2.0**-7
    x = {name: np.float32(1e4 * values) for name, values in x.items()}
    y = np.full((2, 8), 1e6, "float32")
    assert moved(model, x, y, Query(clip_norm=1.0), compiled) <= 1 + 1e-5


@MODES
def test_a_look_up_and_a_projection_that_point_the_same_way(compiled):
    """`TiedTable._cross` in float64: deltas times what was looked up flush to zero in float32."""
    model = tied()
    for clip_norm, length, at in ((1e-3, 1e-3, 1e34), (1e-9, 1e-9, 1e27)):
        x = {
            "ids": np.full((2, 1), 7, "int32"),
            "p": np.full((2, 1, D), length, "float32"),
            "h": np.full((2, 1, D), length / at, "float32"),
            "q": np.zeros((2, 1, V), "float32"),
        }
        x["q"][:, 0, 7] = at
        y = np.full((2, 1), 1e9, "float32")
        assert moved(model, x, y, Query(clip_norm=clip_norm), compiled) <= 1 + 1e-5


@pytest.mark.parametrize("id_", [V, V + 7, -V - 3])
def test_an_id_beyond_a_table_contributes_nothing_of_it(id_):
    """`Lookup`: XLA takes the last row where a norm is found, and adds to none."""
    x = {
        "ids": np.full((2, 1), id_, "int32"),
        "p": np.full((2, 1, D), 100.0, "float32"),
        "h": np.full((2, 1, D), -100.0, "float32"),
        "q": np.zeros((2, 1, V), "float32"),
    }
    x["q"][:, 0, V - 1 if id_ > 0 else 0] = 1
    y = np.full((2, 1), 1e9, "float32")
    assert moved(tied(), x, y, Query(clip_norm=1.0), compiled=True) <= 1 + 1e-5

    ids, p = keras.Input((1,), dtype="int32", name="ids"), keras.Input((1, D), name="p")
    model = private({"ids": ids, "p": p}, summed([layers.Embedding(V, D)(ids), p]))
    centre = np.zeros((V, D), "float32")
    centre[V - 1 if id_ > 0 else 0] = -100.0
    query = Query(clip_norm=1.0, centre=[tf.constant(centre)])
    given = {"ids": x["ids"], "p": x["p"]}
    assert moved(model, given, y, query, compiled=True) <= 1 + 1e-5


@MODES
@pytest.mark.parametrize("norm, scale, delta", [("l1", 0.2, 2e17), ("l2", 1e-25, 1e18)])
def test_what_overflows_and_is_scaled_down_is_left_out(norm, scale, delta, compiled):
    """`OuterProducts._sizes_of_terms`, its infinity: the sum would cut each entry off by itself."""
    x, gate = keras.Input((4,), name="x"), keras.Input((100,), name="gate")
    dense = layers.Dense(100, use_bias=False, kernel_initializer="zeros")
    weighted = layers.Multiply()([dense(x), gate])
    outputs = layers.Lambda(lambda a: tf.reduce_sum(a, axis=1)[:, None])(weighted)
    model = private({"x": x, "gate": gate}, outputs)
    given = {"x": np.zeros((2, 4), "float32"), "gate": np.full((2, 100), delta, "float32")}
    given["x"][:, 0], given["gate"][:, 0] = 1e22, 1e25
    query = Query(norm=norm, scale=[tf.fill((4, 100), scale)], clip_norm=1.0)
    y = np.full((2, 1), -1e30, "float32")

    @tf.function(jit_compile=compiled, autograph=False)
    def total():
        return clipped_sums(model, Batch(given, y, None, tf.constant([True, False])), (query,))

    found = np.float64(total().sums[0][0])
    assert np.abs(found).sum() <= 1 + 1e-5 if norm == "l1" else np.linalg.norm(found) <= 1 + 1e-5


@MODES
def test_a_part_of_a_long_sum_does_not_begin_at_the_last_one(compiled):
    """One large square, and a million of which each alone is less than half a bit of it.

    All in one sum, as XLA has it of one row where it may, the norm comes out 2.7% short.
    """
    size = 10**6
    inputs = np.full((1, 1, 1, size), np.sqrt(0.98 * 2**-24), "float32")
    inputs[..., 0] = 1
    matrix = np.ones((size, 1), "float32")

    @tf.function(jit_compile=compiled)
    def squared_norm(inputs, matrix):
        return OuterProducts(inputs, tf.ones((1, 1, 1, 1)), (size, 1)).squared_norm(matrix)

    exact = np.sum(np.square(inputs, dtype=np.float64))
    assert exact <= squared_norm(inputs, matrix)[0] < 1.005 * exact
