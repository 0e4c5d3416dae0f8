"""Rows and geometries whose squares leave the range of float32, one row present or absent."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.clipping import Batch, Query, clipped_sums
from dp_keras_opt.clipping.factors import Lookup, OuterProducts, TiedTable

FEATURES = 101
TIME = 1.7e18  # a time stamp in nanoseconds, beside features of about 0.01


def linear(**kwargs):
    inputs = keras.Input((FEATURES,))
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = dp.DPModel(inputs, dense(inputs))
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=4)
    model.compile(optimizer, "mse", **kwargs)
    return model


@pytest.fixture(params=["eager", "graph", "xla"])
def sums_of(request):
    def sums_of(model, batch, query):
        def run():
            return clipped_sums(model, batch, (query,)).sums[0]

        if request.param == "eager":
            return run()
        return tf.function(run, jit_compile=request.param == "xla", autograph=False)()

    return sums_of


@pytest.mark.representatives(18)
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("small", [1e-2, 1e-10, 1.0])
@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_a_geometry_that_weighs_most_what_is_least(sums_of, norm, small, rows):
    """The norm of such a row came out as 0, and the sum as 10 C."""
    x = np.full((rows, FEATURES), small, "float32")
    x[:, 0] = TIME
    scale = (1 / np.abs(x[:1].T)).astype("float32")
    mask = tf.range(rows) == 0
    batch = Batch(tf.constant(x), tf.ones((rows, 1)), mask=mask)
    query = Query(scale=[tf.constant(scale)], clip_norm=1.0, norm=norm)
    # The sum is given in the geometry of its query.
    total = np.asarray(sums_of(linear(), batch, query)[0], np.float64)
    moved = np.abs(total).sum() if norm == "l1" else np.linalg.norm(total)
    assert 0 < moved <= 1 + 1e-5


def true_norm(inputs, deltas, scale, norm):
    gradients = np.einsum("bgti,bgto->bgio", *(np.asarray(t, np.float64) for t in (inputs, deltas)))
    scaled = (gradients * np.asarray(scale, np.float64)).reshape(len(gradients), -1)
    return np.abs(scaled).sum(1) if norm == "l1" else np.linalg.norm(scaled, axis=1)


@pytest.mark.parametrize("sizes", [(5, 4), (24, 40)])
@pytest.mark.parametrize("positions", [1, 2, 8, 40])
@pytest.mark.parametrize("spread", [5, 15, 30])
@pytest.mark.parametrize("seed", range(3))
def test_no_norm_of_outer_products_is_too_small(positions, sizes, spread, seed):
    """Inputs, deltas and geometry of entries over many powers of ten, those of zero included."""
    rng = np.random.default_rng(seed)

    def wide(*shape):
        numbers = rng.choice([-1, 1], shape) * 10 ** rng.uniform(-spread, spread / 3, shape)
        return np.where(rng.random(shape) < 0.1, 0, numbers).astype("float32")

    (a, b), scale = (wide(6, 1, positions, size) for size in sizes), np.abs(wide(*sizes))
    inputs, deltas, factor = a, b, OuterProducts(a, b, sizes)
    for norm, found in (
        ("l2", tf.sqrt(factor.squared_norm(scale))), ("l1", factor.l1_norm(scale))
    ):  # fmt: skip
        found, expected = found.numpy(), true_norm(inputs, deltas, scale, norm)
        least = 1e-15  # what squares of natural size lose: far below any clip norm
        assert (found >= expected * (1 - 1e-5) - least).all()
        usual = np.isfinite(found)  # else the row is left out
        usual &= expected > 1e-15 * np.abs(inputs).max() * np.abs(deltas).max() * scale.max()
        np.testing.assert_allclose(found[usual], expected[usual], rtol=1e-3)


def test_the_norm_of_a_tied_table_in_a_wide_geometry():
    """Look-ups and projection point the same way; the product of their scales underflows."""
    ids = tf.constant([[2]])
    looked_up = tf.ones((1, 1, 3))
    inputs = tf.one_hot([[[2]]], 5)  # the projection touches the same row of the table
    factor = TiedTable(
        Lookup(ids, looked_up, (5, 3)), OuterProducts(inputs, tf.ones((1, 1, 1, 3)), (5, 3))
    )
    for size in (1e-25, 1e-10, 1.0, 1e15):
        scale = tf.fill((5, 3), np.float32(size))
        found = np.sqrt(factor.squared_norm(scale * 1e10 if size < 1e-20 else scale))
        expected = 2 * np.sqrt(3) * (size * 1e10 if size < 1e-20 else size)
        assert found >= expected * (1 - 1e-4) or expected < 1e-14


@pytest.mark.representatives(12)
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("which", ["inputs", "deltas"])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_factor_of_zero_and_one_at_the_end_of_the_range(sums_of, normalize, which, square):
    """Their product is 0, and so is the row's part of the sum: the weight made it inf·0."""
    x, y = np.zeros((2, FEATURES), "float32"), np.zeros((2, 1), "float32")
    if which == "inputs":
        x[0] = 3.3e38
    else:
        y[0] = -1.6e38  # the gradient of the loss in the output is 3.2e38
    query = Query(clip_norm=1.0, normalize=normalize, square=square)
    batch = Batch(tf.constant(x), tf.constant(y))
    assert np.isfinite(sums_of(linear(), batch, query)[0]).all()


@pytest.mark.parametrize("normalize", [False, True])
def test_a_private_row_never_makes_public_directions_nan(normalize):
    """A row of ±3.3e38 whose gradient is 0 made all weights NaN, at a stated ε of 0.354."""
    size, rng = 32, np.random.default_rng(0)
    x = rng.normal(size=(64, size)).astype("float32")
    y = (x[:, :1] > 0).astype("float32")
    inputs = keras.Input((size,))
    start = keras.initializers.Constant(1e-3)
    model = dp.DPModel(inputs, keras.layers.Dense(1, kernel_initializer=start)(inputs))
    optimizer = dp.optimizers.SubspaceAdagrad(
        1e-3, rank=2, clip_norm=1.0, noise_multiplier=10.0, batch_size=64, normalize=normalize
    )
    model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
    model.optimizer.build(model.trainable_variables)
    private = x.copy(), y.copy()
    private[0][0] = 3.3e38 * np.sign(model.optimizer._basis.numpy()[:size, 0])
    private[1][0] = private[0][0].astype("float64").sum() > 0
    rows = dp.data.assume_sampling(
        tf.data.Dataset.from_tensors(private), dp.accounting.Sampling.full(64)
    )
    model.fit(dp.data.with_public(rows, (x, y)), verbose=0)
    assert all(np.isfinite(weights).all() for weights in model.get_weights())


@pytest.mark.parametrize("clip_norm", [1e-13, 1e-19, 1e-30])
def test_clip_norms_whose_squares_count_as_zero_are_refused(clip_norm):
    with pytest.raises(ValueError, match="too small for the squares"):
        dp.optimizers.DPSGD(clip_norm=clip_norm, batch_size=8)
