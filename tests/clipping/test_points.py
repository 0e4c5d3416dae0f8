"""Gradients at several points as one contribution, against one example at a time in float64."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import dp_keras_opt as dp
from dp_keras_opt.clipping import Batch, Point, Query, clip_fraction, clipped_sums
from dp_keras_opt.clipping.engines import Engines, engines_for
from dp_keras_opt.clipping.factors import TiedTable
from tests.clipping import test_clipped_sums as models
from tests.helpers.per_example import assert_close, clip_and_sum, one_at_a_time

layers = keras.layers


setup = functools.cache(models._setup)


def separable():
    """Its rule reads the weights themselves."""
    inputs = keras.Input((6, 5, 3))
    hidden = layers.SeparableConv2D(4, 3, activation="tanh")(inputs)
    outputs = layers.Dense(2)(layers.Flatten()(hidden))
    return keras.Model(inputs, outputs), models._features(6, 5, 3), models._features(2)


def standardized():
    inputs = keras.Input((6, 5, 3))
    hidden = dp.layers.StandardizedConv2D(4, 3, activation="tanh")(inputs)
    outputs = layers.Dense(2)(layers.Flatten()(hidden))
    return keras.Model(inputs, outputs), models._features(6, 5, 3), models._features(2)


def low_rank_changes():
    base, x, y = models.layer_norm_and_attention()
    for layer in base.layers:
        if isinstance(layer, layers.Dense):
            layer.enable_lora(2)
    for variable in base.trainable_variables:
        if "lora" in variable.path:
            variable.assign(0.1 * np.random.default_rng(0).normal(size=variable.shape))
    return base, x, y


MODELS = [*models.MODELS, separable, standardized, low_rank_changes]


def test_a_tied_table_is_no_larger_at_two_points(monkeypatch):
    """Than at one: looked up rows and products, and no gradient of the table for each example."""
    inputs = keras.Input((3,), dtype="int32")
    table = layers.ReversibleEmbedding(40, 4)
    model = keras.Model(inputs, table(layers.Dense(4)(table(inputs)), reverse=True))
    rng = np.random.default_rng(0)
    x = y = rng.integers(0, 40, (6, 3))
    offset = [0.1 * rng.normal(size=v.shape).astype("float32") for v in model.trainable_variables]
    points = (Point(1.5), Point(-0.5, [tf.constant(d) for d in offset]))
    made, whole = [], TiedTable.materialize
    monkeypatch.setattr(TiedTable, "materialize", lambda self: made.append(1) or whole(self))

    def loss(y, y_pred, w=None):
        each = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        return tf.reduce_mean(each, axis=-1)

    (found,) = clipped_sums(
        model, (x, y), [Query(points=points, clip_norm=0.1)], per_example_loss=loss
    ).sums
    assert not made
    start, total = model.get_weights(), None
    for coefficient, d in ((1.5, None), (-0.5, offset)):
        model.set_weights(start if d is None else [w + o for w, o in zip(start, d, strict=True)])
        each = one_at_a_time(model, loss, x, y)
        each = [[coefficient * g for g in example] for example in each]
        total = each if total is None else [
            [a + b for a, b in zip(one, other, strict=True)]
            for one, other in zip(total, each, strict=True)
        ]  # fmt: skip
    assert_close(found, clip_and_sum(total, 0.1), rtol=1e-3)


def at_points(model, x, y, points):
    """Σ_k c_k ∇loss(w + d_k) of each example alone."""
    start, total = model.get_weights(), None
    for coefficient, offset in points:
        if offset is not None:
            for variable, d in zip(model.trainable_variables, offset, strict=True):
                variable.assign_add(d)
        found = one_at_a_time(model, models._mse, x, y)
        model.set_weights(start)
        found = [[float(coefficient) * g for g in example] for example in found]
        total = found if total is None else [
            [a + b for a, b in zip(*pair, strict=True)] for pair in zip(total, found, strict=True)
        ]  # fmt: skip
    return total


def some_points(model, rng):
    def offset(size):
        return [tf.constant(size * rng.normal(size=v.shape), tf.float32)
                for v in model.trainable_variables]  # fmt: skip

    return Point(1.7), Point(tf.constant(-0.7), offset(0.3)), Point(0.5, offset(0.1))


@pytest.mark.representatives(8)
@pytest.mark.parametrize("whole_model", [False, True], ids=["per layer", "whole model"])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_one_clip_for_the_combination_of_several_points(make, whole_model):
    model, x, y, *_ = setup(make)
    rng = np.random.default_rng(8)
    points = some_points(model, rng)
    gradients = at_points(model, x, y, points)
    before = model.get_weights()
    norms = [np.sqrt(sum((g**2).sum() for g in example)) for example in gradients]
    clip_norm = 0.7 * float(np.median(norms))
    scale = [np.float32(rng.uniform(0.2, 2, v.shape)) for v in model.trainable_variables]
    queries = (
        Query(points=points, clip_norm=clip_norm),
        Query(points=points, clip_norm=clip_norm, scale=[tf.constant(s) for s in scale]),
        Query(clip_norm=clip_norm),
        Query(points=points, clip_norm=clip_norm, norm="l1"),
    )
    engines = Engines((), (model,)) if whole_model else engines_for(model)
    sums = clipped_sums(model, (x, y), queries, engines).sums
    assert_close(sums[0], clip_and_sum(gradients, clip_norm))
    # Where terms cancel, norms are raised by what rounding may have taken.
    assert_close(sums[1], clip_and_sum(gradients, clip_norm, scale=scale), rtol=1e-3)
    assert_close(sums[2], clip_and_sum(setup(make)[3], clip_norm))
    lengths = [sum(np.abs(g).sum() for g in example) for example in gradients]
    clipped = [
        [min(1, clip_norm / length) * g for g in example]
        for example, length in zip(gradients, lengths, strict=True)
    ]
    assert_close(sums[3], [sum(parts) for parts in zip(*clipped, strict=True)], rtol=1e-3)
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_points_in_a_compiled_step_and_losses_at_the_first():
    model, x, y, *_ = setup(models.dense)
    points = some_points(model, np.random.default_rng(9))[::-1]
    gradients = at_points(model, x, y, points)

    @tf.function(jit_compile=True)
    def traced(x, y):
        result = clipped_sums(model, (x, y), [Query(points=points, clip_norm=0.2)])
        return result.sums[0], result.losses

    sums, losses = traced(tf.constant(x), tf.constant(y))
    assert_close(sums, clip_and_sum(gradients, 0.2))
    start = model.get_weights()
    for variable, d in zip(model.trainable_variables, points[0].offset, strict=True):
        variable.assign_add(d)
    there = np.mean((model.predict(x, verbose=0) - y) ** 2, axis=1)
    model.set_weights(start)
    np.testing.assert_allclose(losses, there, rtol=1e-4)


@pytest.mark.parametrize("at_weights", [True, False])
def test_all_points_have_the_same_dropout_and_each_step_another(at_weights):
    """c and −c at one place cancel, whatever the dropout is; and it goes on."""
    inputs = keras.Input((20,))
    hidden = keras.layers.Dropout(0.5)(keras.layers.Dense(30)(inputs))
    model = models._compiled(keras.Model(inputs, keras.layers.Dense(2)(hidden)))
    zero = [tf.zeros(v.shape) for v in model.trainable_variables]
    last = Point(-1.0) if at_weights else Point(-1.0, [0.0 * z for z in zero])
    x, y = models._features(20), models._features(2)
    query = Query(points=(Point(1.0, zero), last), clip_norm=1.0)
    plain = Query(points=(last,), clip_norm=1.0)
    seen = []
    for _ in range(3):
        sums = clipped_sums(model, (x, y), [query, plain]).sums
        assert max(np.abs(t).max() for t in sums[0]) < 1e-5
        seen.append(sums[1][0].numpy())
    assert not np.allclose(seen[0], seen[1]) and not np.allclose(seen[1], seen[2])


def test_what_layers_add_to_the_loss_counts_at_each_point():
    class Penalized(keras.layers.Layer):
        def call(self, inputs):
            self.add_loss(keras.ops.sum(inputs**2, axis=-1))
            return inputs

    inputs = keras.Input((4,))
    hidden = Penalized()(keras.layers.Dense(3)(inputs))
    model = models._compiled(keras.Model(inputs, keras.layers.Dense(2)(hidden)))
    x, y = models._features(4), models._features(2)
    offset = [0.1 * tf.ones(v.shape) for v in model.trainable_variables]
    there = clipped_sums(
        model, (x, y), [Query(points=(Point(1.0, offset),), clip_norm=np.inf)]
    ).sums[0]
    for variable, d in zip(model.trainable_variables, offset, strict=True):
        variable.assign_add(d)
    moved = clipped_sums(model, (x, y), [Query(clip_norm=np.inf)]).sums[0]
    assert_close(there, [np.float64(t) for t in moved], rtol=1e-5)


def test_without_a_query_there_are_losses_still():
    model, x, y, *_ = setup(models.dense)
    result, asked = (clipped_sums(model, (x, y), queries) for queries in ((), (Query(),)))
    assert result.sums == []
    np.testing.assert_array_equal(result.losses, asked.losses)


def test_points_and_users_do_not_go_together():
    model, x, y, *_ = setup(models.dense)
    points = some_points(model, np.random.default_rng(1))
    mask = tf.constant([[True, True], [True, False]])
    batch = Batch(tf.constant(x[:4]), tf.constant(y[:4]), None, mask)
    with pytest.raises(ValueError, match="not defined for rows of a user"):
        clipped_sums(model, batch, [Query(points=points, clip_norm=1.0)])


@pytest.mark.representatives(3)
@pytest.mark.parametrize(
    "make", [models.dense, models.shared_dense, models.conv2d, models.lstm, separable]
)
def test_neighbouring_batches_differ_by_at_most_the_clip_norm(make):
    model, x, y, *_ = setup(make)
    rng = np.random.default_rng(3)
    directions = [np.float32(rng.normal(size=v.shape)) for v in model.trainable_variables]

    @tf.function
    def sums(x, y, mask, clip_norm, far):
        points = Point(3.0), Point(-2.0, [far * d for d in directions])
        query = Query(points=points, clip_norm=clip_norm)
        return clipped_sums(model, Batch(x, y, None, mask), [query]).sums[0]

    numbers = st.sampled_from([np.nan, np.inf, 0.0, 1e30, -1e30, 1e19, 1e4, 1e-30])

    @settings(max_examples=30, deadline=None)
    @given(
        clip_norm=st.floats(1e-3, 1.0),
        far=st.sampled_from([0.0, 1e-3, 1.0, 1e4, np.nan]),
        place=st.integers(0, 10**6),
        entry=numbers,
        factor=st.one_of(st.just(1.0), numbers),
    )
    def check(clip_norm, far, place, entry, factor):
        adversarial_x, adversarial_y = x.copy(), y.copy()
        adversarial_x[0].flat[place % x[0].size] = entry
        with np.errstate(all="ignore"):
            adversarial_y[0] *= np.float32(factor)
        args = (tf.constant(adversarial_x), tf.constant(adversarial_y))
        mask = np.ones(models.ROWS, bool)
        bounds = (tf.constant(clip_norm, tf.float32), tf.constant(far, tf.float32))
        with_row = sums(*args, tf.constant(mask), *bounds)
        mask[0] = False
        without = sums(*args, tf.constant(mask), *bounds)
        difference = [np.float64(a) - np.float64(b) for a, b in zip(with_row, without, strict=True)]
        assert np.sqrt(sum((d**2).sum() for d in difference)) <= clip_norm * (1 + 1e-5)

    check()


def test_half_precision_and_blocks_of_rows():
    """The loss's factor is undone at each point, and sums over blocks are those of the batch."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    base = keras.Model(inputs, layers.Dense(3, dtype="mixed_float16")(inputs))
    model = dp.DPModel(base.inputs, base.outputs)
    smoother = dp.filters.DiSK(0.5, 2.0)
    optimizer = dp.optimizers.DPSGD(
        0.1, clip_norm=0.2, noise_multiplier=0.0, batch_size=5, gradient_filter=smoother
    )
    model.compile(optimizer=optimizer, loss="mse")
    x, y = models._features(6), models._features(3)
    points = some_points(model, np.random.default_rng(0))
    sums = clipped_sums(model, (x, y), [Query(points=points, clip_norm=0.2)], loss_scale=128.0)
    plain = clipped_sums(model, (x, y), [Query(points=points, clip_norm=0.2)])
    for one, other in zip(sums.sums[0], plain.sums[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-3)


def test_the_share_that_is_clipped_is_that_of_what_is_clipped():
    base, x, y = models.dense()
    model = dp.make_private(base)
    optimizer = dp.optimizers.DPSGD(
        3.0, clip_norm=1.0, noise_multiplier=0.0, batch_size=5,
        gradient_filter=dp.filters.DiSK(0.05, 1.0),
    )  # fmt: skip
    model.compile(optimizer=optimizer, loss="mse")
    model.sampling = dp.accounting.Sampling.poisson(5, 5)
    for _ in range(2):
        model.train_on_batch(x, y)
    (query,) = optimizer.queries()
    total = at_points(model, x, y, query.points)
    norms = [np.sqrt(sum((g**2).sum() for g in example)) for example in total]
    assert clip_fraction(model, (x, y)) == pytest.approx(np.mean(np.array(norms) > 1.0))
