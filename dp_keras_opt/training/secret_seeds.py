"""Random numbers of layers that nobody can know, as long as a model trains."""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

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
        drawn = [(state, keras.ops.convert_to_numpy(state)) for state, _ in given]
        _put(given)
        try:
            yield
        finally:
            _put(drawn)

    def draw(self, model: Any) -> None:
        """Draws them, once in a training, when all layers are built.

        Where the optimizer has a seed, the noise is known as well, and they stay.
        """
        if self._given is not None:
            return
        states = state_changes.seeds(model) if model.optimizer.seed is None else []
        self._given = [(state, keras.ops.convert_to_numpy(state)) for state in states]
        sizes = [4 * math.prod(state.shape) for state in states]
        if not states:
            return
        drawn = workers.of_chief(secrets.token_bytes(sum(sizes)), model.distribute_strategy)
        for state, size in zip(states, sizes, strict=True):
            own, drawn = drawn[:size], drawn[size:]
            numbers = np.frombuffer(own, "uint32").reshape(state.shape)
            state.assign(numbers >> 1)  # of any integer type


def _put(states):
    for state, value in states:
        state.assign(value)
