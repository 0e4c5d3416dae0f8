"""From random words of 64 bits to draws, with full relative precision wherever a draw is small.

A draw that can be exactly 0, or that is a multiple of some grid near 0, lets through what it should
cover: with an exact 0 the clipped sum itself is released, and between the points of a grid nothing
else ever is. So no draw here is made by a subtraction, and every small number in it comes from as
many leading zero bits as it has.
"""

import math

import tensorflow as tf


def exponential(words, dtype, width=64):
    """Exponential draws, −ln u for uniform u in (0, 1): never 0, at most (width + 1)·ln 2.

    Args:
        words: int64 tensor, uniform over the signed integers of `width` bits.
        dtype: of the draws, float32 or float64.
        width: 64, or less if bits were taken off.
    """
    # The sign says in which half u lies; p in (0, ½] is how far it is from that half's end.
    p = tf.abs(tf.cast(words, dtype) + 0.5) * 2.0**-width
    return -tf.where(words < 0, tf.math.log(p), tf.math.log1p(-p))


def circle(words, dtype):
    """(x, y), uniform on the unit circle, neither of them ever 0.

    Args:
        words: int64 tensor, uniform over all its values.
        dtype: of the coordinates, float32 or float64.
    """
    # An angle within ±π/4 of 62 bits; two bits more say which of the four quarters it is in.
    angle = tf.cast(tf.bitwise.right_shift(words, tf.constant(2, tf.int64)), dtype) + 0.5
    angle *= math.pi / 4 * 2.0**-61
    sine, cosine = tf.sin(angle), tf.cos(angle)
    cosine = tf.where(bit(words, 0), cosine, -cosine)
    swap = bit(words, 1)
    return tf.where(swap, sine, cosine), tf.where(swap, cosine, sine)


def rest(words, dtype):
    """Uniform in (−1, 1), never 0, from the low 32 bits: a float32 draw of these words shows none
    of them but with a probability of 2⁻⁸."""
    return (tf.cast(tf.cast(words, tf.int32), dtype) + 0.5) * 2.0**-31


def bit(words, place):
    """Whether a bit of each word, counted from the lowest, is set."""
    return tf.not_equal(tf.bitwise.bitwise_and(words, tf.constant(1 << place, tf.int64)), 0)
