"""The user's data as columns: structures of arrays, in memory or on disk."""

import numbers
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from dp_keras_opt.data import held
from dp_keras_opt.data.sources import stacking
from dp_keras_opt.data.sources.columns import OnDisk, open_column

_ROWS_READ = 4096  # of a column that is read in parts


def columns(data, max_bytes, any_length=False):
    """`(x, y, sample_weight)`, structures of arrays of equal length; the last two may be None.

    Those of files stay there, as `OnDisk`. What is in memory takes no more than allowed. With
    `any_length` a column may be of objects that are each the array of an example.
    """
    check_tuple(data)
    names = ("x", "y", "sample_weight") if len(data) == 3 and data[2] is not None else ("x", "y")
    named = {
        name: _map(lambda leaf, name=name: array(name, leaf, max_bytes, any_length), structure)
        for name, structure in zip(names, data, strict=False)
        if name != "y" or structure is not None
    }
    lengths = {name: [len(a) for a in tf.nest.flatten(s)] for name, s in named.items()}
    distinct = set().union(*lengths.values())
    if not all(lengths.values()) or 0 in distinct:
        raise ValueError(f"`data` is empty. Received lengths: {lengths}")
    if len(distinct) > 1:
        raise ValueError(f"`data` must have arrays of equal length. Received lengths: {lengths}")
    held_here = [a for a in tf.nest.flatten(named) if not isinstance(a, OnDisk)]
    check_size(sum(map(held.nbytes, held_here)), max_bytes)
    weights = named.get("sample_weight")
    return (
        named["x"],
        named.get("y"),
        None if weights is None else tf.nest.map_structure(weights_of_rows, weights),
    )


def as_tensors(structure):
    """Columns in memory as tensors: the only copy that is made."""
    with tf.device("CPU:0"):  # where tf.data gathers, also beside a GPU
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else held.tensor(leaf), structure
        )


def _map(function, structure):
    """`function` of every array of a structure, in which lists become tuples, as in Keras.

    tf.data takes a list for one tensor. Whatever else is a sequence, as a column of a table, is one
    array, and not a structure as it is for `tf.nest`.
    """
    if isinstance(structure, Mapping):
        return {name: _map(function, part) for name, part in structure.items()}
    if isinstance(structure, tuple | list):
        parts = [_map(function, part) for part in structure]
        return type(structure)(*parts) if hasattr(structure, "_fields") else tuple(parts)
    return function(structure)


def array(name, value, max_bytes, any_length=False):
    """One leaf of the data as an array, a tensor or an `OnDisk`, that has a first dimension."""
    value = open_column(value)
    rows = _rows(value) if any_length else None
    if rows is not None:
        return rows
    as_it_is = isinstance(value, tf.Tensor | OnDisk)
    array = value if as_it_is else _as_array(name, value, max_bytes)
    if not array.shape or not _is_numbers_or_strings(array):
        raise TypeError(
            f"`{name}` must be a dense array of numbers or strings with the examples along its "
            f"first dimension, or a structure of such. Received: {_described(value, array)}"
        )
    if name == "sample_weight" and len(array.shape) != 1:
        raise ValueError(
            "`sample_weight` must have one number for each example, of shape [n]. Received: shape "
            f"{tuple(array.shape)}. To weight the positions of an example against each other, do "
            "it in the loss, or mask them."
        )
    return array


def _rows(value):
    """A column of arrays of several lengths as an array of objects, each an array; else None."""
    if isinstance(value, tf.RaggedTensor):
        splits = value.row_splits.numpy()[1:-1]
        return stacking.in_rows(np.split(value.values.numpy(), splits))
    if np.dtype(object) != getattr(value, "dtype", None):
        return None
    values = list(np.asarray(value))
    if not values or not all(isinstance(row, np.ndarray | list | tuple) for row in values):
        return None
    rows = stacking.in_rows([np.asarray(row) for row in values])
    return rows if all(row.ndim and row.dtype.kind in "biufcOSU" for row in rows) else None


def _as_array(name, value, max_bytes):
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return _read_column(name, value, max_bytes)
    return np.asarray(value)


def _read_column(name, column, max_bytes):
    """A column of a table that is on disk, as of Hugging Face's `datasets`, read in parts."""
    parts, size = [], 0
    for start in range(0, len(column), _ROWS_READ):
        try:
            parts.append(np.asarray(column[start : start + _ROWS_READ]))
        except ValueError as error:
            raise ValueError(
                f"`{name}` must have examples of equal shape: pad them. Received: a "
                f"{type(column).__name__} of which NumPy says: {error}"
            ) from error
        size += held.nbytes(parts[-1])
        check_size(size * len(column) // (start + len(parts[-1])), max_bytes)
    return np.concatenate(parts) if parts else np.asarray([])


def _is_numbers_or_strings(array):
    if isinstance(array, tf.Tensor):
        return array.dtype != tf.variant
    if isinstance(array, OnDisk):  # h5py has strings as objects, which are not read here
        return array.dtype.kind not in "mMV"
    if array.dtype == object:
        return all(isinstance(v, str | bytes) for v in array.flat)
    return array.dtype.kind not in "mM"


_BY_A_SAMPLER = "or have a sampler do it, by buckets=dp_keras_opt.data.Buckets(longest)"


def _described(value, array):
    """What stands in the place of an array, and what to do about it where that is known."""
    kind = type(value).__name__
    if array.ndim == 2 and hasattr(value, "columns"):
        return (
            f"a {kind} whose columns are of several types. Make one matrix of it, as by "
            "df.astype('float32'); or, for a model with an input for each column, give these "
            "apart, as dict(df)."
        )
    if array.dtype.kind in "mM":
        return f"{kind} of dates or durations. Make numbers of them."
    if array.ndim and array.dtype == object:
        odd = next(v for v in array.flat if not isinstance(v, str | bytes))
        return (
            f"{kind} of objects, among them {odd!r}. Fill in what is missing, and pad what is of "
            f"several lengths, {_BY_A_SAMPLER}."
        )
    if isinstance(value, tf.RaggedTensor):
        return f"{kind}. Pad it, {_BY_A_SAMPLER}."
    if hasattr(value, "toarray"):  # of SciPy
        return f"{kind}. Make it dense: {kind}.toarray()."
    if array.ndim == 0 and isinstance(value, numbers.Number | str | bytes):
        return (
            f"{kind}. A list is a structure of arrays; for one array, np.array(list), and "
            f"tf.ragged.constant(list) of several lengths, which are padded, {_BY_A_SAMPLER}."
        )
    return kind


def weights_of_rows(array):
    """`sample_weight` as float32 [n], once it is finite."""
    weights = np.asarray(array.whole() if isinstance(array, OnDisk) else array, np.float32)
    wrong = np.sum(~np.isfinite(weights))
    if wrong:
        raise ValueError(f"`sample_weight` must be finite numbers; {wrong} are not finite.")
    return weights


def weights_of_classes(y, class_weight, sample_weight):
    """The weight of each example's class, times its `sample_weight` where that is given."""
    if not isinstance(class_weight, dict) or not all(
        isinstance(w, numbers.Real) and np.isfinite(w) for w in class_weight.values()
    ):
        raise TypeError(
            f"`class_weight` must be a dict from class to finite weight. Received: {class_weight!r}"
        )
    if tf.nest.is_nested(y) or tf.nest.is_nested(sample_weight):
        raise ValueError(
            "`class_weight` needs one output and one array of weights. Received: a structure of y "
            "or of `sample_weight`. Put the class weights into `sample_weight` instead."
        )
    labels = np.asarray(y)
    if labels.ndim == 2:
        labels = labels.argmax(axis=1) if labels.shape[1] > 1 else labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "biuf":
        kind = "string" if labels.dtype.kind in "OSU" else labels.dtype.name
        raise ValueError(
            "`class_weight` needs integer classes of shape [n] or [n, 1], or one-hot classes of "
            f"shape [n, classes]. Received: y of shape {y.shape} and dtype {kind}"
        )
    classes, index = np.unique(labels.round().astype(np.int64), return_inverse=True)
    weights = np.array([class_weight.get(int(c), 1.0) for c in classes], np.float32)[index]
    return weights if sample_weight is None else weights * np.asarray(sample_weight)


def check_tuple(data):
    if isinstance(data, tuple) and len(data) in (2, 3):
        return
    what = f"{len(data)} elements" if isinstance(data, tuple) else type(data).__name__
    advice = "Without targets, use (x, None); as in an autoencoder, (x, x)."
    if not hasattr(data, "__len__"):
        advice = "What comes one by one is written into a file first, by dp_keras_opt.data.write."
    elif hasattr(data, "columns") or hasattr(data, "column_names"):
        advice = (
            "Give its columns: (data[features], data[target]); or map=, a function of one row that "
            "returns (x, y)."
        )
    elif not isinstance(data, tuple) and hasattr(data, "batch_size"):
        advice = "Batches that are sampled already go to `dp.data.assume_sampling`."
    raise TypeError(
        "`data` must be a tuple (x, y) or (x, y, sample_weight), or a tf.data.Dataset of "
        f"such. Received: {what}. {advice}"
    )


def check_size(size, max_bytes):
    if size > max_bytes:
        raise ValueError(
            f"`data` takes at least {size:,} bytes, but max_bytes={max_bytes:,}. Raise it if there "
            "is memory, or leave the data on disk: np.load(path, mmap_mode='r'), arrays of h5py or "
            "zarr, and what dp.data.write makes of a stream are read when they are drawn."
        )
