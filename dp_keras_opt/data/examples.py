"""What batches are drawn from: examples in memory, or of a source that is read batch by batch."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
import warnings
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from dp_keras_opt.checks import whole_number
from dp_keras_opt.data import (
    arrays,
    buckets,
    doubts,
    ending,
    failures,
    fresh_randomness,
    held,
    mapping,
    reading,
)
from dp_keras_opt.data.sources import stacking
from dp_keras_opt.data.sources.columns import Columns, OnDisk
from dp_keras_opt.data.sources.opening import as_source
from dp_keras_opt.data.sources.records import Records
from dp_keras_opt.data.sources.tables import ArrowTable, HuggingFace

_COMPARED = 64  # records that tell whether workers have the same data
_TRIED = 1000  # records that cannot be read before it is doubted that any can


def of(data, class_weight=None, max_bytes=2**40, *, map=None, padding=None, skip_unreadable=False):
    """The `InMemory` or `FromSource` examples of what a user gives to a sampler.

    Args:
        data: a tuple (x, y) or (x, y, sample_weight) of structures of arrays, in memory or on disk;
            a `tf.data.Dataset`; or a source.
        class_weight, max_bytes, map, skip_unreadable: as for `poisson_batches`.
        padding: None, or `Buckets`.
    """
    if not isinstance(padding, buckets.Buckets | None):
        raise TypeError(
            "buckets must be dp_keras_opt.data.Buckets, such as Buckets(512); received "
            f"{padding!r}."
        )
    max_bytes = whole_number(max_bytes, "max_bytes")
    if isinstance(data, tf.data.Dataset):
        arrays.check_tuple(data.element_spec)
        data = reading.read(data, lambda size: arrays.check_size(size, max_bytes))
    else:
        doubts.refuse_copies(data)
    source = None if isinstance(data, tuple) else as_source(data)
    if source is not None and map is None and hasattr(data, "shape"):  # an array, or a frame
        source = None
    if source is None:
        x, y, sample_weight = arrays.columns(data, max_bytes, any_length=padding is not None)
        on_disk = any(isinstance(leaf, OnDisk) for leaf in tf.nest.flatten((x, y)))
        if y is None and (on_disk or map is not None or padding is not None or class_weight):
            raise ValueError(
                "Examples without targets, (x, None), are taken from arrays in memory, without "
                "map, buckets and class_weight. Else give each a target that the loss does not "
                "read, such as (x, x)."
            )
        if not on_disk and map is None and padding is None:
            if class_weight is not None:
                sample_weight = arrays.weights_of_classes(y, class_weight, sample_weight)
            return InMemory(arrays.as_tensors((x, y, sample_weight)))
        given = (x, y) if sample_weight is None else (x, y, sample_weight)
        source = Columns(tf.nest.map_structure(_own, given))
    if isinstance(source, Records | HuggingFace):
        doubts.warn_of_batches(data)
    if isinstance(source, ArrowTable):
        arrays.check_size(source.bytes_in_memory, max_bytes)
    return FromSource(source, map, class_weight, padding, skip_unreadable)


class InMemory:
    """Examples that are tensors.

    Attributes:
        num_examples: how many there are.
    """

    buckets = None

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
        buckets: None, or the `Buckets` of several lengths that they are put into by their own.
        unreadable: which records could not be read and were skipped, and why.
    """

    def __init__(self, source, function, class_weight, padding, skip_unreadable):
        self._padding = padding
        self.buckets = padding if padding is not None and len(padding.lengths) > 1 else None
        self._source, self._class_weight, self._skips = source, class_weight, skip_unreadable
        self.num_examples = len(source)
        if self.num_examples < 1:
            raise ValueError(f"`data` is empty. Received: {type(source).__name__} of no examples.")
        self.unreadable: dict[int, str] = {}
        self._changes = mapping.in_turn(getattr(source, "decode", None), function)
        safe = getattr(source, "is_thread_safe", False)
        self._turn = contextlib.nullcontext() if safe else _turn_of(source)
        self._form = self._form_of_examples()
        self._check_rows()

    def _form_of_examples(self):
        """The `_Form` of all examples: that of the first one that can be read.

        Where they are put into buckets, some more tell which arrays have several lengths.
        """
        tried = range(min(self.num_examples, _TRIED))
        form = next((_Form(*each) for each in self._alone(tried)), None)
        if form is None:
            *_, last = self.unreadable.values()
            raise ValueError(
                f"None of the first {len(tried):,} records of `data` can be read. The last of "
                f"them: {last}"
            )
        if self._padding is not None:
            looked_at = self._spread()
            for place, columns in self._alone(looked_at):
                form.widen(place, columns)
            if not form.has_lengths:
                raise ValueError(
                    f"buckets={self._padding} are for examples of several lengths, and of the "
                    f"{len(looked_at)} looked at all have the shapes {form.shapes}. Leave it out; "
                    "or take off, in map, what fills them up."
                )
        return form

    def _alone(self, places):
        """(place, (x, y, sample_weight)) of each example that can be read, one by one."""
        for place in places:
            try:
                yield place, self._read(np.array([place]))
            except Exception as error:
                if isinstance(error, fresh_randomness.NotTraced) and not self._can_be_traced():
                    raise  # no matter of this record
                if not self._skips:
                    raise _unreadable(place, error) from error
                self.unreadable[int(place)] = f"{type(error).__name__}: {error}"

    def _can_be_traced(self):
        """Whether `map` can, of some record: each form of them is traced by itself."""
        for place in self._spread():
            try:
                self._read(np.array([place]))
            except Exception:
                continue
            return True
        return False

    def _spread(self):
        """Places of a few examples, the same for all who have as many."""
        return np.unique(np.linspace(0, self.num_examples - 1, _COMPARED).round().astype(np.int64))

    def _check_rows(self):
        """Refuses a source whose rows depend on what is asked for beside them.

        The row of another index, or one that others go into, would be drawn, and clipped, as this
        one. Of rows that are random nothing can be told, and a warning says so, unless they are
        read one by one.

        Raises:
            ValueError: a row is another one beside others than alone.
        """
        places = np.unique([0, self.num_examples // 2, self.num_examples - 1])
        try:
            with self._turn:
                several, again = (self._source[places] for _ in range(2))
                alone = [self._source[places[row : row + 1]] for row in range(len(places))]
        except Exception:  # one cannot be read; where it is drawn it is told of
            return
        if any(_row_digest(several, row) != _row_digest(again, row) for row in range(len(places))):
            if not getattr(self._source, "is_one_by_one", False):
                warnings.warn(
                    f"The rows of `data`, a {type(self._source).__name__}, are others each time "
                    "they are read, as by random augmentation. So it cannot be tried whether a row "
                    "depends on those that are asked for beside it, as one that is scaled by the "
                    "mean of all would: it would be clipped as one example, with others in it. "
                    "Give rows as they are, and change them in `map`, which sees one at a time.",
                    stacklevel=6,
                )
            return
        for row, place in enumerate(places):
            if _row_digest(several, row) != _row_digest(alone[row], 0):
                raise ValueError(
                    f"Example {place} of `data` is another one when it is asked for beside others, "
                    f"{places.tolist()}, than alone. A source gives for each index the example of "
                    "that index, in the order of the indices, whatever the others are: see "
                    "dp_keras_opt.data.Source."
                )

    # In TensorFlow.

    def gather(self, indices):
        """As `InMemory.gather`."""
        found = tf.numpy_function(self._batch, [indices], self._types)
        length = self._padding and self._padding.lengths[-1]
        return self._form.tensors(found, indices.shape[0], length)

    def gather_buckets(self, indices, rows_per_unit):
        """The same for each bucket; `rows_per_unit` consecutive rows come into one."""
        lengths, types = self.buckets.lengths, self._types
        split = functools.partial(self._batch, rows_per_unit=rows_per_unit)
        found = tf.numpy_function(split, [indices], types * len(lengths))
        return [
            self._form.tensors(found[place * len(types) : (place + 1) * len(types)], None, length)
            for place, length in enumerate(lengths)
        ]

    @property
    def _types(self):
        return [*map(tf.as_dtype, self._form.dtypes), tf.float32]

    # In Python, one call a batch.

    def begin(self):
        """Called before each iteration."""
        if hasattr(self._source, "check_chunks"):
            self._source.check_chunks()

    def _batch(self, indices, rows_per_unit=None):
        """The arrays of a batch, and which of its rows count; those of each bucket in turn."""
        with failures.kept(), ending.called():
            self._check()
            is_real, places = indices >= 0, _places(indices)
            made, back = np.unique(places, return_inverse=True)
            if self._changes:  # each real row is another, also where it is of the same example
                padding, which = np.unique(places[~is_real], return_inverse=True)
                made = np.concatenate([places[is_real], padding])
                back[is_real], back[~is_real] = np.arange(is_real.sum()), is_real.sum() + which
                order = np.argsort(made, kind="stable")  # in which they are read
                made, back = made[order], np.argsort(order)[back]
            leaves, readable = self._made(made)
            mask = (is_real & readable[back]).astype("float32")
            if self.buckets is not None:
                leaves = [leaf[back] for leaf in leaves]
                parts = buckets.split(self.buckets, leaves, mask, rows_per_unit, places)
                return [array for part in parts for array in part]
            if self._padding is not None:
                leaves = buckets.padded(
                    self._padding, [leaf[back] for leaf in leaves], mask, places
                )
                return [*leaves, mask]
            return [*(held.taken(leaf, back) for leaf in leaves), mask]

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
            rows = self._source_rows(wanted)
        counts = {np.shape(leaf)[:1] for leaf in tf.nest.flatten(rows)}
        if counts != {(len(wanted),)}:
            raise TypeError(
                f"an array of {len(wanted)} indices gave arrays of the lengths {counts}: a source "
                "gives a row for each index; see dp_keras_opt.data.Source"
            )
        if len(back) > len(wanted) or (np.diff(back) != 1).any():
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

    def _source_rows(self, wanted):
        try:
            return self._source[wanted]
        except TypeError as error:
            if type(self._source).__module__.startswith(__name__.partition(".")[0]):
                raise
            raise TypeError(
                f"{error} (asked for an array of {len(wanted)} indices, as "
                "dp_keras_opt.data.Source says. What gives one example for one integer is passed "
                "as a keras.utils.PyDataset.)"
            ) from error

    def digest(self):
        """What tells these examples from others, as far as a few of them do."""
        with self._turn:
            rows = self._source[self._spread()]
        return digest_of([np.array([self.num_examples]), *tf.nest.flatten(rows)])


#: Whose turn it is at a source that is not safe for several threads, of all that draw from it.
_turns: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()
_turns_of_others = threading.Lock()


def _turn_of(source):
    """The lock of what a source reads: two samplers may have been given the same."""
    try:
        return _turns.setdefault(getattr(source, "records", source), threading.Lock())
    except TypeError:  # it has no hash, or no weak references
        return _turns_of_others


def _row_digest(rows, row):
    return digest_of([np.asarray(leaf[row]) for leaf in tf.nest.flatten(rows)])


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

    def widen(self, place, columns):
        """Takes in another example: what differs in its first size may have several."""
        for number, leaf in enumerate(self._leaves(columns)):
            ours, theirs = self.shapes[number], leaf.shape[1:]
            if len(ours) != len(theirs) or ours[1:] != theirs[1:]:
                raise ValueError(
                    f"Examples {self._place} and {place} have the shapes {ours} and {theirs}. "
                    "Buckets are for sizes of the first dimension that differ."
                )
            if ours and ours[0] != theirs[0]:
                self.shapes[number] = (None, *ours[1:])

    @property
    def has_lengths(self):
        """Whether an array has several lengths."""
        return any(None in shape for shape in self.shapes)

    def conformed(self, columns, places):
        """The arrays of some examples, once they have this form."""
        leaves = self._leaves(columns)
        return [
            self._column(*each, places)
            for each in zip(leaves, self.dtypes, self.shapes, strict=True)
        ]

    def tensors(self, leaves_and_mask, rows, length=None):
        """((x, y, sample_weight), mask) of tensors, once their shapes are stated.

        Args:
            leaves_and_mask: what `_batch` gives, as tensors.
            rows: how many rows they have, None where that is not known.
            length: of what has several lengths.
        """
        *leaves, mask = leaves_and_mask
        mask.set_shape([rows])
        for leaf, shape in zip(leaves, self.shapes, strict=True):
            leaf.set_shape([rows, *(length if size is None else size for size in shape)])
        rest = iter(leaves)
        packed = tf.nest.map_structure(
            lambda leaf: None if leaf is None else next(rest), self._structure
        )
        return packed, mask

    def zeros(self):
        """One row without values."""
        return [
            stacking.in_rows([np.zeros((0, *shape[1:]), dtype)])
            if None in shape
            else np.zeros((1, *shape), dtype)
            for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        ]

    def _leaves(self, columns):
        tf.nest.assert_same_structure(self._structure, _tuples(columns))
        flat = tf.nest.flatten(_tuples(columns))
        return [stacking.settled(leaf) for leaf in flat if leaf is not None]

    def _column(self, array, dtype, shape, places):
        if None in shape:
            return self._column_of_rows(array, dtype, shape, places)
        if stacking.is_ragged(array) or array.shape[1:] != shape:
            for place, row in zip(places, array, strict=True):
                if np.shape(row) != shape:
                    raise ValueError(
                        f"Examples {self._place} and {place} have the shapes {shape} and "
                        f"{np.shape(row)}; all must have one. Pad or cut them to a length that "
                        "is fixed without looking at the data: map=lambda x, y: ...; or, to a few "
                        "lengths: buckets=dp_keras_opt.data.Buckets(longest)."
                    )
        self._check_type(array, dtype, places[0])
        return array.astype(dtype, copy=False)

    def _column_of_rows(self, array, dtype, shape, places):
        """The same for an array of several lengths, as an array of its rows."""
        rows = [np.asarray(row) for row in array]
        for place, row in zip(places, rows, strict=True):
            if row.shape[1:] != shape[1:] or row.ndim != len(shape):
                raise ValueError(
                    f"Examples {self._place} and {place} have the shapes {shape} and {row.shape}. "
                    "Buckets are for sizes of the first dimension that differ."
                )
            self._check_type(row, dtype, place)
        return stacking.in_rows([row.astype(dtype, copy=False) for row in rows])

    def _check_type(self, array, dtype, place):
        if dtype.kind != "O" and not np.can_cast(array.dtype, dtype, "same_kind"):
            raise TypeError(
                f"Examples {self._place} and {place} have the types {dtype} and {array.dtype}."
            )


def _places(indices):
    """Of which examples the rows are: of padding, whose values it has."""
    return np.where(indices >= 0, indices, ~indices)


def _changed(change, rows):
    """Columns of changed examples; their weights stay."""
    if isinstance(rows, tuple) and len(rows) == 3:
        changed = change(rows[:2])
        return (*changed, rows[2]) if len(changed) == 2 else changed
    return change(rows)


def _unreadable(place, error):
    why = f"{type(error).__name__}: {error}".rstrip(".")
    return ValueError(
        f"Record {place} of `data` cannot be read: {why}. Mend it or leave it out; or, with "
        "skip_unreadable=True, it counts as an example that contributes nothing, and "
        "batches.unreadable tells."
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
    if tf.is_tensor(column):
        return column.numpy()
    if stacking.is_ragged(column):
        return stacking.in_rows([np.array(row) for row in column])
    return np.array(column, held.dtype_of(column))
