"""User-level privacy: all rows of a user are clipped as one, whatever they hold.

The oracle takes one user at a time: `tf.GradientTape` of the mean loss of that user's own rows,
then clipping in float64. Rows of padding hold NaN in these tests, so that none may count.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import dp_keras_opt as dp
from dp_keras_opt.clipping import Batch, Query, clipped_sums
from dp_keras_opt.clipping.engines import Engines, engines_for
from tests.helpers.per_example import assert_close, clip_and_sum

layers = keras.layers


# Models, each with a function of a generator and a number that draws so many inputs.


def dense():
    inputs = keras.Input((6,))
    hidden = layers.Dense(7, activation="tanh")(inputs)
    return keras.Model(inputs, layers.Dense(2)(hidden)), lambda rng, n: rng.normal(size=(n, 6))


def wide_dense_on_sequence():  # the norm is that of a Gram matrix
    inputs = keras.Input((2, 40))
    hidden = layers.Dense(40, activation="tanh", use_bias=False)(inputs)
    outputs = layers.Dense(2)(layers.Flatten()(hidden))
    return keras.Model(inputs, outputs), lambda rng, n: rng.normal(size=(n, 2, 40))


def attention():
    inputs = keras.Input((3, 4))
    attended = layers.MultiHeadAttention(2, 3)(inputs, inputs)
    hidden = layers.Flatten()(layers.LayerNormalization()(attended))
    return keras.Model(inputs, layers.Dense(2)(hidden)), lambda rng, n: rng.normal(size=(n, 3, 4))


class Tied(layers.Layer):
    """An embedding whose table is also the output projection."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = layers.ReversibleEmbedding(5, 3)

    def call(self, ids):
        return self.table(keras.ops.mean(self.table(ids), axis=1), reverse=True)


def tied_embedding():
    ids = keras.Input((3,), dtype="int32")
    outputs = layers.Dense(2)(Tied()(ids))
    return keras.Model(ids, outputs), lambda rng, n: rng.integers(0, 5, (n, 3)).astype("int32")


def embedding():
    ids = keras.Input((), dtype="int32")
    outputs = layers.Dense(2)(layers.Embedding(4, 3)(ids))
    return keras.Model(ids, outputs), lambda rng, n: rng.integers(0, 4, n).astype("int32")


def convolution():
    inputs = keras.Input((5, 4, 2))
    hidden = layers.Conv2D(4, 2, groups=2, activation="tanh")(inputs)
    outputs = layers.Dense(2)(layers.Flatten()(hidden))
    return keras.Model(inputs, outputs), lambda rng, n: rng.normal(size=(n, 5, 4, 2))


def lstm():
    inputs = keras.Input((3, 2))
    return (
        keras.Model(inputs, layers.Dense(2)(layers.LSTM(4)(inputs))),
        lambda rng, n: rng.normal(size=(n, 3, 2)),
    )


MODELS = [
    dense, wide_dense_on_sequence, attention, embedding, convolution, lstm,
    *([tied_embedding] if hasattr(layers, "ReversibleEmbedding") else []),
]  # fmt: skip


def compiled(base, **kwargs):
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=4)
    model = dp.make_private(base)
    model.compile(optimizer=optimizer, loss="mse", **kwargs)
    return model


def people(draw_x, counts, weighted=False, seed=0):
    """For each user a tuple (x, y, weight) of so many rows; the gradients of users are alike."""
    rng, users = np.random.default_rng(seed), []
    for count in counts:
        x, y = draw_x(rng, count), rng.normal(size=2) + rng.normal(size=(count, 2)) / 3
        x = x.astype("float32") if x.dtype.kind == "f" else x
        weight = rng.uniform(0.2, 2, count) if weighted else np.ones(count)
        users.append((x, y.astype("float32"), weight.astype("float32")))
    return users


def blocks(users, size, empty=()):
    """The `Batch` of these users, K = `size`; padding is NaN, the `empty` users are all padding."""

    def block(part):
        parts = [user[part] for user in users]
        filler = np.nan if parts[0].dtype.kind == "f" else 0
        full = np.full((len(users), size, *parts[0].shape[1:]), filler, parts[0].dtype)
        for rows, own in zip(full, parts, strict=True):
            rows[: len(own)] = own
        return tf.constant(full.reshape(-1, *full.shape[2:]))

    mask = np.arange(size) < np.array([[len(user[1])] for user in users])
    mask[list(empty)] = False
    return Batch(block(0), block(1), block(2), tf.constant(mask))


def one_user_at_a_time(model, users):
    """float64 gradients of each user's mean weighted loss, None for nobody's."""
    gradients = []
    for x, y, weight in users:
        with tf.GradientTape() as tape:
            errors = tf.square(y - model(tf.constant(x), training=True))
            loss = tf.reduce_mean(tf.reduce_mean(errors, axis=1) * weight)
        found = tape.gradient(loss, [v.value for v in model.trainable_variables])
        gradients.append([np.array(tf.convert_to_tensor(g), np.float64) for g in found])
    return gradients


def whole(gradients):
    return [np.sqrt(sum((g**2).sum() for g in user)) for user in gradients]


# Gradients, norms and sums.


@pytest.mark.representatives(7)
@pytest.mark.parametrize("whole_model", [False, True], ids=["per layer", "whole model"])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_clipped_sum_is_that_of_one_user_at_a_time(make, whole_model):
    base, draw_x = make()
    model, users = compiled(base), people(draw_x, (3, 1, 4, 2), weighted=True)
    gradients = one_user_at_a_time(base, users)
    median = float(np.median(whole(gradients)))  # binds for half of the users
    rng = np.random.default_rng(3)
    scale = [rng.uniform(0.2, 2.0, v.shape).astype("float32") for v in model.trainable_variables]
    scaled = [tf.constant(s) for s in scale]
    queries = (
        Query(clip_norm=np.inf),
        Query(clip_norm=median),
        Query(clip_norm=median, normalize=True),
        Query(clip_norm=median, scale=scaled),
        Query(clip_norm=median, scale=scaled, square=True),
    )
    engines = Engines((), (model,)) if whole_model else engines_for(model)
    result = clipped_sums(model, blocks(users, 4), queries, engines)
    assert_close(result.sums[0], clip_and_sum(gradients, np.inf))
    assert_close(result.sums[1], clip_and_sum(gradients, median))
    assert_close(result.sums[2], clip_and_sum(gradients, median, normalize=True))
    assert_close(result.sums[3], clip_and_sum(gradients, median, scale=scale))
    assert_close(result.sums[4], clip_and_sum(gradients, median, scale=scale, square=True))
    assert int(result.non_finite) == 0


def clip_by_parts(gradients, parts, bounds, order):
    """Σ clip of the variables of each part to its bound, in the norm of this order."""
    total = [np.zeros_like(g) for g in gradients[0]]
    for user in gradients:
        for indices, bound in zip(parts, bounds, strict=True):
            entries = np.concatenate([user[i].ravel() for i in indices])
            factor = min(1.0, bound / max(np.linalg.norm(entries, order), 1e-300))
            for i in indices:
                total[i] += factor * user[i]
    return total


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    spare=st.integers(0, 2),
    model=st.sampled_from([dense, embedding, attention]),
    kind=st.sampled_from(["l1", "per_layer", "per_layer, l1", "proportions"]),
    weighted=st.booleans(),
    seed=st.integers(0, 99),
)
def test_ragged_users_in_each_kind_of_clipping(counts, spare, model, kind, weighted, seed):
    keras.utils.set_random_seed(seed)
    base, draw_x = model()
    model, users = compiled(base), people(draw_x, counts, weighted, seed)
    gradients = one_user_at_a_time(base, users)
    order = 1 if "l1" in kind else 2
    owners = [[i for i, v in enumerate(base.trainable_variables) if v.path.startswith(layer.path)]
              for layer in (part for part in base._flatten_layers() if part.trainable_variables)
              if not list(layer._flatten_layers(include_self=False))]  # fmt: skip
    owners = [indices for indices in owners if indices]
    names = list(dp.clipping.groups.variables_by_layer(model))
    shares = np.linspace(1, 2, len(names)) if kind == "proportions" else np.ones(len(names))
    bound = 0.3 * float(np.median([np.linalg.norm(np.concatenate([g.ravel() for g in user]), order)
                                   for user in gradients]))  # fmt: skip
    style = dict(zip(names, shares.tolist(), strict=True)) if kind == "proportions" else "per_layer"
    if kind == "l1":
        style, owners, shares = "flat", [range(len(gradients[0]))], np.ones(1)
    assert sorted(i for indices in owners for i in indices) == list(range(len(gradients[0])))
    query = Query(clip_norm=bound, norm="l1" if order == 1 else "l2", style=style)
    result = clipped_sums(model, blocks(users, max(counts) + spare), (query,))
    bounds = bound * shares / np.linalg.norm(shares, order)
    assert_close(result.sums[0], clip_by_parts(gradients, owners, bounds, order))


def test_norms_of_users():
    base, draw_x = dense()
    model, users = compiled(base), people(draw_x, (3, 1, 4, 2), weighted=True)
    expected = whole(one_user_at_a_time(base, users))
    for rows in (1, 9, 100):
        found = dp.clipping.per_example_norms(model, blocks(users, 4), batch_size=rows)
        np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_one_row_a_user_is_clipping_by_row():
    base, draw_x = dense()
    model, users = compiled(base), people(draw_x, (1,) * 5)
    batch = blocks(users, 1, empty=[2])
    by_row = batch._replace(mask=tf.reshape(batch.mask, [-1]))
    (ours,), (theirs,) = (clipped_sums(model, b, (Query(clip_norm=0.1),)).sums
                          for b in (batch, by_row))  # fmt: skip
    assert_close(ours, [t.numpy() for t in theirs], rtol=1e-6)


def test_public_rows_are_no_users():
    base, draw_x = dense()
    model, users = compiled(base), people(draw_x, (2, 3))
    others = people(draw_x, (2, 1), seed=5)  # three public rows, and one of padding
    both = blocks([*users, *others], 3, empty=[2, 3])
    public = np.float32([0] * 6 + [1 / 3, 1 / 3, 0, 1 / 3, 0, 0])
    alone = [
        tuple(part[i : i + 1] for part in user) for user in others for i in range(len(user[1]))
    ]
    gradients = one_user_at_a_time(base, alone)
    flat = np.array([np.concatenate([g.ravel() for g in one]) for one in gradients])
    rng = np.random.default_rng(4)
    directions = [rng.normal(size=(1, *v.shape)) for v in model.trainable_variables]
    queries = (
        Query(clip_norm=0.1),
        Query(population="public"),
        Query(population="public", directions=[tf.constant(d, tf.float32) for d in directions]),
    )
    sums = clipped_sums(model, both._replace(public=tf.constant(public)), queries).sums
    assert_close(sums[0], clip_and_sum(one_user_at_a_time(base, users), 0.1))
    vector = [np.concatenate([np.ravel(t) for t in part]) for part in (*sums[1:], directions)]
    np.testing.assert_allclose(vector[0], flat.mean(axis=0), rtol=1e-4, atol=1e-5)
    moment = flat.T @ flat @ vector[2] / 3
    np.testing.assert_allclose(vector[1], moment, rtol=1e-3, atol=1e-4 * np.abs(moment).max())


# What a neighbouring data set can change.


def distance(one, other):
    pairs = zip(one, other, strict=True)
    return np.sqrt(sum(np.sum((np.float64(a) - np.float64(b)) ** 2) for a, b in pairs))


@pytest.mark.representatives(6)
@pytest.mark.parametrize("normalize", [False, True], ids=["clip", "normalize"])
@pytest.mark.parametrize("make", [dense, wide_dense_on_sequence, embedding, convolution, lstm])
def test_one_user_moves_the_sums_by_at_most_the_clip_norm(make, normalize):
    base, draw_x = make()
    model, size = compiled(base), 3
    batch = blocks(people(draw_x, (3, 3, 3, 3)), size)  # the last two are one user and another

    @tf.function
    def sums(x, y, mask, clip_norm):
        query = Query(clip_norm=clip_norm, normalize=normalize)
        queries = (query, query._replace(square=True))
        return clipped_sums(model, Batch(x, y, None, mask), queries).sums

    numbers = st.sampled_from([np.nan, np.inf, -np.inf, 0.0, 1e30, -1e30, 1e19, 1e4, 1e-30])

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(
        clip_norm=st.floats(1e-3, 1.0),
        places=st.lists(st.tuples(st.integers(6, 11), st.integers(0, 99), numbers), max_size=4),
        factors=st.lists(st.one_of(st.just(1.0), numbers), min_size=6, max_size=6),
        own=st.lists(st.booleans(), min_size=6, max_size=6),
    )
    def check(clip_norm, places, factors, own):
        x, y, mask = batch.x.numpy(), batch.y.numpy(), batch.mask.numpy()
        for row, place, entry in places:
            if x.dtype == np.float32:
                x[row].flat[place % x[row].size] = entry
        with np.errstate(all="ignore"):
            y[6:] *= np.float32(factors)[:, None]
        mask[2:] = np.reshape(own, (2, 3))  # rows left out hold what they hold

        def of(*there):
            shown = mask & np.isin(np.arange(4), there)[:, None]
            return sums(tf.constant(x), tf.constant(y), tf.constant(shown), tf.constant(clip_norm))

        without, first, second = of(0, 1), of(0, 1, 2), of(0, 1, 3)
        for query, bound in enumerate((clip_norm, clip_norm**2)):
            assert distance(first[query], without[query]) <= bound * (1 + 1e-5)
            assert distance(second[query], without[query]) <= bound * (1 + 1e-5)
            assert distance(first[query], second[query]) <= 2 * bound * (1 + 1e-5)

    check()


def test_without_grouping_a_user_moves_the_sum_by_more():
    """The sabotaged engine, which clips row by row, must fail what the engine passes."""
    base, draw_x = dense()
    model, users = compiled(base), people(draw_x, (4, 4), seed=1)
    (x, y, w), bound = users[1], 1e-3
    users[1] = x[[0] * 4], y[[0] * 4], w  # four times the same
    batches = [blocks(users, 4, empty) for empty in ((), (1,))]
    by_row = [b._replace(mask=tf.reshape(b.mask, [-1])) for b in batches]
    moved = [
        distance(*(clipped_sums(model, b, (Query(clip_norm=bound),)).sums[0] for b in pair))
        for pair in (batches, by_row)
    ]
    np.testing.assert_allclose(moved, [bound, 4 * bound], rtol=1e-3)


def test_what_is_not_finite_zeroes_its_user_and_nobody_else():
    base, draw_x = dense()
    model, users = compiled(base), people(draw_x, (3, 2, 3))
    good = clipped_sums(model, blocks(users, 3, [1]), (Query(clip_norm=0.1),)).sums[0]
    users[1][0][1, 2] = np.nan  # in one of two rows
    result = clipped_sums(model, blocks(users, 3), (Query(clip_norm=0.1),))
    for a, b in zip(result.sums[0], good, strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(result.non_finite) == 1


def test_a_mask_of_unknown_width_is_not_taken_for_one_by_row():
    base, draw_x = dense()
    batch, model = blocks(people(draw_x, (2, 2)), 2), compiled(base)

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.bool)])
    def sums(mask):
        return clipped_sums(model, batch._replace(mask=mask), (Query(clip_norm=0.1),)).sums

    with pytest.raises(TypeError):
        sums(batch.mask)
