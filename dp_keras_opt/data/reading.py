"""A `tf.data.Dataset` of examples, read into memory once."""

import itertools
import warnings
from collections import deque

import numpy as np
import tensorflow as tf

from dp_keras_opt.data import held
from dp_keras_opt.data.doubts import refuse_copies, warn_of_batched_dataset

_CHUNK = 128  # examples that are read at a time
_LOOKED_AT = 8  # examples that are read twice
_SLAB = 2**26  # bytes of an array that are held apart where the number of examples is not known
_BLOCK = 2**24  # bytes that are compared at a time


def read(dataset, check_size):
    """A finite data set of examples as a structure of tensors.

    Args:
        dataset: the `tf.data.Dataset`.
        check_size: function of a number of bytes, which raises where they are too many.
    """
    spec, n = dataset.element_spec, int(dataset.cardinality())
    _check(spec, n)
    refuse_copies(dataset)
    warn_of_batched_dataset(dataset)
    slabs, rows, size = deque(), 0, 0
    try:
        for chunk in dataset.batch(_CHUNK).as_numpy_iterator():
            leaves = tf.nest.flatten(chunk)
            rows += len(leaves[0])
            size += sum(map(held.nbytes, leaves))
            check_size(size if n < 0 else size * n // rows)
            _add(slabs, leaves, n)
    except tf.errors.InvalidArgumentError as error:
        raise ValueError(
            "`data` must have examples of equal shape: pad them or, if they are batches, call "
            f"`.unbatch()`. TensorFlow says: {error.message}"
        ) from error
    if not rows:
        raise ValueError("`data` is empty. Received: a data set without examples.")
    rooms = _joined(slabs, rows)
    _doubt_randomness(dataset, [room.array[:rows] for room in rooms])
    return tf.nest.pack_sequence_as(spec, [room.tensor() for room in rooms])


def _check(spec, n):
    if n == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "`data` is an infinite data set, but the probability of an example is batch_size / n. "
            "Remove `repeat()`, or sample batches yourself and use `dp.data.assume_sampling`."
        )
    leaves = tf.nest.flatten(spec)
    if not all(isinstance(leaf, tf.TensorSpec) for leaf in leaves):
        raise TypeError(f"`data` must have dense examples: pad them. Received: {spec}")
    if all(leaf.shape.rank and leaf.shape[0] is None for leaf in leaves):
        raise ValueError(
            f"`data` must be examples, but looks like batches: {spec}. Call `.unbatch()`, or state "
            "the shape of an example with `tf.ensure_shape` in a `map`."
        )


def _add(slabs, leaves, n):
    """Copies a chunk, a list of arrays, into the last slab, or into a new one."""
    if not slabs or slabs[-1][0].free < len(leaves[0]):
        largest = max(1, *(held.nbytes(leaf[:1]) for leaf in leaves))
        rows = n if n >= 0 else max(_CHUNK, _SLAB // largest)
        slabs.append([held.Held(rows, leaf) for leaf in leaves])
    for room, leaf in zip(slabs[-1], leaves, strict=True):
        room.add(leaf)


def _joined(slabs, rows):
    """One `Held` for each array; slabs are let go one after the other, so that memory is too."""
    if len(slabs) == 1:
        return slabs[0]
    rooms = [held.Held(rows, room.array) for room in slabs[0]]
    while slabs:
        for room, slab in zip(rooms, slabs.popleft(), strict=True):
            room.add(slab.array[: slab.filled])
    return rooms


def _doubt_randomness(dataset, arrays):
    """Warns of examples that are others each time they are read: here they are read once."""
    try:
        again = list(itertools.islice(dataset.take(_LOOKED_AT).as_numpy_iterator(), _LOOKED_AT))
    except tf.errors.OpError:  # it can be read only once
        return
    again = [
        [np.asarray(v).astype(a.dtype) for v, a in zip(tf.nest.flatten(e), arrays, strict=True)]
        for e in again
    ]
    in_order = all(
        _finds(example, [array[place : place + 1] for array in arrays])
        for place, example in enumerate(again)
    )
    if not in_order and not all(_finds(example, arrays) for example in again):  # not just shuffled
        warnings.warn(
            "The examples of `data` are others when they are read a second time, as by random "
            "augmentation. They are read once, so that each stays what it is now. To have it "
            "changed whenever it is drawn, call map on the batches instead: "
            "poisson_batches(...).map(lambda x, y: ...).",
            stacklevel=6,
        )


def _finds(example, arrays):
    """Whether an example is among those that the arrays hold."""
    step = max(1, _BLOCK // max(1, *(array[:1].nbytes for array in arrays)))
    for start in range(0, len(arrays[0]), step):
        parts = [array[start : start + step] for array in arrays]
        same = np.ones(len(parts[0]), bool)
        for part, value in zip(parts, example, strict=True):
            equal = part == value
            if part.dtype.kind in "fc":
                equal |= np.isnan(part) & np.isnan(value)
            same &= equal.reshape(len(part), -1).all(axis=1)
        if same.any():
            return True
    return False
