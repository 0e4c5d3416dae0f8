"""What cannot be private, by name, with the fix."""

import math

import keras
from keras.src.models.functional import Functional

from dp_keras_opt import provenance
from dp_keras_opt.clipping.independence import MIXING


def validate(model: keras.Model) -> None:
    """Refuses what is known to break per-example clipping, before anything is run.

    Other ways of mixing examples are found by running the model on synthetic data before the first
    training step (`self_check.py`).

    Raises:
        ValueError: naming every such layer and its fix.
    """
    problems = [problem for layer in model._flatten_layers() for problem in _problems(layer)]
    if problems:
        raise ValueError("This model cannot be trained privately:\n- " + "\n- ".join(problems))


def _problems(layer):
    if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
        yield MIXING.format(
            what=f"BatchNormalization layer '{layer.name}' in training mode",
            fix="Replace it with GroupNormalization (dp_keras_opt.clipping.fix(model) does that), "
            "or freeze it with layer.trainable = False.",
        )
    if isinstance(layer, keras.layers.RNN) and layer.stateful:
        yield MIXING.format(
            what=f"Stateful layer '{layer.name}' carries state from batch to batch and",
            fix="Set stateful=False.",
        )
    if type(layer).__name__ in ("MixUp", "CutMix"):
        yield MIXING.format(
            what=f"{type(layer).__name__} layer '{layer.name}'", fix="Remove it from the model."
        )
    if getattr(layer, "activity_regularizer", None) is not None:
        yield (
            f"The activity_regularizer of layer '{layer.name}' is a loss over the whole batch. "
            "Remove it, or put the penalty into the per-example loss."
        )


def fix(model: keras.Model) -> keras.Model:
    """A copy of a functional or Sequential model that can be trained privately.

    Each BatchNormalization becomes a GroupNormalization of the same axis, with up to 32 groups;
    all other layers keep their configuration and weights.

    Raises:
        ValueError: the model is subclassed, so its layers cannot be exchanged from outside.
    """
    if not isinstance(model, keras.Sequential | Functional):
        raise ValueError(
            "clipping.fix needs a functional or Sequential model. In a subclassed model, replace "
            "BatchNormalization by GroupNormalization in the code."
        )
    options = {"clone_function": _without_batch_statistics}
    if not isinstance(model, keras.Sequential):
        options["call_function"] = _call_without_mask
    fixed = keras.models.clone_model(model, **options)
    originals = {layer.name: layer for layer in model._flatten_layers(include_self=False)}
    for layer in fixed._flatten_layers(include_self=False):
        original = originals.get(layer.name)
        if original is not None and type(original) is type(layer) and not hasattr(layer, "layers"):
            layer.set_weights(original.get_weights())
    provenance.copied(model.weights, fixed.weights)  # they carry what was spent on them
    if hasattr(model, "ledger"):
        fixed.ledger.merge(model.ledger)
    return fixed


def _call_without_mask(layer, *args, **kwargs):
    if isinstance(layer, keras.layers.GroupNormalization):  # takes none of the other's arguments
        return layer(args[0])
    return layer(*args, **kwargs)


def _without_batch_statistics(layer):
    if isinstance(layer, keras.layers.BatchNormalization):
        axis = layer.axis
        channels = layer.moving_mean.shape[0] if layer.built else 1
        return keras.layers.GroupNormalization(
            groups=math.gcd(32, channels),
            axis=axis,
            epsilon=layer.epsilon,
            center=layer.center,
            scale=layer.scale,
            name=layer.name,
        )
    if isinstance(layer, keras.Sequential | Functional):
        return fix(layer)
    return layer.__class__.from_config(layer.get_config())
