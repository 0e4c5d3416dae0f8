"""The kinds of files that `data.py` trains from: how each is written, and opened by whom.

Packages that only one kind needs are imported where it is used.
"""

import os
import pathlib
from typing import Any, NamedTuple

import numpy as np

PICTURE = (96, 96, 3)
_BLOCK = 2**14  # rows that are written at a time


class Opened(NamedTuple):
    """One copy of the data.

    Attributes:
        data: what a sampler of this library takes.
        map: the `map` of that sampler.
        plain: function of a batch size: what `keras.Model.fit` takes, endless; None where there is
            no usual way.
        how: what `plain` is, in words.
    """

    data: Any
    map: Any
    plain: Any
    how: str


class Kind(NamedTuple):
    """A kind of file.

    Attributes:
        label: in words.
        packages: what must be installed.
        write: function of a folder and of columns x, y that writes them.
        open: function of a folder and of the shape of an example's x and y: an `Opened`.
    """

    label: str
    packages: tuple
    write: Any
    open: Any


# In memory, and mapped.


def write_arrays(folder, x, y):
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)


def open_memory(folder, *shapes):
    x, y = np.load(folder / "x.npy"), np.load(folder / "y.npy")
    return Opened((x, y), None, lambda size: shuffled(x, y, size), "arrays as tensors, shuffled")


def open_memmap(folder, *shapes):
    x, y = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xy")
    return Opened(
        (x, y), None, lambda size: rows_of(x, y, size, True), "PyDataset of shuffled rows"
    )


def shuffled(x, y, size):
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((x, y))
    return data.repeat().shuffle(10_000).batch(size).prefetch(tf.data.AUTOTUNE)


def rows_of(x, y, size, shuffles):
    """A `PyDataset` of arrays on disk: random rows of them, or slices one after the other."""
    import keras

    count = x.shape[0]

    class Rows(keras.utils.PyDataset):
        def __len__(self):
            return 10**6

        def __getitem__(self, index):
            if shuffles:
                where = np.sort(np.random.default_rng(index).choice(count, size, replace=False))
            else:
                start = index * size % (count - size + 1)
                where = slice(start, start + size)
            return x[where], y[where]

    return Rows()


# Records.


def write_array_record(folder, x, y):
    import dp_keras_opt as dp

    dp.data.write(zip(x, y, strict=True), folder / "data.array_record")


def open_array_record(folder, *shapes):
    path = folder / "data.array_record"

    def plain(size):
        import grain
        from array_record.python import array_record_data_source

        records = array_record_data_source.ArrayRecordDataSource([os.fspath(path)])
        parsed = grain.MapDataset.source(records).shuffle(seed=0).repeat().map(example)
        few = grain.ReadOptions(
            num_threads=2, prefetch_buffer_size=2
        )  # 500 would go on for minutes
        return parsed.batch(size).to_iter_dataset(few)

    def example(record):
        import tensorflow as tf

        features = tf.train.Example.FromString(record).features.feature
        values = (features[place].bytes_list.value[0] for place in "01")
        kinds = ("float32" if len(shapes[0]) > 1 else "int32", "int32")
        return tuple(
            np.frombuffer(value, kind).reshape(shape)
            for value, kind, shape in zip(values, kinds, shapes, strict=True)
        )

    return Opened(path, None, plain, "grain, shuffled, parsed in Python")


def serialized(x, y):
    """A `tf.train.Example` as it is often written: values as features."""
    import tensorflow as tf

    def feature(values):
        if values.dtype.kind == "f":
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=[values.tobytes()]))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=np.atleast_1d(values).ravel()))

    features = tf.train.Features(feature={"x": feature(x), "y": feature(y)})
    return tf.train.Example(features=features).SerializeToString()


def write_tfrecord(folder, x, y):
    import tensorflow as tf

    import dp_keras_opt as dp

    path = folder / "data.tfrecord"
    with tf.io.TFRecordWriter(os.fspath(path)) as writer:
        for row in zip(x, y, strict=True):
            writer.write(serialized(*row))
    dp.data.index_tfrecord(path)


def open_tfrecord(folder, *shapes):
    import tensorflow as tf

    import dp_keras_opt as dp

    path = folder / "data.tfrecord"
    is_picture = len(shapes[0]) > 1
    kinds = {"y": tf.io.FixedLenFeature(shapes[1], tf.int64)}
    kinds["x"] = tf.io.FixedLenFeature((), tf.string)
    if not is_picture:
        kinds["x"] = tf.io.FixedLenFeature(shapes[0], tf.int64)

    def parse(record):
        row = tf.io.parse_single_example(record, kinds)
        if not is_picture:
            return row["x"], row["y"]
        return tf.reshape(tf.io.decode_raw(row["x"], tf.float32), shapes[0]), row["y"]

    def plain(size):
        records = tf.data.TFRecordDataset(os.fspath(path)).repeat().shuffle(10_000)
        parsed = records.map(parse, num_parallel_calls=tf.data.AUTOTUNE)
        return parsed.batch(size).prefetch(tf.data.AUTOTUNE)

    return Opened(dp.data.TFRecords(path), parse, plain, "TFRecordDataset, shuffled, map(parse)")


# Tables.


def table(x, y):
    import pyarrow

    def column(values):
        if values.ndim == 1:
            return pyarrow.array(values)
        flat = pyarrow.array(values.reshape(-1))
        return pyarrow.FixedSizeListArray.from_arrays(flat, values[0].size)

    return pyarrow.table({"x": column(x), "y": column(y)})


def write_feather(folder, x, y):
    from pyarrow import feather

    feather.write_feather(table(x, y), folder / "data.feather", compression="uncompressed")


def open_feather(folder, *shapes):
    path = folder / "data.feather"

    def plain(size):
        from pyarrow import feather

        rows = feather.read_table(path)
        columns = (
            rows[name].combine_chunks().flatten().to_numpy().reshape(-1, *shape)
            if shape
            else rows[name].to_numpy()
            for name, shape in zip("xy", shapes, strict=True)
        )
        return shuffled(*columns, size)

    return Opened(path, shaped(*shapes), plain, "read into memory, then as that")


def write_hugging_face(folder, x, y):
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset(table(x, y)).save_to_disk(os.fspath(folder / "saved"))


def open_hugging_face(folder, *shapes):
    import datasets
    import tensorflow as tf

    dataset = datasets.load_from_disk(os.fspath(folder / "saved"))

    def plain(size):
        batches = dataset.to_tf_dataset(size, columns="x", label_cols="y", shuffle=True)
        batches = batches.map(lambda x, y: (tf.reshape(x, (-1, *shapes[0])), y))
        return batches.repeat().prefetch(tf.data.AUTOTUNE)

    return Opened(dataset, shaped(*shapes), plain, "to_tf_dataset(shuffle=True)")


def shaped(shape, _):
    """The `map` that makes an example of a row of a table."""
    import tensorflow as tf

    return lambda row: (tf.reshape(row["x"], shape), row["y"])


# Arrays of files.


def write_h5py(folder, x, y):
    import h5py

    with h5py.File(folder / "data.h5", "w") as file:
        file["x"], file["y"] = x, y


def write_h5py_chunks(folder, x, y):
    import h5py

    with h5py.File(folder / "data.h5", "w") as file:
        file.create_dataset("x", data=x, chunks=(16, *x.shape[1:]), compression="gzip")
        file["y"] = y


def open_h5py(folder, *shapes):
    import h5py

    file = h5py.File(folder / "data.h5")
    x, y = file["x"], file["y"]
    return Opened((x, y), None, lambda size: rows_of(x, y, size, False), "PyDataset of slices")


def write_zarr(folder, x, y):
    import zarr

    for name, values in {"x": x, "y": y}.items():
        chunks = (16 if name == "x" else len(y), *values.shape[1:])
        place = os.fspath(folder / name)
        array = zarr.open(
            place, mode="w", shape=values.shape, chunks=chunks, dtype=values.dtype.str
        )
        array[:] = values


def open_zarr(folder, *shapes):
    import zarr

    x, y = (zarr.open(os.fspath(folder / name), mode="r") for name in "xy")
    return Opened((x, y), None, lambda size: rows_of(x, y, size, False), "PyDataset of slices")


# Pictures.


def write_jpegs(folder, x, y):
    """Pictures with texture, each in the folder of its class; of `x` only the number counts."""
    import tensorflow as tf

    generator = np.random.default_rng(0)
    for label in np.unique(y):
        (folder / f"class{label}").mkdir()
    for start in range(0, len(y), 500):
        labels = y[start : start + 500]
        coarse = generator.normal(size=(len(labels), 12, 12, 3)).astype("float32")
        fine = generator.normal(size=(len(labels), *PICTURE)).astype("float32")
        pictures = 128 + 50 * tf.image.resize(coarse, PICTURE[:2]) + 10 * fine
        pictures = tf.cast(tf.clip_by_value(pictures, 0, 255), tf.uint8)
        for place, (picture, label) in enumerate(zip(pictures, labels, strict=True), start):
            path = folder / f"class{label}" / f"{place:06d}.jpg"
            path.write_bytes(tf.io.encode_jpeg(picture, quality=90).numpy())


def open_jpegs(folder, *shapes):
    import keras
    import tensorflow as tf

    import dp_keras_opt as dp

    size = shapes[0][:2]

    def plain(batch_size):
        batches = keras.utils.image_dataset_from_directory(
            folder, batch_size=batch_size, image_size=size, verbose=False
        )
        return batches.repeat().prefetch(tf.data.AUTOTUNE)

    folder_of_pictures = dp.data.image_folder(folder, image_size=size)
    return Opened(folder_of_pictures, None, plain, "image_dataset_from_directory")


KINDS = {
    "memory": Kind("arrays in memory", (), write_arrays, open_memory),
    "memmap": Kind("`np.memmap`", (), write_arrays, open_memmap),
    "array_record": Kind(
        "ArrayRecord, of `dp.data.write`", ("array_record", "grain"),
        write_array_record, open_array_record,
    ),
    "tfrecord": Kind("TFRecord", ("google_crc32c",), write_tfrecord, open_tfrecord),
    "hugging_face": Kind(
        "Hugging Face (Arrow)", ("datasets",), write_hugging_face, open_hugging_face
    ),
    "feather": Kind("Feather", ("pyarrow",), write_feather, open_feather),
    "h5py": Kind("h5py, in one piece", ("h5py",), write_h5py, open_h5py),
    "h5py_chunks": Kind("h5py, gzip, chunks of 16", ("h5py",), write_h5py_chunks, open_h5py),
    "zarr": Kind("zarr, chunks of 16", ("zarr",), write_zarr, open_zarr),
    "jpeg": Kind("folder of JPEGs, 96 px", (), write_jpegs, open_jpegs),
}  # fmt: skip


# Large files, row by row and never as a whole in memory.

WIDTH = 784  # numbers of a row, and with it 3,136 bytes


def write_large(kind, folder, gigabytes):
    """Writes rows of `WIDTH` float32 and a class until the file has this size; gives their number.

    The bytes are real, no hole: of a block of normal numbers whose first column counts the rows.
    """
    generator = np.random.default_rng(0)
    block = generator.standard_normal((_BLOCK, WIDTH), dtype="float32")
    labels = generator.integers(0, 10, _BLOCK, dtype="int32")
    blocks = max(1, int(gigabytes * 10**9 / block.nbytes))

    def rows():
        for number in range(blocks):
            block[:, 0] = np.arange(_BLOCK) + number * _BLOCK
            yield from zip(block, labels, strict=True)

    if kind == "memmap":
        shape = (blocks * _BLOCK, WIDTH)
        with open(folder / "x.npy", "wb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for number in range(blocks):
                block[:, 0] = np.arange(_BLOCK) + number * _BLOCK
                file.write(block.data)
        np.save(folder / "y.npy", np.tile(labels, blocks))
    elif kind == "array_record":
        import dp_keras_opt as dp

        dp.data.write(rows(), folder / "data.array_record")
    else:
        import tensorflow as tf

        import dp_keras_opt as dp

        with tf.io.TFRecordWriter(os.fspath(folder / "data.tfrecord")) as writer:
            for row in rows():
                writer.write(serialized(*row))
        dp.data.index_tfrecord(folder / "data.tfrecord")
    return blocks * _BLOCK


def size_of(folder):
    """Bytes of the files of a folder."""
    return sum(path.stat().st_size for path in pathlib.Path(folder).rglob("*") if path.is_file())
