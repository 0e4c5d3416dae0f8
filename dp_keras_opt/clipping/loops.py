"""Layers that run others in a loop, over the steps of a sequence."""

from __future__ import annotations

import keras

#: Layers that run their sublayers in a loop: nothing inside can be recorded on its own.
LOOPS = (keras.layers.RNN, keras.layers.Wrapper)

#: Wrappers that call what they wrap once, on the whole batch, and assign to its weights before.
ONCE = (keras.layers.SpectralNormalization,)


def runs_loop(layer: keras.layers.Layer) -> bool:
    """Whether the layer runs its sublayers in a loop."""
    return isinstance(layer, LOOPS) and not isinstance(layer, ONCE)
