"""Rows that are clipped as one: all of one user's, or of another unit of several rows.

Where the mask of a batch is (units, K), each K consecutive rows are one unit's, as far as the mask
says True; the others are padding. A unit's loss is the mean of its rows' losses, so its gradient is
the sum of those of the shares; it does not grow with the number of rows.
"""

from typing import Any, NamedTuple

import tensorflow as tf


class PerUnit(NamedTuple):
    """What each unit of a batch gives: a row, or rows that are clipped as one.

    Attributes:
        losses: (units,).
        valid: boolean (units,), False for padding and for public rows.
        gradients: for each trainable variable a `Factor` of that many rows, or None where the loss
            does not depend on it.
    """

    losses: Any
    valid: Any
    gradients: list

    def grouped(self, mask):
        """The same with the rows of each unit as one.

        Rows of padding are zeroed first: what they hold, NaN too, is not their unit's.
        """
        size = mask.shape[1]
        losses = tf.reshape(tf.where(self.valid, self.losses, 0.0), (-1, size))
        valid = tf.reduce_any(tf.reshape(self.valid, (-1, size)), axis=1)
        gradients = [g and g.keep(self.valid).grouped(size) for g in self.gradients]
        return PerUnit(tf.reduce_sum(losses, axis=1), valid, gradients)


def shares(mask):
    """What each row's loss counts in its unit's mean, (units·K,); 1 for rows of nobody."""
    number = tf.reduce_sum(tf.cast(mask, tf.float32), axis=1, keepdims=True)
    return tf.reshape(tf.where(mask, 1 / tf.maximum(number, 1.0), 1.0), [-1])
