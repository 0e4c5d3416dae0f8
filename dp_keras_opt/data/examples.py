"""What batches are drawn from: examples in memory, or of a source that is read batch by batch."""

from __future__ import annotations

import contextlib
import hashlib
import threading

import numpy as np
import tensorflow as tf

from dp_keras_opt.checks import whole_number
from dp_keras_opt.data import arrays, held, mapping, reading
from dp_keras_opt.data.sources import stacking
from dp_keras_opt.data.sources.columns import Columns, OnDisk
from dp_keras_opt.data.sources.opening import as_source
from dp_keras_opt.data.sources.tables import ArrowTable

_COMPARED = 64  # records that tell whether workers have the same data


def of(data, class_weight=None, max_bytes=2**40, *, map=None, skip_unreadable=False):
    """The `InMemory` or `FromSource` examples of what a user gives to a sampler.

    Args:
        data: a tuple (x, y) or (x, y, sample_weight) of structures of arrays, in memory or on disk;
            a `tf.data.Dataset`; or a source.
        class_weight, max_bytes, map, skip_unreadable: as for `poisson_batches`.
    """
    max_bytes = whole_number(max_bytes, "max_bytes")
    if isinstance(data, tf.data.Dataset):
        arrays.check_tuple(data.element_spec)
        data = reading.read(data, lambda size: arrays.check_size(size, max_bytes))
    source = None if isinstance(data, tuple) else as_source(data)
    if source is not None and map is None and hasattr(data, "shape"):  # an array, or a frame
        source = None
    if source is None:
        x, y, sample_weight = arrays.columns(data, max_bytes)
        on_disk = any(isinstance(leaf, OnDisk) for leaf in tf.nest.flatten((x, y)))
        if not on_disk and map is None:
            if class_weight is not None:
                sample_weight = arrays.weights_of_classes(y, class_weight, sample_weight)
            return InMemory(arrays.as_tensors((x, y, sample_weight)))
        given = (x, y) if sample_weight is None else (x, y, sample_weight)
        source = Columns(tf.nest.map_structure(_own, given))
    if isinstance(source, ArrowTable):
        arrays.check_size(source.bytes_in_memory, max_bytes)
    return FromSource(source, map, class_weight, skip_unreadable)


class InMemory:
    """Examples that are tensors.

    Attributes:
        num_examples: how many there are.
    """

    def __init__(self, tensors):
        self._tensors = tensors
        self.num_examples = len(tf.nest.flatten(tensors)[0])

    def gather(self, indices):
        """((x, y, sample_weight), mask) of a batch, as tensors.

        Args:
            indices: int64 tensor: i for example i, ~i for padding with its values.
        """
        places = tf.maximum(indices, -1 - indices)
        batch = tf.nest.map_structure(
            lambda values: None if values is None else tf.gather(values, places), self._tensors
        )
        return batch, tf.cast(indices >= 0, tf.float32)

    def digest(self):
        """What tells these examples from others."""
        return digest_of(tf.nest.flatten(self._tensors))

    def begin(self):
        """Called before each iteration."""


class FromSource:
    """Examples that are read from a source when they are drawn, and changed each alone.

    Attributes:
        num_examples: how many there are.
        unreadable: which records could not be read and were skipped, and why.
        error: what went wrong last, or None: TensorFlow passes on only its text.
    """

    def __init__(self, source, function, class_weight, skip_unreadable):
        self._source, self._class_weight, self._skips = source, class_weight, skip_unreadable
        self.num_examples = len(source)
        if self.num_examples < 1:
            raise ValueError(f"`data` is empty. Received: {type(source).__name__} of no examples.")
        self.unreadable: dict[int, str] = {}
        self.error: Exception | None = None
        self._changes = mapping.in_turn(getattr(source, "decode", None), function)
        safe = getattr(source, "is_thread_safe", False)
        self._turn = contextlib.nullcontext() if safe else threading.Lock()
        self._form = self._form_of_examples()

    def _form_of_examples(self):
        """The `_Form` of all examples: that of the first one that can be read."""
        for place in range(self.num_examples):
            here = np.array([place])
            try:
                return _Form(place, self._read(here))
            except Exception as error:
                if not self._skips:
                    raise _unreadable(place, error) from error
        raise ValueError(f"None of the {self.num_examples} records of `data` can be read.")

    # In TensorFlow.

    def gather(self, indices):
        """As `InMemory.gather`."""
        dtypes, shapes = self._form.dtypes, self._form.shapes
        types = [*map(tf.as_dtype, dtypes), tf.float32]
        *leaves, mask = tf.numpy_function(self._batch, [indices], types)
        mask.set_shape(indices.shape)
        for leaf, shape in zip(leaves, shapes, strict=True):
            leaf.set_shape((indices.shape[0], *shape))
        return self._form.packed(leaves), mask

    # In Python, one call a batch.

    def begin(self):
        """Called before each iteration."""
        if hasattr(self._source, "check_chunks"):
            self._source.check_chunks()

    def _batch(self, indices):
        """The arrays of a batch, and which of its rows count."""
        try:
            self._check()
            is_real = indices >= 0
            places = np.where(is_real, indices, ~indices)
            made, back = np.unique(places, return_inverse=True)
            if self._changes:  # each real row is another, also where it is of the same example
                padding, which = np.unique(places[~is_real], return_inverse=True)
                made = np.concatenate([places[is_real], padding])
                back[is_real], back[~is_real] = np.arange(is_real.sum()), is_real.sum() + which
            leaves, readable = self._made(made)
            mask = (is_real & readable[back]).astype("float32")
            return [*(held.taken(leaf, back) for leaf in leaves), mask]
        except Exception as error:
            self.error = error
            raise

    def _check(self):
        """Raises where the source is no longer what it was."""
        if hasattr(self._source, "check"):
            self._source.check()
        if len(self._source) != self.num_examples:
            raise RuntimeError(
                f"`data` had {self.num_examples} examples and has {len(self._source)} now: they "
                "must stay what they are while they are trained on, or ε would be another."
            )

    def _made(self, places):
        """The arrays of these examples, and which of them could be read."""
        try:
            rows = self._read(places)
        except Exception as error:
            return self._one_by_one(places, error)
        return self._form.conformed(rows, places), np.ones(len(places), bool)

    def _one_by_one(self, places, error):
        """As `_made`, once an error has come: finds the records that it comes from."""
        parts, readable = [], np.ones(len(places), bool)
        for row, place in enumerate(places):
            try:
                rows = self._read(places[row : row + 1])
            except Exception as own:
                if not self._skips:
                    raise _unreadable(place, own) from own
                self.unreadable[int(place)] = f"{type(own).__name__}: {own}"
                parts.append(self._form.zeros())
                readable[row] = False
            else:
                parts.append(self._form.conformed(rows, places[row : row + 1]))
        if readable.all():  # none of them fails alone
            raise error
        return [np.concatenate(columns) for columns in zip(*parts, strict=True)], readable

    def _read(self, places):
        """(x, y, sample_weight) of the examples of these places, as columns."""
        wanted, back = np.unique(places, return_inverse=True)
        with self._turn:
            rows = self._source[wanted]
        counts = {np.shape(leaf)[:1] for leaf in tf.nest.flatten(rows)}
        if counts != {(len(wanted),)}:
            raise TypeError(
                f"an array of {len(wanted)} indices gave arrays of the lengths {counts}: a source "
                "gives a row for each index; see dp_keras_opt.data.Source"
            )
        if self._changes:  # else they are asked for in order, and each once
            rows = stacking.rows(rows, back)
        for change in self._changes:
            rows = _changed(change, rows)
        if not isinstance(rows, tuple) or len(rows) not in (2, 3):
            raise TypeError(
                "an example must be a tuple (x, y) or (x, y, sample_weight), and is "
                f"{_described(rows)}: make one of it, map=lambda ...: (x, y)"
            )
        x, y, weights = (*rows, None)[:3]
        if weights is not None:
            weights = tf.nest.map_structure(arrays.weights_of_rows, weights)
        if self._class_weight is not None:
            weights = arrays.weights_of_classes(y, self._class_weight, weights)
        return x, y, weights

    def digest(self):
        """What tells these examples from others, as far as a few of them do."""
        places = np.unique(
            np.linspace(0, self.num_examples - 1, _COMPARED).round().astype(np.int64)
        )
        with self._turn:
            rows = self._source[places]
        return digest_of([np.array([self.num_examples]), *tf.nest.flatten(rows)])


class _Form:
    """The structure, types and shapes that all examples have.

    Args:
        place: where the example is whose they are.
        columns: (x, y, sample_weight) of it.
    """

    def __init__(self, place, columns):
        self._place = place
        self._structure = tf.nest.map_structure(
            lambda leaf: None if leaf is None else 0, _tuples(columns)
        )
        leaves = self._leaves(columns)
        self.dtypes = [held.dtype_of(arrays.array("data", leaf, 2**40)) for leaf in leaves]
        self.dtypes = [np.dtype(object) if d.kind in "OSU" else d for d in self.dtypes]
        self.shapes = [leaf.shape[1:] for leaf in leaves]

    def conformed(self, columns, places):
        """The arrays of some examples, once they have this form."""
        leaves = self._leaves(columns)
        return [
            self._column(*each, places)
            for each in zip(leaves, self.dtypes, self.shapes, strict=True)
        ]

    def packed(self, leaves):
        """(x, y, sample_weight) of these leaves."""
        rest = iter(leaves)
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else next(rest), self._structure
        )

    def zeros(self):
        """One row without values."""
        return [np.zeros((1, *s), d) for d, s in zip(self.dtypes, self.shapes, strict=True)]

    def _leaves(self, columns):
        tf.nest.assert_same_structure(self._structure, _tuples(columns))
        flat = tf.nest.flatten(_tuples(columns))
        return [stacking.settled(leaf) for leaf in flat if leaf is not None]

    def _column(self, array, dtype, shape, places):
        if stacking.is_ragged(array) or array.shape[1:] != shape:
            for place, row in zip(places, array, strict=True):
                if np.shape(row) != shape:
                    raise ValueError(
                        f"Examples {self._place} and {place} have the shapes {shape} and "
                        f"{np.shape(row)}; all must have one. Pad or cut them to a length that "
                        "is fixed without looking at the data: map=lambda x, y: ..."
                    )
        if dtype.kind != "O" and not np.can_cast(array.dtype, dtype, "same_kind"):
            raise TypeError(
                f"Examples {self._place} and {places[0]} have the types {dtype} and {array.dtype}."
            )
        return array.astype(dtype, copy=False)


def _changed(change, rows):
    """Columns of changed examples; their weights stay."""
    if isinstance(rows, tuple) and len(rows) == 3:
        changed = change(rows[:2])
        return (*changed, rows[2]) if len(changed) == 2 else changed
    return change(rows)


def _unreadable(place, error):
    return ValueError(
        f"Record {place} of `data` cannot be read: {type(error).__name__}: {error}. Mend it or "
        "leave it out; or, with skip_unreadable=True, it counts as an example that contributes "
        "nothing, and batches.unreadable tells."
    )


def _tuples(structure):
    """The structure with tuples for lists: what TensorFlow's data sets have."""
    if isinstance(structure, dict):
        return {name: _tuples(part) for name, part in structure.items()}
    if isinstance(structure, tuple | list):
        parts = [_tuples(part) for part in structure]
        return type(structure)(*parts) if hasattr(structure, "_fields") else tuple(parts)
    return structure


def _described(rows):
    if isinstance(rows, dict):
        return f"a dict of {', '.join(map(repr, rows))}"
    return f"{len(rows)} elements" if isinstance(rows, tuple) else f"one {type(rows).__name__}"


def digest_of(leaves):
    """16 bytes that tell these arrays from others."""
    digest = hashlib.blake2b(digest_size=16)
    for leaf in leaves:
        if leaf is None:
            continue
        values = np.asarray(leaf)
        digest.update(str(values.shape).encode())
        if values.dtype == object:
            digest.update(repr(values.tolist()).encode())
        else:
            digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    return digest.digest()


def _own(column):
    """A column of a source that nobody else can change, where it is in memory."""
    if isinstance(column, OnDisk):
        return column
    return column.numpy() if tf.is_tensor(column) else np.array(column, held.dtype_of(column))
