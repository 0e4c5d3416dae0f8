"""What cannot be private, by name, with the fix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import keras

from dp_keras_opt._keras import layers_of
from dp_keras_opt.clipping.normalization import names, trained_normalizations

#: Why a layer (or a loss) cannot stay; takes `what`.
MIXING = (
    "{what} mixes the examples of a batch, so that clipping one example's gradient does not bound "
    "that example's influence."
)

_ALONE = (
    "Remove it from the model, and give it each {} alone, before batches are made: "
    "dp_keras_opt.data.poisson_batches(..., map=lambda x, y: (layer(x), y))."
)

#: Layers that mix a batch, and what to do. Three equalize one histogram of all pictures, which they
#: do in some draws only, and a spectrogram in decibels ends below the loudest of all: running them
#: need not show it.
_MIXING_LAYERS = {
    "MixUp": "Remove it from the model.",
    "CutMix": "Remove it from the model.",
    "Equalization": _ALONE.format("picture"),
    "RandAugment": _ALONE.format("picture"),
    "AugMix": _ALONE.format("picture"),
    "MelSpectrogram": f"{_ALONE.format('sound')} Or make it with power_to_db=False.",
}


class Problem(NamedTuple):
    """Layers that break per-example clipping.

    Attributes:
        layers: their names.
        reason: what they do, in a sentence that names them.
        fix: what to do about it.
    """

    layers: tuple[str, ...]
    reason: str
    fix: str

    def __str__(self) -> str:
        return f"{self.reason} {self.fix}"


def problems(model: keras.Model) -> list[Problem]:
    """What in a model is known to break per-example clipping, before anything is run.

    Other ways of mixing examples are found by running the model on synthetic data before the first
    training step.

    Args:
        model: any Keras model.

    Returns:
        The problems; none is no proof that there are none.
    """
    return [*_normalizations(model), *(p for each in layers_of(model) for p in _of(each))]


def validate(model: keras.Model) -> None:
    """Refuses a model that has `problems`.

    Raises:
        ValueError: naming every such layer and its fix.
    """
    found = problems(model)
    if found:
        listed = "\n- ".join(map(str, found))
        raise ValueError(f"This model cannot be trained privately:\n- {listed}")


def _normalizations(model: keras.Model) -> Iterator[Problem]:
    layers = [layer.name for layer in trained_normalizations(model)]
    if layers:
        what = f"BatchNormalization {names(layers)} in training mode"
        fix = (
            "Replace it with GroupNormalization: dp_keras_opt.clipping.fix(model) does that in a "
            "copy. Or freeze it, if its statistics are pre-trained: fix(model, 'frozen'), or "
            "layer.trainable = False."
        )
        yield Problem(tuple(layers), MIXING.format(what=what), fix)


def _of(layer: keras.layers.Layer) -> Iterator[Problem]:
    if isinstance(layer, keras.layers.RNN) and layer.stateful:
        what = f"Stateful layer '{layer.name}' carries state from batch to batch and"
        yield Problem((layer.name,), MIXING.format(what=what), "Set stateful=False.")
    mixing = [kind.__name__ for kind in type(layer).__mro__ if kind.__name__ in _MIXING_LAYERS]
    if mixing and getattr(layer, "power_to_db", True):
        what = f"{mixing[0]} layer '{layer.name}'"
        yield Problem((layer.name,), MIXING.format(what=what), _MIXING_LAYERS[mixing[0]])
    if getattr(layer, "activity_regularizer", None) is not None:
        yield Problem(
            (layer.name,),
            f"The activity_regularizer of layer '{layer.name}' is a loss over the whole batch.",
            "Remove it, and put the penalty into the per-example loss: a dp_keras_opt.Objective is "
            "given what layers give.",
        )
