"""Users: several rows whose gradients are clipped as one.

Where the mask of a batch is (users, K), each K consecutive rows are one user's, as far as the mask
says True; the others are padding. A user's loss is the mean of their rows' losses, so a user's
gradient is the sum of those of the shares; it does not grow with how much they wrote.
"""

import tensorflow as tf

from dp_keras_opt.clipping.factors import Materialized, Outer, Rows, RowsAndOuter, sizes_of


def shares(mask):
    """What each row's loss counts in its user's mean, (users·K,); 1 for rows of nobody."""
    number = tf.reduce_sum(tf.cast(mask, tf.float32), axis=1, keepdims=True)
    return tf.reshape(tf.where(mask, 1 / tf.maximum(number, 1.0), 1.0), [-1])


def of_users(losses, mask, factors):
    """Rows as users: (loss of each, which are there, gradients as factors); B is `users` then.

    Rows of padding are zeroed first: what they hold, NaN too, is not their user's.
    """
    valid, size = tf.reshape(mask, [-1]), mask.shape[1]
    losses = tf.reshape(tf.where(valid, losses, 0.0), (-1, size))
    factors = [None if f is None else summed(f.keep(valid), size) for f in factors]
    return tf.reduce_sum(losses, axis=1), tf.reduce_any(mask, axis=1), factors


def summed(factor, size):
    """The sums of the gradients of each `size` consecutive rows, as one factor of fewer rows."""
    if type(factor) is RowsAndOuter:
        return RowsAndOuter(summed(factor.rows, size), summed(factor.outer, size))
    if type(factor) is Rows:
        return Rows(_merged(factor.ids, size, 1), _merged(factor.deltas, size, 1), factor.shape)
    if type(factor) is Outer:
        inputs, deltas = (_merged(t, size, 2) for t in (factor.inputs, factor.deltas))
        return Outer(inputs, deltas, factor.shape, factor.layout, factor.order)
    gradients = factor.materialize()
    parts = tf.reshape(gradients, (-1, size, *gradients.shape[1:]))
    return Materialized(tf.reduce_sum(parts, axis=1))


def _merged(tensor, size, axis):
    """(B·size, ...) as (B, ...): what stood in consecutive rows stands along `axis`."""
    _, *sizes = sizes_of(tensor)
    split = tf.reshape(tensor, (-1, size, *sizes))
    last = range(axis + 1, len(sizes) + 2)
    sizes[axis - 1] *= size
    return tf.reshape(tf.transpose(split, (0, *range(2, axis + 1), 1, *last)), (-1, *sizes))
