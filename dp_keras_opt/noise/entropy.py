"""Where randomness comes from: the operating system, unless a user asks for a seed."""

import math
import secrets
import warnings

import numpy as np
import tensorflow as tf

from dp_keras_opt import replicas


class NoiseSource:
    """A stream of random numbers that is never saved and never repeats.

    The whole state of the Philox generator, key and counter (192 bits), is drawn from the
    operating system. It lives in a plain Python object, so that neither Keras nor
    `tf.train.Checkpoint` saves it: a restored run continues with noise that was never used.

    Args:
        seed: None, or an integer for a reproducible stream. Whoever knows the seed can subtract
            the noise; a warning says so.
    """

    #: Of the draws, and of the memory of past ones.
    dtype = tf.float32

    def __init__(self, seed=None):
        self._seeded = seed is not None
        if seed is None:
            state = _fresh_state()
        else:
            warnings.warn(
                "A noise seed was given: whoever knows it can subtract the noise, so this run "
                "gives no privacy guarantee. Leave seed=None outside of tests.",
                stacklevel=2,
            )
            state = np.random.SeedSequence(seed).generate_state(3, np.uint64).view(np.int64)
        self._memories = {}

        def generator():
            return tf.random.Generator.from_state(state, alg="philox")

        self._generator = replicas.without_strategy(generator)  # one for all replicas

    def share(self, strategy):
        """Has all workers of a strategy draw the same numbers, from a fresh state of the first."""
        if not self._seeded and replicas.place(strategy)[1] > 1:
            state = replicas.of_chief(_fresh_state().tobytes(), strategy)
            self._generator.reset(np.frombuffer(state, np.int64))

    def remember(self, stream, slots, shapes):
        """Makes the memory of a stream of correlated noise: so many buffers of all variables.

        The buffers are past noise, as secret as the generator, and like it saved nowhere.
        """
        size = sum(math.prod(shape) for shape in shapes)

        def memory():
            step = tf.Variable(0, dtype=tf.int64, trainable=False)
            zeros = tf.zeros((size,), self.dtype)
            return step, [tf.Variable(zeros, trainable=False) for _ in range(slots)]

        self._memories[stream] = replicas.without_strategy(memory)

    def memory(self, stream):
        """(steps of the run so far, buffers) of a stream."""
        return self._memories[stream]

    def restart(self):
        """Begins all streams anew: a new run of the mechanism."""
        for step, buffers in self._memories.values():
            step.assign(0)
            for buffer in buffers:
                buffer.assign(tf.zeros_like(buffer))

    def export(self):
        """The buffers of all streams, as NumPy arrays: {stream: [(size,), …]}."""
        return {
            stream: [buffer.numpy() for buffer in buffers]
            for stream, (_, buffers) in self._memories.items()
        }

    def restore(self, memories, steps):
        """Goes on with a run after so many steps, from what `export` gave.

        Raises:
            ValueError: the buffers do not fit.
        """
        own = {stream: [tuple(b.shape) for b in buffers] for stream, (_, buffers) in
               self._memories.items()}  # fmt: skip
        theirs = {stream: [b.shape for b in buffers] for stream, buffers in memories.items()}
        if own != theirs:
            raise ValueError(f"Past noise of the shapes {theirs} does not fit {own}.")
        for stream, (step, buffers) in self._memories.items():
            step.assign(steps)
            for buffer, past in zip(buffers, memories[stream], strict=True):
                buffer.assign(past)

    def step(self, stream):
        """Steps of the run so far."""
        return self._memories[stream][0].read_value()

    def normal(self, shape):
        """Fresh standard normals of the given static shape, float32.

        By Box and Muller's method from 64 random bits for each two: 40 for the radius √(−2 ln u),
        24 for the angle. They end at 7.5, with a probability of 5·10⁻¹³ beyond. Those that
        TensorFlow draws end at 5.68, and what lies beyond would tell a sum apart from its neighbour
        with a probability above many a delta.
        """
        size = math.prod(shape)
        bits = self._generator.uniform_full_int(((size + 1) // 2,), dtype=tf.uint64)
        radius, angle = (
            tf.cast(part, tf.float32)
            for part in (
                tf.bitwise.right_shift(bits, tf.constant(24, tf.uint64)),
                tf.bitwise.bitwise_and(bits, tf.constant(2**24 - 1, tf.uint64)),
            )
        )
        radius = tf.sqrt(-2 * tf.math.log((radius + 0.5) * 2.0**-40))
        angle *= 2 * math.pi * 2.0**-24
        both = tf.concat([radius * tf.cos(angle), radius * tf.sin(angle)], axis=0)
        return tf.reshape(both[:size], shape)

    def laplace(self, shape):
        """Fresh Laplace draws of scale 1 and the given static shape, float32.

        From 64 random bits each: 52 for the magnitude −ln u, whose tail then ends at 36 instead of
        16 scales (probability 2⁻⁵³), and one for the sign.
        """
        bits = self._generator.uniform_full_int(shape, dtype=tf.uint64)
        magnitude = tf.bitwise.right_shift(bits, tf.constant(12, tf.uint64))  # 52 bits
        uniform = (tf.cast(magnitude, tf.float64) + 0.5) * 2.0**-52  # in (0, 1), symmetric
        positive = tf.equal(tf.bitwise.bitwise_and(bits, tf.constant(1, tf.uint64)), 1)
        exponential = tf.cast(-tf.math.log(uniform), tf.float32)
        return tf.where(positive, exponential, -exponential)


def _fresh_state():
    return np.frombuffer(secrets.token_bytes(24), dtype=np.int64)


def numpy_generator(seed=None):
    """A NumPy generator for sampling batches, from OS entropy unless `seed` is given."""
    return np.random.Generator(np.random.PCG64(secrets.randbits(256) if seed is None else seed))
