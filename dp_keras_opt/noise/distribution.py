"""A distribution, by how it is drawn from random words; a new one is one object of this kind."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf


class Distribution(NamedTuple):
    """What is drawn, by its formulas.

    Attributes:
        graph: float32 draws in a graph: function of (source, shape) that calls `source.words`.
        host: the same by NumPy: function of (words, size) that yields arrays of `size` draws, and
            calls `words` with a shape for random int64 words.
        secure: as `host`, float64 draws of several words each, for `secure_noise=True`.
        number: how many arrays there are.
    """

    graph: Callable[..., Any]
    host: Callable[..., Any]
    secure: Callable[..., Any]
    number: int = 1


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
    if size <= _AT_ONCE or source.on_host:
        return source.draw(distribution, shape)
    number = -(-size // _AT_ONCE)

    def add(block, draws):
        return block + 1, draws.write(block, source.draw(distribution, (_AT_ONCE,)))

    draws = tf.TensorArray(source.dtype, number, element_shape=(_AT_ONCE,))
    _, draws = tf.while_loop(
        lambda block, _: block < number, add, (0, draws), parallel_iterations=1
    )
    return tf.reshape(tf.reshape(draws.concat(), (-1,))[:size], shape)
