"""A distribution, by how it is drawn from random words; a new one is one object of this kind."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from dp_keras_opt.noise import bits


class Distribution(NamedTuple):
    """Two ways to draw, each a function of (source, shape) that calls `source.words`.

    Attributes:
        ordinary: float32 draws.
        secure: float64 draws of several words each, for `secure_noise=True`.
    """

    ordinary: Callable[..., Any]
    secure: Callable[..., Any]


#: So many numbers are drawn at once for several variables, at most.
_TOGETHER = 2**18

#: And so many of a large variable: a draw takes several times the memory of what it gives.
_AT_ONCE = 2**20


def drawn(source, distribution, shapes):
    """Independent draws of these static shapes; those of small ones are cut from one draw.

    A model of many variables would else have as many copies of a draw in its graph.
    """
    found, small = [], []

    def cut():
        sizes = [math.prod(shape) for shape in small]
        if len(small) == 1:
            found.append(_draw(source, distribution, *small))
        else:
            draws = tf.split(source.draw(distribution, (sum(sizes),)), sizes)
            found.extend(map(tf.reshape, draws, small))
        small.clear()

    for shape in map(tuple, shapes):
        if small and sum(map(math.prod, small)) + math.prod(shape) > _TOGETHER:
            cut()
        small.append(shape)
    if small:
        cut()
    return found


def _draw(source, distribution, shape):
    """One draw of this shape, in blocks where it is large; each of them is fresh."""
    size = math.prod(shape)
    if size <= _AT_ONCE:
        return source.draw(distribution, shape)
    number = -(-size // _AT_ONCE)

    def add(block, draws):
        return block + 1, draws.write(block, source.draw(distribution, (_AT_ONCE,)))

    draws = tf.TensorArray(source.dtype, number, element_shape=(_AT_ONCE,))
    _, draws = tf.while_loop(
        lambda block, _: block < number, add, (0, draws), parallel_iterations=1
    )
    return tf.reshape(tf.reshape(draws.concat(), (-1,))[:size], shape)


def sum_of_two(source, shape, radius):
    """Σ r·cos v of two radii and angles, where cancelling leaves neither a 0 nor a grid.

    Args:
        source: of the words.
        shape: of the draws.
        radius: function of words that gives the radii r.
    """
    words = source.words(5, math.prod(shape))
    cosines, _ = bits.circle(words[2:4], source.dtype)
    total = tf.reduce_sum(radius(words[:2]) * cosines, axis=0)
    # What is less than the two numbers' last digit is not in their sum: it is drawn.
    return tf.reshape(total + 2.0**-53 * bits.rest(words[4], source.dtype), shape)
