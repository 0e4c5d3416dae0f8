"""The source that a user's object, or a path, is made into."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import keras

from dp_keras_opt.data.sources.columns import Columns, OnDisk, open_column
from dp_keras_opt.data.sources.protocol import Source
from dp_keras_opt.data.sources.records import Records
from dp_keras_opt.data.sources.tables import ArrowTable, HuggingFace, open_table, table_of_frame
from dp_keras_opt.data.sources.tfrecord import TFRecords
from dp_keras_opt.data.sources.written import Written

#: Packages whose data sets give one example for an integer; users inherit from them.
_ONE_BY_ONE = {"grain", "tensorflow_datasets", "torch"}


def as_source(data: Any) -> Source | None:
    """The source that an object is, or that an adapter makes of it; None where there is none.

    Args:
        data: what a user gives to a sampler.
    """
    if isinstance(data, str | os.PathLike):
        return _of_path(os.fspath(data))
    package = type(data).__module__.partition(".")[0]
    if package == "datasets" and hasattr(data, "cache_files"):
        return HuggingFace(data)
    if package == "pyarrow" and hasattr(data, "take"):
        return ArrowTable(data)
    if package == "polars" and hasattr(data, "collect"):
        raise TypeError(
            f"`data` is a {type(data).__name__}, which has no rows yet. Call its collect(); or "
            "write it with sink_ipc(path, compression=None), and pass the path, *.arrow."
        )
    if package in ("pandas", "polars") and hasattr(data, "columns"):
        return table_of_frame(data)
    array = open_column(data)
    if isinstance(array, OnDisk):
        return Columns(array)
    packages = {kind.__module__.partition(".")[0] for kind in type(data).__mro__}
    one_by_one = packages & _ONE_BY_ONE or hasattr(data, "__getitems__")
    if isinstance(data, keras.utils.PyDataset) or (one_by_one and hasattr(data, "__getitem__")):
        return Records(data)
    has_rows = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    return data if has_rows and not isinstance(data, tuple | list | Mapping) else None


def _of_path(path):
    if path.endswith(".npy"):
        return Columns(open_column(path))
    if path.endswith((".arrow", ".feather", ".parquet")):
        return open_table(path)
    if path.endswith((".tfrecord", ".tfrecords")):
        return TFRecords(path)
    if path.endswith(".array_record") or os.path.exists(f"{path}.json"):
        return Written(path)
    raise ValueError(
        f"{path} is no kind of file that is read by its name: .npy, .array_record (which "
        "dp_keras_opt.data.write writes), .tfrecord, .feather, .arrow or .parquet. Open it, as by "
        "image_folder, text_folder, h5py.File or zarr.open, and pass what has a length and rows."
    )
