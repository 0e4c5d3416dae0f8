"""Sums of the rows of tables and their counts, against one example at a time."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import dp_keras_opt as dp
from dp_keras_opt.clipping import Batch, Query, Tables, clipped_sums
from tests.helpers.per_example import clip_and_sum, one_at_a_time

WORDS, ITEMS, LENGTH, C, C1 = 9, 6, 4, 0.05, 0.8


def build(mask_zero=False):
    """Two tables: words, of which there are several in an example, and one item."""
    words, item = keras.Input((LENGTH,), dtype="int32"), keras.Input((), dtype="int32")
    x = keras.layers.Embedding(WORDS, 3, mask_zero=mask_zero, name="words")(words)
    x = keras.layers.GlobalAveragePooling1D()(x)
    z = keras.layers.Embedding(ITEMS, 2, name="items")(item)
    outputs = keras.layers.Dense(2, name="out")(keras.layers.Concatenate()([x, z]))
    keras.utils.set_random_seed(0)
    return dp.DPModel([words, item], outputs)


def batch_of(rng, rows=8):
    x = (rng.integers(0, WORDS, (rows, LENGTH)), rng.integers(0, ITEMS, rows))
    x = tuple(part.astype("int32") for part in x)
    return x, rng.normal(size=(rows, 2)).astype("float32")


def loss(y, y_pred, weight=None):
    each = tf.reduce_mean(tf.square(y - y_pred), axis=-1)
    return each if weight is None else each * tf.cast(weight, each.dtype)


MODEL = build()
ASKED = Tables({0: None, 1: None}, C1)


def asked(batch, query, model=MODEL):
    """(sums as dense arrays, counts of words, counts of items)."""
    (total,) = clipped_sums(model, batch, [query], per_example_loss=loss).sums
    sums, counts = [np.array(tf.convert_to_tensor(each)) for each in total[:-1]], total[-1].numpy()
    return sums, counts[:WORDS], counts[WORDS:]


def counted(x, units):
    """Σ min(1, C₁/√k) in each touched row, of units that are lists of rows; in float64."""
    words, items = np.zeros(WORDS), np.zeros(ITEMS)
    for rows in units:
        touched = {int(w) for row in rows for w in x[0][row]}, {int(x[1][row]) for row in rows}
        share = min(1.0, C1 / np.sqrt(sum(map(len, touched)))) if rows else 0.0
        words[list(touched[0])] += share
        items[list(touched[1])] += share
    return words, items


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sets(st.integers(0, 7)), st.sampled_from(["flat", "per_layer"]))
def test_sums_and_counts_are_those_of_each_example_alone(seed, padding, style):
    x, y = batch_of(np.random.default_rng(seed))
    mask = np.array([row not in padding for row in range(8)])
    query = Query(clip_norm=C, style=style, tables=ASKED)
    sums, *counts = asked(Batch(x, y, None, mask), query)
    plain = Query(clip_norm=C, style=style)
    (expected,) = clipped_sums(MODEL, Batch(x, y, None, mask), [plain], per_example_loss=loss).sums
    for one, other in zip(sums, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-8)
    for one, other in zip(counts, counted(x, [[row] for row in np.flatnonzero(mask)]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_sums_are_clipped_as_the_specification_says():
    x, y = batch_of(np.random.default_rng(1))
    gradients = one_at_a_time(MODEL, lambda y, p: tf.reduce_sum(loss(y, p)), list(x), y)
    sums, *_ = asked(Batch(x, y), Query(clip_norm=C, tables=ASKED))
    norms = [np.sqrt(sum(np.sum(g**2) for g in each)) for each in gradients]
    assert min(norms) > C
    for one, other in zip(sums, clip_and_sum(gradients, C), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7)


def test_a_sum_has_no_other_rows_and_each_once():
    x, y = batch_of(np.random.default_rng(2), rows=2)
    (total,) = clipped_sums(MODEL, Batch(x, y), [Query(clip_norm=C, tables=ASKED)],
                            per_example_loss=loss).sums  # fmt: skip
    assert sorted(total[0].indices.numpy()) == sorted(set(x[0].ravel()))
    assert sorted(total[1].indices.numpy()) == sorted(set(x[1]))
    assert tuple(total[0].dense_shape) == (WORDS, 3)


def test_whoever_contributes_nothing_counts_nowhere():
    x, y = batch_of(np.random.default_rng(3))
    y[2] = np.nan  # its gradient is not finite
    weight = np.ones(8, "float32")
    weight[5] = 0.0  # by `zero_out`, as if it were not there
    x[0][1] = x[0][1][0]  # one word, four times
    query = Query(clip_norm=C, tables=ASKED)

    def counts(*batch):
        return clipped_sums(MODEL, Batch(*batch), [query], per_example_loss=loss).sums[0][-1]

    expected = np.concatenate(counted(x, [[row] for row in range(8) if row not in (2, 5)]))
    for run in (counts, tf.function(counts)):
        found = run(tuple(map(tf.constant, x)), tf.constant(y), tf.constant(weight))
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_rows_of_padding_are_in_no_count():
    model = build(mask_zero=True)
    x, y = batch_of(np.random.default_rng(4))
    x[0][:, 2:] = 0
    _, words, _ = asked(Batch(x, y), Query(clip_norm=C, tables=ASKED), model)
    assert words[0] == 0.0 or np.any(x[0][:, :2] == 0)
    x[0][:, :2] = np.maximum(x[0][:, :2], 1)
    _, words, _ = asked(Batch(x, y), Query(clip_norm=C, tables=ASKED), model)
    assert words[0] == 0.0 and words[1:].sum() > 0


def test_a_table_that_is_looked_up_in_twice():
    """A row counts once, whichever of two inputs brings it."""
    ones, others = (keras.Input((LENGTH,), dtype="int32") for _ in range(2))
    table, mean = keras.layers.Embedding(WORDS, 2), keras.layers.GlobalAveragePooling1D()
    model = dp.DPModel([ones, others], mean(table(ones)) * (1 + mean(table(others))))
    rng = np.random.default_rng(11)
    x = tuple(rng.integers(0, WORDS, (5, LENGTH)).astype("int32") for _ in range(2))
    y, bound = rng.normal(size=(5, 2)).astype("float32"), 10.0
    query = Query(clip_norm=C, tables=Tables({0: None}, bound))
    ((total, counts),) = clipped_sums(model, Batch(x, y), [query], per_example_loss=loss).sums
    gradients = one_at_a_time(model, lambda y, p: tf.reduce_sum(loss(y, p)), list(x), y)
    expected = clip_and_sum(gradients, C)
    np.testing.assert_allclose(tf.convert_to_tensor(total), expected[0], rtol=1e-4, atol=1e-7)
    touched = [{*x[0][row], *x[1][row]} for row in range(5)]
    for word in range(WORDS):
        assert counts[word] == sum(word in each for each in touched)


def test_rows_of_a_user_count_as_one():
    x, y = batch_of(np.random.default_rng(5))
    mask = np.array([[True, True], [True, False], [True, True], [False, False]])
    _, *counts = asked(Batch(x, y, None, mask), Query(clip_norm=C, tables=ASKED))
    expected = counted(x, [[0, 1], [2], [4, 5]])
    for one, other in zip(counts, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.floats(0.3, 3.0))
def test_one_unit_moves_sums_by_c_and_counts_by_c1(seed, users, bound):
    """Also where its words repeat, its loss is huge and its rows are trained only in part."""
    rng = np.random.default_rng(seed)
    x, y = batch_of(rng)
    y[:2] *= rng.choice([1e-3, 1.0, 1e4])
    mask = np.ones((4, 2) if users else 8, bool)
    without = mask.copy()
    without[0] = False
    trained = tf.constant(rng.random(WORDS) < 0.7)
    query = Query(clip_norm=C, tables=Tables({0: trained, 1: None}, bound))
    (one, *n), (other, *m) = (asked(Batch(x, y, None, each), query) for each in (mask, without))
    moved = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(one, other, strict=True)))
    counts = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(n, m, strict=True)))
    assert moved <= C * (1 + 1e-4) and counts <= bound * (1 + 1e-5)
    assert counts > 0.99 * min(bound, 1.0)  # nobody counts less than she may


def test_rows_that_are_not_trained_are_dropped_before_the_clip():
    x, y = batch_of(np.random.default_rng(6))
    trained = np.arange(WORDS) < 5
    query = Query(clip_norm=C, tables=Tables({0: tf.constant(trained), 1: None}, C1))
    sums, words, _ = asked(Batch(x, y), query)
    gradients = one_at_a_time(MODEL, lambda y, p: tf.reduce_sum(loss(y, p)), list(x), y)
    for each in gradients:
        each[0][~trained] = 0.0
    for one, other in zip(sums, clip_and_sum(gradients, C), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7)
    assert not words[~trained].any() and words[trained].any()


def test_without_counts_there_is_no_vector_behind():
    x, y = batch_of(np.random.default_rng(7))
    query = Query(clip_norm=C, tables=Tables({1: None}))
    (total,) = clipped_sums(MODEL, Batch(x, y), [query], per_example_loss=loss).sums
    assert len(total) == 4 and not isinstance(total[0], tf.IndexedSlices)
    assert isinstance(total[1], tf.IndexedSlices)


def tied():
    inputs = keras.Input((LENGTH,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(WORDS, 3, name="tied")
    return dp.DPModel(inputs, table(table(inputs), reverse=True))


def test_what_cannot_be_answered_by_row_is_refused():
    rng = np.random.default_rng(8)
    x = rng.integers(0, WORDS, (4, LENGTH)).astype("int32")
    y = rng.integers(0, WORDS, (4, LENGTH)).astype("int32")
    model = tied()

    def each(y, y_pred, weight=None):
        losses = keras.ops.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        return tf.reduce_mean(losses, axis=1)

    query = Query(clip_norm=C, tables=Tables({0: None}, C1))
    with pytest.raises(ValueError, match="tied/embeddings is not only looked up in"):
        clipped_sums(model, Batch(x, y), [query], per_example_loss=each)
    scale = [tf.ones(v.shape) for v in MODEL.trainable_variables]
    x, y = batch_of(rng)
    for other in ({"scale": scale}, {"square": True}, {"centre": scale}):
        with pytest.raises(ValueError, match="plain clipped sums only"):
            clipped_sums(MODEL, Batch(x, y), [Query(clip_norm=C, tables=ASKED, **other)],
                         per_example_loss=loss)  # fmt: skip


def test_a_table_is_not_read_as_a_whole():
    """TensorFlow would copy it at each step, once it is assigned by row."""
    query = Query(clip_norm=C, tables=ASKED)
    x, y = batch_of(np.random.default_rng(9))

    def read(query):
        run = tf.function(
            lambda *a: clipped_sums(MODEL, Batch(*a), [query], per_example_loss=loss).sums[0]
        )
        graph = run.get_concrete_function(tuple(map(tf.constant, x)), tf.constant(y)).graph
        reads = (op for op in graph.get_operations() if op.type == "ReadVariableOp")
        return {tuple(op.outputs[0].shape) for op in reads}

    tables = {(WORDS, 3), (ITEMS, 2)}
    assert read(Query(clip_norm=C)) >= tables and not read(query) & tables
