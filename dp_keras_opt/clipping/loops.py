"""Layers that run others in a loop, over the steps of a sequence."""

from __future__ import annotations

import keras

#: Layers that run their sublayers in a loop: nothing inside can be recorded on its own.
LOOPS = (keras.layers.RNN, keras.layers.Wrapper)

#: Wrappers that call what they wrap once, on the whole batch, and assign to its weights before.
ONCE = (keras.layers.SpectralNormalization,)

#: Those that call it so once a step, where the number of steps is known, and else in a loop.
ONCE_A_STEP = (keras.layers.TimeDistributed,)


def runs_loop(layer: keras.layers.Layer, open_sizes: bool = True) -> bool:
    """Whether the layer runs its sublayers in a loop, if sizes such as lengths are open or not."""
    calls = ONCE if open_sizes else (*ONCE, *ONCE_A_STEP)
    return isinstance(layer, LOOPS) and not isinstance(layer, calls)
