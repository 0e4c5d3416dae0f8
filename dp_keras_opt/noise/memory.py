"""What correlated noise remembers: past noise, as secret as the generator, saved nowhere."""

import math

import tensorflow as tf

from dp_keras_opt import replicas


class NoiseMemory:
    """The buffers of each stream of correlated noise, and the steps of its run."""

    #: Of the buffers, and of the draws that they remember.
    dtype = tf.float32

    def __init__(self):
        self._memories = {}

    def remember(self, stream, slots, shapes):
        """Makes the memory of a stream of correlated noise: so many buffers of all variables."""
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
