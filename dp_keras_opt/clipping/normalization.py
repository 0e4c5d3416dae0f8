"""Batch normalization exchanged for group normalization, or frozen, in a copy of a model."""

import contextlib
import warnings
from collections.abc import Sequence

import keras
import numpy as np

from dp_keras_opt import provenance
from dp_keras_opt._keras import Functional, exchange_part, layers_of
from dp_keras_opt.clipping.per_example import children


def fix(model: keras.Model, batch_norm: str = "group") -> keras.Model:
    """A copy of a model whose batch normalization does not keep it from being trained privately.

    With "group" each BatchNormalization that is trained becomes a GroupNormalization of the same
    axis, with up to 32 groups of 4 channels or more (one group where there are no positions besides
    the channels); its scale and shift are kept. With "frozen" it is frozen: the running statistics
    of a pre-trained model stay what they are, and are used in training too; so do its scale and
    shift. All other layers keep their configuration and weights. Models nested in the model, and
    layers that the code of others calls, are treated likewise.

    Args:
        model: a functional, Sequential or subclassed model. A task of KerasHub, such as a
            classifier, is made again around its backbone: `fix(task.backbone)`.
        batch_norm: "group", for training from scratch; or "frozen", for fine-tuning.

    Returns:
        The copy; what was spent on the weights of the model has been spent on its weights, too.
        What the code of a class calls is exchanged in the objects, and not in the class: of such a
        model save the weights, and load them into what `fix` makes again.

    Raises:
        ValueError: the model, or a layer, cannot be made again from its configuration.
    """
    if batch_norm not in ("group", "frozen"):
        raise ValueError(f"batch_norm must be 'group' or 'frozen'; received {batch_norm!r}.")
    if batch_norm == "group":
        _warn(trained_normalizations(model))
    fixed = _copy(model)
    if batch_norm == "frozen":
        for layer in trained_normalizations(fixed):
            layer.trainable = False
    else:
        fixed = _exchanged(fixed, {})
    provenance.copied(model.weights, fixed.weights)  # they carry what was spent on them
    if hasattr(model, "ledger"):
        fixed.ledger.merge(model.ledger)
    return fixed


def trained_normalizations(model: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Each BatchNormalization of a model, or in a layer, that is trained."""
    kind = keras.layers.BatchNormalization
    return [each for each in layers_of(model) if isinstance(each, kind) and each.trainable]


def _is_graph(model):
    """Whether a model is nothing but its layers and how they are connected."""
    kinds = keras.Sequential, Functional
    return any(isinstance(model, kind) and type(model).call is kind.call for kind in kinds)


def names(layers: Sequence[str], shown: int = 3) -> str:
    """The names of layers for a message, the first few of many."""
    more = f" and {len(layers) - shown} more" * (len(layers) > shown)
    return ", ".join(f"'{name}'" for name in layers[:shown]) + more


def _warn(found):
    trained = [layer.name for layer in found if _has_statistics(layer)]
    if trained:
        warnings.warn(
            f"clipping.fix drops the moving mean and variance of BatchNormalization "
            f"{names(trained)}, with which the other weights were trained; these have to be "
            "trained again. To keep a pre-trained model as it is, freeze its batch normalization "
            "instead: fix(model, 'frozen').",
            stacklevel=3,
        )


def _has_statistics(layer):
    return layer.built and (np.any(layer.moving_mean) or np.any(layer.moving_variance != 1))


def _copy(model):
    """A model of its own with the same layers, weights and trainable flags."""
    if not _is_graph(model):
        return _copy_of_subclass(model)
    pairs = []

    def again(layer):
        if not isinstance(layer, keras.layers.Layer) or isinstance(layer, keras.layers.Lambda):
            return layer  # an operation, or a function that Keras does not make again: no weights
        with _named(layer):
            pairs.append((layer, type(layer).from_config(layer.get_config())))
        return pairs[-1][1]

    copy = keras.models.clone_model(model, clone_function=again)
    if model.built and not copy.built:
        copy.build(model.input_shape)
    for layer, other in pairs:
        with _named(layer):
            _settle(other, layer)
    return copy


def _copy_of_subclass(model):
    """The same for a model that has a `call` of its own."""
    try:
        copy = type(model).from_config(model.get_config())
        if model.built and not copy.built:
            copy.build_from_config(model.get_build_config())
        _settle(copy, model)
    except Exception as error:
        raise ValueError(
            f"clipping.fix cannot copy the model: {type(model).__name__} is not made again by "
            "from_config(get_config()), as it must be to be saved. Mend these methods; or replace "
            "BatchNormalization by GroupNormalization in its code, or freeze it "
            f"(layer.trainable = False). ({error})"
        ) from error
    return copy


def _settle(copy, layer):
    """Gives a copy of a layer what its configuration leaves out."""
    for part, same in zip(layers_of(layer), layers_of(copy), strict=True):
        if same.trainable != part.trainable:
            same.trainable = part.trainable
        if hasattr(part, "_released_on"):  # what `adapt_privately` has spent on it
            same._released_on = part._released_on
    copy.set_weights(layer.get_weights())


@contextlib.contextmanager
def _named(layer):
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"clipping.fix cannot copy layer '{layer.name}': from_config(get_config()) of "
            f"{type(layer).__name__} does not make one of the same weights. Mend these methods; "
            "apply LoRA and quantization after `fix`; or freeze the batch normalization of the "
            f"model (layer.trainable = False) and use it as it is. ({error})"
        ) from error


def _exchanged(layer, made):
    """A layer or model of a copy, with group normalization in the place of what is trained.

    Args:
        made: what took the place of layers and models, by their ids.
    """
    if id(layer) in made or not isinstance(layer, keras.layers.Layer):  # such as an operation
        return made.get(id(layer), layer)
    renewed = layer
    if isinstance(layer, keras.layers.BatchNormalization):
        renewed = _group_normalization(layer) if layer.trainable else layer
    elif trained_normalizations(layer):
        if _is_graph(layer):  # the graph once more, on the same layers but for the exchanged
            options = {} if isinstance(layer, keras.Sequential) else {"call_function": _call}
            renewed = keras.models.clone_model(
                layer, clone_function=lambda part: _exchanged(part, made), **options
            )
        else:  # whose code calls what its attributes hold
            for part in children(layer):
                other = _exchanged(part, made)
                if other is not part:
                    exchange_part(layer, part, other)
    made[id(layer)] = renewed
    return renewed


def _call(layer, *args, **kwargs):
    if isinstance(layer, keras.layers.GroupNormalization):  # takes none of the other's arguments
        return layer(args[0])
    return layer(*args, **kwargs)


def _group_normalization(layer):
    config = layer.get_config()
    taken = ("name", "trainable", "dtype", "axis", "epsilon", "center", "scale")
    taken += tuple(f"{w}_{s}" for w in ("gamma", "beta") for s in ("initializer", "regularizer"))
    taken += ("gamma_constraint", "beta_constraint")
    config = {name: config[name] for name in taken if name in config}
    group = keras.layers.GroupNormalization.from_config(config | {"groups": _groups(layer)})
    if layer.built:
        shape = [None] * layer.input_spec.ndim
        for axis, size in layer.input_spec.axes.items():
            shape[axis] = size
        group.build(shape)
        for name in ("gamma", "beta"):
            if getattr(layer, name) is not None:
                getattr(group, name).assign(getattr(layer, name))
    return group


def _groups(layer):
    """How many groups: of single numbers nothing would be left but zeros."""
    if not layer.built or layer.input_spec.ndim == 2:
        return 1
    channels = layer.moving_mean.shape[0]
    fitting = (n for n in range(1, 33) if channels % n == 0 and channels // n >= 4)
    return max(fitting, default=1)
