"""Draws by NumPy, on one core, in blocks that stay in its cache.

This takes less than half of the processor's time of the operations of a graph, each of which goes
through all of the memory. They share the work among all cores, which Python's lock leaves no gain
of here: it pays on one core or two. The formulas are those of the graph, or of `secure_noise`.
"""

import math
import os

import numpy as np
import tensorflow as tf

#: Numbers in a block.
_BLOCK = 2**15


def cores():
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def tensors(formula, shape, count, dtype, words, key=()):
    """`count` tensors of fresh draws, one where it is 1.

    Args:
        formula: function of (words, size) that yields arrays of that many draws, independent of
            each other, `count` or more.
        shape: static, of each tensor.
        count: how many tensors.
        dtype: of the draws.
        words: function of `key` and a block's number that gives a function of a shape to random
            words of that block, int64.
        key: a tensor that the words follow from. Without one each execution draws other numbers,
            so that a graph may neither merge nor leave out nor repeat it.
    """

    def drawn(*key):
        size = math.prod(shape)
        whole = [_aligned(size, dtype.as_numpy_dtype) for _ in range(count)]

        for start in range(0, size, _BLOCK):
            stop = min(start + _BLOCK, size)
            parts = formula(words(*key, start // _BLOCK), stop - start)
            for draws, part in zip(whole, parts):  # noqa: B905  no more of them than are wanted
                draws[start:stop] = part
        return [draws.reshape(shape) for draws in whole]

    found = tf.numpy_function(drawn, key, [dtype] * count, stateful=not key)
    found = tuple(tf.ensure_shape(draws, shape) for draws in tf.nest.flatten(found))
    return found if count > 1 else found[0]


def _aligned(size, dtype):
    """An empty array at a multiple of 64 bytes, which TensorFlow takes without a copy."""
    memory = np.empty(size * np.dtype(dtype).itemsize + 64, np.uint8)
    return memory[-memory.ctypes.data % 64 :][: size * np.dtype(dtype).itemsize].view(dtype)


def philox(key, block):
    """Function of a shape that gives words of a block, by Philox; `key` is two words."""
    generator = np.random.Philox(key=key.view(np.uint64), counter=(0, 0, 0, block))
    return lambda *shape: generator.random_raw(shape).view(np.int64)


def numbers(whole, words):
    """Uniform float32 numbers of the size of 32-bit integers, never 0 and on no grid near 0.

    Of a 64-bit number a float32 shows the first 24 bits that follow on leading zeros. So 32 bits or
    somewhat fewer are drawn for all, and more only of those that are so small that they would show.

    Args:
        whole: int32, the upper bits, of the size of the numbers.
        words: function of a shape that gives int64 words, here for the bits below them.
    """
    found = whole.astype(np.float32)
    found += 0.5
    small = np.flatnonzero(np.abs(found) < 2.0**23)
    exact = (whole.ravel()[small].astype(np.int64) << 32) + (words(len(small)) & 0xFFFFFFFF)
    found.ravel()[small] = (exact.astype(np.float32) + 0.5) * 2.0**-32
    return found


def normals(words, size):
    """Standard normals, float32, as `gaussian` makes them in a graph."""
    pairs = (size + 1) // 2
    first, last = words(pairs).view(np.int32).reshape(2, pairs)
    radius, angle = numbers(np.stack([first, last >> 2]), words)  # two bits are for the quarter
    radius *= 2.0**-32
    radius = exponential(radius)
    radius *= 2
    np.sqrt(radius, out=radius)
    angle *= math.pi / 4 * 2.0**-29
    cosine, sine = np.cos(angle), np.sin(angle)
    # Choices go by the bits of the numbers: np.where takes longer than all the rest.
    x, y = cosine.view(np.int32), sine.view(np.int32)
    x ^= (~last & 1) << 31  # the sign
    swap = (x ^ y) & -(last >> 1 & 1)
    x ^= swap
    y ^= swap
    return np.concatenate([radius * cosine, radius * sine])[:size]


def exponential(numbers):
    """As `bits.exponential`, of numbers that are uniform within ±½, and which it overwrites."""
    below = numbers < 0
    p = np.abs(numbers, out=numbers)
    logs = np.log(p)
    np.log1p(np.negative(p, out=p), out=p)
    logs -= p
    logs *= below  # times 0 where p is far from 0
    p += logs
    return np.negative(p, out=p)


def rest(words, size, dtype):
    """Uniform in (−1, 1), never 0, of 32 bits."""
    return (words((size + 1) // 2).view(np.int32)[:size].astype(dtype) + 0.5) * 2.0**-31


def sum_of_two(words, size, radius):
    """Σ r·sin v of two radii and angles, float64, where cancelling leaves neither a 0 nor a grid.

    Args:
        words: function of a shape that gives int64 words.
        size: how many sums.
        radius: function of numbers that are uniform within ±½, which it may overwrite, that gives
            the radii r.
    """
    radii = radius((words(2, size) + 0.5) * 2.0**-64)
    # For v uniform within ±π/2; by the tangent of v/2, which takes a third of the time of a sine.
    half = np.tan((words(2, size) + 0.5) * (math.pi / 4 * 2.0**-63))
    total = np.sum(2 * radii * half / (1 + half * half), axis=0)
    # What is less than the two numbers' last digit is not in their sum: it is drawn.
    return total + 2.0**-53 * rest(words, size, np.float64)
