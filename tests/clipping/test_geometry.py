"""Matrix geometries and centres, against one example at a time in float64."""

import functools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import dp_keras_opt as dp
from dp_keras_opt.clipping import Batch, Query, clip_fraction, clipped_sums, per_example_norms
from dp_keras_opt.clipping.engines import Engines, engines_for
from dp_keras_opt.clipping.factors import Mapped, OuterProducts
from dp_keras_opt.clipping.geometry import Kronecker, LowRank, Mixed
from dp_keras_opt.noise.released import Released
from tests.clipping import test_clipped_sums as models
from tests.clipping.test_points import MODELS, setup
from tests.helpers.per_example import assert_close, clip_and_sum, one_at_a_time


def flat(tensors):
    return np.concatenate([np.asarray(t, np.float64).ravel() for t in tensors])


def like(vector, shapes):
    cuts = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    return [part.reshape(shape) for part, shape in zip(np.split(vector, cuts), shapes, strict=True)]


def in_float64(geometry, tensors):
    """M of a list of tensors, written from the definition."""
    tensors = [np.asarray(t, np.float64) for t in tensors]
    if geometry is None:
        return tensors
    if isinstance(geometry, Kronecker):
        images = []
        for t, left, right in zip(tensors, geometry.left, geometry.right, strict=True):
            matrix = t.reshape(-1, (t.shape or (1,))[-1])
            matrix = matrix if left is None else np.asarray(left, np.float64) @ matrix
            matrix = matrix if right is None else matrix @ np.asarray(right, np.float64)
            images.append(matrix.reshape(t.shape))
        return images
    basis = np.stack([flat(u) for u in zip(*geometry.directions, strict=True)])  # (k, d)
    along, rest = np.float64(geometry.along), float(geometry.rest)
    vector = flat(tensors)
    image = rest * vector + basis.T @ ((along - rest) * (basis @ vector))
    return like(image, [t.shape for t in tensors])


def kronecker(shapes, rng, sides=("left", "right")):
    def matrix(size):
        return tf.constant(rng.normal(size=(size, size)) / np.sqrt(size), tf.float32)

    left = [matrix(math.prod(shape[:-1])) if "left" in sides else None for shape in shapes]
    right = [matrix((shape or (1,))[-1]) if "right" in sides else None for shape in shapes]
    return Kronecker(left, right)


def low_rank(shapes, rng, rank=3):
    size = sum(map(math.prod, shapes))
    basis = np.linalg.qr(rng.normal(size=(size, min(rank, size))))[0].T
    directions = [np.stack(u) for u in zip(*(like(row, shapes) for row in basis), strict=True)]
    along = rng.uniform(0.05, 1.0, len(basis))
    return LowRank([tf.constant(u, tf.float32) for u in directions],
                   tf.constant(along, tf.float32), tf.constant(0.4))  # fmt: skip


GEOMETRIES = {
    "both sides": kronecker,
    "right side": lambda shapes, rng: kronecker(shapes, rng, ("right",)),
    "low rank": low_rank,
    "none": lambda shapes, rng: None,
}


@pytest.mark.representatives(12)
@pytest.mark.parametrize("whole_model", [False, True], ids=["per layer", "whole model"])
@pytest.mark.parametrize("kind", GEOMETRIES)
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_each_example_contributes_its_image_clipped(make, kind, whole_model):
    model, x, y, gradients, *_ = setup(make)
    rng = np.random.default_rng(3)
    shapes = [tuple(v.shape) for v in model.trainable_variables]
    geometry = GEOMETRIES[kind](shapes, rng)
    mean = [np.mean(g, axis=0) for g in zip(*gradients, strict=True)]
    centre = [np.float32(0.8 * a) for a in mean]
    engines = Engines((), (model,)) if whole_model else engines_for(model)
    for used in (None, centre):
        left = [
            [g - a for g, a in zip(e, used or np.zeros(len(e)), strict=True)] for e in gradients
        ]
        images = [in_float64(geometry, example) for example in left]
        clip_norm = 0.7 * float(np.median([np.linalg.norm(flat(e)) for e in images]))
        given = used and [tf.constant(a) for a in used]
        query = Query(geometry=geometry, centre=given, clip_norm=clip_norm)
        queries = [query, query._replace(style="per_layer"), query._replace(norm="l1")]
        sums = clipped_sums(model, (x, y), queries, engines).sums
        # Where terms cancel, norms are raised by what rounding may have taken.
        assert_close(sums[0], clip_and_sum(images, clip_norm), rtol=1e-3)
        expected = np.zeros(len(flat(images[0])))
        for group, bound in dp.clipping.clip_groups(model, queries[1]):
            parts = [[v if i in group else 0 * v for i, v in enumerate(e)] for e in images]
            expected += flat(clip_and_sum(parts, bound))
        np.testing.assert_allclose(flat(sums[1]), expected, rtol=1e-2, atol=1e-3 * clip_norm)
        clipped = sum(min(1, clip_norm / np.abs(flat(e)).sum()) * flat(e) for e in images)
        np.testing.assert_allclose(flat(sums[2]), clipped, rtol=1e-2, atol=1e-4 * clip_norm)


def test_in_a_scale_and_around_a_centre():
    model, x, y, gradients, *_ = setup(models.dense)
    rng = np.random.default_rng(4)
    scale = [np.float32(rng.uniform(0.2, 2, v.shape)) for v in model.trainable_variables]
    centre = [np.float32(np.mean(g, axis=0)) for g in zip(*gradients, strict=True)]
    left = [[g - a for g, a in zip(e, centre, strict=True)] for e in gradients]
    query = Query([tf.constant(s) for s in scale], 0.1, centre=[tf.constant(a) for a in centre])
    sums = clipped_sums(model, (x, y), [query]).sums
    assert_close(sums[0], clip_and_sum(left, 0.1, scale=scale), rtol=1e-3)


def wide(inputs, *layers):
    """A model in which per-example gradients take more room than what was recorded."""
    hidden = inputs
    for layer in layers:
        hidden = layer(hidden)
    outputs = keras.layers.Dense(3)(keras.layers.Flatten()(hidden))
    return keras.Model(inputs, outputs), models._features(*inputs.shape[1:]), models._features(3)


def wide_dense_on_sequence():
    return wide(keras.Input((2, 16)), keras.layers.Dense(24, activation="tanh"))


def wide_convolution():
    return wide(keras.Input((4, 12)), keras.layers.Conv1D(24, 3, activation="tanh"))


@pytest.mark.parametrize("make", [models.dense, wide_dense_on_sequence, wide_convolution])
def test_nothing_is_as_large_as_the_batch_times_the_weights(make, monkeypatch):
    model, x, y, *_ = setup(make)
    shapes = [tuple(v.shape) for v in model.trainable_variables]
    rng = np.random.default_rng(6)
    centre = [tf.constant(rng.normal(size=shape), tf.float32) for shape in shapes]
    made = []
    for factor in (Mixed, Mapped, OuterProducts):
        whole = factor.materialize
        monkeypatch.setattr(
            factor, "materialize", lambda self, of=whole: made.append(self.shape) or of(self)
        )
    for geometry in (None, kronecker(shapes, rng), low_rank(shapes, rng)):
        clipped_sums(model, (x, y), [Query(geometry=geometry, centre=centre, clip_norm=0.2)])
    assert not [shape for shape in made if len(shape) > 1]
    clipped_sums(model, (x, y), [Query(centre=centre, norm="l1", clip_norm=0.2)])
    assert made


def test_in_a_compiled_step():
    model, x, y, gradients, *_ = setup(models.dense)
    rng = np.random.default_rng(5)
    shapes = [tuple(v.shape) for v in model.trainable_variables]
    for geometry in (kronecker(shapes, rng), low_rank(shapes, rng)):
        centre = [tf.constant(0.1 * rng.normal(size=shape), tf.float32) for shape in shapes]
        query = Query(geometry=geometry, centre=centre, clip_norm=0.2)

        @tf.function(jit_compile=True)
        def traced(x, y, query=query):
            return clipped_sums(model, (x, y), [query]).sums[0]

        left = [[g - np.asarray(a) for g, a in zip(e, centre, strict=True)] for e in gradients]
        expected = clip_and_sum([in_float64(geometry, e) for e in left], 0.2)
        assert_close(traced(tf.constant(x), tf.constant(y)), expected, rtol=1e-3)


def compiled_dense():
    model, x, y, gradients, *_ = setup(models.dense)
    shapes = [tuple(v.shape) for v in model.trainable_variables]
    centre = [tf.constant(np.random.default_rng(6).normal(size=shape), tf.float32)
              for shape in shapes]  # fmt: skip
    return model, x, y, gradients, centre


@pytest.mark.parametrize("how", ["masked", "of weight 0", "without rows"])
def test_who_is_not_there_contributes_nothing_around_a_centre(how):
    """Not clip(−a), which would move the sum by up to 2C beside what the example contributes."""
    model, x, y, gradients, centre = compiled_dense()
    query = Query(centre=centre, clip_norm=0.2)
    rows = len(x)
    batch = {
        "masked": Batch(x, y, mask=tf.range(rows) > 0),
        "of weight 0": Batch(x, y, sample_weight=tf.cast(tf.range(rows) > 0, tf.float32)),
        "without rows": Batch(x[1:], y[1:]),
    }[how]
    left = [[g - np.asarray(a) for g, a in zip(e, centre, strict=True)] for e in gradients[1:]]
    assert_close(clipped_sums(model, batch, [query]).sums[0], clip_and_sum(left, 0.2), rtol=1e-3)


def test_an_example_without_a_gradient_contributes_minus_the_centre():
    model, x, _, _, centre = compiled_dense()
    y = model.predict(x, verbose=0)
    left = [[-np.asarray(a, np.float64) for a in centre]] * len(x)
    query = Query(centre=centre, clip_norm=0.2)
    assert_close(clipped_sums(model, (x, y), [query]).sums[0], clip_and_sum(left, 0.2), rtol=1e-3)


def test_users_are_seen_as_one_around_a_centre():
    model, x, y, gradients, centre = compiled_dense()
    x, y = (np.concatenate([part, part])[:6] for part in (x, y))
    mask = tf.constant([[True, True], [True, False], [True, True]])
    weight = tf.constant([1.0, 1.0, 1.0, 1.0, 0.0, 0.0])  # the third user is not there
    users = [
        [(a + b) / 2 for a, b in zip(gradients[0], gradients[1], strict=True)],
        gradients[2],
    ]
    left = [[g - np.asarray(a) for g, a in zip(e, centre, strict=True)] for e in users]
    query = Query(centre=centre, clip_norm=0.2)
    sums = clipped_sums(model, Batch(x, y, weight, mask), [query]).sums[0]
    assert_close(sums, clip_and_sum(left, 0.2), rtol=1e-3)


def test_a_variable_that_the_loss_does_not_know_is_at_minus_its_centre():
    inputs = keras.Input((3,))
    unused = keras.layers.Dense(2, name="unused")(inputs)
    outputs = keras.layers.Dense(1)(inputs)
    model = keras.Model(inputs, [outputs, unused])
    x, y = models._features(3), models._features(1)
    rng = np.random.default_rng(7)
    shapes = [tuple(v.shape) for v in model.trainable_variables]
    centre = [tf.constant(rng.normal(size=shape), tf.float32) for shape in shapes]
    for geometry in (None, low_rank(shapes, rng)):
        query = Query(centre=centre, geometry=geometry, clip_norm=0.3)
        found = clipped_sums(
            model, (x, y), [query, Query()],
            per_example_loss=lambda y, y_pred, w: tf.reduce_mean((y - y_pred[0]) ** 2, axis=1),
        ).sums[0]  # fmt: skip
        gradients = one_at_a_time(
            model, lambda y, y_pred: tf.reduce_mean((y - y_pred[0]) ** 2), x, y
        )
        left = [[g - np.asarray(a) for g, a in zip(e, centre, strict=True)] for e in gradients]
        expected = clip_and_sum([in_float64(geometry, e) for e in left], 0.3)
        assert_close(found, expected, rtol=1e-3)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([1e-12, 1e-3, 1.0, 1e6, 1e18, float("nan"), float("inf")]),
    far=st.sampled_from([0.0, 1e-6, 1.0, 1e4]),
    kind=st.sampled_from(sorted(GEOMETRIES)),
)
def test_one_row_moves_the_sum_by_no_more_than_the_bound(seed, size, far, kind):
    model, x, y, *_ = setup(models.dense)
    rng = np.random.default_rng(seed)
    shapes = [tuple(v.shape) for v in model.trainable_variables]
    geometry = GEOMETRIES[kind](shapes, rng)
    centre = [tf.constant(far * rng.normal(size=shape), tf.float32) for shape in shapes]
    x = np.array(x)
    x[0] = size * rng.normal(size=x[0].shape)
    there, gone = tf.fill([len(x)], True), tf.range(len(x)) > 0
    clip_norm = 10 ** rng.uniform(-3, 1)
    query = Query(geometry=geometry, centre=centre, clip_norm=clip_norm)
    with_row, without = (
        flat(clipped_sums(model, Batch(x, y, mask=mask), [query]).sums[0]) for mask in (there, gone)
    )
    rounding = 1e-5 * (np.linalg.norm(without) + clip_norm)
    assert np.linalg.norm(with_row - without) <= clip_norm + rounding


@pytest.mark.parametrize("positions", [1, 4])
@pytest.mark.parametrize("units", [1, 20])
@pytest.mark.parametrize("kind", ["a centre", "a scale", "low rank"])
def test_what_flushes_to_zero_on_the_way_is_not_missing_from_a_norm(kind, units, positions):
    """Tiny inputs times large deltas, in the inner product with a centre or with directions."""
    features = 16
    inputs = keras.Input((positions, features))
    layer = keras.layers.Dense(units, use_bias=False, kernel_initializer="zeros")
    model = keras.Model(inputs, layer(inputs))
    x = np.full((1, positions, features), 1.3e-38, np.float32)
    centre, query = np.full((features, units), 0.5 / units**0.5), Query(clip_norm=1.0)
    if kind == "low rank":  # Most of a row lies along a direction that is shortened the most.
        x[..., :8], x[..., 8:] = 2e-38, 0.0
        x[..., 8] = 6e-38
        basis = np.zeros((1, features, units))
        basis[0, :8], basis[0, 8] = -0.25 / units**0.5, (0.5 / units) ** 0.5
        geometry = LowRank([tf.constant(basis, tf.float32)], tf.constant([1e-3]), tf.constant(1.0))
        query = query._replace(geometry=geometry)
    else:
        query = query._replace(centre=[tf.constant(centre, tf.float32)])
        if kind == "a scale":
            query = query._replace(scale=[tf.ones((features, units))])
    lengths, by = [], 1e38 / positions / units**0.5
    for weight in (by, -by):
        found = clipped_sums(
            model, (x, np.zeros((1, 1), np.float32)), [query],
            per_example_loss=lambda y, y_pred, w, by=weight: (
                by * tf.reduce_sum(y_pred, axis=(1, 2))
            ),
        ).sums[0]  # fmt: skip
        lengths.append(np.linalg.norm(flat(found)) / query.clip_norm)
    assert 0.99 < max(lengths) <= 1 + 1e-6


def test_numbers_that_would_stretch_are_taken_for_one():
    """So that what flushed to zero in a norm cannot be made large afterwards."""
    model, x, y, gradients, *_ = setup(models.dense)
    shapes = [tuple(v.shape) for v in model.trainable_variables]
    given = low_rank(shapes, np.random.default_rng(8))
    stretched = given._replace(along=given.along * 50.0, rest=given.rest * 50.0)
    capped = given._replace(along=tf.minimum(stretched.along, 1.0), rest=tf.constant(1.0))
    sums = clipped_sums(model, (x, y), [Query(geometry=stretched, clip_norm=0.1)]).sums[0]
    expected = clip_and_sum([in_float64(capped, e) for e in gradients], 0.1)
    assert_close(sums, expected, rtol=1e-3)


@pytest.mark.parametrize("kind", ["both sides", "low rank"])
def test_what_is_released_is_taken_back(kind):
    rng = np.random.default_rng(9)
    shapes = [(3, 2, 4), (4,), ()]
    geometry = GEOMETRIES[kind](shapes, rng)
    if kind == "both sides":
        inverses = [[tf.linalg.inv(m) for m in side] for side in geometry[:2]]
        geometry = geometry._replace(inverse=Kronecker(*inverses))
    gradient = [rng.normal(size=shape) for shape in shapes]
    centre = [rng.normal(size=shape) for shape in shapes]
    left = [g - a for g, a in zip(gradient, centre, strict=True)]
    value = [tf.constant(v, tf.float32) for v in in_float64(geometry, left)]
    centre = [tf.constant(a, tf.float32) for a in centre]
    answer = Released(value, 0.3, geometry=geometry, centre=centre).unscaled()
    np.testing.assert_allclose(flat(answer.value), flat(gradient), rtol=1e-3, atol=1e-3)
    identity = np.eye(sum(map(math.prod, shapes)))
    inverse = np.stack([flat(in_float64(geometry.inverse, like(e, shapes))) for e in identity])
    expected = 0.3 * np.sqrt((inverse**2).sum(axis=0))
    np.testing.assert_allclose(flat(answer.noise_std), expected, rtol=1e-3)


def test_norms_and_shares_are_those_around_the_centre(monkeypatch):
    model, x, y, gradients, centre = compiled_dense()
    private = dp.make_private(model)
    private.compile(dp.optimizers.DPSGD(0.1, clip_norm=1.0, batch_size=8), "mse")
    lengths = [
        np.linalg.norm(flat([g - np.asarray(a) for g, a in zip(e, centre, strict=True)]))
        for e in gradients
    ]
    bound = float(np.median(lengths)) * 1.01
    query = functools.partial(Query, centre=centre, clip_norm=bound)
    monkeypatch.setattr(type(private.optimizer), "queries", lambda self: (query(),))
    assert clip_fraction(private, (x, y)) == np.mean(np.array(lengths) > bound)
    assert len(per_example_norms(private, (x, y))) == len(x)


def test_two_geometries_and_those_of_public_rows_are_refused():
    model, x, y, _, centre = compiled_dense()
    shapes = [tuple(v.shape) for v in model.trainable_variables]
    geometry = low_rank(shapes, np.random.default_rng(10))
    share = tf.ones(len(x)) / len(x)
    for query in (
        Query(scale=centre, geometry=geometry),
        Query(population="public", centre=centre),
        Query(population="public", geometry=geometry),
    ):
        with pytest.raises(ValueError, match="one geometry"):
            clipped_sums(model, Batch(x, y, public=share), [query])
