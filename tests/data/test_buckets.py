"""Examples of several lengths: each is padded by its own length alone, and clipped as it is."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import dp_keras_opt as dp
from dp_keras_opt.data import Buckets
from dp_keras_opt.data.buckets import split
from tests.helpers.normals import assert_exactly
from tests.helpers.per_example import assert_close, clip_and_sum

N, B, WORDS, CLIP, RATE = 60, 12, 20, 0.02, 50.0
LENGTHS = (4, 8, 20)
_rng = np.random.default_rng(0)
SIZES = np.clip(_rng.geometric(0.15, N), 1, LENGTHS[-1])
X = np.empty(N, object)
X[:] = [_rng.integers(1, WORDS, size) for size in SIZES]
TAGS = np.empty(N, object)
TAGS[:] = [words % 3 for words in X]
Y = np.array([words.sum() % 2 for words in X])
USERS = np.repeat(np.arange(N // 3), 3)
FIXED = np.zeros((N, LENGTHS[-1]), int)
for _row, _words in zip(FIXED, X, strict=True):
    _row[: len(_words)] = _words


def quiet(make, *args, **kwargs):
    """Without the warning that seeds void the amplification."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*got seed=")
        return make(*args, **kwargs)


def model_of(kind, jit_compile=False, **how):
    keras.utils.set_random_seed(1)
    layers = keras.layers
    inputs = keras.Input((None,), dtype="int64")
    hidden = layers.Embedding(WORDS, 6, mask_zero=True)(inputs)
    if kind == "attention":
        hidden = layers.MultiHeadAttention(2, 3)(hidden, hidden)
    if kind == "recurrent":
        hidden = layers.LSTM(5)(hidden)
    elif kind == "stacked cells":  # the general engine
        hidden = layers.RNN([layers.LSTMCell(5), layers.GRUCell(5)])(hidden)
    elif kind != "tags":
        hidden = layers.GlobalAveragePooling1D()(hidden)
    model = dp.DPModel(inputs, layers.Dense(3 if kind == "tags" else 2)(hidden))
    how = {"clip_norm": CLIP, "noise_multiplier": 1e-9, "batch_size": B} | how
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        dp.optimizers.DPSGD(RATE, **how), loss, metrics=["accuracy"], jit_compile=jit_compile
    )
    return model


def gradients_of(model, units, targets):
    """Of each unit alone, of its examples as they are: the gradient of their mean loss, float64."""
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    found = []
    for unit in units:
        with tf.GradientTape() as tape:
            losses = [crossentropy(targets[i][None], model(X[i][None])) for i in unit]
            loss = sum(losses) / len(losses)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        found.append([np.array(tf.convert_to_tensor(g), np.float64) for g in gradients])
    return found


def rows_of(batch):
    """(length of the bucket, words, target) of each row that counts."""
    for x, y, rows in batch.blocks:
        for words, target, mask in zip(x.numpy(), y.numpy(), np.ravel(rows.mask), strict=True):
            if mask:
                yield x.shape[1], words, target


def places_of(batch):
    """Which examples the rows of a batch are: the target is the number."""
    return [int(target) for _, _, target in rows_of(batch)]


# What comes into which bucket.


SAMPLERS = {
    "poisson": lambda data, **how: dp.data.poisson_batches(data, B, 5, seed=1, **how),
    "truncated": lambda data, **how: dp.data.poisson_batches(
        data, B, 5, max_batch_size=14, seed=1, **how
    ),
    "fixed order": lambda data, **how: dp.data.fixed_order_epochs(data, B, order_seed=1, **how),
    "balls in bins": lambda data, **how: dp.data.balls_in_bins(data, B, seed=1, **how),
    "without replacement": lambda data, **how: dp.data.without_replacement_batches(
        data, B, 5, seed=1, **how
    ),
    "users": lambda data, **how: dp.data.poisson_users(
        data, USERS, B // 3, 5, examples_per_user=2, seed=1, **how
    ),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_examples_are_those_that_are_drawn_without_buckets(sampler):
    numbers = np.arange(N)
    plain = list(quiet(SAMPLERS[sampler], (FIXED, numbers)))
    buckets = list(quiet(SAMPLERS[sampler], (X, numbers), buckets=Buckets(LENGTHS)))
    assert len(plain) == len(buckets)
    for (_, y, rows), batch in zip(plain, buckets, strict=True):
        drawn = [int(i) for i, mask in zip(y, np.ravel(rows.mask), strict=True) if mask]
        assert sorted(places_of(batch)) == sorted(drawn)
        for (x, targets, _), length in zip(batch.blocks, LENGTHS, strict=True):
            assert x.shape[1] == length and x.shape[0] == targets.shape[0]
        for length, words, i in rows_of(batch):
            np.testing.assert_array_equal(words, FIXED[i, :length])
            unit = [i]
            if sampler == "users":  # who comes where the longest of those drawn fits
                unit = [j for j in places_of(batch) if USERS[j] == USERS[i]]
            longest = max(SIZES[j] for j in unit)
            assert length == min(bound for bound in LENGTHS if bound >= longest)
        in_buckets = [
            [i for i in drawn if np.searchsorted(LENGTHS, SIZES[i]) == place] for place in range(3)
        ]
        if sampler != "users":  # in each bucket in the order of the draw
            assert places_of(batch) == [i for part in in_buckets for i in part]


@given(
    st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=2, max_size=24),
    st.sampled_from([1, 2]),
)
def test_each_unit_is_in_one_bucket_by_its_own_length(rows, per_unit):
    rows = rows[: len(rows) // per_unit * per_unit]
    sizes, mask = np.array([size for size, _ in rows]), np.array([real for _, real in rows], "f")
    column = np.empty(len(rows), object)
    column[:] = [np.full(size, place + 1) for place, size in enumerate(sizes)]
    places = np.arange(len(rows))
    parts = split(Buckets([3, 7, 12]), [column, places], mask, per_unit, places)
    kept = []
    for (words, numbers, counts), length, before in zip(parts, (3, 7, 12), (-1, 3, 7), strict=True):
        assert words.shape == (len(numbers), length) and len(numbers) % per_unit == 0
        for unit in range(0, len(numbers), per_unit):
            own = slice(unit, unit + per_unit)
            longest = max((sizes * mask)[numbers[own]], default=0)
            if counts[own].any():
                assert before < longest <= length
                np.testing.assert_array_equal(counts[own], mask[numbers[own]])
                kept += list(numbers[own])
        for row, number in zip(words, numbers, strict=True):
            expected = np.zeros(length)
            expected[: min(length, sizes[number])] = number + 1
            np.testing.assert_array_equal(row, expected)
    units = mask.reshape(-1, per_unit).any(axis=1)
    assert sorted(kept) == [i for i in places if units[i // per_unit]]
    assert len(parts[0][1]) >= per_unit  # a step always has rows


@pytest.mark.parametrize(
    "lengths, expected",
    [
        (512, (16, 32, 64, 128, 256, 512)),
        (100, (16, 32, 64, 100)),
        (8, (8,)),
        ([5, 9], (5, 9)),
        (np.int64(20), (16, 20)),
    ],
)
def test_lengths(lengths, expected):
    assert Buckets(lengths).lengths == expected


@pytest.mark.parametrize("lengths", [[], [8, 4], [4, 4], [0, 4], 0, [2.5], "64"])
def test_lengths_that_are_none(lengths):
    with pytest.raises((ValueError, TypeError), match="lengths must be"):
        Buckets(lengths)


# What is trained.


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("kind", ["attention", "tags", "recurrent", "stacked cells"])
def test_a_step_is_that_of_unpadded_examples_one_at_a_time(kind, jit_compile):
    targets = TAGS if kind == "tags" else Y
    model = model_of(kind, jit_compile)
    numbers = {FIXED[i].tobytes(): i for i in range(N)}
    batches = quiet(dp.data.poisson_batches, (X, targets), B, 1, buckets=Buckets(LENGTHS), seed=6)
    drawn = []
    for _, words, _ in rows_of(next(iter(batches))):
        key = np.zeros(LENGTHS[-1], int)
        key[: len(words)] = words
        drawn.append(numbers[key.tobytes()])
    assert len({np.searchsorted(LENGTHS, SIZES[i]) for i in drawn}) == 3
    before = model.get_weights()
    expected = clip_and_sum(gradients_of(model, [[i] for i in drawn], targets), CLIP)
    batches = quiet(dp.data.poisson_batches, (X, targets), B, 1, buckets=Buckets(LENGTHS), seed=6)
    model.fit(batches, verbose=0)
    change = [(a - b) * B / RATE for a, b in zip(before, model.get_weights(), strict=True)]
    assert_close(change, expected)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_users_and_views_are_clipped_whole(jit_compile):
    def batches():
        return quiet(
            dp.data.poisson_users,
            (X, np.arange(N)),
            USERS,
            4,
            1,
            examples_per_user=3,
            views=2,
            map=lambda x, y: (x, y),
            physical_batch_size=12,
            buckets=Buckets(LENGTHS),
            seed=2,
        ).dataset

    (batch,) = batches()
    assert all(rows.mask.shape[1] == 6 for _, _, rows in batch.blocks)
    users = sorted({USERS[i] for i in places_of(batch)})
    units = [[i for i in places_of(batch)[::2] if USERS[i] == user] for user in users]
    model = model_of("pooled", jit_compile)
    before = model.get_weights()
    expected = clip_and_sum(gradients_of(model, units, Y), CLIP)

    def with_targets(batch):
        blocks = ((x, tf.gather(Y, numbers), rows) for x, numbers, rows in batch.blocks)
        return dp.data.Blocks(tuple(blocks))

    sampling = dp.accounting.Sampling.poisson(N // 3, 4, unit="user", examples_per_unit=6)
    again = tf.data.Dataset.from_tensors(batch).map(with_targets)
    model.optimizer.batch_size = 4
    model.fit(dp.data.assume_sampling(again, sampling), verbose=0)
    change = [(a - b) * 4 / RATE for a, b in zip(before, model.get_weights(), strict=True)]
    assert_close(change, expected)


@pytest.mark.parametrize("how", [{}, {"steps_per_execution": 2}, {"run_eagerly": True}])
def test_training_is_that_of_one_length(how):
    found = []
    for data, buckets in ((FIXED, None), (X, Buckets(LENGTHS)), (X, Buckets([20]))):
        model = model_of("pooled")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.compile(
                model.optimizer, model.loss, metrics=["accuracy"], jit_compile=False, **how
            )
        batches = quiet(dp.data.poisson_batches, (data, Y), B, 4, buckets=buckets, seed=4)
        assert isinstance(batches.dataset.element_spec, dp.data.Blocks) == (
            buckets is not None and len(buckets.lengths) > 1
        )
        history = model.fit(batches, epochs=2, verbose=0)
        assert model.ledger.steps == 8
        found.append((model.get_weights(), history.history))
    for weights, history in found[1:]:
        assert_close(weights, found[0][0], 1e-5)
        for name, values in found[0][1].items():
            np.testing.assert_allclose(history[name], values, rtol=1e-5)


def of_sizes(*sizes):
    """The examples of these lengths, all of them in each batch."""
    data = np.empty(len(sizes), object)
    data[:] = [np.arange(size) % (WORDS - 1) + 1 for size in sizes]
    return data, np.zeros(len(sizes), int)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_buckets_may_be_empty(jit_compile):
    """All in the last, all in the first, and nobody at all: a step of noise."""
    model = model_of("pooled", jit_compile, batch_size=1)
    model.fit(dp.data.poisson_batches(of_sizes(19, 20), 1, 1, buckets=Buckets(LENGTHS)), verbose=0)
    model.fit(dp.data.poisson_batches(of_sizes(1, 2, 9), 1, 9, buckets=Buckets(LENGTHS)), verbose=0)
    assert model.ledger.steps == 10 and model.non_finite_examples == 0
    assert all(np.isfinite(w).all() for w in model.get_weights())
    data, targets = of_sizes(*[9] * 200)
    data[0] = data[0][:1]
    none = dp.data.poisson_batches((data, targets), 1, 1, buckets=Buckets(LENGTHS))
    before = model.get_weights()
    while True:
        batch = next(iter(none))
        if not places_of(batch):
            break
    again = tf.data.Dataset.from_tensors(batch)
    sampling = dp.accounting.Sampling.poisson(200, 1)
    history = model.fit(dp.data.assume_sampling(again, sampling), verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-8)


def test_noise_is_drawn_once_a_step():
    sigma, words = 1.5, np.zeros(N)
    inputs = keras.Input((None,), dtype="int64")
    hidden = keras.layers.Embedding(WORDS, 50, mask_zero=True)(inputs)
    model = dp.DPModel(inputs, keras.layers.GlobalAveragePooling1D()(hidden))
    model.compile(
        dp.optimizers.DPSGD(1.0, clip_norm=0.5, noise_multiplier=sigma, batch_size=B), "mse"
    )
    before = model.get_weights()
    model.fit(
        dp.data.poisson_batches(
            (X, np.zeros((N, 50)), words), B, 1, buckets=Buckets(LENGTHS), physical_batch_size=2
        ),
        verbose=0,
    )
    (change,) = (a - b for a, b in zip(before, model.get_weights(), strict=True))
    assert_exactly(change, sigma * 0.5 / B)


def test_state_that_passes_move_on_does_not_tell_how_many_were_taken():
    states = []
    for sizes in ((20,) * 30, (1, 20, 5, 6)):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((None,), dtype="int64")
        hidden = keras.layers.Embedding(WORDS, 4, mask_zero=True)(inputs)
        hidden = keras.layers.Dropout(0.5, seed=1)(keras.layers.GlobalAveragePooling1D()(hidden))
        model = dp.DPModel(inputs, keras.layers.Dense(2)(hidden))
        optimizer = dp.optimizers.DPSGD(  # with a seed, so that those of layers stay as they are
            1.0, clip_norm=1.0, noise_multiplier=1.0, batch_size=4, seed=0
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=False)
        data = of_sizes(*sizes)
        data[0][0] = data[0][0][:1]  # two lengths in any case
        batches = dp.data.poisson_batches(
            data, 4, 2, buckets=Buckets(LENGTHS), physical_batch_size=1
        )
        model.fit(batches, verbose=0)
        states.append([v.numpy() for v in model.non_trainable_variables])
    assert states[0]
    for one, other in zip(*states, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_trained_model_is_saved_and_goes_on(tmp_path):
    model = model_of("pooled", noise_multiplier=1.0)
    how = {"batch_size": B, "steps_per_epoch": 2, "buckets": Buckets(LENGTHS)}
    report = dp.callbacks.PrivacyReport(delta=1e-3)
    model.fit(dp.data.poisson_batches((X, Y), **how), verbose=0, callbacks=[report])
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    loaded.fit(dp.data.poisson_batches((X, Y), **how), verbose=0)
    assert loaded.ledger.steps == 4
    same = dp.accounting.epsilon(
        model.optimizer, dp.accounting.Sampling.poisson(N, B), steps=2, delta=1e-3
    )
    assert report.epsilon == pytest.approx(same)
    np.testing.assert_allclose(loaded.predict(FIXED[:3, :9], verbose=0).shape, (3, 2))


def test_a_training_loop_of_ones_own():
    model = model_of("pooled")
    batches = dp.data.poisson_batches((X, Y), B, 3, buckets=Buckets(LENGTHS))
    model.sampling = batches.sampling
    for batch in batches:
        model.train_on_batch(batch)
    assert model.ledger.steps == 3


# Where they come from.


def test_sources_and_functions(tmp_path):
    def expected():
        return quiet(dp.data.poisson_batches, (X, Y), B, 3, buckets=Buckets(LENGTHS), seed=5)

    def same(data, **how):
        batches = quiet(
            dp.data.poisson_batches, data, B, 3, buckets=Buckets(LENGTHS), seed=5, **how
        )
        for one, other in zip(expected(), batches, strict=True):
            tf.nest.map_structure(np.testing.assert_array_equal, one, other)

    ragged = tf.RaggedTensor.from_row_lengths(np.concatenate(X), SIZES)
    same((ragged, Y))
    same((FIXED, Y), map=lambda x, y: (x[: tf.reduce_sum(tf.cast(x > 0, tf.int32))], y))
    same((FIXED, Y), map=dp.data.PythonFunction(lambda x, y: (x[: (x > 0).sum()], y)))
    pyarrow = pytest.importorskip("pyarrow")
    same(
        pyarrow.table({"x": [words.tolist() for words in X], "y": Y}),
        map=lambda row: (row["x"], row["y"]),
    )
    pytest.importorskip("array_record")
    dp.data.write(zip(X, Y, strict=True), tmp_path / "texts")
    same(tmp_path / "texts")


def test_structures_and_strings_are_padded():
    words = np.empty(N, object)
    words[:] = [np.array([f"w{i}" for i in row], object) for row in X]
    batches = dp.data.poisson_batches(
        ({"words": words, "weights": X / 2, "one": np.arange(N)}, TAGS),
        B,
        1,
        buckets=Buckets(LENGTHS),
    )
    count = 0
    for x, y, rows in next(iter(batches)).blocks:
        for text, half, i, tags, mask in zip(
            x["words"], x["weights"], x["one"], y, np.asarray(rows.mask), strict=True
        ):
            if mask:
                size, count = SIZES[i], count + 1
                assert [w.decode() for w in text.numpy()[:size]] == list(words[i])
                assert set(text.numpy()[size:]) <= {b""}
                np.testing.assert_array_equal(half[:size], (X[i] / 2).astype("float32"))
                np.testing.assert_array_equal(tags[:size], TAGS[i])
                assert not np.any(half[size:]) and not np.any(tags[size:])
    assert count


def test_a_record_that_is_skipped_counts_in_no_bucket():
    class Damaged:
        def __len__(self):
            return N

        def __getitem__(self, indices):
            if 7 in indices:
                raise OSError("bad sector")
            return X[indices], Y[indices]

    batches = dp.data.poisson_batches(
        Damaged(), N, 1, buckets=Buckets(LENGTHS), skip_unreadable=True
    )
    assert len(list(rows_of(next(iter(batches))))) == N - 1
    assert list(batches.unreadable) == [7]


# What is refused.


def test_losses_that_change_with_the_padding_are_refused():
    inputs = keras.Input((None,), dtype="int64")
    hidden = keras.layers.Embedding(WORDS, 4)(inputs)  # no mask
    model = dp.DPModel(inputs, keras.layers.Dense(2)(keras.layers.GlobalAveragePooling1D()(hidden)))
    optimizer = dp.optimizers.DPSGD(1.0, clip_norm=1.0, noise_multiplier=1.0, batch_size=B)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(ValueError, match="sizes of x open.*changes when.*Mask the padding"):
        model.fit(dp.data.poisson_batches((X, Y), B, 2, buckets=Buckets(LENGTHS)), verbose=0)
    assert model.ledger.steps == 0
    model.fit(dp.data.poisson_batches((X, Y), B, 2, buckets=Buckets([20])), verbose=0)  # one length


def test_what_is_longer_is_an_error_that_names_it_or_cut():
    batches = dp.data.poisson_batches((X, Y), N, 1, buckets=Buckets([4, 8]))
    first = int(np.flatnonzero(SIZES.max() == SIZES)[0])
    with pytest.raises(ValueError, match=f"Example {first} has the length {SIZES.max()}"):
        list(batches)
    for lengths in ([4, 8], [8]):
        batches = dp.data.poisson_batches((X, Y), N, 1, buckets=Buckets(lengths, cut=True))
        batch = next(iter(batches))
        if len(lengths) > 1:
            assert len(list(rows_of(batch))) == N
        else:
            assert batch[0].shape[1] == 8 and np.sum(batch[2].mask) == N


@pytest.mark.parametrize(
    "data, how, match",
    [
        ((FIXED, Y), {}, "for examples of several lengths.*60 looked at.*Leave it out"),
        ((X, Y), {"buckets": 512}, r"buckets must be dp_keras_opt.data.Buckets, such as"),
        ((X, Y), {"buckets": None}, "must be a dense array.*pad what is of"),
    ],
)
def test_refuses(data, how, match):
    with pytest.raises((ValueError, TypeError), match=match):
        dp.data.poisson_batches(data, B, **({"buckets": Buckets(20)} | how))


def test_public_rows_and_functions_of_padded_examples():
    batches = dp.data.poisson_batches((X, Y), B, 2, buckets=Buckets(LENGTHS))
    with pytest.raises(ValueError, match="Public rows do not go with buckets.*Buckets"):
        dp.data.with_public(batches, (FIXED[:3], Y[:3]))
    with pytest.raises(TypeError, match="padded already.*map= of the sampler"):
        batches.map(lambda x, y: (x, y))
    of_one = dp.data.poisson_batches((X, Y), B, 2, buckets=Buckets([20]))
    x, _, rows = next(iter(dp.data.with_public(of_one, (FIXED[:3], Y[:3]))))
    assert x.shape[1] == 20 and np.sum(rows.public) == pytest.approx(1)
