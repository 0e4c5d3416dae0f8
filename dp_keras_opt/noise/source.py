"""Where the noise of a training comes from: a generator that is never saved and never repeats."""

import warnings
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from dp_keras_opt import workers
from dp_keras_opt.noise import entropy, host
from dp_keras_opt.noise.memory import NoiseMemory


class NoiseSource:
    """A stream of random words, what is drawn from them, and the memory of correlated noise.

    The whole state of the Philox generator, key and counter (192 bits), is drawn from the
    operating system. It lives in a plain Python object, so that neither Keras nor
    `tf.train.Checkpoint` saves it: a restored run continues with noise that was never used. A copy,
    and a fork of the process, draw a state of their own.

    Args:
        seed: None, or an integer for a reproducible stream. Whoever knows the seed can subtract
            the noise; a warning says so.

    Reference: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC
    2011, doi:10.1145/2063384.2063405 (Philox).
    """

    #: Of the draws, and of the buffers that remember them.
    dtype = tf.float32
    #: Whether there is `draw_again`.
    can_repeat = True
    #: Whether draws are made by NumPy: see `settle`.
    on_host = False

    def __init__(self, seed=None):
        self.memory = NoiseMemory()
        self._seed = seed
        self._process = entropy.process()
        if seed is None:
            state = entropy.words(3)
        else:
            warnings.warn(
                "A noise seed was given: whoever knows it can subtract the noise, so this run "
                "gives no privacy guarantee. Leave seed=None outside of tests.",
                stacklevel=2,
            )
            state = np.random.SeedSequence(seed).generate_state(3, np.uint64).view(np.int64)

        make = tf.random.Generator.from_state
        self._generator = workers.without_strategy(make, state, "philox")  # one for all replicas

    def __reduce__(self):  # also what `copy` and `deepcopy` go by
        return type(self), (self._seed,)

    def share(self, strategy):
        """Has all workers of a strategy draw the same numbers, from a fresh state of the first."""
        if self._seed is None and workers.place(strategy)[1] > 1:
            state = workers.of_chief(entropy.words(3).tobytes(), strategy)
            self._generator.reset(np.frombuffer(state, np.int64))

    def settle(self, strategy, compiled):
        """Has draws made by NumPy where that is faster: to be called when a step is traced.

        It is on one core or two. Not in what XLA compiles, nor with a GPU, to which they would be
        sent; nor by one of several workers, each of which must draw what the others draw.
        """
        alone = workers.place(strategy)[1] == 1 and not tf.config.list_physical_devices("GPU")
        self.on_host = alone and host.cores() <= 2 and not compiled

    def renew_after_fork(self):
        """Draws a new state where the process is a fork of the one that the state was drawn in.

        To be called from Python before each execution of a graph, which cannot ask.
        """
        if self._process != entropy.process():
            self._process = entropy.process()
            self._renew()
            self.memory.reset()

    def _renew(self):
        if self._seed is None:
            self._generator.reset(entropy.words(3))

    def words(self, *shape):
        """Fresh random words, int64, of the given static shape."""
        if tf.executing_eagerly():
            self.renew_after_fork()
        return self._generator.uniform_full_int(shape, dtype=tf.int64)

    def draw(self, distribution, shape):
        """Fresh draws from a `Distribution`, of the given static shape."""
        if not self.on_host:
            return distribution.graph(self, shape)
        key = [self.words(2)]
        return host.tensors(
            distribution.host, shape, distribution.number, self.dtype, host.philox, key
        )

    def draw_again(self, distribution, shape, key):
        """Draws that follow from a key alone, two `words` of this source: twice the same.

        The key is the noise, for who has it, and as secret. A key serves one draw. These are made
        in the graph everywhere: what is drawn again may have been drawn by another program.
        """
        return distribution.graph(_Keyed(key, self.dtype), shape)


class _Keyed(NamedTuple):
    """Random words that follow from a key, by Philox."""

    key: tf.Tensor
    dtype: tf.DType

    def words(self, *shape):
        return tf.random.stateless_uniform(shape, self.key, None, None, tf.int64, alg="philox")
