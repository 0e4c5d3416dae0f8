"""Where randomness comes from: the operating system, unless a user asks for a seed."""

import math
import os
import secrets
import warnings

import numpy as np
import tensorflow as tf

from dp_keras_opt import replicas
from dp_keras_opt.noise import bits
from dp_keras_opt.noise.memory import NoiseMemory

_forks = [0]


def _count_fork():
    # In every child of the process, also in those that only load data: nothing else happens here.
    _forks[0] += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


def process():
    """What tells this process from the one that it was forked from, also where ids come again."""
    return os.getpid(), _forks[0]


class NoiseSource(NoiseMemory):
    """A stream of random numbers that is never saved and never repeats.

    The whole state of the Philox generator, key and counter (192 bits), is drawn from the
    operating system. It lives in a plain Python object, so that neither Keras nor
    `tf.train.Checkpoint` saves it: a restored run continues with noise that was never used. A copy,
    and a fork of the process, draw a state of their own.

    Args:
        seed: None, or an integer for a reproducible stream. Whoever knows the seed can subtract
            the noise; a warning says so.
    """

    def __init__(self, seed=None):
        super().__init__()
        self._seed = seed
        self._process = process()
        if seed is None:
            state = _fresh_state()
        else:
            warnings.warn(
                "A noise seed was given: whoever knows it can subtract the noise, so this run "
                "gives no privacy guarantee. Leave seed=None outside of tests.",
                stacklevel=2,
            )
            state = np.random.SeedSequence(seed).generate_state(3, np.uint64).view(np.int64)

        def generator():
            return tf.random.Generator.from_state(state, alg="philox")

        self._generator = replicas.without_strategy(generator)  # one for all replicas

    def __reduce__(self):  # also what `copy` and `deepcopy` go by
        return type(self), (self._seed,)

    def share(self, strategy):
        """Has all workers of a strategy draw the same numbers, from a fresh state of the first."""
        if self._seed is None and replicas.place(strategy)[1] > 1:
            state = replicas.of_chief(_fresh_state().tobytes(), strategy)
            self._generator.reset(np.frombuffer(state, np.int64))

    def renew_after_fork(self):
        """Draws a new state where the process is a fork of the one that the state was drawn in.

        To be called from Python before each execution of a graph, which cannot ask.
        """
        if self._process != process():
            self._process = process()
            self._renew()
            self.restart()

    def _renew(self):
        if self._seed is None:
            self._generator.reset(_fresh_state())

    def _words(self, *shape):
        """Fresh random words, int64, of the given static shape."""
        if tf.executing_eagerly():
            self.renew_after_fork()
        return self._generator.uniform_full_int(shape, dtype=tf.int64)

    def normal(self, shape):
        """Fresh standard normals of the given static shape, float32.

        By Box and Muller's method, from 128 random bits for each two. They are never 0 and end at
        9.4, with a probability of 6·10⁻²¹ beyond. Those that TensorFlow draws end at 5.68, and what
        lies beyond would tell a sum apart from its neighbour with a probability above many a delta.
        """
        return self.normal_and_rest(shape)[0]

    def normal_and_rest(self, shape):
        """`normal`, and uniform draws in (−1, 1) of the same shape, for who adds normals up.

        Near 0 a sum of normals is a multiple of their last digit. With the uniform draws in units
        of that digit it is as fine there as a normal.
        """
        size = math.prod(shape)
        words = self._words(2, (size + 1) // 2)
        radius = tf.sqrt(2 * bits.exponential(words[0], self.dtype))
        normals = radius * tf.stack(bits.circle(words[1], self.dtype))
        return tuple(
            tf.reshape(tf.reshape(both, [-1])[:size], shape)
            for both in (normals, bits.rest(words, self.dtype))
        )

    def laplace(self, shape):
        """Fresh Laplace draws of scale 1 and the given static shape, float32.

        From 64 random bits each, one of which is the sign. They are never 0 and end at 44, where
        a true one would be with a probability of 2⁻⁶⁴.
        """
        words = self._words(*shape)
        magnitude = tf.bitwise.right_shift(words, tf.constant(1, tf.int64))
        exponential = bits.exponential(magnitude, self.dtype, 63)
        return tf.where(bits.bit(words, 0), exponential, -exponential)


def _fresh_state():
    return np.frombuffer(secrets.token_bytes(24), dtype=np.int64)


def numpy_generator(seed=None):
    """A NumPy generator for sampling batches, from OS entropy unless `seed` is given."""
    return np.random.Generator(np.random.PCG64(secrets.randbits(256) if seed is None else seed))
