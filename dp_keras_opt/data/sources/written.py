"""Whatever streams, written once as ArrayRecord, of which any example is read at once.

A record is a `tf.train.Example` with a feature of bytes for each array: numbers as they lie in
memory, strings as they are. A JSON file beside tells their types and shapes.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from dp_keras_opt.data.sources.files import Unchanged
from dp_keras_opt.data.sources.packages import of_extra_data
from dp_keras_opt.data.sources.stacking import column, without_lists
from dp_keras_opt.files import replacing
from dp_keras_opt.types import Path

_FORMAT = "dp-keras-opt examples, version 1"
_NUMBER_OF = "number of records"
#: Types of numbers that TensorFlow reads from bytes.
_DECODED = {
    "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16"
}  # fmt: skip


def write(examples: Iterable[Any], path: Path) -> int:
    """Writes examples into a file that samplers draw from, whatever their number.

    Args:
        examples: yields examples one by one, each a tuple (x, y), a dict, or another structure of
            arrays, numbers and strings: a `tf.data.Dataset`, a generator, a streaming data set of
            Hugging Face. A list of numbers is an array. All have one structure and the same types;
            lengths may differ where the number of dimensions does not. Read once, and never held
            in memory.
        path: of the ArrayRecord file to write, which by custom ends in .array_record; a second
            file, with .json behind the name, holds what the arrays are. Files that are there are
            replaced once the new ones are whole.

    Returns:
        The number of examples.

    Raises:
        ImportError: the package array-record is not installed.
        TypeError, ValueError: an example is of another structure, type or number of dimensions
            than the first, or there is none; the message names it by its number.
    """
    with of_extra_data("array-record", "Files of examples are written by"):
        from array_record.python import array_record_module

    path = pathlib.Path(path)
    form, count = None, 0
    if isinstance(examples, tf.data.Dataset):
        examples = examples.as_numpy_iterator()
    with replacing(path) as beside, replacing(f"{path}.json") as description:
        # Groups of one record: any of them is read without others. Zstandard, the default, takes
        # more than twice as long to read.
        writer = array_record_module.ArrayRecordWriter(os.fspath(beside), "group_size:1,snappy")
        try:
            for count, example in enumerate(examples, 1):
                skeleton, leaves = _taken_apart(without_lists(example))
                found = _Form.of(skeleton, leaves)
                form = found if form is None else form.with_another(found, count - 1)
                writer.write(form.serialized(leaves))
        finally:
            writer.close()
        if form is None:
            raise ValueError(f"There are no examples to write to {path}.")
        description.write_text(json.dumps(form.as_json() | {_NUMBER_OF: count}, indent=1))
    return count


class Written:
    """The examples of a file that `write` has written, as a source.

    Args:
        path: of the file.
    """

    is_thread_safe = True

    def __init__(self, path: Path) -> None:
        with of_extra_data("array-record", "Files that dp.data.write wrote are read by"):
            from array_record.python import array_record_module

        described = json.loads(pathlib.Path(f"{os.fspath(path)}.json").read_text())
        self._form = _Form.from_json(described, path)
        # Its `read` of many records takes half the time of ArrayRecordDataSource, which is for
        # many files. Reading ahead is for those who read in order.
        self._records = array_record_module.ArrayRecordReader(
            os.fspath(path), "readahead_buffer_size:0"
        )
        self._files = Unchanged([path])
        if len(self) != described[_NUMBER_OF]:
            raise ValueError(
                f"{path} has {len(self)} records, of {described[_NUMBER_OF]} that were "
                "written: it was cut short, or replaced."
            )

    def __len__(self):
        return self._records.num_records()

    def __getitem__(self, indices):
        return self._form.parsed(self._records.read(indices.tolist()))

    def check(self):
        self._files.check()


class _Form:
    """What the arrays of an example are, and how they lie in a record.

    Attributes:
        skeleton: the structure of an example, as JSON, with numbers in the places of its arrays.
        dtypes: names of types, of NumPy's or "string".
        shapes: lists of sizes; those that differ between examples are None.
    """

    def __init__(self, skeleton, dtypes, shapes):
        self.skeleton, self.dtypes, self.shapes = skeleton, dtypes, shapes

    @classmethod
    def of(cls, skeleton, leaves):
        dtypes = ["string" if leaf.dtype == object else leaf.dtype.name for leaf in leaves]
        return cls(skeleton, dtypes, [list(leaf.shape) for leaf in leaves])

    def with_another(self, other, place):
        """The form of this example, the one at `place`, and those before it.

        Raises:
            TypeError, ValueError: they have none in common.
        """
        received = f"Example {place} is {other}, and those before it are {self}"
        if (other.skeleton, other.dtypes) != (self.skeleton, self.dtypes):
            raise TypeError(f"{received}: all must have one structure, and each array one type.")
        shapes = []
        for dtype, ours, theirs in zip(self.dtypes, self.shapes, other.shapes, strict=True):
            if len(ours) != len(theirs) or (dtype == "string" and ours != theirs):
                raise ValueError(
                    f"{received}: the number of dimensions of an array must not change, nor that "
                    "of strings in it. Join what belongs to one text, and split it in `map`."
                )
            shapes.append([a if a == b else None for a, b in zip(ours, theirs, strict=True)])
        return _Form(self.skeleton, self.dtypes, shapes)

    def __str__(self):
        kinds = zip(self.dtypes, self.shapes, strict=True)
        return str(_from_json(self.skeleton, [f"{dtype}{shape}" for dtype, shape in kinds]))

    # A record.

    def serialized(self, leaves):
        """A record of an example, from its arrays."""
        features = tf.train.Features()
        for place, leaf in enumerate(leaves):
            is_string = leaf.dtype == object
            values = [_bytes(v) for v in leaf.flat] if is_string else [leaf.tobytes()]
            features.feature[str(place)].bytes_list.value.extend(values)
            features.feature[f"{place}/shape"].int64_list.value.extend(leaf.shape)
        return tf.train.Example(features=features).SerializeToString()

    def parsed(self, records):
        """The columns of several records, in the structure of an example."""
        with tf.device("CPU:0"):
            found = self._parse(tf.constant(records))
        columns = [self._column(place, found) for place in range(len(self.dtypes))]
        return _from_json(self.skeleton, columns)

    @functools.cached_property
    def _parse(self):
        """Function of records that gives tensors, of numbers where their number is always one."""
        wanted: dict[str, Any] = {}
        for place, (dtype, shape) in enumerate(zip(self.dtypes, self.shapes, strict=True)):
            size = shape if dtype == "string" else []
            wanted[str(place)] = tf.io.FixedLenFeature(size, tf.string)
            if None in shape:
                wanted[f"{place}/shape"] = tf.io.FixedLenFeature([len(shape)], tf.int64)

        def parse(records):
            found = tf.io.parse_example(records, wanted)
            for place, (dtype, shape) in enumerate(zip(self.dtypes, self.shapes, strict=True)):
                if dtype in _DECODED and None not in shape:
                    numbers = tf.io.decode_raw(found[str(place)], dtype)
                    found[str(place)] = tf.reshape(numbers, [-1, *shape])
            return found

        return tf.function(parse, [tf.TensorSpec([None], tf.string)], autograph=False)

    def _column(self, place, found):
        dtype, shape, values = self.dtypes[place], self.shapes[place], found[str(place)].numpy()
        if dtype == "string" or values.dtype == dtype:
            return values
        if None in shape:
            sizes = found[f"{place}/shape"].numpy()
            return column(
                [
                    np.frombuffer(value, dtype).reshape(size)
                    for value, size in zip(values, sizes, strict=True)
                ]
            )
        return np.frombuffer(b"".join(values), dtype).reshape(len(values), *shape)

    # As JSON.

    def as_json(self):
        return {
            "format": _FORMAT,
            "structure": self.skeleton,
            "types": self.dtypes,
            "shapes": self.shapes,
        }

    @classmethod
    def from_json(cls, described, path):
        if described.get("format") != _FORMAT:
            raise ValueError(
                f"{path}.json says that the file is {described.get('format')!r}, and this version "
                f"of the library reads {_FORMAT!r}."
            )
        return cls(described["structure"], described["types"], described["shapes"])


def _leaf(value):
    """A value as an array of numbers, or of objects where it is strings."""
    array = np.asarray(value, object) if isinstance(value, str | bytes) else np.asarray(value)
    if array.dtype.kind in "SU":
        array = array.astype(object)
    is_string = array.dtype == object and all(isinstance(v, str | bytes) for v in array.flat)
    if not is_string and array.dtype.kind not in "biufc":
        raise TypeError(
            f"An example must be arrays of numbers or strings. Received: {value!r}, of dtype "
            f"{array.dtype}."
        )
    return array if is_string else array.astype(array.dtype.newbyteorder("<"))


def _bytes(value):
    return value.encode() if isinstance(value, str) else value


def _taken_apart(example):
    """(the structure of an example, as JSON with numbers for its arrays; these arrays)."""
    leaves: list[Any] = []

    def skeleton(part):
        if isinstance(part, dict):  # in the order of names, whatever that of an example is
            return {"dict": {name: skeleton(part[name]) for name in sorted(part)}}
        if isinstance(part, tuple | list):
            return {"tuple": [skeleton(each) for each in part]}
        leaves.append(_leaf(part))
        return len(leaves) - 1

    return skeleton(example), leaves


def _from_json(skeleton, leaves):
    """The structure, with `leaves` in the places of numbers."""
    if not isinstance(skeleton, dict):
        return leaves[skeleton]
    if "dict" in skeleton:
        return {name: _from_json(part, leaves) for name, part in skeleton["dict"].items()}
    return tuple(_from_json(part, leaves) for part in skeleton["tuple"])
