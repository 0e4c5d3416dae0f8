"""Data in memory once: rows are copied to where TensorFlow reads them, and cast on the way."""

import math

import keras
import numpy as np
import tensorflow as tf

_ALIGNMENT = 64  # bytes; what TensorFlow's kernels may expect of a tensor


class Held:
    """Room for the rows of an array, which becomes a tensor in the same memory.

    `tf.convert_to_tensor` has two copies of an array for a while, besides the array.

    Args:
        rows: how many there are at most.
        like: an array of such rows.
        dtype: what they are cast to; default: `dtype_of(like)`.
    """

    def __init__(self, rows, like, dtype=None):
        self.array = _empty((rows, *like.shape[1:]), dtype_of(like) if dtype is None else dtype)
        self.filled = 0

    def add(self, rows):
        """Copies rows to behind those that are there."""
        self.array[self.filled : self.filled + len(rows)] = rows
        self.filled += len(rows)

    @property
    def free(self):
        """For how many more rows there is room."""
        return len(self.array) - self.filled

    def tensor(self):
        """The rows as a tensor on the CPU. Nothing may be added any more."""
        array = self.array[: self.filled]
        if array.dtype.kind not in "biufc":  # strings; DLPack has numbers only
            return tf.convert_to_tensor(array)
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def tensor(array, dtype=None):
    """An array, or a tensor, as a tensor of that type on the CPU; see `Held`."""
    dtype = dtype_of(array) if dtype is None else np.dtype(dtype)
    if array.dtype == dtype and (tf.is_tensor(array) or dtype.kind in "OSU"):
        return tf.convert_to_tensor(array)  # a tensor as it is: nobody can change it
    held = Held(len(array), array, dtype)
    held.add(array)
    return held.tensor()


def taken(array, indices):
    """Rows of an array as an array of their own, where TensorFlow can use them as they are."""
    if array.dtype.kind not in "biufc":
        return array[indices]
    rows = _empty((len(indices), *array.shape[1:]), array.dtype)
    return np.take(array, indices, axis=0, out=rows, mode="clip")  # "raise" would copy them again


def dtype_of(array):
    """What an array is held as: as Keras does, floating-point numbers as its `floatx`."""
    dtype = _numpy_dtype(array)
    return np.dtype(keras.config.floatx()) if dtype.kind == "f" else dtype


def nbytes(array):
    """How many bytes an array takes once it is held."""
    size = math.prod(array.shape) * dtype_of(array).itemsize
    if array.dtype == object:
        values = np.asarray(array).flat
        size += sum(len(v) for v in values if isinstance(v, str | bytes))
        size += sum(nbytes(v) for v in values if isinstance(v, np.ndarray))
    return size


def _numpy_dtype(array):
    return np.dtype(getattr(array.dtype, "as_numpy_dtype", array.dtype))


def _empty(shape, dtype):
    """An array without values; of numbers, at an address that TensorFlow can use as it is."""
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        return np.empty(shape, dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
