"""What cannot be private, by name, with the fix."""

import keras

from dp_keras_opt.clipping.fix import names, trained_normalizations
from dp_keras_opt.clipping.independence import MIXING


def validate(model: keras.Model) -> None:
    """Refuses what is known to break per-example clipping, before anything is run.

    Other ways of mixing examples are found by running the model on synthetic data before the first
    training step (`self_check.py`).

    Raises:
        ValueError: naming every such layer and its fix.
    """
    problems = [*_normalizations(model)]
    problems += [problem for layer in model._flatten_layers() for problem in _problems(layer)]
    if problems:
        raise ValueError("This model cannot be trained privately:\n- " + "\n- ".join(problems))


def _normalizations(model):
    by_owner = {}
    for layer, owner in dict.fromkeys(trained_normalizations(model)):
        by_owner.setdefault(owner, []).append(layer.name)
    for owner, layers in by_owner.items():
        if owner is None:
            fix = (
                "Replace it with GroupNormalization (dp_keras_opt.clipping.fix(model) does that), "
                "or freeze it with layer.trainable = False."
            )
        else:
            fix = (
                "Freeze it with layer.trainable = False, if its statistics are pre-trained; or "
                f"replace it with GroupNormalization in the code of {type(owner).__name__}, in "
                f"which '{owner.name}' calls it."
            )
        what = f"BatchNormalization {names(layers)} in training mode"
        yield MIXING.format(what=what, fix=fix)


def _problems(layer):
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
