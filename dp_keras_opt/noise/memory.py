"""The past noise of correlated noise: as secret as the generator.

It is saved nowhere but in the secret file of `DPModel.save_run`.
"""

import tensorflow as tf

from dp_keras_opt import workers


class NoiseMemory:
    """The buffers of each stream of correlated noise, and how many steps it has taken.

    A stream is a release of the optimizer, or a part of one. Each buffer holds past noise of all
    variables, one after another, or what it is drawn from again.

    Attributes:
        run: the segment of a ledger whose noise it is; None where that is of none.
    """

    def __init__(self):
        self._streams = {}
        self.run = None

    def allocate(self, stream, buffers):
        """Makes the buffers of a stream, all of them zeros.

        Args:
            stream: its name, (index of the release, part of it).
            buffers: a `tf.TensorSpec` for each.
        """

        def variables():
            steps = tf.Variable(0, dtype=tf.int64, trainable=False)
            zeros = [tf.zeros(buffer.shape, buffer.dtype) for buffer in buffers]
            return steps, [tf.Variable(value, trainable=False) for value in zeros]

        self._streams[stream] = workers.without_strategy(variables)

    @property
    def streams(self):
        """The names of all streams."""
        return list(self._streams)

    def steps(self, stream):
        """The variable that counts a stream's steps since its beginning."""
        return self._streams[stream][0]

    def buffers(self, stream):
        """The variables with a stream's past noise."""
        return self._streams[stream][1]

    def reset(self):
        """Begins all streams anew: another run of the mechanism."""
        self.run = None
        for steps, buffers in self._streams.values():
            steps.assign(0)
            for buffer in buffers:
                buffer.assign(tf.zeros_like(buffer))

    def state(self):
        """The buffers of all streams, as NumPy arrays: {stream: [buffer, …]}."""
        return {
            stream: [buffer.numpy() for buffer in buffers]
            for stream, (_, buffers) in self._streams.items()
        }

    def load(self, state, steps):
        """Goes on after that many steps, from what `state` gave.

        Raises:
            ValueError: the buffers do not fit.
        """
        own = {
            stream: [tuple(buffer.shape) for buffer in buffers]
            for stream, (_, buffers) in self._streams.items()
        }
        theirs = {stream: [past.shape for past in buffers] for stream, buffers in state.items()}
        if own != theirs:
            raise ValueError(f"Past noise of the shapes {theirs} does not fit {own}.")
        for stream, (count, buffers) in self._streams.items():
            count.assign(steps)
            for buffer, past in zip(buffers, state[stream], strict=True):
                buffer.assign(past)
