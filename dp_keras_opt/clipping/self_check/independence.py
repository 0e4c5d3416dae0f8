"""Whether rows are independent: whether what one gives is the same whatever the others are.

A test and not a proof: mixing that no synthetic batch provokes is not seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_keras_opt._keras import rows_with_attached
from dp_keras_opt.clipping.batch import Batch, map_leaves
from dp_keras_opt.clipping.observed import NotPerExample
from dp_keras_opt.clipping.self_check.passes import DOES_NOT_RUN, Passes, agree
from dp_keras_opt.clipping.state_changes import Snapshot
from dp_keras_opt.clipping.validation import MIXING

_FIX = (
    "Let each example's output and loss depend on that example alone. (Random numbers that do not "
    "come from a keras.random.SeedGenerator of the layer look the same: the check runs twice.)"
)
_NEGATIVES = (
    "Negatives of a contrastive loss must not come from the batch: take them from a public "
    "catalogue, or draw them for each example, before batches are made: map= of a sampler of "
    "dp_keras_opt.data."
)


def is_random_in_inference(passes: Passes, batch: Batch, before: Snapshot) -> bool:
    """Whether inference gives other losses with other random numbers.

    Some layers draw in inference, too; others move their generators on to no effect.
    """
    one = passes.run(batch, before, training=False)
    before.shift += 1
    other = passes.run(batch, before, training=False)
    before.shift -= 1
    seen = zip(one.seen, other.seen, strict=False)
    same = all(_equal(of_one, of_other) for (_, of_one), (_, of_other) in seen)
    return not (same and _equal(one.losses, other.losses))


def check_independence(
    passes: Passes,
    batch: Batch,
    changed: Batch,
    row: int,
    before: Snapshot,
    alone_in: str | None,
    copies: Sequence[int],
    must_be_finite: bool = False,
) -> None:
    """Runs a model on batches that differ in one row, and on copies of this row, and compares.

    Args:
        passes: of the model.
        batch, changed: synthetic batches that differ in one row.
        row: the place of that row.
        before: the model's state at which each pass begins.
        alone_in: the mode, "training" or "inference", in which copies of a row have no other random
            numbers than the batch; None where they have in both.
        copies: how many; other numbers than that of the rows, which may matter by itself.
        must_be_finite: whether the batches tell nothing where the losses are not finite.

    Raises:
        ValueError: the outputs of a layer, a loss that it adds, or the losses of other rows
            changed, or are others for a row among its copies.
    """
    rows = keras.tree.flatten(batch.x)[0].shape[0]
    try:
        other = passes.run(changed, before)
    except NotPerExample:
        raise
    except DOES_NOT_RUN:
        return  # the model has no place for such values
    if must_be_finite and not np.isfinite(other.losses).all():
        return
    if other.losses.shape != (rows,):
        _refuse(passes.objective, "Return one value per example, without the mean.")
    try:
        first = passes.run(batch, before)
    except NotPerExample:
        raise
    except DOES_NOT_RUN:
        if must_be_finite:
            return
        raise
    before_it, it, after_it = slice(row), slice(row, row + 1), slice(row + 1, None)

    def has_rows(place):
        """Whether what a layer gives has a row for each, and not as many of something else."""
        fewer = map_leaves(lambda t: t[1:], batch)
        seen = passes.run(fewer, before).seen
        return place >= len(seen) or seen[place][1].shape[:1] == (rows - 1,)

    others = [(before_it, before_it), (after_it, after_it)]
    _compare(passes.objective, first, other, others, has_rows)
    if alone_in is not None:
        training = alone_in == "training"
        if not training:
            first = passes.run(batch, before, training)
        for number in copies:
            copied = map_leaves(lambda t, n=number: np.repeat(t[it], n, axis=0), batch)
            alone = passes.run(copied, before, training)
            each = [(it, slice(place, place + 1)) for place in range(number)]  # at every place
            _compare(passes.objective, first, alone, each, other_kernels=True)


def check_loss_alone(
    losses: Callable[[Any], np.ndarray], given: Any, copies: Sequence[int], objective: str
) -> None:
    """Compares the loss of rows with the loss of copies of them, of what the model gave once.

    For models that draw random numbers whatever the mode, so that they cannot be run twice.

    Args:
        losses: function of what the model was given and gave, a structure of tensors, of one row
            for each example, that returns the losses (B,).
        given: that structure.
        copies: how many.
        objective: what messages call the loss.

    Raises:
        ValueError: a loss is another among copies.
    """
    first = losses(given)
    for row in (0, len(first) - 1):
        for number in copies:
            copied = functools.partial(_copies, row=row, number=number)
            alone = losses(map_leaves(copied, given))
            expected = np.repeat(first[row : row + 1], number, axis=0)
            if not _equal(expected, alone, 1e-5 * _usual(first)):
                _refuse(objective, f"{_FIX} {_NEGATIVES}")


def _copies(tensor, row, number):
    """A tensor of copies of one row, with what belongs to them."""
    return rows_with_attached(tensor, lambda t: tf.repeat(t[row : row + 1], number, axis=0))


def check_independent_gradients(
    passes: Passes, batch: Batch, changed: Batch, row: int, before: Snapshot
) -> None:
    """Compares the gradients of the other rows' losses, in batches that differ in one row.

    A loss may have the same value whatever the others are, and not the same gradient, as where it
    is multiplied by what is 1 in value alone.

    Raises:
        ValueError: they are not the same.
    """
    try:
        pair = [passes.losses_and_gradients(each, before, without=row) for each in (batch, changed)]
    except NotPerExample:
        raise
    except DOES_NOT_RUN:
        return
    for one, other in zip(pair[0][1:], pair[1][1:], strict=True):
        if not (np.isfinite(one).all() and np.isfinite(other).all()):
            return  # such values tell nothing
        if not agree(one, other, passes.model):
            _refuse(f"{passes.objective}, in its gradient,", f"{_FIX} {_NEGATIVES}")


def _compare(objective, first, second, places, has_rows=lambda place: True, other_kernels=False):
    """Compares rows of one pass with rows of another: (which of these, which of those).

    Layers of whose tensor, by its place, `has_rows` is False are not compared.

    With `other_kernels`, sums may be taken in another order. What is left where their terms cancel
    has errors that are relative to what is left elsewhere: to the rows of the first pass, which are
    of one magnitude, and not to this row. A layer hands on what errors it is given, as tanh does
    those of large numbers that cancel. Behind numbers that are missing, or as large as there are
    any, a difference tells nothing: kernels differ in what they make of these (max pooling and
    activations of missing numbers), and sums overflow in one order and not in another.
    """

    rounding = 0.0  # of the tensor before, in kernels of which nothing else is expected

    def same(one, other):
        usual = _usual(one) if other_kernels else 0.0
        error = max(1e-5 * usual, min(2 * rounding, 1e-2 * usual))
        return all(_equal(one[this], other[that], error) for this, that in places)

    tells = True
    for place, ((name, one), (_, other)) in enumerate(zip(first.seen, second.seen, strict=False)):
        alike = one.shape[:1] == first.losses.shape and other.shape[:1] == second.losses.shape
        alike = alike and one.shape[1:] == other.shape[1:]
        if alike and not same(one, other) and has_rows(place):
            if not tells:
                return
            _refuse(f"Layer '{name}' (or an operation just before it)")
        if other_kernels and alike:
            tells &= all(
                _is_ordinary(one[this]) and _is_ordinary(other[that]) for this, that in places
            )
            rounding = max(_difference(one[this], other[that]) for this, that in places)
    if tells and not same(first.losses, second.losses):
        _refuse(objective, f"{_FIX} {_NEGATIVES}")


def _refuse(what, fix=_FIX):
    raise ValueError(f"{MIXING.format(what=what)} {fix}")


def _usual(rows):
    """The median over rows of their largest finite entry."""
    return np.median([_largest(row) for row in rows]) if rows.dtype.kind not in "OSU" else 0.0


def _largest(row):
    row = np.abs(np.asarray(row, np.float64))
    return np.max(row, initial=0.0, where=np.isfinite(row))


def _difference(one, other):
    """The largest between numbers of two tensors."""
    if one.dtype.kind in "OSUb":
        return 0.0
    with np.errstate(invalid="ignore"):
        return _largest(np.asarray(one, np.float64) - np.asarray(other, np.float64))


def _is_ordinary(rows):
    """Whether all numbers are finite, and less than half of the largest that their type has."""
    if rows.dtype.kind in "OSUbiu":
        return True
    limit = 3e4 if rows.dtype == np.float16 else 1.5e38
    return bool(np.all(np.abs(np.asarray(rows, np.float64)) < limit))


def _equal(a, b, error=0.0):
    """Equality up to rounding, which is relative to the largest entry of each row, or `error`."""
    if a.shape != b.shape:
        return False
    if np.all(a == b):
        return True
    return a.dtype.kind not in "OSU" and all(
        _close(*pair, error) for pair in zip(a, b, strict=True)
    )


def _close(a, b, error):
    a, b = (np.asarray(row, np.float64) for row in (a, b))
    with np.errstate(invalid="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        return bool((same | (np.abs(a - b) <= 1e-3 * _largest(b) + error + 1e-5)).all())
