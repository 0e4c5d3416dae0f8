"""Data that stay on disk: the batches are those of the same data in memory, bit by bit."""

import json
import os
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.data import examples, samplers

N, B = 37, 5
_rng = np.random.default_rng(0)
X = _rng.normal(size=(N, 4, 3)).astype("float32")
Y = _rng.integers(0, 5, N)
TEXTS = np.array(["a" * (i % 7) + "é\0b" * (i % 2) for i in range(N)], object)


# Each kind of file: function of a folder that writes the data, and gives them and a `map`.


def _memmap(folder):
    for name, values in {"x": X, "y": Y}.items():
        np.save(folder / f"{name}.npy", values)
    return tuple(np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xy"), None


def _paths(folder):
    _memmap(folder)
    return (folder / "x.npy", str(folder / "y.npy")), None


def _h5py(folder):
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "data.h5", "w") as file:
        file.create_dataset("x", data=X, chunks=(4, 4, 3), compression="gzip")
        file["y"] = Y
    file = h5py.File(folder / "data.h5")
    return (file["x"], file["y"]), None


def _zarr(folder):
    zarr = pytest.importorskip("zarr")
    arrays = []
    for name, values in {"x": X, "y": Y}.items():
        array = zarr.open(
            str(folder / name), mode="w", shape=values.shape, chunks=4, dtype=values.dtype.str
        )
        array[:] = values
        arrays.append(zarr.open(str(folder / name), mode="r"))
    return tuple(arrays), None


def _beside_memory(folder):
    (x, _), _ = _memmap(folder)
    return (x, Y), None


def _pydataset(folder):
    class Examples(keras.utils.PyDataset):
        def __len__(self):
            return N

        def __getitem__(self, index):
            return X[index], Y[index]

    return Examples(), None


def _array_record(folder):
    pytest.importorskip("array_record")
    path = folder / "data.array_record"
    dataset = tf.data.Dataset.from_tensor_slices((X, Y))
    assert dp.data.write(dataset, path) == N
    return path, None


def _raw_array_record(folder):
    module = pytest.importorskip("array_record.python.array_record_module")
    source = pytest.importorskip("array_record.python.array_record_data_source")
    writer = module.ArrayRecordWriter(str(folder / "raw"), "group_size:1")
    for x, y in zip(X, Y, strict=True):
        writer.write(_serialized(x, y))
    writer.close()
    return source.ArrayRecordDataSource(str(folder / "raw")), _parse


def _serialized(x, y):
    feature = {
        "x": tf.train.Feature(float_list=tf.train.FloatList(value=x.ravel())),
        "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[int(y)])),
    }
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


def _parse(record):
    kinds = {
        "x": tf.io.FixedLenFeature(X.shape[1:], tf.float32),
        "y": tf.io.FixedLenFeature((), tf.int64),
    }
    row = tf.io.parse_single_example(record, kinds)
    return row["x"], row["y"]


def _tfrecord(folder):
    pytest.importorskip("google_crc32c")
    paths = [folder / "a.tfrecord", folder / "b.tfrecord"]
    for path, rows in zip(paths, (range(20), range(20, N)), strict=True):
        with tf.io.TFRecordWriter(str(path)) as writer:
            for row in rows:
                writer.write(_serialized(X[row], Y[row]))
    assert dp.data.index_tfrecord(paths) == N
    return dp.data.TFRecords(paths), _parse


def _hugging_face(folder):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"x": X.tolist(), "y": Y}).cast_column(
        "x", datasets.Array2D((4, 3), "float32")
    ).save_to_disk(str(folder / "saved"))
    return datasets.load_from_disk(str(folder / "saved")), lambda row: (row["x"], row["y"])


def _feather(folder):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import feather

    table = pyarrow.table({"x": X.reshape(N, -1).tolist(), "y": Y})
    feather.write_feather(table, folder / "data.feather", compression="uncompressed")
    return folder / "data.feather", lambda row: (tf.reshape(row["x"], (4, 3)), row["y"])


def _parquet(folder):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"x": X.tolist(), "y": Y}), folder / "data.parquet")
    return folder / "data.parquet", lambda row: (row["x"], row["y"])


def _frame(make):
    columns = {f"c{i}": X.reshape(N, -1)[:, i] for i in range(12)} | {"y": Y}

    def example(row):
        return tf.reshape([row[f"c{i}"] for i in range(12)], (4, 3)), row["y"]

    return make(columns), example


def _pandas(folder):
    return _frame(pytest.importorskip("pandas").DataFrame)


def _polars(folder):
    return _frame(pytest.importorskip("polars").DataFrame)


class Own:
    """A source of the user's own, as the protocol says."""

    def __init__(self, length=N):
        self.length, self.asked = length, []

    def __len__(self):
        return self.length

    def __getitem__(self, indices):
        self.asked.append(indices)
        assert indices.dtype == np.int64 and (np.diff(indices) > 0).all()
        return X[indices], Y[indices]


def _own(folder):
    return Own(), None


def _grain(folder):
    grain = pytest.importorskip("grain")
    mapped = grain.MapDataset.range(N).map(lambda i: (X[i], Y[i]))
    return mapped, None


SOURCES = {
    function.__name__.strip("_"): function
    for function in (
        _memmap,
        _paths,
        _h5py,
        _zarr,
        _beside_memory,
        _pydataset,
        _array_record,
        _raw_array_record,
        _tfrecord,
        _hugging_face,
        _feather,
        _parquet,
        _pandas,
        _polars,
        _own,
        _grain,
    )
}

USERS = np.repeat(np.arange(10), 4)[:N]
SAMPLERS = {
    "poisson": lambda data, **how: dp.data.poisson_batches(data, B, 6, seed=1, **how),
    "truncated": lambda data, **how: dp.data.poisson_batches(
        data, B, 6, max_batch_size=7, seed=1, **how
    ),
    "cyclic": lambda data, **how: dp.data.cyclic_poisson(data, B, 3, 6, order_seed=2**64, **how),
    "fixed order": lambda data, **how: dp.data.fixed_order_epochs(data, B, order_seed=1, **how),
    "balls in bins": lambda data, **how: dp.data.balls_in_bins(data, B, seed=1, **how),
    "without replacement": lambda data, **how: dp.data.without_replacement_batches(
        data, B, 6, seed=1, **how
    ),
    "users": lambda data, **how: dp.data.poisson_users(
        data, USERS, 3, 6, examples_per_user=2, seed=1, **how
    ),
    "users in bins": lambda data, **how: dp.data.balls_in_bins(
        data, 3, users=USERS, examples_per_user=2, seed=1, **how
    ),
}


def _drawn(make, data, **how):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*got seed=")
        return make(data, **how)


def _assert_equal(one, other):
    """All batches, and what is said of them."""
    assert one.dataset.element_spec[:2] == other.dataset.element_spec[:2]
    assert one.sampling == other.sampling
    assert len(one) == len(other)
    count = 0
    for left, right in zip(one, other, strict=True):
        left, right = tf.nest.flatten(left), tf.nest.flatten(right)
        for a, b in zip(left, right, strict=True):
            np.testing.assert_array_equal(a, b)
        count += 1
    assert count == len(one)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("source", ["memmap", "h5py", "own"])
def test_all_samplers_draw_from_a_source_what_they_draw_from_memory(
    sampler, source, tmp_path, monkeypatch
):
    if sampler == "cyclic":  # its draws have no seed
        seeded = np.random.default_rng
        monkeypatch.setattr(samplers, "numpy_generator", lambda seed=3: seeded(seed))
    data, mapped = SOURCES[source](tmp_path)
    make = SAMPLERS[sampler]
    _assert_equal(_drawn(make, data, map=mapped), _drawn(make, (X, Y)))


@pytest.mark.parametrize("source", SOURCES)
def test_all_sources_give_what_memory_gives(source, tmp_path):
    data, mapped = SOURCES[source](tmp_path)
    for sampler in ("poisson", "users"):
        make = SAMPLERS[sampler]
        _assert_equal(_drawn(make, data, map=mapped), _drawn(make, (X, Y)))


@pytest.mark.parametrize("source", ["memmap", "tfrecord", "hugging_face"])
def test_a_model_trains(source, tmp_path):
    data, mapped = SOURCES[source](tmp_path)
    inputs = keras.Input(X.shape[1:])
    outputs = keras.layers.Dense(5)(keras.layers.Flatten()(inputs))
    weights = []
    for given in ((X, Y), data):
        keras.utils.set_random_seed(0)
        model = dp.DPModel.from_config(dp.DPModel(inputs, outputs).get_config())
        optimizer = dp.optimizers.DPSGD(0.1, clip_norm=0.1, noise_multiplier=1e-9, batch_size=B)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.compile(optimizer, loss)
            how = {"map": mapped} if given is data else {}
            model.fit(SAMPLERS["poisson"](given, **how), epochs=2, verbose=0)
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert model.ledger.steps == 12


def test_strings_come_as_they_are(tmp_path):
    pytest.importorskip("array_record")
    rows = [{"text": text, "n": i} for i, text in enumerate(TEXTS)]
    dp.data.write(rows, tmp_path / "texts")
    batches = dp.data.poisson_batches(
        tmp_path / "texts", N, 1, map=lambda row: (row["text"], row["n"])
    )
    x, y, rows = next(iter(batches))
    assert x.dtype == tf.string and np.sum(rows.mask) == N
    for text, number, mask in zip(x.numpy(), y.numpy(), rows.mask, strict=True):
        assert text.decode() == TEXTS[number] or not mask


def test_public_rows_and_weights_beside_a_source(tmp_path):
    (x, y), _ = _memmap(tmp_path)
    weights = np.linspace(0, 2, N)
    makes = [
        _drawn(SAMPLERS["poisson"], (*given, weights), class_weight={1: 2.0, 4: 0.5})
        for given in ((x, y), (X, Y))
    ]
    _assert_equal(*makes)
    _assert_equal(*(dp.data.with_public(each, (X[:4], Y[:4])) for each in makes))


def test_ids_of_users_from_a_column(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame({"x": X[:, 0, 0], "y": Y, "who": [f"u{i}" for i in USERS]})
    how = {"examples_per_user": 2, "seed": 1, "map": lambda row: (row["x"], row["y"])}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_name = dp.data.poisson_users(frame, "who", 3, 6, **how)
        by_array = dp.data.poisson_users(frame, frame["who"], 3, 6, **how)
    _assert_equal(by_name, by_array)
    with pytest.raises(ValueError, match="users='whom' is none of the columns"):
        dp.data.poisson_users(frame, "whom", 3, 6, **how)
    with pytest.raises(TypeError, match="users='who' names a column, and `data` is no table"):
        dp.data.poisson_users((X, Y), "who", 3, 6, examples_per_user=2)


# What users have, as it comes.


def test_a_data_set_that_inherits_from_torch_is_read_item_by_item():
    base = type("Dataset", (), {"__module__": "torch.utils.data.dataset"})

    class Items(base):
        def __len__(self):
            return N

        def __getitem__(self, index):
            return list(X)[index], int(Y[index])  # a list takes no array

    make = SAMPLERS["poisson"]
    _assert_equal(_drawn(make, Items()), _drawn(make, (X, Y)))


def test_a_source_that_takes_one_index_is_told_of():
    class One(Own):
        def __getitem__(self, index):
            return list(X)[index]

    with pytest.raises(ValueError, match="asked for an array of 1 indices.*keras.utils.PyDataset"):
        dp.data.poisson_batches(One(), B)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: ([x[0, 0], x[1, 0]], y),
        dp.data.PythonFunction(lambda x, y: (x[:2, 0].tolist(), y)),
    ],
    ids=["traced", "python"],
)
def test_a_list_of_numbers_is_an_array(function):
    make = SAMPLERS["poisson"]
    _assert_equal(_drawn(make, (X, Y), map=function), _drawn(make, (X[:, :2, 0], Y)))


def test_lists_of_a_stream_are_arrays(tmp_path):
    pytest.importorskip("array_record")
    rows = ({"x": X[i].tolist(), "words": ["a", TEXTS[i]], "y": int(Y[i])} for i in range(N))
    dp.data.write(rows, tmp_path / "rows")
    described = json.loads((tmp_path / "rows.json").read_text())
    assert described["shapes"] == [[2], [4, 3], []]  # in the order of their names
    batches = _drawn(SAMPLERS["poisson"], tmp_path / "rows", map=lambda row: (row["x"], row["y"]))
    _assert_equal(batches, _drawn(SAMPLERS["poisson"], (X, Y)))


def test_a_file_that_polars_streamed_into(tmp_path):
    polars = pytest.importorskip("polars")
    pytest.importorskip("pyarrow")
    texts = [f"t{i}" for i in range(N)]
    columns = {"text": texts, "words": [[text, "b"] for text in texts], "y": Y.tolist()}
    frame = polars.DataFrame(columns)
    path = tmp_path / "rows.arrow"
    frame.lazy().sink_ipc(path, compression=None)  # strings are views in it

    def example(row):
        return (row["text"], row["words"]), row["y"]

    given = ((np.array(texts, object), np.array(columns["words"], object)), Y)
    for data in (path, frame):
        make = SAMPLERS["users"]
        _assert_equal(_drawn(make, data, map=example), _drawn(make, given))
    batches = dp.data.poisson_users(path, "text", 5, examples_per_user=1, map=example)
    assert batches.sampling.num_examples == N
    with pytest.raises(TypeError, match=r"is a LazyFrame.*Call its collect\(\)"):
        dp.data.poisson_batches(frame.lazy(), B, map=example)


@pytest.mark.parametrize(
    "data, match",
    [
        (iter([(X[0], Y[0])]), "comes one by one is written.*dp_keras_opt.data.write"),
        ("table.csv", "table.csv is no kind of file that is read by its name"),
    ],
)
def test_what_has_no_rows(data, match):
    with pytest.raises((TypeError, ValueError), match=match):
        dp.data.poisson_batches(data, B)


@pytest.mark.parametrize(
    "package, use",
    [
        ("google_crc32c", lambda folder: dp.data.TFRecords(folder / "a.tfrecord")),
        ("array_record.python", lambda folder: dp.data.write([(1, 2)], folder / "a")),
        ("pyarrow", lambda folder: dp.data.poisson_batches(folder / "a.feather", B)),
    ],
)
def test_a_package_that_is_missing_is_named(package, use, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"pip install 'dp-keras-opt\[data\]'"):
        use(tmp_path)


# Reading.


def test_only_rows_that_are_drawn_are_read_each_once_in_one_call_a_batch():
    source = Own()
    batches = _drawn(SAMPLERS["poisson"], source, views=3, map=lambda x, y: (x, y))
    source.asked.clear()
    found = list(batches)
    assert len(source.asked) == len(found) == 6
    of_padding = X[0].tobytes()
    asked = [{X[i].tobytes() for i in indices} - {of_padding} for indices in source.asked]
    for x, _, rows in found:  # batches may be read in another order
        drawn = {row.tobytes() for row in x.numpy()[np.asarray(rows.mask).ravel() > 0]}
        asked.remove(drawn - {of_padding})


@pytest.mark.parametrize("how", ["as it is", "big endian", "block of the user", "written to"])
def test_arrays_of_h5py_in_one_piece_are_mapped_where_that_gives_the_same(how, tmp_path):
    h5py = pytest.importorskip("h5py")
    path, block = tmp_path / "data.h5", 512 if how == "block of the user" else 0
    columns = {"x": X.astype(">f4") if how == "big endian" else X, "y": Y.astype("int16")}
    columns |= {
        "half": X.astype("float16"),
        "is": Y > 2,
        "pair": X + 1j,
        "text": ["a" * i for i in range(N)],
    }
    with h5py.File(path, "w", userblock_size=block) as file:
        for name, values in columns.items():
            file[name] = values
        file.create_dataset("none", X.shape, "f4")  # was never written, and is all zeros
    file = h5py.File(path, "r+" if how == "written to" else "r")
    opened = {name: dp.data.sources.columns.OnDisk(file[name]) for name in file}
    is_mapped = {name for name, each in opened.items() if each._mapped is not None}
    assert is_mapped == (set() if block or how == "written to" else {"x", "y", "half"})
    some = np.array([0, 3, N - 1])
    for name, each in opened.items():
        np.testing.assert_array_equal(each[some], file[name][some])
        assert each[some].dtype == file[name][some].dtype


# Functions of an example.


def _doubled(x, y):
    return x * 2, {"class": y, "sum": x.sum()}


@pytest.mark.parametrize("processes", [0, 2])
def test_functions_of_python(processes):
    function = dp.data.PythonFunction(_doubled, processes)
    np.testing.assert_array_equal(function(X[0], Y[0])[0], 2 * X[0])
    batches = _drawn(SAMPLERS["poisson"], (X, Y), map=function)
    for (x, y, _), (x_, y_, _) in zip(batches, _drawn(SAMPLERS["poisson"], (X, Y)), strict=True):
        np.testing.assert_array_equal(x, 2 * x_)
        np.testing.assert_array_equal(y["class"], y_)
        np.testing.assert_allclose(y["sum"], np.sum(x_, axis=(1, 2)), rtol=1e-5)


def _noisy(x, y):
    return x + np.random.normal(), y


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: (x + tf.random.normal(()), y),
        dp.data.PythonFunction(_noisy),
        dp.data.PythonFunction(_noisy, processes=2),
    ],
    ids=["traced", "python", "spawned"],
)
def test_each_draw_is_changed_anew_and_alone(function):
    batches = dp.data.poisson_batches((np.zeros((N, 2)), Y), N, 1, map=function, views=2)
    drawn = [next(iter(batches)) for _ in range(2)]
    shifts = [x.numpy()[np.asarray(rows.mask).ravel() > 0] for x, _, rows in drawn]
    for each in shifts:
        assert (each[:, 0] == each[:, 1]).all()
        assert len(set(each[:, 0])) == 2 * N  # no two rows alike
    assert not set(shifts[0][:, 0]) & set(shifts[1][:, 0])


def _halved(x, y):
    x /= 2  # what it is given is its own
    return x, y


def test_a_function_of_python_may_write_where_tensorflow_has_been(tmp_path):
    folder, _ = _pictures(tmp_path)
    halved = dp.data.PythonFunction(_halved)
    batches = _drawn(SAMPLERS["poisson"], folder, map=halved)
    traced = _drawn(SAMPLERS["poisson"], folder, map=lambda x, y: (x / 2, y))
    _assert_equal(batches, traced)


def test_pictures_are_decoded_and_changed_each_alone(tmp_path):
    folder, pictures = _pictures(tmp_path)
    batches = dp.data.poisson_batches(
        folder, 8, 1, views=2, map=lambda x, y: (x + tf.random.uniform((4, 4, 3)) / 2, y)
    )
    x, _, rows = next(iter(batches))
    x = x.numpy()[np.asarray(rows.mask).ravel() > 0]
    np.testing.assert_array_equal({each.tobytes() for each in np.floor(x)}, pictures)
    assert len({(each % 1).tobytes() for each in x}) == len(x) == 16


def _pictures(folder):
    """A source of 8 pictures of whole numbers, and their bytes as float32."""
    found = set()
    for i in range(8):
        (folder / "ab"[i % 2]).mkdir(exist_ok=True)
        picture = np.random.default_rng(i).integers(0, 250, (4, 4, 3), dtype="uint8")
        keras.utils.save_img(folder / "ab"[i % 2] / f"{i}.png", picture, scale=False)
        found.add(picture.astype("float32").tobytes())
    return dp.data.image_folder(folder, image_size=(4, 4)), found


def test_a_function_may_change_the_shape():
    batches = dp.data.poisson_batches((X, Y), B, map=lambda x, y: (x[0], (y, y)))
    assert batches.dataset.element_spec[0].shape.as_list() == [None, 3]
    assert len(batches.dataset.element_spec[1]) == 2


@pytest.mark.parametrize(
    "function, match",
    [
        (3, "map must be a function of one example; received 3"),
        (lambda x, y: x, r"must be a tuple \(x, y\).*is one ndarray.*map=lambda"),
    ],
)
def test_functions_that_are_none(function, match):
    with pytest.raises((TypeError, ValueError), match=match):
        dp.data.poisson_batches((X, Y), B, map=function)


def test_functions_for_other_processes_can_be_imported():
    with pytest.raises(TypeError, match="cannot be sent to other processes.*top of a module"):
        dp.data.PythonFunction(lambda x, y: (x, y), processes=2)


# What goes wrong.


def _error_of(batches):
    with pytest.raises((ValueError, RuntimeError)) as caught:
        list(batches)
    assert not isinstance(caught.value, tf.errors.OpError)
    return str(caught.value)


class Damaged(Own):
    def __getitem__(self, indices):
        if 7 in indices or 11 in indices:
            raise OSError("bad sector")
        return super().__getitem__(indices)


def test_a_record_that_cannot_be_read_is_named():
    batches = dp.data.poisson_batches(Damaged(), N, 1)
    assert "Record 7 of `data` cannot be read: OSError: bad sector" in _error_of(batches)


def test_a_record_that_is_skipped_contributes_nothing_and_is_counted():
    batches = dp.data.poisson_batches(Damaged(), N, 1, skip_unreadable=True)
    x, y, rows = next(iter(batches))
    assert np.sum(rows.mask) == N - 2 and not np.any(x[np.asarray(rows.mask) == 0][:2])
    assert batches.unreadable == {i: "OSError: bad sector" for i in (7, 11)}
    assert batches.sampling.num_examples == N


def test_when_no_record_can_be_read_one_reason_is_given(monkeypatch):
    monkeypatch.setattr(examples, "_TRIED", 5)

    class None_(Own):
        def __getitem__(self, indices):
            self.asked.append(indices)
            raise OSError("no disk")

    source = None_()
    with pytest.raises(ValueError, match="None of the first 5 records.*OSError: no disk"):
        dp.data.poisson_batches(source, B, skip_unreadable=True)
    assert len(source.asked) == 5


def test_pictures_that_are_none(tmp_path):
    pytest.importorskip("PIL")  # which writes them here
    for name in "ab":
        (tmp_path / name).mkdir()
        for i in range(4):
            keras.utils.save_img(tmp_path / name / f"{i}.png", X[:1].repeat(4, 0)[..., :1])
    (tmp_path / "b" / "2.png").write_bytes(b"no picture")
    folder = dp.data.image_folder(tmp_path, image_size=(4, 4))
    assert "Record 6 of `data` cannot be read" in _error_of(dp.data.poisson_batches(folder, 8, 1))
    batches = dp.data.poisson_batches(folder, 8, 1, skip_unreadable=True)
    assert np.sum(next(iter(batches))[2].mask) == 7
    assert list(batches.unreadable) == [6]


def test_examples_of_different_shapes_are_both_named():
    class Ragged(Own):
        def __getitem__(self, indices):
            rows = np.empty(len(indices), object)
            rows[:] = [np.zeros(3 + (i == 5)) for i in indices]
            return rows, Y[indices]

    error = _error_of(dp.data.poisson_batches(Ragged(), N, 1))
    assert "Examples 0 and 5 have the shapes (3,) and (4,)" in error and "map=" in error


def test_a_source_that_changes_its_length():
    source = Own()
    batches = dp.data.poisson_batches(source, N, 1)
    source.length -= 1
    assert "had 37 examples and has 36 now" in _error_of(batches)


def test_a_file_that_is_cut_short_or_written_to(tmp_path):
    data, _ = _memmap(tmp_path)
    batches = dp.data.poisson_batches(data, N, 1)
    list(batches)
    os.truncate(tmp_path / "x.npy", 200)  # reading on would end the process
    assert "x.npy was changed while it was trained on" in _error_of(batches)


def test_chunks_that_are_gone_are_no_zeros(tmp_path):
    data, _ = _zarr(tmp_path)
    batches = dp.data.poisson_batches(data, N, 1)
    list(batches)
    files = [path for path in (tmp_path / "x").rglob("*") if path.is_file()]
    next(path for path in files if path.name[0] not in ".z").unlink()  # no description
    assert "1 chunks of" in _error_of(batches)


def test_a_source_that_gives_other_rows_than_asked_for():
    class Wrong(Own):
        def __getitem__(self, indices):
            return X[:2], Y[:2]

    with pytest.raises(ValueError, match="an array of 1 indices gave arrays of the lengths"):
        dp.data.poisson_batches(Wrong(), B)


def test_the_end_of_a_source_does_not_end_the_epoch():
    class Ends(Own):
        def __getitem__(self, indices):
            if len(indices) > 1:
                raise StopIteration
            return super().__getitem__(indices)

    error = _error_of(dp.data.poisson_batches(Ends(), N, 3))
    assert "StopIteration" in error


# Files of this library.


def test_the_index_of_a_tfrecord_file_is_checked(tmp_path):
    pytest.importorskip("google_crc32c")
    data, parse = _tfrecord(tmp_path)
    path = tmp_path / "a.tfrecord"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="is not the index of .*a.tfrecord as it is now"):
        dp.data.TFRecords(path)
    with pytest.raises(ValueError, match="a.tfrecord is no TFRecord file from byte .* ends within"):
        dp.data.index_tfrecord(path)
    damaged = bytearray(whole)
    damaged[50] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="record at byte .* is damaged"):
        dp.data.index_tfrecord(path)
    batches = dp.data.poisson_batches(
        dp.data.TFRecords([path, tmp_path / "b.tfrecord"]), N, 1, map=parse, skip_unreadable=True
    )
    assert np.sum(next(iter(batches))[2].mask) == N - 1
    with pytest.raises(FileNotFoundError, match="no index.*dp-keras-opt index"):
        (tmp_path / "b.tfrecord.index").unlink()
        dp.data.TFRecords(tmp_path / "b.tfrecord")
    with tf.io.TFRecordWriter(str(path), "GZIP") as writer:
        writer.write(b"1")
    with pytest.raises(ValueError, match="It is compressed"):
        dp.data.index_tfrecord(path)


def test_what_is_written_is_of_one_form(tmp_path):
    pytest.importorskip("array_record")
    path = tmp_path / "file"
    with pytest.raises(TypeError, match="Example 2 is .*all must have one structure"):
        dp.data.write([(1, 2), (3, 4), {"x": 5}], path)
    with pytest.raises(ValueError, match="Example 1 is .*number of dimensions"):
        dp.data.write([(np.ones(1), 2), (np.ones((1, 1)), 4)], path)
    with pytest.raises(TypeError, match="arrays of numbers or strings. Received: None"):
        dp.data.write([(None, 2)], path)
    with pytest.raises(ValueError, match="no examples to write"):
        dp.data.write([], path)
    assert os.listdir(tmp_path) == []
    turned = [{"a": 1, "b": (2, "x")}, {"b": (3, "y"), "a": 4}]  # one structure
    assert dp.data.write(turned, path) == 2
    found = dp.data.sources.written.Written(path)[np.arange(2)]
    assert found["a"].tolist() == [1, 4] and found["b"][0].tolist() == [2, 3]
    dp.data.write(((np.arange(i % 3), f"t{i}") for i in range(9)), path)
    assert json.loads((tmp_path / "file.json").read_text())["shapes"] == [[None], []]
    batches = dp.data.poisson_batches(
        path,
        9,
        1,
        map=lambda x, text: (tf.ensure_shape(tf.pad(x, [[0, 2 - tf.size(x)]]), [2]), text),
    )
    x, y, _ = next(iter(batches))
    for row, text in zip(x.numpy().tolist(), y.numpy(), strict=True):
        assert row == [[0, 0], [0, 0], [0, 1]][int(text[1:]) % 3]


# Folders.


@pytest.mark.parametrize("how", [{}, {"crop_to_aspect_ratio": True}, {"pad_to_aspect_ratio": True}])
@pytest.mark.parametrize("label_mode", ["int", "binary", "categorical"])
def test_folders_are_read_as_by_keras(tmp_path, label_mode, how):
    pytest.importorskip("PIL")
    rng = np.random.default_rng(1)
    for name in ("dog", "cat"):
        (tmp_path / name / "deeper").mkdir(parents=True)
        for i in range(3):
            picture = rng.integers(0, 255, (9, 14, 3)).astype("uint8")
            keras.utils.save_img(tmp_path / name / "deeper" / f"{i}.png", picture)
            (tmp_path / name / f"{i}.txt").write_text(f"{name} {i}")
    pictures = dp.data.image_folder(tmp_path, image_size=(6, 5), label_mode=label_mode, **how)
    texts = dp.data.text_folder(tmp_path, label_mode=label_mode)
    assert pictures.class_names == texts.class_names == ("cat", "dog")
    by_keras = {
        pictures: keras.utils.image_dataset_from_directory(
            tmp_path,
            image_size=(6, 5),
            label_mode=label_mode,
            batch_size=None,
            shuffle=False,
            **how,
        ),
        texts: keras.utils.text_dataset_from_directory(
            tmp_path, label_mode=label_mode, batch_size=None, shuffle=False
        ),
    }
    for source, expected in by_keras.items():
        ours = list(dp.data.fixed_order_epochs(source, 1, order_seed=0))
        theirs = {_key(x): np.asarray(y) for x, y in expected}
        assert len(ours) == len(theirs) == 6
        for x, y, _ in ours:
            np.testing.assert_array_equal(y[0], theirs[_key(x[0])])


def _key(x):
    return x.numpy() if x.dtype == tf.string else x.numpy().tobytes()
