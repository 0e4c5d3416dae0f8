"""Examples of several lengths: each is padded to the next of a few lengths, by its own alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dp_keras_opt.checks import whole_number

_SHORTEST = 16  # of the powers of two


class Blocks(NamedTuple):
    """A batch of examples of several lengths: what a sampler with `buckets` yields.

    Attributes:
        blocks: (x, y, RowInfo) for each length, from the shortest to the longest. The first has at
            least one row, which may be padding; the others may have none.
    """

    blocks: tuple[Any, ...]


def blocks_of(batch: Any) -> tuple[Any, ...]:
    """The parts of a batch that are of one length each: itself, where it is no `Blocks`."""
    return batch.blocks if isinstance(batch, Blocks) else (batch,)


class Buckets:
    """The lengths that examples are padded to, each to the shortest that holds it.

    Into which bucket an example comes depends on its own length alone (a user, or the views of an
    example, on the longest of theirs), so that nobody changes what others are padded to: unlike
    `padded_batch`, which pads all to the longest of their batch.

    What is padded are the arrays of an example (x, y, or those in them) that have several lengths,
    along their first dimension, all to one length, with 0, "" or False behind their values. Which
    these are is seen from some examples spread over the data. The model must mask the padding
    through to the loss (`mask_zero=True` in `Embedding`, `Masking`), as the check before the first
    step requires: an example's loss would depend on the buckets.

    Args:
        lengths: ascending, fixed without looking at the data (quantiles of private lengths would
            reveal them). Of one number, the powers of two below it, from 16 on, and it. [512] pads
            all to one length.
        cut: whether what is longer than the longest is cut to it; default: it is an error.

    Attributes:
        lengths: a tuple of integers.
    """

    def __init__(self, lengths: int | Sequence[int], *, cut: bool = False) -> None:
        if isinstance(lengths, int | np.integer):
            longest = whole_number(lengths, "lengths")
            powers = (2**power for power in range(64))
            lengths = [p for p in powers if _SHORTEST <= p < longest] + [longest]
        found = tuple(whole_number(length, "lengths") for length in lengths)
        if not found or any(a >= b for a, b in zip(found, found[1:], strict=False)):
            raise ValueError(
                "lengths must be one integer or ascending ones, such as [64, 128, 512]; received "
                f"{lengths!r}."
            )
        self.lengths, self.cut = found, cut

    def __repr__(self) -> str:
        return f"Buckets({list(self.lengths)}{', cut=True' if self.cut else ''})"


def rows_at_a_time(batch_size: float) -> int:
    """How many rows of the longest bucket, or as much of the others, are processed at a time.

    Under XLA each bucket in use costs up to that much more than what is in it: little of a batch.
    """
    return max(1, math.ceil(batch_size / 32))


def split(
    buckets: Buckets,
    leaves: Sequence[np.ndarray],
    mask: np.ndarray,
    rows_per_unit: int,
    places: np.ndarray,
) -> list[list[np.ndarray]]:
    """The rows of each bucket: its arrays, and their mask.

    Args:
        leaves: the arrays of the rows of a batch; one of objects has a row in each.
        mask: float32 [rows], 0 for rows that are padding.
        rows_per_unit: how many consecutive rows stay together.
        places: int64 [rows], whose they are, for a message.

    Raises:
        ValueError: an example is longer than the longest bucket.
    """
    lengths = _lengths_of(buckets, leaves, mask, places)
    in_units = np.arange(len(mask)).reshape(-1, rows_per_unit)
    bucket = np.searchsorted(buckets.lengths[:-1], lengths[in_units].max(axis=1))
    bucket[~mask[in_units].any(axis=1)] = -1
    found = []
    for index, length in enumerate(buckets.lengths):
        rows = in_units[bucket == index].ravel()
        counts = mask[rows]
        if index == 0 and not len(rows):  # a step of noise only has rows, too
            rows, counts = in_units[0], np.zeros(rows_per_unit, mask.dtype)
        found.append([*(_padded(leaf, length, rows) for leaf in leaves), counts])
    return found


def padded(
    buckets: Buckets, leaves: Sequence[np.ndarray], mask: np.ndarray, places: np.ndarray
) -> list[np.ndarray]:
    """All rows, of the longest length; as `split`."""
    _lengths_of(buckets, leaves, mask, places)
    return [_padded(leaf, buckets.lengths[-1]) for leaf in leaves]


def _lengths_of(buckets, leaves, mask, places):
    """The length of each row, 0 of padding."""
    lengths = np.zeros(len(mask), np.int64)
    for leaf in filter(_has_rows, leaves):
        lengths = np.maximum(lengths, [len(row) for row in leaf])
    lengths[mask == 0] = 0
    if lengths.max() > buckets.lengths[-1] and not buckets.cut:
        raise ValueError(
            f"Example {places[lengths.argmax()]} has the length {lengths.max()}, and the longest "
            f"of {buckets} is {buckets.lengths[-1]}. Add a longer one, cut it in map, or have it "
            "cut: Buckets(..., cut=True)."
        )
    return lengths


def _has_rows(leaf):
    """Whether it holds an array for each row: its examples have several lengths."""
    return leaf.dtype == object and len(leaf) > 0 and isinstance(leaf[0], np.ndarray)


def _padded(leaf, length, rows=slice(None)):
    """Some rows of an array, all of one length, where they have several."""
    if not _has_rows(leaf):
        return leaf[rows]
    one, chosen = leaf[0], leaf[rows]
    nothing = b"" if one.dtype == object else 0
    padded = np.full((len(chosen), length, *one.shape[1:]), nothing, one.dtype)
    for place, row in zip(padded, chosen, strict=True):
        place[: len(row)] = row[:length]
    return padded
