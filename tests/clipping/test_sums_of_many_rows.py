"""Rows made for the order in which a batch is summed: what one moves a sum by is C, next to.

Half of the rows bring a running sum just below a power of two, and one lifts it above. The others
are just over half a unit there: each is rounded up to a whole one, and below to about itself. What
is summed may be much longer than C where a part of it is taken away from the sum alone.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.clipping import Query, factors
from dp_keras_opt.clipping.geometry import Kronecker, LowRank
from dp_keras_opt.layers import StandardizedConv2D
from tests.clipping.test_cancelling_terms import MODES, D, V, gated, moved, private, summed, tied

layers = keras.layers
UNIT = 2.0**-24


def lengths(rows, near, lift=0.5, around=False):
    """Numbers (rows,): half of them near `near`, or below; the others, as summed, over half a unit.

    Args:
        rows: how many.
        near: at most twice what the first are.
        lift: what the first is more.
        around: whether what is summed is over its distance from the first.
    """
    count = rows // 2
    power = 2.0 ** np.floor(np.log2(count * near))
    found = np.full(rows, np.float32((power - lift / 2) / count), "float32")
    found[0] += np.float32(lift)
    half = 1.02 * power * UNIT
    found[count:] = half * found[1] / (1 + half) if around else half
    return found


def biased():
    """Σ x_i · bias_i: an example's x is its gradient in the bias."""
    x = keras.Input((2,), name="x")
    dense = layers.Dense(2, kernel_initializer="zeros")
    zeros = layers.Lambda(lambda a: tf.zeros_like(a[:, :1]))(x)
    outputs = layers.Lambda(lambda a: tf.reduce_sum(a, axis=1)[:, None])(
        layers.Multiply()([dense(zeros), x])
    )
    return private(x, outputs)


def looked_up():
    """A look-up times p."""
    ids, p = keras.Input((1,), dtype="int32", name="ids"), keras.Input((1, 1), name="p")
    return private({"ids": ids, "p": p}, summed([layers.Embedding(V, 1)(ids), p]))


def only(index, tensor):
    """A tensor for one variable of two, as `biased` has them: kernel and bias."""
    return [tensor if index == i else None for i in range(2)]


def target(rows):
    return np.full((rows, 1), -1e30, "float32")


@MODES
@pytest.mark.parametrize("size", [1, 16])
@pytest.mark.parametrize("rows", [1024, 4096])
def test_around_a_centre(rows, size, compiled):
    """`Centred`, summed in float64."""
    x = lengths(rows, 100.0, around=True)
    centre = np.zeros((size, 1), "float32")
    centre[0] = x[1]
    inputs = np.zeros((rows, 1, size), "float32")
    inputs[:, 0, 0] = x
    given = {"x": inputs, "gate": np.ones((rows, 1, 1), "float32")}
    query = Query(clip_norm=1.0, centre=[tf.constant(centre)])
    found = moved(gated(size, 1), given, target(rows), query, compiled)
    assert 0.4 <= found <= 1 + 4 * UNIT * rows


GEOMETRIES = {
    "Mapped": Kronecker(only(1, None), only(1, tf.constant([[0.5, -0.5], [-0.5, 0.5]]))),
    "Mixed": LowRank(
        [tf.zeros((1, 1, 2)), tf.constant([[0.5**0.5, 0.5**0.5]])], tf.zeros([1]), tf.ones([])
    ),
}


@MODES
@pytest.mark.parametrize("name", GEOMETRIES)
def test_in_a_geometry_that_takes_away_what_is_common(name, compiled):
    """`Mapped` and `Mixed`, summed in float64."""
    rows, near = 4096, 60.0
    x = np.zeros((rows, 2), "float32")
    x[:, 0] = lengths(rows, near, lift=1.0)
    x[: rows // 2, 1] = x[1, 0]
    query = Query(clip_norm=1.0, geometry=GEOMETRIES[name])
    found = moved(biased(), x, target(rows), query, compiled)
    assert 0.4 <= found <= 1 + 4 * UNIT * rows


@MODES
def test_before_a_standardized_kernel(compiled):
    """`Standardized`, its floor: what is taken away is not more than 2⁴ of what is left."""
    rows, near = 4096, 14.0 * 3**-0.5
    x, gate = keras.Input((1, 1, 3), name="x"), keras.Input((1, 1, 1), name="gate")
    layer = StandardizedConv2D(1, 1, use_bias=False)
    outputs = layers.Flatten()(layers.Multiply()([layer(x), gate]))
    model = private({"x": x, "gate": gate}, outputs)
    layer.kernel.assign(np.reshape(np.float32([1.5**0.5, -(1.5**0.5), 0]), (1, 1, 3, 1)))
    given = np.zeros((rows, 1, 1, 3), "float32")
    given[..., 2] = lengths(rows, near)[:, None, None]
    given[: rows // 2, ..., :2] = given[1, 0, 0, 2]
    given = {"x": given, "gate": np.ones((rows, 1, 1, 1), "float32")}
    found = moved(model, given, target(rows), Query(clip_norm=1.0), compiled)
    assert 0.1 <= found <= 1 + 2**-3


@MODES
@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_a_look_up_and_a_projection_that_cancel(norm, compiled):
    """`TiedTable`, its floor."""
    rows, near = 4096, 7.0
    given = {
        "ids": np.full((rows, 1), 7, "int32"),
        "p": np.zeros((rows, 1, D), "float32"),
        "h": np.zeros((rows, 1, D), "float32"),
        "q": np.zeros((rows, 1, V), "float32"),
    }
    given["q"][:, :, 7] = 1
    given["p"][:, 0, 0] = lengths(rows, near)
    given["h"][: rows // 2, 0, 0] = -given["p"][1, 0, 0]
    query = Query(clip_norm=1.0, norm=norm)
    found = moved(tied(), given, target(rows), query, compiled)
    assert 0.1 <= found <= 1 + 2**-3


@MODES
@pytest.mark.parametrize("size", [1, 16])
def test_of_a_plain_kernel(size, compiled):
    """`over_rows`: 1,024 of 16,384 rows at a time."""
    rows = 2**14
    inputs = np.zeros((rows, 1, size), "float32")
    inputs[:, 0, 0] = lengths(rows, 0.9, lift=0.1)
    inputs[0, 0, 0] = 1
    given = {"x": inputs, "gate": np.ones((rows, 1, 1), "float32")}
    found = moved(gated(size, 1), given, target(rows), Query(clip_norm=1.0), compiled)
    at_once = rows // factors.SHARES
    assert 0.9 <= found <= 1 + 2 * UNIT * (at_once**2 + rows)


@MODES
@pytest.mark.parametrize("kind", ["kernel", "table"])
def test_of_squares(kind, compiled):
    """`weighted_sum_of_squares`, as `SubspaceAdagrad` asks for it: a row moves it by C² at most."""
    rows = 2**13
    root = lengths(rows, 0.9, lift=0.1)[:, None]
    root[0] = 1
    root = np.sqrt(root)
    if kind == "kernel":
        model = gated(1, 1)
        given = {"x": root[..., None], "gate": np.ones((rows, 1, 1), "float32")}
    else:
        model = looked_up()
        given = {"ids": np.full((rows, 1), 7, "int32"), "p": root[..., None]}
    query = Query(clip_norm=1.0, square=True)
    found = moved(model, given, target(rows), query, compiled)
    assert 0.9 <= found <= 1 + 2 * UNIT * (factors.ROWS**2 + rows)


def test_of_a_batch_that_is_processed_in_chunks():
    """`sums_in_chunks`, which adds chunks up in float64."""
    rows, chunk = 2**13, 4
    x = lengths(rows, 0.9, lift=0.1)
    x[0] = 1
    x[rows // 2 :] /= chunk
    given = {"x": x[:, None, None], "gate": np.ones((rows, 1, 1), "float32")}
    one = np.ones(rows, "float32")
    other = one.copy()
    other[0] = 0

    def total(weights):
        model = gated(1, 1)
        optimizer = dp.optimizers.DPSGD(1.0, clip_norm=1.0, noise_multiplier=0.0, batch_size=rows)
        model.compile(optimizer, "mae", jit_compile=False, physical_batch_size=chunk)
        model.sampling = dp.accounting.Sampling.full(rows)
        model.train_on_batch(given, target(rows), sample_weight=weights)
        return -rows * np.float64(model.trainable_variables[0].numpy())[0, 0]

    found = total(one) - total(other)
    assert 0.9 <= found <= 1 + 2 * UNIT * (chunk**2 + rows)
