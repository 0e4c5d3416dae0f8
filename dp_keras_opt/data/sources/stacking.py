"""Rows that were read one by one, as columns; and columns, as rows."""

import numbers

import numpy as np
import tensorflow as tf

_VALUES = str | bytes | numbers.Number | np.generic


def stacked(rows):
    """One structure of arrays from a list of structures of values of one form."""
    return tf.nest.map_structure(lambda *values: column(values), *map(without_lists, rows))


def without_lists(structure):
    """A structure with arrays in the places of lists of numbers or strings, as tokenizers give."""
    if isinstance(structure, dict):
        return {name: without_lists(part) for name, part in structure.items()}
    if isinstance(structure, list) and _is_array(structure):
        array = np.asarray(structure)
        return array.astype(object) if array.dtype.kind in "SU" else array
    if isinstance(structure, tuple | list):
        parts = [without_lists(part) for part in structure]
        return type(structure)(*parts) if hasattr(structure, "_fields") else type(structure)(parts)
    return structure


def _is_array(values):
    return all(
        _is_array(value) if isinstance(value, list) else isinstance(value, _VALUES)
        for value in values
    )


def column(values):
    """An array of values, along a new first dimension; of objects where their shapes differ."""
    if isinstance(values[0], str | bytes):  # NumPy's own type for them ends in no zero byte
        return np.array(values, object)
    arrays = [np.asarray(value) for value in values]
    if len({array.shape for array in arrays}) == 1:
        return np.stack(arrays)
    return in_rows(arrays)


def in_rows(arrays):
    """An array of objects, each an array, whatever their shapes."""
    rows = np.empty(len(arrays), object)
    for place, array in enumerate(arrays):
        rows[place] = array
    return rows


def joined(parts):
    """One structure of columns from a list of such, one after the other."""
    return tf.nest.map_structure(_joined, *parts)


def _joined(*columns):
    if len({array.shape[1:] for array in columns}) == 1:
        return np.concatenate(columns)
    return column([value for array in columns for value in array])


def row(structure, index):
    """One row of a structure of columns."""
    return tf.nest.map_structure(lambda array: array[index], structure)


def rows(structure, indices):
    """Some rows of a structure of columns."""
    return tf.nest.map_structure(lambda array: array[indices], structure)


def settled(array):
    """A column of objects as one of numbers, where its arrays are of one shape after all."""
    return column(list(array)) if is_ragged(array) else array


def is_ragged(array):
    """Whether an array holds arrays, of several shapes; strings are values."""
    return array.dtype == object and any(isinstance(value, np.ndarray) for value in array)
