"""How somebody in good faith could make ε false with data of their own; and what becomes of it.

One example more or fewer must move a clipped sum by the clip norm at most: so a row must be that of
its index alone, padding must be nothing, and a unit must be clipped whole, and come as accounted.
"""

import dataclasses
import os
import pathlib
import threading
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.data import doubts
from dp_keras_opt.data.samplers import random_groups

N, B, K, CLIP = 37, 8, 3, 0.05
_rng = np.random.default_rng(0)
X = _rng.normal(size=(N, 4)).astype("float32")
Y = np.arange(N, dtype="float32")[:, None]
USERS = np.arange(N) // 3


class Own:
    """A source as it should be."""

    def __len__(self):
        return N

    def __getitem__(self, indices):
        return X[indices], Y[indices]


def _model(batch_size=B, noise_multiplier=0.0, **compiled):
    inputs = keras.Input((4,))
    model = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
    model.set_weights([np.full(w.shape, 0.1, "float32") for w in model.get_weights()])
    optimizer = dp.optimizers.DPSGD(
        1.0, clip_norm=CLIP, noise_multiplier=noise_multiplier, batch_size=batch_size
    )
    model.compile(optimizer, "mse", jit_compile=False, **compiled)
    return model


def _moved(model, batches):
    """What a fit moves the weights by; without noise."""
    before = model.get_weights()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(batches, verbose=0)
    parts = zip(before, model.get_weights(), strict=True)
    return np.concatenate([(old - new).ravel() for old, new in parts])


def _clipped(rows):
    """The sum of the clipped gradients of these examples at the first weights, by NumPy."""
    inputs = np.hstack([X[rows], np.ones((len(rows), 1))])
    gradients = 2 * (0.1 * inputs.sum(axis=1, keepdims=True) - Y[rows]) * inputs
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    assert (norms > CLIP).all()
    return np.sum(gradients * CLIP / norms, axis=0)


# Sources that give other rows than those that were asked for.


class Reversed(Own):
    """As where a database gives rows in an order of its own: users get the rows of others."""

    def __getitem__(self, indices):
        return X[indices][::-1], Y[indices][::-1]


class OfTheFront(Own):
    def __getitem__(self, indices):
        return X[: len(indices)], Y[: len(indices)]


class Normalized(Own):
    """By the mean of what is read together: one example would move the rows of all others."""

    def __getitem__(self, indices):
        return X[indices] - X[indices].mean(axis=0), Y[indices]


@pytest.mark.parametrize("source", [Reversed, OfTheFront, Normalized])
@pytest.mark.parametrize("sampler", ["poisson", "users"])
def test_rows_that_depend_on_what_else_is_read_are_refused(source, sampler):
    with pytest.raises(
        ValueError, match="Example .* another one when it is asked for beside other"
    ):
        if sampler == "poisson":
            dp.data.poisson_batches(source(), B)
        else:
            dp.data.poisson_users(source(), USERS, 3, examples_per_user=2)


def test_augmentation_in_a_source_is_none_of_that():
    class Augmented(Own):
        def __getitem__(self, indices):
            return X[indices] + np.random.normal(size=(len(indices), 1)), Y[indices]

    class Strings(Own):
        def __getitem__(self, indices):
            texts = np.array(["", "a\0", "é", "longer"], object)[indices % 4]
            ragged = np.empty(len(indices), object)
            ragged[:] = [np.arange(i % 3 + 1) for i in indices]
            return {"text": texts, "ids": ragged, "nan": np.full(len(indices), np.nan)}

    with pytest.warns(UserWarning, match="others each time"):
        assert len(dp.data.poisson_batches(Augmented(), B)) == 5
    length = tf.strings.length
    batches = dp.data.poisson_batches(
        Strings(), B, map=lambda row: (length(row["text"]), row["ids"][0])
    )
    assert len(list(batches)) == 5


def test_a_pydataset_of_batches_draws_a_warning():
    class OfBatches(keras.utils.PyDataset):
        def __len__(self):
            return 9

        def __getitem__(self, index):
            return X[4 * index : 4 * index + 4], Y[4 * index : 4 * index + 4]

    with pytest.warns(UserWarning, match="OfBatches look like batches of 4 rows") as found:
        dp.data.poisson_batches(OfBatches(), 2)
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dp.data.poisson_batches(OneByOne(), 2, map=lambda x, y: (x, y))


class Together(Own):
    """Rows that are asked for together, as data sets of PyTorch may have."""

    batch = 1

    def __len__(self):
        return N // self.batch

    def __getitem__(self, index):
        rows = slice(self.batch * index, self.batch * (index + 1))
        return (X[index], Y[index]) if self.batch == 1 else (X[rows], Y[rows])

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class TogetherInBatches(Together):
    batch = 4


def test_batches_of_other_libraries_draw_a_warning():
    datasets, grain = pytest.importorskip("datasets"), pytest.importorskip("grain")
    pairs = grain.MapDataset.source(list(zip(X, Y, strict=True)))
    rows = datasets.Dataset.from_dict({"x": X, "y": Y})
    map = {"map": lambda row: (row["x"], row["y"])}
    for data, how in [(pairs, {}), (rows, map), (Together(), {})]:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            dp.data.poisson_batches(data, 2, **how)
    for data, how in [(pairs.batch(4), {}), (rows.batch(4), map), (TogetherInBatches(), {})]:
        with pytest.warns(UserWarning, match="look like batches of 4 rows") as found:
            dp.data.poisson_batches(data, 2, **how)
        assert found[0].filename == __file__


def test_a_data_set_is_read_as_it_was_given():
    """With a transform that was set on the object later, rows were centred by others of a batch."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": X, "y": Y})
    rows.set_format("numpy")
    batches = dp.data.without_replacement_batches(rows, 4, map=lambda row: (row["x"], row["y"]))
    rows.set_transform(lambda batch: {name: np.zeros_like(batch[name]) for name in batch})
    x, *_ = next(iter(batches))
    assert np.all(np.any(np.isclose(x.numpy()[:, None], X[None]).all(axis=2), axis=1))
    assert not np.all(x.numpy() == 0)


def repeated(kind):
    if kind.startswith("tensorflow"):
        examples = tf.data.Dataset.from_tensor_slices((X, Y))
        return {
            "tensorflow": examples.repeat(3),
            "tensorflow, within": examples.repeat(3).map(lambda x, y: (x, y)).take(5),
            "tensorflow, endless": examples.repeat().take(100),
            "tensorflow, to itself": examples.concatenate(examples),
        }[kind]
    if kind == "grain":
        grain = pytest.importorskip("grain")
        return grain.MapDataset.source(list(zip(X, Y, strict=True))).repeat(3).shuffle(seed=1)
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": X, "y": Y})
    if kind == "arrow":
        return pytest.importorskip("pyarrow").concat_tables([rows.data.table] * 2)
    return rows.repeat(3) if kind == "hugging face" else rows.select([0, 1, 2, 0])


@pytest.mark.parametrize("kind", [
    "tensorflow", "tensorflow, within", "tensorflow, endless", "tensorflow, to itself", "grain",
    "hugging face", "arrow", "indices",
])  # fmt: skip
def test_repeated_examples_are_refused(kind):
    with pytest.raises(ValueError, match="its examples several times"):
        dp.data.poisson_batches(repeated(kind), 2, map=lambda *row: (row[0], row[0]))


def test_what_is_not_repeated_is_taken():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": X, "y": Y})
    parts = datasets.concatenate_datasets([rows.select(range(5)), rows.select(range(5, 9))])
    for data in (rows.select([3, 1, 2]), parts, rows.shuffle(seed=1), rows.shard(3, 1)):
        batches = dp.data.poisson_batches(data, 2, map=lambda row: (row["x"], row["y"]))
        assert batches.sampling.num_examples == len(data)
    once = tf.data.Dataset.from_tensor_slices((X, Y)).repeat(1)
    assert dp.data.poisson_batches(once, 2).sampling.num_examples == N


def test_windows_of_a_series_are_taken():
    """Keras repeats the beginnings of all windows beside the number of each."""
    windows = keras.utils.timeseries_dataset_from_array(X, Y, 3, batch_size=None)
    assert dp.data.poisson_batches(windows, 2).sampling.num_examples == N - 2


def test_an_order_that_changes_is_not_fixed():
    examples, size = tf.data.Dataset.from_tensor_slices((X, Y)), 3
    fixed = dp.accounting.Sampling.fixed_order(N, size)
    shuffled = examples.shuffle(N)
    with pytest.raises(ValueError, match="shuffled anew"):
        dp.data.assume_sampling(shuffled.batch(size).prefetch(1), fixed)
    once = examples.shuffle(N, reshuffle_each_iteration=False)
    for data in (once, shuffled.cache(), examples):
        dp.data.assume_sampling(data.batch(size), fixed)
    dp.data.assume_sampling(shuffled.batch(size), dp.accounting.Sampling.shuffled(N, size))


class _Reshuffled(keras.utils.PyDataset):
    """As Keras's guides have it."""

    def __init__(self):
        super().__init__()
        self.order = np.arange(N)

    def __len__(self):
        return -(-N // 3)

    def __getitem__(self, index):
        rows = self.order[3 * index : 3 * index + 3]
        return X[rows], Y[rows]


class _AtTheEnd(_Reshuffled):
    def on_epoch_end(self):
        np.random.default_rng().shuffle(self.order)


class _AtTheBeginning(_Reshuffled):
    def on_epoch_begin(self):
        np.random.default_rng().shuffle(self.order)


def _interleaved(deterministic):
    parts = tf.data.Dataset.range(3)
    return parts.interleave(
        lambda part: tf.data.Dataset.from_tensor_slices((X, Y)).shard(3, part),
        num_parallel_calls=2,
        deterministic=deterministic,
    )


def _mapped(deterministic):
    examples = tf.data.Dataset.from_tensor_slices((X, Y))
    return examples.map(lambda x, y: (x, y), num_parallel_calls=2, deterministic=deterministic)


@pytest.mark.parametrize("by_option", [False, True])
@pytest.mark.parametrize("make", [_interleaved, _mapped])
def test_an_order_by_what_is_read_first_is_not_fixed(make, by_option):
    """ε = 6.2 was 5.5, of correlated noise, six passes and an interleaved data set."""
    fixed, options = dp.accounting.Sampling.fixed_order(N, 3), tf.data.Options()
    for deterministic in (True, None):
        dp.data.assume_sampling(make(deterministic).batch(3).prefetch(1), fixed)
    options.deterministic = False
    raced = make(None).with_options(options) if by_option else make(False)
    with pytest.raises(ValueError, match="may come in another in each.*deterministic=False"):
        dp.data.assume_sampling(raced.batch(3).prefetch(1), fixed)
    dp.data.assume_sampling(raced.batch(3), dp.accounting.Sampling.shuffled(N, 3))


@pytest.mark.parametrize("kind", [_AtTheEnd, _AtTheBeginning])
def test_a_sequence_that_shuffles_itself_is_not_in_a_fixed_order(kind):
    """ε = 6.7 was 5.5, of correlated noise and six passes."""
    fixed = dp.accounting.Sampling.fixed_order(N, 3)
    dp.data.assume_sampling(_Reshuffled(), fixed)
    with pytest.raises(ValueError, match="may come in another in each.*on_epoch_end of their own"):
        dp.data.assume_sampling(kind(), fixed)
    dp.data.assume_sampling(kind(), dp.accounting.Sampling.shuffled(N, 3))


def _mapped_within(data, deterministic=None):
    return data.map(lambda x, y: (x, y), num_parallel_calls=2, deterministic=deterministic)


@pytest.mark.parametrize("how", ["flat_map", "interleave"])
@pytest.mark.parametrize("is_raced", [False, True])
def test_an_order_that_changes_within_the_parts_is_not_fixed(how, is_raced):
    fixed, parts = dp.accounting.Sampling.fixed_order(N, 3), tf.data.Dataset.range(3)

    def part_of(changes):
        def part(number):
            rows = tf.data.Dataset.from_tensor_slices((X, Y)).shard(3, number)
            if is_raced:
                return _mapped_within(rows, False if changes else None)
            return rows.shuffle(9, seed=1, reshuffle_each_iteration=changes)

        return part

    dp.data.assume_sampling(getattr(parts, how)(part_of(False)).batch(3), fixed)
    with pytest.raises(ValueError, match="may come in another in each"):
        dp.data.assume_sampling(getattr(parts, how)(part_of(True)).batch(3), fixed)


def test_loaders_of_grain_that_repeat_what_they_shuffle_are_not_in_a_fixed_order():
    grain = pytest.importorskip("grain.python")
    examples = grain.MapDataset.source(list(zip(X, Y, strict=True)))
    for data, anew in (
        (examples, False),
        (examples.shuffle(seed=1), False),  # in one order
        (examples.repeat(2), False),
        (examples.shuffle(seed=1).repeat(2).batch(3), True),
        (examples.shuffle(seed=1).repeat(2).to_iter_dataset().batch(3), True),
    ):
        assert doubts.is_reshuffled(data) == anew
    for shuffle in (False, True):
        for epochs in (1, 2):
            sampler = grain.IndexSampler(
                N, grain.NoSharding(), shuffle=shuffle, num_epochs=epochs, seed=1
            )
            loader = grain.DataLoader(data_source=list(X), sampler=sampler)
            assert doubts.is_reshuffled(loader) == (shuffle and epochs > 1)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_of_pytorch_that_shuffles_is_not_in_a_fixed_order(shuffle):
    data = pytest.importorskip("torch.utils.data")
    rows = list(zip(X, Y, strict=True))
    sampler = data.RandomSampler(rows) if shuffle else data.SequentialSampler(rows)
    in_batches = data.BatchSampler(sampler, 3, drop_last=False)
    loaders = [
        data.DataLoader(rows, batch_size=3, shuffle=shuffle),
        data.DataLoader(rows, batch_sampler=in_batches),
    ]
    assert [doubts.is_reshuffled(loader) for loader in loaders] == [shuffle] * 2


def test_the_folders_of_a_path_are_not_walked_as_data():
    """They are its `parents`, each with its own: of forty folders a walk would not end."""
    doubts.refuse_copies(pathlib.Path("/".join("folder" for _ in range(40))))


def test_no_rows_of_hugging_face_are_no_copies():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [1.0, 2.0, 3.0]}).shuffle(seed=0)
    doubts.refuse_copies(rows.filter(lambda row: False, keep_in_memory=True))


def test_a_transform_of_hugging_face_sees_one_row_at_a_time():
    """What it takes the mean of is a row, also where random numbers hide that from any check."""
    datasets = pytest.importorskip("datasets")
    seen = []

    def centred(rows):
        x = np.array(rows["x"], "float32")
        seen.append(len(x))
        return {"x": x - x.mean(axis=0) + np.random.normal(size=x.shape), "y": rows["y"]}

    rows = datasets.Dataset.from_dict({"x": X, "y": Y}).with_transform(centred)
    batches = dp.data.poisson_batches(rows, B, map=lambda row: (row["x"], row["y"]))
    assert len(list(batches)) == len(batches)
    assert set(seen) == {1}


def test_random_rows_that_are_read_together_draw_a_warning():
    class Centred(Own):
        def __getitem__(self, indices):
            x = X[indices]
            return x - x.mean(axis=0) + np.random.normal(size=x.shape), Y[indices]

    with pytest.warns(UserWarning, match="depends on those that are asked for") as found:
        dp.data.poisson_batches(Centred(), B)
    assert found[0].filename == __file__


DATASET = tf.data.Dataset.from_tensor_slices(np.zeros((12, 3)))
BATCHES = DATASET.batch(4)
SLICES = tf.data.Dataset.from_tensor_slices


@pytest.mark.parametrize("dataset", [
    BATCHES, DATASET.batch(4, num_parallel_calls=2), DATASET.padded_batch(4), BATCHES.rebatch(2),
    DATASET.ragged_batch(4), BATCHES.concatenate(BATCHES), BATCHES.cache().prefetch(1).take(2),
    tf.data.Dataset.zip((BATCHES, BATCHES)), BATCHES.map(tf.square).shuffle(3).repeat(2),
    keras.utils.timeseries_dataset_from_array(np.arange(9.0), np.arange(9.0), 2),
])  # fmt: skip
def test_what_is_in_batches_is_known(dataset):
    assert doubts.is_batched(dataset)


@pytest.mark.parametrize("dataset", [
    DATASET, DATASET.rebatch(4), BATCHES.unbatch(), BATCHES.flat_map(SLICES),
    BATCHES.interleave(SLICES), BATCHES.interleave(SLICES, num_parallel_calls=2),
    BATCHES.concatenate(DATASET), tf.data.Dataset.zip((BATCHES, DATASET)), DATASET.window(4),
    tf.data.Dataset.from_generator(lambda: [[1.0]], output_signature=tf.TensorSpec([None])),
])  # fmt: skip
def test_examples_are_not_taken_for_batches(dataset):
    assert not doubts.is_batched(dataset)


def test_a_source_of_one_example_and_of_examples_that_cannot_be_read():
    class One(Own):
        def __len__(self):
            return 1

    class Damaged(Own):
        def __getitem__(self, indices):
            if N - 1 in indices:
                raise OSError("bad sector")
            return super().__getitem__(indices)

    assert len(list(dp.data.poisson_batches(One(), 1))) == 1
    batches = dp.data.poisson_batches(Damaged(), N, 1, skip_unreadable=True)
    ((_, _, rows),) = batches
    assert np.sum(rows.mask) == N - 1


def test_records_that_are_there_twice_are_two():
    """Each is an example of its own: whoever is in both needs `users`, which clips them as one."""
    twice = np.repeat(np.arange(10), 2)
    moved = _moved(_model(20), dp.data.poisson_batches((X[twice], Y[twice]), 20, 1))
    np.testing.assert_allclose(moved, 2 * _clipped(np.arange(10)) / 20, rtol=1e-4)
    users = dp.data.poisson_users((X[twice], Y[twice]), twice, 10, 1, examples_per_user=2)
    moved = _moved(_model(10), users)
    np.testing.assert_allclose(moved, _clipped(np.arange(10)) / 10, rtol=1e-4)


# Padding.


@pytest.mark.parametrize("sampler", ["poisson", "users", "views", "skipped"])
def test_padding_contributes_nothing_whatever_map_makes_of_it(sampler):
    """Of example 0, which pads, map makes what is huge or NaN; it is drawn in none of the steps."""

    def spoilt(x, y):
        return tf.where(y[0] == 0, x * np.nan, x), tf.where(y[0] == 0, 1e30, y)

    how = {"map": spoilt, "physical_batch_size": 24}
    if sampler == "users":
        make, of = dp.data.poisson_users, {"users": np.arange(N), "examples_per_user": 2}
    else:
        make = dp.data.poisson_batches
        of = {"views": {"views": K}, "skipped": {"skip_unreadable": True}}.get(sampler, {})
    batches = make((X, Y), batch_size=2, steps_per_epoch=1, **of, **how)
    while True:
        ((x, y, rows),) = batches
        drawn = y.numpy().ravel()[rows.mask.numpy().ravel() == 1]
        if len(drawn) and drawn.max() < N:  # without example 0
            break
    assert np.isnan(x).any()
    again = tf.data.Dataset.from_tensors((x, y, rows))
    model = _model(2)
    moved = _moved(model, dataclasses.replace(batches, dataset=again))
    expected = _clipped(np.unique(drawn).astype(int)) / 2
    np.testing.assert_allclose(moved, expected, rtol=1e-3, atol=1e-6)
    assert model.non_finite_examples == 0


def test_users_with_views_and_room_left_are_clipped_whole():
    """Two views of each row of a user, rows that are missing, and blocks that would cut a user."""
    for physical in (1, 5, 7, 1000):
        users = dp.data.poisson_users(
            (X, Y), USERS, 13, 1, examples_per_user=2, map=lambda x, y: (x, y), views=K,
            physical_batch_size=physical,
        )  # fmt: skip
        assert users.physical_batch_size % (2 * K) == 0
        ((_, y, rows),) = users
        assert rows.mask.shape[1] == 2 * K and len(y) % users.physical_batch_size == 0
        for own, mask in zip(y.numpy().reshape(-1, 2 * K), rows.mask.numpy(), strict=True):
            assert len(set(USERS[own[mask == 1].astype(int)])) <= 1
    batches = dp.data.poisson_batches(
        (X, Y), N, 1, map=lambda x, y: (x, y), views=K, physical_batch_size=7
    )
    expected = _clipped(np.arange(N)) / N
    for rows in (None, 2, 4, 7):
        moved = _moved(_model(N, physical_batch_size=rows), batches)
        np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=1e-6)


def test_public_rows_and_map_beside_views():
    """Public rows are changed by their own map, once each; views by `Batches.map`, each alone."""
    views = dp.data.poisson_batches((X, Y), N, 1, map=lambda x, y: (x, y), views=K)
    mapped = views.map(lambda x, y: (2 * x, y))
    ((x, y, rows),) = mapped
    np.testing.assert_array_equal(x, 2 * X[y.numpy().ravel().astype(int)])
    assert rows.mask.shape[1] == K
    public = dp.data.with_public(views, (X[:5], Y[:5]), 4, map=lambda x, y: (-x, y))
    ((x, y, rows),) = public
    is_public = rows.public.numpy() > 0
    assert is_public.sum() == 4
    places = y.numpy().ravel().astype(int)
    np.testing.assert_array_equal(x[is_public], -X[places[is_public]])
    drawn = np.repeat(rows.mask.numpy().sum(axis=1) > 0, K)
    assert not (drawn & is_public).any() and drawn.sum() == N * K
    np.testing.assert_array_equal(x[drawn], X[places[drawn]])
    moved = _moved(_model(N), views.map(lambda x, y: (x, y)))
    np.testing.assert_allclose(moved, _clipped(np.arange(N)) / N, rtol=1e-4, atol=1e-6)


# Errors that tell of other examples.


def test_an_error_that_two_examples_make_together_skips_neither():
    """Whether one is in the sum would depend on the other."""

    class Together(Own):
        def __getitem__(self, indices):
            if {7, 11} <= set(indices.tolist()):
                raise OSError("too large together")
            return super().__getitem__(indices)

    batches = dp.data.poisson_batches(Together(), N, 1, skip_unreadable=True)
    with pytest.raises(OSError, match="^too large together"):
        list(batches)
    assert batches.unreadable == {}


def test_an_error_of_one_example_beside_one_of_two_skips_that_one_alone():
    class Both(Own):
        def __getitem__(self, indices):
            if {7, 11} <= set(indices.tolist()) or 20 in indices:
                raise OSError("bad")
            return super().__getitem__(indices)

    ((_, y, rows),) = (batches := dp.data.poisson_batches(Both(), N, 1, skip_unreadable=True))
    drawn = set(y.numpy().ravel()[rows.mask.numpy() == 1])
    assert drawn == set(range(N)) - {20} and list(batches.unreadable) == [20]


# At the same time.


def test_iterations_at_once_and_two_models_have_draws_of_their_own():
    batches = dp.data.poisson_batches(Own(), B, 30)
    at_once = [(tuple(one[1].numpy().ravel()), tuple(other[1].numpy().ravel()))
               for one, other in zip(batches, batches, strict=True)]  # fmt: skip
    assert sum(one == other for one, other in at_once) < 3  # both empty, of 30: P < 1e-6
    models = [_model(noise_multiplier=1.0) for _ in range(2)]
    for model in models:
        model.fit(batches, verbose=0)
        assert model.ledger.steps == 30
    assert not np.array_equal(models[0].get_weights()[0], models[1].get_weights()[0])


class Counting(Own):
    """Notes how many threads are in it at once."""

    def __init__(self):
        self.inside, self.most = 0, 0

    def __getitem__(self, indices):
        self.inside += 1
        self.most = max(self.most, self.inside)
        threading.Event().wait(1e-3)
        self.inside -= 1
        return super().__getitem__(indices)


class Unhashable(Counting):
    __hash__ = None

    def __eq__(self, other):
        return self is other


class OneByOne(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.source = Counting()

    def __len__(self):
        return N

    def __getitem__(self, index):
        x, y = self.source[np.array([index])]
        return x[0], y[0, 0]


@pytest.mark.parametrize("kind", [Counting, Unhashable, OneByOne])
def test_a_source_that_is_not_thread_safe_is_read_by_one_thread(kind):
    """Also of two samplers, and as public rows: threads that share a position get others' rows."""
    source = kind()
    one, other = (dp.data.poisson_batches(source, B, 5) for _ in range(2))
    third = dp.data.with_public(one, source, 3)
    threads = [threading.Thread(target=list, args=(each,)) for each in (one, one, other, third)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert getattr(source, "source", source).most == 1


def test_a_fork_draws_its_own():
    stream = dp.data.samplers.PoissonSampler(
        dp.accounting.Sampling.poisson(400, 50), [np.arange(400)], 3, 8
    )
    draws = iter(stream)
    next(draws)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, next(draws).tobytes())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as end:
        theirs = end.read()
    os.waitpid(child, 0)
    assert theirs and theirs != next(draws).tobytes()


# Whose rows.


@pytest.mark.parametrize(
    "ids, error",
    [
        (np.where(USERS == 1, np.nan, USERS), TypeError),
        (np.array([None if u == 1 else f"u{u}" for u in USERS], object), TypeError),
        (np.array([np.nan if u == 1 else f"u{u}" for u in USERS], object), TypeError),
        (np.array([u if u % 2 else f"{u}" for u in USERS.tolist()], object), TypeError),
        (USERS > 1, TypeError),
        (USERS[:, None], ValueError),
        (USERS[1:], ValueError),
        (np.append(USERS, 3), ValueError),
    ],
)
@pytest.mark.parametrize("source", [(X, Y), Own()], ids=["memory", "source"])
def test_ids_that_are_missing_or_of_other_data_are_refused(source, ids, error):
    with pytest.raises(error, match="`users` must"):
        dp.data.poisson_users(source, ids, 3, examples_per_user=2)


def test_ids_that_are_missing_in_a_table(tmp_path):
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    columns = {"x": X[:, 0], "y": Y[:, 0]}
    missing = [None if u == 1 else f"u{u}" for u in USERS]
    numbers = [None if u == 1 else int(u) for u in USERS]
    tables = [pyarrow.table(columns | {"who": pyarrow.array(ids)}) for ids in (missing, numbers)]
    tables += [pandas.DataFrame(columns | {"who": ids}) for ids in (missing, numbers)]
    for table in tables:
        with pytest.raises(ValueError, match="column 'who' has no value in row 3"):
            dp.data.poisson_users(
                table, "who", 3, examples_per_user=2, map=lambda row: (row["x"], row["y"])
            )


def test_a_dataset_of_tensorflow_is_read_once():
    """A shuffle in it would otherwise give an index another example each time."""
    shuffled = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(N)
    batches = dp.data.fixed_order_epochs(shuffled, N, map=lambda x, y: (x, y), order_seed=1)
    first, second = (next(iter(batches))[1].numpy() for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert sorted(first.ravel()) == list(range(N))
    with pytest.raises(TypeError, match="can come in another order than their users"):
        dp.data.poisson_users(shuffled, USERS, 3, examples_per_user=2, map=lambda x, y: (x, y))


def test_groups_that_can_be_guessed_are_refused_where_places_move():
    """By a seed that is known the groups follow from the places, which move with one row less."""
    seed = 42
    whole = random_groups(40, 4, seed)
    less = random_groups(39, 4, seed)
    before = {int(row): turn for turn, rows in enumerate(whole) for row in rows if row}
    after = {int(row) + 1: turn for turn, rows in enumerate(less) for row in rows}
    assert before.keys() == after.keys()  # all but the first row
    assert sum(before[row] != after[row] for row in before) > 20
    with pytest.raises(ValueError, match="order_seed=42 can be guessed.*zero_out"):
        dp.data.cyclic_poisson((X, Y), B, 2, order_seed=seed)
    dp.data.cyclic_poisson((X, Y), B, 2, order_seed=seed, adjacency="zero_out")
    drawn = dp.data.cyclic_poisson((X, Y), B, 2)
    again = dp.data.cyclic_poisson((X, Y), B, 2, order_seed=drawn.order_seed)
    assert again.order_seed == drawn.order_seed


def test_shards_of_shards_and_public_shards_are_refused():
    own = dp.data.own_shard((X, Y))
    with pytest.raises(TypeError, match="OwnShard"):
        dp.data.poisson_batches(dp.data.own_shard(own), B)
    with pytest.raises(TypeError, match="OwnShard"):
        dp.data.with_public(dp.data.poisson_batches((X, Y), B), own)
    alone = dp.data.poisson_batches(own, B)  # of one worker it is the whole
    assert alone.sampling == dp.accounting.Sampling.poisson(N, B) and alone.workers == 1
