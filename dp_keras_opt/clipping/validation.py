"""What cannot be private, by name, with the fix."""

import math

import keras
import numpy as np
from keras.src.models.functional import Functional

MIXING = (
    "{what} mixes the examples of a batch, so that clipping one example's gradient does not bound "
    "that example's influence. {fix}"
)


def validate(model):
    """Refuses what is known to break per-example clipping, before anything is run.

    Other ways of mixing examples are found by running the model on synthetic data before the first
    training step (see `check_independence`).

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
    if getattr(layer, "activity_regularizer", None) is not None:
        yield (
            f"The activity_regularizer of layer '{layer.name}' is a loss over the whole batch. "
            "Remove it, or put the penalty into the per-example loss."
        )


def fix(model):
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
        if type(original) is type(layer) and not hasattr(layer, "layers"):
            layer.set_weights(original.get_weights())
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


def check_independence(model, forward, batch, changed):
    """Runs the model on two batches that differ in row 0 only, and compares all that happens.

    Args:
        model: the model.
        forward: function of a batch that returns the losses (B,), in training mode.
        batch, changed: synthetic batches that differ in their first row.

    Raises:
        ValueError: the outputs of a layer, or the losses, of other rows changed; a variable took a
            value that depends on the data; or a layer adds a loss that depends on the data.
    """
    if not all(layer.built for layer in model._flatten_layers()):
        forward(batch)  # building calls layers more often, and makes variables and layers
        validate(model)
    first, second = _observe(model, forward, batch), _observe(model, forward, changed)
    rows = keras.tree.flatten(batch.x)[0].shape[0]
    if first.losses.shape != (rows,):
        raise ValueError(
            MIXING.format(what="The loss", fix="Return one value per example, without the mean.")
        )
    for (name, before), (_, after) in zip(first.outputs, second.outputs, strict=False):
        same_rows = before.shape == after.shape and before.shape[:1] == (rows,)
        if same_rows and not _equal(before[1:], after[1:]):
            raise ValueError(
                MIXING.format(what=f"Layer '{name}' (or an operation just before it)", fix=_FIX)
            )
    if not _equal(first.losses[1:], second.losses[1:]):
        raise ValueError(MIXING.format(what="The loss", fix=_FIX))
    for path, before, after in zip(first.paths, first.states, second.states, strict=True):
        if not np.array_equal(before, after, equal_nan=before.dtype.kind == "f"):
            raise ValueError(
                f"Variable '{path}' is updated from the data during training, without noise, and "
                "is saved with the model. Remove the layer that does so, or freeze it."
            )
    if first.added:
        raise ValueError(
            f"Layer '{first.added[0]}' calls add_loss with a loss that depends on the data, which "
            "cannot be split into the examples' own losses. Put it into the loss function."
        )


_FIX = (
    "Let each example's output and loss depend on that example alone. (Random numbers that do not "
    "come from a keras.random.SeedGenerator of the layer look the same: the check runs twice.)"
)


class _Observation:
    """What one forward pass in training mode did; the model's state is put back afterwards."""

    def __init__(self, model, losses, outputs):
        self.losses = losses
        self.outputs = outputs
        self.paths = [v.path for v in model.non_trainable_variables]
        self.states = [keras.ops.convert_to_numpy(v) for v in model.non_trainable_variables]
        self.added = [layer.name for layer in model._flatten_layers() if layer._losses]


def _observe(model, forward, batch):
    states = [keras.ops.convert_to_numpy(v) for v in model.non_trainable_variables]
    outputs = []
    leaves = [
        layer
        for layer in model._flatten_layers(include_self=False)
        if not list(layer._flatten_layers(include_self=False))
    ]
    restore = [(layer, layer.call) for layer in leaves]
    for layer in leaves:
        object.__setattr__(layer, "call", _observed(layer.name, layer.call, outputs))
    try:
        losses = np.asarray(forward(batch))
        return _Observation(model, losses, outputs)
    finally:
        for layer, _ in restore:
            object.__delattr__(layer, "call")
        for variable, state in zip(model.non_trainable_variables, states, strict=True):
            variable.assign(state)


def _observed(name, call, outputs):
    def observed(*args, **kwargs):
        result = call(*args, **kwargs)
        for leaf in keras.tree.flatten((args, kwargs, result)):
            if hasattr(leaf, "numpy"):
                outputs.append((name, leaf.numpy()))
        return result

    return observed


def _equal(a, b):
    return a.shape == b.shape and np.allclose(
        a.astype(np.float64), b.astype(np.float64), rtol=1e-3, atol=1e-5, equal_nan=True
    )
