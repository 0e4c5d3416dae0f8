"""The user's data as tensors in memory: structures of arrays, or a data set of examples."""

import numbers
from collections.abc import Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from dp_keras_opt.checks import whole_number
from dp_keras_opt.data import held, reading

_ROWS_READ = 4096  # of a column that is read in parts


def examples(data, class_weight, max_bytes):
    """((x, y, sample_weight) as tensors, their number), class weights multiplied in."""
    max_bytes = whole_number(max_bytes, "max_bytes")
    if isinstance(data, tf.data.Dataset):
        _check_tuple(data.element_spec)
        data = reading.read(data, lambda size: _check_size(size, max_bytes))
    x, y, sample_weight = tensors(data, max_bytes)
    if class_weight is not None:
        sample_weight = _weights_of_classes(y, class_weight, sample_weight)
    return (x, y, sample_weight), len(keras.tree.flatten(x)[0])


def tensors(data, max_bytes):
    """`(x, y, sample_weight)` as structures of tensors of equal length; the last may be None.

    They are the only copy that is made, once it is known that they are no larger than allowed.
    """
    _check_tuple(data)
    names = ("x", "y", "sample_weight") if len(data) == 3 and data[2] is not None else ("x", "y")
    data = {
        name: _map(lambda leaf, name=name: _array(name, leaf, max_bytes), structure)
        for name, structure in zip(names, data, strict=False)
    }
    lengths = {name: [len(a) for a in tf.nest.flatten(s)] for name, s in data.items()}
    distinct = set().union(*lengths.values())
    if not all(lengths.values()) or 0 in distinct:
        raise ValueError(f"`data` is empty. Received lengths: {lengths}")
    if len(distinct) > 1:
        raise ValueError(f"`data` must have arrays of equal length. Received lengths: {lengths}")
    _check_size(sum(map(held.nbytes, tf.nest.flatten(data))), max_bytes)
    weights = data.get("sample_weight")
    with tf.device("CPU:0"):  # where tf.data gathers, also beside a GPU
        x, y = (tf.nest.map_structure(held.tensor, data[name]) for name in ("x", "y"))
        return x, y, None if weights is None else tf.nest.map_structure(_weight, weights)


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


def _array(name, value, max_bytes):
    """One leaf of the data as an array, or a tensor, that has a first dimension."""
    array = value if _is_dense_tensor(value) else _as_array(name, value, max_bytes)
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
        _check_size(size * len(column) // (start + len(parts[-1])), max_bytes)
    return np.concatenate(parts) if parts else np.asarray([])


def _is_dense_tensor(value):
    return isinstance(value, tf.Tensor)


def _is_numbers_or_strings(array):
    if _is_dense_tensor(array):
        return array.dtype != tf.variant
    if array.dtype == object:
        return all(isinstance(v, str | bytes) for v in array.flat)
    return array.dtype.kind not in "mM"


def _described(value, array):
    """What stands in the place of an array, and what to do about it where that is known."""
    kind = type(value).__name__
    if array.ndim == 2 and hasattr(value, "columns"):
        return (
            f"a {kind} whose columns are of several types. Give its columns apart, as dict(df), "
            "for a model with an input for each."
        )
    if array.dtype.kind in "mM":
        return f"{kind} of dates or durations. Make numbers of them."
    if array.ndim and array.dtype == object:
        odd = next(v for v in array.flat if not isinstance(v, str | bytes))
        return (
            f"{kind} of objects, among them {odd!r}. Fill in what is missing, and pad what is of "
            "several lengths."
        )
    if array.ndim == 0 and isinstance(value, numbers.Number):
        return f"{kind}. A list is a structure of arrays; for an array of numbers, np.array(list)."
    return kind


def _weight(array):
    weights = np.asarray(array, np.float32)
    wrong = np.sum(~np.isfinite(weights))
    if wrong:
        raise ValueError(f"`sample_weight` must be finite numbers; {wrong} are not finite.")
    return held.tensor(weights, np.float32)


def _weights_of_classes(y, class_weight, sample_weight):
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
        raise ValueError(
            "`class_weight` needs integer classes of shape [n] or [n, 1], or one-hot classes of "
            f"shape [n, classes]. Received: y of shape {y.shape} and dtype {y.dtype.name}"
        )
    classes, index = np.unique(labels.round().astype(np.int64), return_inverse=True)
    weights = np.array([class_weight.get(int(c), 1.0) for c in classes], np.float32)[index]
    return tf.convert_to_tensor(weights if sample_weight is None else weights * sample_weight)


def _check_tuple(data):
    if isinstance(data, tuple) and len(data) in (2, 3):
        return
    what = f"{len(data)} elements" if isinstance(data, tuple) else type(data).__name__
    advice = "Without targets, as in an autoencoder, use (x, x)."
    if hasattr(data, "columns") or hasattr(data, "column_names"):
        advice = "Give its columns: (data[features], data[target])."
    elif not isinstance(data, tuple) and hasattr(data, "batch_size"):
        advice = "Batches that are sampled already go to `dp.data.assume_sampling`."
    raise TypeError(
        "`data` must be a tuple (x, y) or (x, y, sample_weight), or a tf.data.Dataset of "
        f"such. Received: {what}. {advice}"
    )


def _check_size(size, max_bytes):
    if size > max_bytes:
        raise ValueError(
            f"`data` takes at least {size:,} bytes, but max_bytes={max_bytes:,}. Raise it if there "
            "is memory, or sample batches yourself and use `dp.data.assume_sampling`."
        )
