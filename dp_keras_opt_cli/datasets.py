"""Data set files: `.npz`, CSV and TFRecord, as `(x, y)` of arrays in memory."""

import collections
import csv
import hashlib
import json
import pathlib
import zipfile

import numpy as np
import tensorflow as tf

from dp_keras_opt_cli.results import FileError, UsageError

_TYPES = ("float32", "int64", "string")  # what a tf.train.Example can hold


def load(path, target=None, features=(), schema=None):
    """Reads a data set.

    Args:
        path: `.npz`, `.csv`, `.tfrecord` or `.tfrecords`.
        target: name of the column or array to predict.
        features: descriptions "name:shape:type" of a TFRecord file.
        schema: path of a JSON file with the same.

    Returns:
        (x, y), each an array with the examples along its first dimension, or a dict of such: the
        arrays "x" and "y", or "x_NAME" and "y_NAME" by NAME; with `target`, that one and the
        others by their names. A CSV file gives x as one float32 matrix and y as (n, 1).

    Raises:
        FileError: there is no such file, or not with such data.
        UsageError: it is not said what to read of it.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileError(f"There is no file {path}.")
    if path.suffix == ".npz":
        return _checked(path, *_parted(path, _npz(path), target))
    if path.suffix == ".csv":
        return _csv(path, target)
    if path.suffix in (".tfrecord", ".tfrecords"):
        described = _described(features, schema)
        return _checked(path, *_parted(path, _tfrecord(path, described), target))
    raise UsageError(f"{path} is none of .npz, .csv and .tfrecord, which can be read.")


def load_all(arguments, *others):
    """DATA, and the data of other files of the same form, None where a path is None.

    Args:
        arguments: parsed, of a parser with `add_arguments`.
        *others: paths.

    Returns:
        A list of (x, y) or None.

    Raises:
        FileError, UsageError: as `load` and `check_alike`.
    """
    form = arguments.target, arguments.features, arguments.schema
    data = load(arguments.data, *form)
    loaded = [data]
    for path in others:
        loaded.append(path and load(path, *form))
        if path:
            check_alike(path, loaded[-1], arguments.data, data)
    return loaded


def split(data, shares):
    """Disjoint parts of a data set. Which ones equal examples are in depends on them alone.

    So one example more or less makes no other one change its part, and what is private for those
    that are trained on stays so. The other parts choose and judge, without noise.

    Args:
        data: (x, y).
        shares: of all examples, about, for the parts beside the first; 0 gives None.

    Returns:
        A list of (x, y): what is left, and the parts.

    Raises:
        FileError: a part would be empty.
    """
    columns = [column for part in data for column in _columns(part)]
    copies = collections.Counter()
    places = [_place(row, copies) for row in zip(*columns, strict=True)]
    ends = np.cumsum([1 - sum(shares), *shares])
    part_of = np.searchsorted(ends[:-1], places, side="right")
    counts = np.bincount(part_of, minlength=len(ends))
    if any(share and not count for share, count in zip((1, *shares), counts, strict=True)):
        raise FileError(f"{len(places)} examples are too few to hold some out. Give more files.")

    def rows(arrays, chosen):
        if isinstance(arrays, dict):
            return {name: array[chosen] for name, array in arrays.items()}
        return arrays[chosen]

    return [tuple(rows(part, part_of == place) for part in data) if count else None
            for place, count in enumerate(counts)]  # fmt: skip


def _columns(arrays):
    """The arrays of x or y."""
    return arrays.values() if isinstance(arrays, dict) else [arrays]


def _place(row, copies):
    """A number in [0, 1), as if by chance, by which a row of several columns decides alone.

    Args:
        row: its values.
        copies: how often each content came before, to be counted on: equal rows differ in that
            alone, so one fewer is one fewer in one part.
    """
    digest = hashlib.sha256()
    for value in row:
        value = np.asarray(value)
        if value.dtype.kind in "biuf":  # as float64: other rows may decide on the type
            content = value.astype(np.float64).tobytes()
        else:
            content = repr(value.tolist()).encode()
        digest.update(len(content).to_bytes(8, "big") + content)
    content = digest.digest()
    digest.update(copies[content].to_bytes(8, "big"))
    copies[content] += 1
    return int.from_bytes(digest.digest()[:6], "big") / 2**48


def check_alike(path, data, like, other):
    """Refuses data of another form than the training data, which it is to be used beside.

    Args:
        path: of the file that `data` was loaded from.
        data: (x, y).
        like: path of the training data.
        other: their (x, y).

    Raises:
        FileError: the arrays, their shapes, or the columns and their order are others.
    """
    forms = _form(path, data), _form(like, other)
    if forms[0] != forms[1]:
        raise FileError(f"{path} has {forms[0]}, but {like} has {forms[1]}. Give both one form.")


def _form(path, data):
    """The arrays of a data set in words: their names, or columns, and shapes of an example."""
    if pathlib.Path(path).suffix == ".csv":
        with open(path, newline="", encoding="utf-8-sig") as file:
            return f"columns {', '.join(next(row for row in csv.reader(file) if row))}"
    arrays = {
        f"{part}_{name}": array
        for part, given in zip("xy", data, strict=True)
        for name, array in (given if isinstance(given, dict) else {"": given}).items()
    }
    return ", ".join(f"{name.rstrip('_')} {array.shape[1:]}" for name, array in arrays.items())


def _checked(path, x, y):
    arrays = [*(x.values() if isinstance(x, dict) else [x])]
    arrays += [*(y.values() if isinstance(y, dict) else [y])]
    lengths = {len(array) if array.ndim else 0 for array in arrays}
    if len(lengths) > 1 or 0 in lengths:
        raise FileError(
            f"{path}: all arrays need the same number of examples, and at least one; their "
            f"lengths are {sorted(lengths)}."
        )
    return x, y


def _parted(path, arrays, target):
    """(x, y) of arrays by name."""
    if target is not None:
        if target not in arrays:
            raise FileError(f"{path} has no {target!r}; it has {', '.join(arrays)}.")
        y = arrays.pop(target)
        if not arrays:
            raise FileError(f"{path} has {target!r} only, and nothing to predict it from.")
        return (arrays if len(arrays) > 1 else next(iter(arrays.values()))), y
    parts = []
    for part in ("x", "y"):
        named = {n[2:]: a for n, a in arrays.items() if n.startswith(f"{part}_")}
        if (part in arrays) == bool(named):
            raise FileError(
                f"{path} has {', '.join(arrays) or 'nothing'}. Needed are x and y, or several "
                "x_NAME or y_NAME; or name what to predict by --target."
            )
        parts.append(named or arrays[part])
    return parts


# .npz


def _npz(path):
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (ValueError, OSError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise FileError(
            f"{path} cannot be read as .npz: {error}. Save arrays of numbers or fixed-length "
            "strings with numpy.savez."
        ) from error


# CSV


def _csv(path, target):
    if target is None:
        raise UsageError(f"{path}: give the column to predict, --target NAME.")
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            header, *rows = [row for row in csv.reader(file) if row] or [[]]
    except (UnicodeDecodeError, csv.Error) as error:
        raise FileError(f"{path} is no CSV text in UTF-8: {error}.") from error
    if target not in header:
        raise FileError(f"{path} has no column {target!r}; its header is {', '.join(header)}.")
    if len(set(header)) < len(header) or len(header) < 2 or not rows:
        raise FileError(
            f"{path} needs a header of different names, a column beside {target!r}, and rows; its "
            f"header is {', '.join(header)}, and it has {len(rows)} rows."
        )
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise FileError(
                f"{path}: row {number} has {len(row)} fields, the header has {len(header)}."
            )
    columns = {
        name: _numbers(path, name, column)
        for name, column in zip(header, zip(*rows, strict=True), strict=True)
    }
    y = columns.pop(target)
    return np.stack(list(columns.values()), axis=1), y[:, None]


def _numbers(path, name, column):
    try:
        return np.array(column, np.float64).astype(np.float32)
    except ValueError:
        number, value = next((i, v) for i, v in enumerate(column, 1) if not _is_number(v))
        if not value.strip():
            raise FileError(
                f"{path}: column {name!r} is empty in row {number}. Fill in what is missing, by a "
                "value that is fixed without looking at the data, or take the column out."
            ) from None
        raise FileError(
            f"{path}: column {name!r} is not numeric: {value!r} in row {number}. Encode it as "
            "numbers, or take the column out."
        ) from None


def _is_number(text):
    try:
        float(text)
    except ValueError:
        return False
    return True


# TFRecord


def _described(features, schema):
    """{name: (shape, type)} of the options --feature or --schema."""
    if bool(features) == bool(schema):
        raise UsageError(
            "A TFRecord file does not say what is in it: give --feature NAME:SHAPE:TYPE for each "
            "feature, or --schema FILE."
        )
    found = {}
    for feature in features:
        name, *rest = feature.split(":")
        if len(rest) != 2:
            raise UsageError(f"--feature {feature!r} is not NAME:SHAPE:TYPE, as x:28x28:float32.")
        found[name] = _feature(
            f"--feature {feature!r}", [s for s in rest[0].split("x") if s], rest[1]
        )
    for name, each in (_schema(schema) if schema else {}).items():
        where = f"{schema}: feature {name!r}"
        if not isinstance(each, dict) or not isinstance(each.get("shape"), list):
            raise FileError(f'{where} must be {{"shape": [...], "dtype": "..."}}.')
        found[name] = _feature(where, each["shape"], each.get("dtype"))
    return found


def _schema(path):
    try:
        content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"The schema {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise FileError(f"The schema {path} is no JSON: {error}.") from error
    if not isinstance(content, dict):
        raise FileError(f"The schema {path} must be a JSON object of features by name.")
    return content


def _feature(where, shape, dtype):
    if dtype not in _TYPES or not all(str(size).isdigit() for size in shape):
        raise UsageError(
            f"{where}: its type must be one of {', '.join(_TYPES)}, its shape numbers."
        )
    return [int(size) for size in shape], dtype


def _tfrecord(path, described):
    spec = {
        name: tf.io.FixedLenFeature(shape, getattr(tf, dtype))
        for name, (shape, dtype) in described.items()
    }
    records = tf.data.TFRecordDataset(str(path)).batch(1024)
    parsed = records.map(lambda batch: tf.io.parse_example(batch, spec))
    try:
        parts = list(parsed.as_numpy_iterator())
    except tf.errors.DataLossError as error:
        raise FileError(f"{path} is no TFRecord file, or is damaged: {error.message}") from error
    except tf.errors.InvalidArgumentError as error:
        raise FileError(f"{path} has other features than described: {error.message}") from error
    if not parts:
        raise FileError(f"{path} has no examples.")
    return {name: np.concatenate([part[name] for part in parts]) for name in described}
