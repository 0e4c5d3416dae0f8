"""A user's data as arrays of rows, some thousand at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from dp_keras_opt.data.doubts import is_batched, refuse_copies
from dp_keras_opt.data.sources.columns import OnDisk, open_column

#: So many rows are looked at together.
_ROWS = 2**14


def chunks(values: Any) -> Iterator[Any]:
    """The rows of a column in their order, as arrays, or as `tf.RaggedTensor`s.

    Args:
        values: an array, a list, a tensor, a column of a frame; an array of a file, of NumPy, h5py
            or zarr, or the path of a `.npy` file; a `tf.data.Dataset` of such rows, in batches, or
            of single numbers or strings.

    Raises:
        ValueError: they are no rows: a single number, none, several columns, or without an end; or
            it cannot be told that a data set is in batches.
    """
    if isinstance(values, tf.data.Dataset):
        yield from _of_dataset(values)
        return
    values = open_column(values)
    if not isinstance(values, OnDisk) and not _is_ragged(values):
        values = np.asarray(values)
    if not values.shape or not values.shape[0]:
        raise ValueError(f"There must be rows of values; received the shape {values.shape}.")
    for start in range(0, values.shape[0], _ROWS):
        stop = min(start + _ROWS, values.shape[0])
        yield values[np.arange(start, stop)] if isinstance(values, OnDisk) else values[start:stop]


def check_order(dataset: tf.data.Dataset) -> None:
    """Refuses a data set whose rows come in another order each time: ids would be of other rows.

    Raises:
        ValueError: two passes have different rows in some place.
    """
    one, other = (_digest(dataset) for _ in range(2))
    if one != other:
        raise ValueError(
            "The data set gives its rows in another order at each pass, so that `users` would "
            "name the users of other rows: their contributions would not be bounded. Leave out "
            "shuffle()."
        )


def check_batched(dataset: tf.data.Dataset) -> None:
    """Refuses a data set of examples: each number or word of one would count as a unit.

    Raises:
        ValueError: `batch` was not called on it, as far as can be told; or `repeat` was.
    """
    refuse_copies(dataset)
    if not is_batched(dataset):
        raise ValueError(
            f"The data set has elements {dataset.element_spec}, and nothing shows that these are "
            "batches: of single examples each number or word would count as a unit, and a unit "
            "could move the figures by as many as it has. Call .batch(256) if they are examples, "
            "or .unbatch().batch(256) if they are batches that a generator, or several data sets, "
            "give."
        )


def _digest(dataset):
    """Of all rows, in their order."""
    found = hashlib.blake2b()
    for batch in dataset:
        for leaf in tf.nest.flatten(batch, expand_composites=True):
            values = np.asarray(leaf)
            content = repr(values.tolist()).encode() if values.dtype == object else values.tobytes()
            found.update(repr((values.shape, len(content))).encode() + content)
    return found.digest()


def _is_ragged(value):
    return isinstance(value, tf.RaggedTensor)


def _of_dataset(dataset):
    spec = dataset.element_spec
    if not isinstance(spec, tf.TensorSpec | tf.RaggedTensorSpec):
        raise ValueError(
            f"The data set must have one column; its elements are {spec}. Choose it: "
            "dataset.map(lambda x, y: x)."
        )
    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise ValueError("The data set has no end: each row is to count once. Leave out repeat().")
    if spec.shape.rank == 0:
        dataset = dataset.batch(_ROWS)
    check_batched(dataset)
    empty = True
    for batch in dataset:
        empty = False
        yield batch if _is_ragged(batch) else batch.numpy()
    if empty:
        raise ValueError("The data set is empty.")
