"""What cannot be private, by name, with the fix."""

from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from dp_keras_opt.clipping.fix import names, trained_normalizations
from dp_keras_opt.clipping.state_changes import seeds

MIXING = (
    "{what} mixes the examples of a batch, so that clipping one example's gradient does not bound "
    "that example's influence. {fix}"
)


def validate(model: keras.Model) -> None:
    """Refuses what is known to break per-example clipping, before anything is run.

    Other ways of mixing examples are found by running the model on synthetic data before the first
    training step (see `check_independence`).

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
            )
            fix += "or freeze it with layer.trainable = False."
        else:
            fix = "Freeze it with layer.trainable = False, if its statistics are pre-trained; or "
            fix += f"replace it with GroupNormalization in the code of {type(owner).__name__}, "
            fix += f"in which '{owner.name}' calls it."
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


def check_independence(model, forward, batch, changed, row, before):
    """Runs the model on batches that differ in one row, and on single rows, and compares.

    A test and not a proof: mixing that no synthetic batch provokes is not seen.

    Args:
        model: a built model.
        forward: function (batch, training=True) that returns the losses (B,).
        batch, changed: synthetic batches that differ in one row.
        row: the place of that row.
        before: the `Snapshot` of the model's state at which each pass is to begin.

    Raises:
        ValueError: the outputs of a layer, or the losses, of other rows changed, or are others for
            a row alone; or a layer adds a loss that depends on the data.
    """
    rows = keras.tree.flatten(batch.x)[0].shape[0]
    first = _observe(model, forward, batch, before)
    second = _observe(model, forward, changed, before)
    if first.losses.shape != (rows,):
        raise ValueError(
            MIXING.format(what="The loss", fix="Return one value per example, without the mean.")
        )
    for (name, one), (_, other) in zip(first.outputs, second.outputs, strict=False):
        same_rows = one.shape == other.shape and one.shape[:1] == (rows,)
        if same_rows and not _equal(*(np.delete(t, row, axis=0) for t in (one, other))):
            _refuse_layer(name)
    if not _equal(np.delete(first.losses, row), np.delete(second.losses, row)):
        raise ValueError(MIXING.format(what="The loss", fix=_FIX))
    added, training = first.added, not first.is_random
    if not training:  # a row alone would get other random numbers
        first = _observe(model, forward, batch, before, training)
    if training or not _differs(model, forward, batch, before, first):
        single = tf.nest.map_structure(lambda t: None if t is None else t[row : row + 1], batch)
        alone = _observe(model, forward, single, before, training)
        for (name, one), (_, other) in zip(first.outputs, alone.outputs, strict=False):
            same = one.shape[:1] == (rows,) and other.shape == (1, *one.shape[1:])
            if same and not _equal(one[row : row + 1], other):
                _refuse_layer(name)
        if not _equal(first.losses[row : row + 1], alone.losses):
            raise ValueError(MIXING.format(what="The loss", fix=_FIX))
    if added:
        raise ValueError(
            f"Layer '{added[0]}' calls add_loss with a loss that depends on the data, which "
            "cannot be split into the examples' own losses. Put it into the loss function."
        )


def _differs(model, forward, batch, before, first):
    """Whether another pass in inference mode, with other random numbers, gives other losses.

    Some layers draw in inference, too; others move their generators on and use nothing of it.
    """
    if not first.is_random:
        return False
    before.shift += 1
    again = _observe(model, forward, batch, before, training=False)
    before.shift -= 1
    return not _equal(first.losses, again.losses)


def is_random(model, forward, batch, before):
    """Whether a pass in training mode draws random numbers: whether it moves a generator on.

    Having a generator says nothing; recurrent layers have one without any dropout.
    """
    return _observe(model, forward, batch, before).is_random


def _refuse_layer(name):
    raise ValueError(
        MIXING.format(what=f"Layer '{name}' (or an operation just before it)", fix=_FIX)
    )


_FIX = (
    "Let each example's output and loss depend on that example alone. (Random numbers that do not "
    "come from a keras.random.SeedGenerator of the layer look the same: the check runs twice.)"
)


class _Observation(NamedTuple):
    """What one forward pass did."""

    losses: np.ndarray
    outputs: list  # (name of a layer, an argument or result of its call)
    added: list  # names of layers that added a loss
    is_random: bool


def _observe(model, forward, batch, before, training=True):
    before.put_back()
    outputs, before_it = [], [np.array(state) for state in seeds(model)]
    leaves = [
        layer
        for layer in model._flatten_layers(include_self=False)
        if not list(layer._flatten_layers(include_self=False))
    ]
    restore = [(layer, layer.call) for layer in leaves]
    for layer in leaves:
        object.__setattr__(layer, "call", _observed(layer.name, layer.call, outputs))
    try:
        losses = np.asarray(forward(batch, training))
        added = [layer.name for layer in model._flatten_layers() if layer._losses]
        now = [np.array(state) for state in seeds(model)]
        moved = not all(map(np.array_equal, before_it, now))
        return _Observation(losses, outputs, added, moved)
    finally:
        for layer, _ in restore:
            object.__delattr__(layer, "call")


def _observed(name, call, outputs):
    def observed(*args, **kwargs):
        result = call(*args, **kwargs)
        for leaf in keras.tree.flatten((args, kwargs, result)):
            if isinstance(leaf, tf.Tensor) and hasattr(leaf, "numpy"):  # not ragged, not symbolic
                outputs.append((name, leaf.numpy()))
        return result

    return observed


def _equal(a, b):
    """Equality up to rounding, which is relative to the largest entry of each row."""
    if a.shape != b.shape:
        return False
    if a.dtype.kind in "OSU":
        return np.array_equal(a, b)
    a, b = (np.reshape(t, (len(t), -1)).astype(np.float64) for t in (a, b))
    with np.errstate(invalid="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        largest = np.max(np.abs(b), axis=1, keepdims=True, initial=0.0, where=np.isfinite(b))
        return bool((same | (np.abs(a - b) <= 1e-3 * largest + 1e-5)).all())
