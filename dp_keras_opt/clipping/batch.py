"""The rows of one physical batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from dp_keras_opt import deprecation


@deprecation.renamed_attributes(rows="num_rows")
class Batch(NamedTuple):
    """The rows of one physical batch.

    Attributes:
        x, y: inputs and targets, any structure of tensors with one row per example.
        sample_weight: None, or weights that multiply each example's loss before clipping.
        mask: None, or a boolean (B,): False for padding, which contributes exactly zero, and for
            public rows. If it is (B/K, K) instead, each K consecutive rows are those of one user,
            who is clipped as one (`grouped_rows.py`).
        public: None, or float32 (B,): for rows declared public, one over their number in the
            logical batch; 0 for all others.
    """

    x: Any
    y: Any
    sample_weight: Any = None
    mask: Any = None
    public: Any = None

    @property
    def num_rows(self) -> int | None:
        """Number of rows where it is static, else None."""
        return tf.nest.flatten(self.x)[0].shape[0]

    @property
    def rows_per_user(self) -> int | None:
        """K where each K consecutive rows are clipped as one, None where each row is."""
        by_row = self.mask is None or self.mask.shape.rank == 1
        return None if by_row else int(self.mask.shape[1])  # never by row because K is unknown


def valid_rows(batch: Batch, losses: tf.Tensor, *, weighted: bool = False) -> tf.Tensor:
    """Which rows are private and no padding, boolean (B,), for losses (B,).

    Args:
        batch, losses: of the rows.
        weighted: whether those that have no weight but 0 do not count either.
    """
    valid = tf.fill(tf.shape(losses), True)
    if batch.mask is not None:
        valid = tf.reshape(batch.mask, [-1])
    weights = [w for w in tf.nest.flatten(batch.sample_weight) if w is not None]
    if weighted and weights:
        given = [tf.reduce_any(w != 0, axis=range(1, w.shape.rank)) for w in weights]
        valid &= tf.reduce_any(given, axis=0)
    return valid


def map_leaves(function: Any, structure: Any) -> Any:
    """`function` of every leaf of a structure that is not None."""
    return tf.nest.map_structure(lambda t: None if t is None else function(t), structure)
