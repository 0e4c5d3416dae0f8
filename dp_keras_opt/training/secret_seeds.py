"""Random numbers of layers that nobody can know, and that are drawn once, in training."""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_keras_opt import workers
from dp_keras_opt.clipping import state_changes


class SecretSeeds:
    """Draws the seeds of a model's layers from the operating system, and puts them back.

    Dropout draws for each place in a batch. Where one example is not there, others are in its
    place, and so on: only to somebody who cannot know what was drawn for which place are the two
    alike. Seeds that were given are known, and a model that is exported has those in it that it
    has then: so these are its own again.
    """

    def __init__(self) -> None:
        self._given: list[tuple[Any, np.ndarray]] | None = None  # None: none are drawn yet

    @contextlib.contextmanager
    def around_training(self) -> Iterator[None]:
        """Around steps before which `draw` is called; at the end the seeds are as before."""
        self._given = None
        try:
            yield
        finally:
            _put(self._given or ())
            self._given = None

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Around the writing of a model while it trains: it has the seeds that were given."""
        given = self._given or ()
        with state_changes.restored([state for state, _ in given]):
            _put(given)
            yield

    def draw(self, model: Any) -> None:
        """Draws them, once in a training, when all layers are built.

        Where the optimizer has a seed, the noise is known as well, and they stay.
        """
        if self._given is not None:
            return
        states = state_changes.seeds(model) if model.optimizer.seed is None else []
        self._given = [(state, keras.ops.convert_to_numpy(state)) for state in states]
        if not states:
            return
        sizes = [4 * math.prod(state.shape) for state in states]
        drawn = workers.of_chief(secrets.token_bytes(sum(sizes)), model.distribute_strategy)
        for state, size in zip(states, sizes, strict=True):
            own, drawn = drawn[:size], drawn[size:]
            numbers = np.frombuffer(own, "uint32").reshape(state.shape)
            state.assign(numbers >> 1)  # of any integer type


class SeedsOfChunks:
    """Within a step: has layers draw other numbers for each chunk of a batch, on each replica.

    The states count draws. Of a chunk, they would be those of the next step otherwise, and of a
    replica those of every other.
    """

    #: Of a replica. More chunks than a step has.
    _CHUNKS = 2**20

    def __init__(self, model: Any) -> None:
        self._states = state_changes.seeds(model)
        self._given = [tf.convert_to_tensor(state) for state in self._states]
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        self._first = tf.cast(replica, tf.int64) * self._CHUNKS

    def begin(self, chunk: Any) -> None:
        """Before the chunk of this number, 0 for the first of a batch."""
        for state, given in zip(self._states, self._given, strict=True):
            place = self._first + tf.cast(chunk, tf.int64)
            state.assign(given + tf.cast(tf.stack([place, 0]), given.dtype))

    def end(self) -> None:
        """At the end of the step: the seeds as they were, the counts as they are."""
        for state, given in zip(self._states, self._given, strict=True):
            state.assign(tf.stack([given[0], tf.convert_to_tensor(state)[1]]))


def _put(states):
    for state, value in states:
        state.assign(value)
