"""Tables: Arrow and Feather files, data sets of Hugging Face, frames of pandas and Polars."""

from __future__ import annotations

import copy

import numpy as np

from dp_keras_opt.data.sources.files import Unchanged
from dp_keras_opt.data.sources.packages import of_extra_data
from dp_keras_opt.data.sources.stacking import column, stacked


class ArrowTable:
    """A `pyarrow.Table` as a source, in memory or mapped from a file.

    Args:
        table: the table.
        paths: of the files that it is mapped from, if there are any.

    Attributes:
        bytes_in_memory: what it takes there; nothing where it is mapped.
    """

    is_thread_safe = True

    def __init__(self, table, paths=(), bytes_in_memory=None):
        self._table = table
        self._files = Unchanged(paths)
        # `take` knows no views, which Polars writes strings as.
        self._taken = [field.name for field in table.schema if "_view" not in str(field.type)]
        self.bytes_in_memory = table.nbytes if bytes_in_memory is None else bytes_in_memory

    def __len__(self):
        return self._table.num_rows

    def __getitem__(self, indices):
        taken = self._table.select(self._taken).take(indices)
        return arrays_of(taken) | {
            name: _array(_one_by_one(self._table.column(name), indices), name)
            for name in self._table.column_names
            if name not in self._taken
        }

    @property
    def names(self):
        return self._table.column_names

    def whole(self, name):
        """One column, read into memory."""
        return arrays_of(self._table.select([name]))[name]

    def check(self):
        self._files.check()


class HuggingFace:
    """A `datasets.Dataset` as a source; what its format decodes is decoded."""

    is_thread_safe = True

    def __init__(self, dataset):
        # As Arrow, of which columns become arrays at once, unless somebody has to decode them.
        decodes = any(hasattr(each, "decode_example") for each in _features(dataset.features))
        if dataset.format["type"] is None:
            dataset = dataset.with_format("numpy" if decodes else "arrow")
        else:  # `set_format` and `set_transform` change the object in place
            dataset = copy.copy(dataset)
        self._dataset = dataset
        #: Whether a function of the user's makes the rows, which is given one at a time.
        self.is_one_by_one = dataset.format["type"] == "custom"
        self._files = Unchanged(each["filename"] for each in dataset.cache_files)

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, indices):
        if self.is_one_by_one:
            return stacked([self._dataset[place] for place in indices.tolist()])
        rows = self._dataset[indices]
        return arrays_of(rows) if hasattr(rows, "column_names") else _plain(rows)

    @property
    def names(self):
        return self._dataset.column_names

    def whole(self, name):
        """One column, read into memory."""
        rows = self._dataset.select_columns([name]).with_format("arrow")[:]
        return arrays_of(rows)[name]

    def check(self):
        self._files.check()


def open_table(path):
    """The `ArrowTable` of a file: Feather and Arrow mapped, as far as they can be; Parquet read."""
    with of_extra_data("pyarrow", "Feather and Parquet files are read by"):
        import pyarrow

    before = pyarrow.total_allocated_bytes()
    if path.endswith(".parquet"):
        from pyarrow import parquet

        table = parquet.read_table(path)
    else:
        from pyarrow import feather

        table = feather.read_table(path, memory_map=True)  # what is compressed is read
    return ArrowTable(table, [path], pyarrow.total_allocated_bytes() - before)


def table_of_frame(frame):
    """The `ArrowTable` of a data frame of pandas or Polars; each column is one type."""
    with of_extra_data("pyarrow", "Data frames are read through"):
        import pyarrow
    if hasattr(frame, "to_arrow"):  # Polars
        return ArrowTable(frame.to_arrow())

    return ArrowTable(pyarrow.Table.from_pandas(frame, preserve_index=False))


def arrays_of(table):
    """The columns of a `pyarrow.Table` as a dict of arrays."""
    return {name: _array(table.column(name), name) for name in table.column_names}


def _one_by_one(column, indices):
    """Values of a column of views, as an array without any."""
    import pyarrow

    values = [column[index].as_py() for index in indices.tolist()]
    return pyarrow.array(values, _without_views(column.type))


def _without_views(kind):
    """A type of Arrow with plain strings and lists for views of such."""
    import pyarrow
    from pyarrow import types

    if str(kind) in ("string_view", "binary_view"):
        return pyarrow.large_string() if str(kind) == "string_view" else pyarrow.large_binary()
    if types.is_struct(kind):
        return pyarrow.struct([(field.name, _without_views(field.type)) for field in kind])
    if hasattr(kind, "value_type") and not types.is_dictionary(kind):
        return pyarrow.large_list(_without_views(kind.value_type))
    return kind


def _array(values, name):
    """A column, or what its lists hold, as an array; one of objects where their lengths differ."""
    import pyarrow
    from pyarrow import compute, types

    if isinstance(values, pyarrow.ChunkedArray):
        values = values.combine_chunks()
        if isinstance(values, pyarrow.ChunkedArray):  # of no chunk, or too large for one
            values = pyarrow.concat_arrays(values.chunks)
    if isinstance(values, pyarrow.ExtensionArray):  # of fixed shape, and Hugging Face's
        values = values.storage
    if types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if values.null_count:
        place = compute.is_null(values).to_numpy(zero_copy_only=False).argmax()
        raise ValueError(f"column {name!r} has no value in row {place} of those read")
    kind = values.type
    if types.is_struct(kind):
        return {field.name: _array(values.field(i), name) for i, field in enumerate(kind)}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = _array(values.flatten(), name)
        ends = np.cumsum(compute.list_value_length(values).to_numpy(zero_copy_only=False))
        lengths = np.diff(ends, prepend=0)
        if len(set(lengths.tolist())) == 1:
            return inner.reshape(len(values), int(lengths[0]), *inner.shape[1:])
        return column(
            [inner[end - length : end] for end, length in zip(ends, lengths, strict=True)]
        )
    return values.to_numpy(zero_copy_only=False)


def _features(features):
    """All of a structure of `datasets.Features`."""
    if isinstance(features, dict):
        features = list(features.values())
    if isinstance(features, list):
        return [one for each in features for one in _features(each)]
    inner = getattr(features, "feature", None)  # of a sequence
    return [features, *(_features(inner) if inner is not None else ())]


def _plain(rows):
    """What the "numpy" format, or one of the user's, gives: a dict of arrays or of lists."""
    return {
        name: values if isinstance(values, np.ndarray) else column(list(values))
        for name, values in rows.items()
    }
