"""Data as users have them: tables, columns on disk, pipelines, loaders; what is said of them."""

import sys
import types
import warnings
from collections.abc import Sequence

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.accounting import Sampling
from dp_keras_opt.data import RowInfo, assume_sampling, poisson_batches

N, B = 40, 4
X = np.random.default_rng(0).normal(size=(N, 3)).astype("float32")
Y = X.sum(axis=1)


def _model(**compiled):
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=B)
    model.compile(optimizer, "mse", **compiled)
    return model


def _all_of(batches):
    """The examples that ever come, sorted: (x, y)."""
    seen = {}
    for x, y, rows in batches:
        for a, b, mask in zip(np.asarray(x), np.asarray(y), rows.mask, strict=True):
            if mask:
                seen[a.tobytes()] = b
    return sorted(seen.values())


# Columns of tables on disk, as of Hugging Face's `datasets`.


class Column(Sequence):
    """Shaped as `datasets.arrow_dataset.Column`: a sequence whose slices are lists."""

    def __init__(self, source, name):
        self.source, self.name = source, name

    def __len__(self):
        return len(self.source[self.name])

    def __getitem__(self, key):
        return self.source[self.name][key]


def _column(values):
    return Column({"values": list(values)}, "values")


def test_columns_are_arrays(monkeypatch):
    monkeypatch.setattr(dp.data.arrays, "_ROWS_READ", 7)  # read in several parts
    batches = poisson_batches((_column(X.tolist()), _column(Y.tolist())), B, 200)
    assert batches.dataset.element_spec[0].dtype == tf.float32
    np.testing.assert_array_equal(_all_of(batches), np.sort(Y))
    texts = poisson_batches(({"text": _column(["a"] * N)}, _column(range(N))), B)
    x, y, _ = next(iter(texts))
    assert x["text"].dtype == tf.string and y.dtype == tf.int64


def test_columns_of_hugging_face():
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist(), "text": ["a"] * N})
    for form in (table, table.with_format("numpy")):
        batches = poisson_batches((form["x"], form["y"]), B, 200)
        np.testing.assert_array_equal(_all_of(batches), np.sort(Y))
    _model().fit(poisson_batches((table["x"], table["y"]), B), verbose=0)
    with pytest.raises(TypeError, match=r"Received: Dataset. Give its columns"):
        poisson_batches(table, B)
    with pytest.raises(TypeError, match=r"`x` must be.*Received: float.*np.array\(list\)"):
        poisson_batches((table[:]["x"], table[:]["y"]), B)


@pytest.mark.parametrize(
    "column, error, match",
    [
        ([[1.0], [1.0, 2.0]] * 20, ValueError, "`x` must have examples of equal shape: pad them"),
        ([None, 1.0] * 20, TypeError, "`x` must be.*among them None. Fill in"),
        ([], ValueError, "`data` is empty"),
    ],
)
def test_columns_that_are_no_array(column, error, match):
    with pytest.raises(error, match=match):
        poisson_batches((_column(column), Y), B)


def test_a_column_that_is_too_large_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr(dp.data.arrays, "_ROWS_READ", 4)
    read = []

    class Counted(Column):
        def __getitem__(self, key):
            read.append(key)
            return super().__getitem__(key)

    column = Counted({"values": X.tolist()}, "values")
    with pytest.raises(ValueError, match="at least 480 bytes, but max_bytes=479"):
        poisson_batches((column, Y), B, max_bytes=479)
    assert len(read) == 1


# Tables in memory.


def test_data_frames():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=["a", "b", "c"])
    np.testing.assert_array_equal(
        _all_of(poisson_batches((frame, pandas.Series(Y)), B, 200)), np.sort(Y)
    )
    mixed = frame.assign(genre=["rock", "jazz"] * (N // 2))
    with pytest.raises(TypeError, match=r"`x` must be.*DataFrame whose columns.*dict\(df\)"):
        poisson_batches((mixed, Y), B)
    x, _, _ = next(iter(poisson_batches((dict(mixed), Y), B)))
    assert x["genre"].dtype == tf.string and x["a"].dtype == tf.float32
    with pytest.raises(TypeError, match=r"Received: DataFrame. Give its columns"):
        poisson_batches(mixed, B)
    with pytest.raises(TypeError, match="dates or durations. Make numbers"):
        poisson_batches((pandas.to_datetime(pandas.Series(["2020-01-01"] * N)), Y), B)


class Frame:
    """Shaped as a data frame of several types."""

    columns = ("number", "text")

    def __array__(self, dtype=None, copy=None):
        return np.array([[1.0, "a"]] * N, object)


@pytest.mark.parametrize(
    "x, match",
    [
        (Frame(), r"a Frame whose columns are of several types.*astype.*dict\(df\)"),
        (tf.ragged.constant([[1.0], [2.0, 3.0]] * (N // 2)), "RaggedTensor. Pad it, or.*buckets="),
        (scipy.sparse.csr_matrix(np.eye(N)), r"csr_matrix. Make it dense: csr_matrix.toarray\(\)"),
        ([[1.0], [2.0, 3.0]] * (N // 2), r"A list is.*tf.ragged.constant\(list\).*buckets="),
        (np.array(["2020-01-01"] * N, "datetime64[D]"), "ndarray of dates or durations"),
        (np.array(["a", None] * (N // 2), object), "ndarray of objects, among them None"),
        ([1.0, 2.0], r"Received: float. A list is a structure of arrays.*np.array\(list\)"),
    ],
    ids=["frame", "ragged", "sparse", "lists", "dates", "missing", "list"],
)
def test_arrays_of_what_cannot_be_trained_on(x, match):
    with pytest.raises(TypeError, match=f"`x` must be a dense array.*{match}"):
        poisson_batches((x, Y), B)


def test_several_data_sets_under_their_names_are_no_examples():
    datasets = pytest.importorskip("datasets")
    parts = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"x": X, "y": Y})})
    with pytest.raises(ValueError, match=r"several parts: \['train'\].*data\['train'\]"):
        poisson_batches(parts, B, map=lambda row: (row["x"], row["y"]))


@pytest.mark.parametrize("shape", [(N, 3), (N, 1)])
def test_weights_of_two_dimensions_are_refused_for_their_shape(shape):
    with pytest.raises(ValueError, match=r"of shape \[n\]. Received: shape \(40, \d\).*mask"):
        poisson_batches((X, Y, np.ones(shape)), B)


# Pipelines.


def _pipeline():
    return tf.data.Dataset.from_tensor_slices((X, Y))


def _warnings_of(dataset):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = poisson_batches(dataset, B)
    about = [w for w in caught if "`data`" in str(w.message)]
    assert all(w.filename == __file__ for w in about)
    return batches, [str(w.message) for w in about]


def _noisy(x, y):
    # Not tf.random: with the seed that tests set, each reading of it is the same.
    noise = tf.numpy_function(lambda: np.random.default_rng().normal(), (), tf.float64)
    return x + tf.ensure_shape(tf.cast(noise, tf.float32), ()), y


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("shuffled", [True, False])
def test_augmentation_that_would_be_frozen_is_warned_of(known, shuffled):
    data = _pipeline() if known else _pipeline().filter(lambda x, y: True)
    data = data.shuffle(N) if shuffled else data
    _, texts = _warnings_of(data.map(_noisy))
    (text,) = texts
    assert "read a second time" in text and "poisson_batches(...).map(lambda x, y: ...)" in text


@pytest.mark.parametrize(
    "data",
    [
        _pipeline(),
        _pipeline().shuffle(N),
        _pipeline().map(lambda x, y: ({"x": x, "missing": x * np.nan}, tf.strings.as_string(y))),
        _pipeline().shuffle(N).map(lambda x, y: (x * np.nan, tf.strings.as_string(y))),
        _pipeline().cache().shuffle(N).prefetch(2),
        tf.data.Dataset.from_tensor_slices((np.ones((N, 7)), np.ones((N, 7)))),
        _pipeline().batch(8, drop_remainder=True).unbatch(),
    ],
)
def test_pipelines_that_are_what_they_seem_draw_no_warning(data):
    assert _warnings_of(data)[1] == []


def test_a_pipeline_that_can_be_read_only_once():
    rows = iter([(X[i], Y[i]) for i in range(N)])
    signature = (tf.TensorSpec([3], tf.float32), tf.TensorSpec([], tf.float32))
    batches, texts = _warnings_of(
        tf.data.Dataset.from_generator(lambda: rows, output_signature=signature)
    )
    assert texts == [] and batches.sampling.num_examples == N


@pytest.mark.parametrize(
    "batched",
    [
        lambda data: data.batch(8, drop_remainder=True),
        lambda data: data.batch(8, drop_remainder=True).map(lambda x, y: (x * 2, y)).prefetch(2),
        lambda data: data.padded_batch(8, drop_remainder=True).shuffle(3),
    ],
)
def test_batches_that_would_count_as_examples_are_warned_of(batched):
    batches, texts = _warnings_of(batched(_pipeline()))
    assert batches.sampling.num_examples == 5
    (text,) = texts
    assert "batches of 8 rows" in text and "`.unbatch()`" in text


# Batches of one's own.


class PoissonRows(keras.utils.PyDataset):
    """Poisson batches of 8 rows, padded, that are drawn when they are asked for."""

    def __init__(self, weighted=False, **kwargs):
        super().__init__(**kwargs)
        self.weighted, self.epochs = weighted, []

    def __len__(self):
        return 5

    def __getitem__(self, index):
        drawn = np.flatnonzero(np.random.default_rng(index).uniform(size=N) < B / N)[:8]
        places = np.pad(drawn, (0, 8 - len(drawn)))
        mask = (np.arange(8) < len(drawn)).astype("float32")
        return X[places], Y[places], RowInfo(mask, mask * 2 if self.weighted else None)

    def on_epoch_end(self):
        self.epochs.append("end")


class FromABeginning(PoissonRows):
    """With workers it would be refused."""

    def on_epoch_begin(self):
        self.epochs.append("begin")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("threads", [False, True], ids=["alone", "threads"])
def test_rows_of_a_py_dataset(weighted, threads):
    """They train as the same batches of a generator do."""
    data = PoissonRows(weighted, workers=2) if threads else FromABeginning(weighted)
    losses = []
    generator = (data[i % 5] for i in range(1000))
    for given in (data, generator):
        keras.utils.set_random_seed(0)
        model = _model()
        model.optimizer.learning_rate = 0.0
        batches = assume_sampling(given, Sampling.poisson(N, B))
        history = model.fit(batches, epochs=2, steps_per_epoch=5, verbose=0)
        losses.append(history.history["loss"])
        assert model.ledger.steps == 10
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert data.epochs.count("begin") == (0 if threads else 2) and data.epochs[-1] == "end"


def test_a_py_dataset_without_rows_is_as_it_was():
    class Plain(keras.utils.PyDataset):
        def __len__(self):
            return N // B

        def __getitem__(self, index):
            return X[index * B : (index + 1) * B], Y[index * B : (index + 1) * B]

    model = _model()
    model.fit(assume_sampling(Plain(), Sampling.shuffled(N, B)), epochs=2, verbose=0)
    assert model.ledger.steps == 2 * N // B


class Loader:
    """Shaped as a DataLoader of PyTorch."""

    batch_size = B

    def __init__(self):
        self.dataset = range(N)

    def __len__(self):
        return N // B

    def __iter__(self):
        for start in range(0, N, B):
            yield X[start : start + B], Y[start : start + B]


def test_loaders_that_keras_does_not_read_are_refused_where_they_are_given():
    sampling = Sampling.shuffled(N, B)
    for given in (Loader(), iter([]), map(str, ())):
        with pytest.raises(
            TypeError, match=r"batches that Keras reads.*\(batch for batch in data\)"
        ):
            assume_sampling(given, sampling)
    model = _model()
    model.fit(assume_sampling((batch for batch in Loader()), sampling), verbose=0)
    assert model.ledger.steps == N // B
    with pytest.raises(TypeError, match="Received: Loader. Batches .*assume_sampling"):
        poisson_batches(Loader(), B)


def test_loaders_of_pytorch_are_taken(monkeypatch):
    """By Keras's own adapter, here beside a module that has what it uses of PyTorch."""

    class Tensor(np.ndarray):
        def cpu(self):
            return self

    class DataLoader(Loader):
        __module__ = "torch.utils.data.dataloader"

        def __iter__(self):
            for x, y in super().__iter__():
                yield [x.view(Tensor), y.view(Tensor)]

    torch = types.ModuleType("torch")
    torch.utils = types.SimpleNamespace(data=types.SimpleNamespace(DataLoader=DataLoader))
    monkeypatch.setitem(sys.modules, "torch", torch)
    model = _model()
    batches = assume_sampling(DataLoader(), Sampling.shuffled(N, B))
    assert batches.steps_per_epoch == N // B
    model.fit(batches, epochs=2, verbose=0)
    assert model.ledger.steps == 2 * N // B


def test_loaders_of_the_real_pytorch():
    torch = pytest.importorskip("torch")
    examples = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    loader = torch.utils.data.DataLoader(examples, batch_size=B, shuffle=True)
    model = _model()
    model.fit(assume_sampling(loader, Sampling.shuffled(N, B)), epochs=2, verbose=0)
    assert model.ledger.steps == 2 * N // B
