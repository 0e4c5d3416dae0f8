"""Batch normalization exchanged for group normalization, where that can be done from outside."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence

import keras
import numpy as np

from dp_keras_opt import provenance
from dp_keras_opt._keras import Functional, layers_of
from dp_keras_opt.clipping.per_example import children


def fix(model: keras.Model) -> keras.Model:
    """A copy of a functional or Sequential model that can be trained privately.

    Each BatchNormalization that is trained becomes a GroupNormalization of the same axis, with up
    to 32 groups of 4 channels or more (one group where there are no positions besides the
    channels); its scale and shift are kept. All other layers keep their configuration and weights.
    Models nested in the model are treated likewise.

    Frozen batch normalization (`trainable = False`) is private as it is, and stays. So does what is
    inside of layers and models with a `call` of their own; a warning names it.

    Args:
        model: a functional or Sequential model.

    Returns:
        The copy; what was spent on the weights of the model has been spent on its weights, too.

    Raises:
        ValueError: the model is subclassed, so its layers cannot be exchanged from outside; or a
            layer cannot be made again from its configuration.
    """
    if not _is_graph(model):
        raise ValueError(
            f"clipping.fix needs a functional or Sequential model; {type(model).__name__} has a "
            "`call` of its own: replace BatchNormalization by GroupNormalization in its code."
        )
    found = list(trained_normalizations(model))
    _warn(found)
    copy = _copy(model)
    exchanged = {id(layer): layer for layer, owner in trained_normalizations(copy) if not owner}
    made = {}
    fixed = _exchange(copy, exchanged, made)
    for key, layer in exchanged.items():
        for name in ("gamma", "beta"):
            if getattr(layer, name, None) is not None:  # built, and with this weight
                getattr(made[key], name).assign(getattr(layer, name))
    provenance.copied(model.weights, fixed.weights)  # they carry what was spent on them
    if hasattr(model, "ledger"):
        fixed.ledger.merge(model.ledger)
    return fixed


def trained_normalizations(
    model: keras.Model, owner: keras.layers.Layer | None = None
) -> Iterator[tuple[keras.layers.Layer, keras.layers.Layer | None]]:
    """Yields each BatchNormalization that is trained, with the layer or model whose code calls it.

    The latter is None where `fix` can exchange it.
    """
    if not _is_graph(model):
        owner = model
    for layer in children(model):
        if not isinstance(layer, keras.layers.BatchNormalization):
            yield from trained_normalizations(layer, owner)
        elif layer.trainable:
            yield layer, owner


def _is_graph(model):
    """Whether a model is nothing but its layers and how they are connected."""
    kinds = keras.Sequential, Functional
    return any(isinstance(model, kind) and type(model).call is kind.call for kind in kinds)


def names(layers: Sequence[str], shown: int = 3) -> str:
    """The names of layers for a message, the first few of many."""
    more = f" and {len(layers) - shown} more" * (len(layers) > shown)
    return ", ".join(f"'{name}'" for name in layers[:shown]) + more


def _warn(found):
    left = [layer.name for layer, owner in found if owner]
    if left:
        owners = dict.fromkeys(type(owner).__name__ for _, owner in found if owner)
        warnings.warn(
            f"clipping.fix cannot exchange BatchNormalization {names(left)}, which the code of "
            f"{', '.join(owners)} calls. Freeze it (layer.trainable = False), or replace it there.",
            stacklevel=3,
        )
    trained = [layer.name for layer, owner in found if not owner and _has_statistics(layer)]
    if trained:
        warnings.warn(
            f"clipping.fix drops the moving mean and variance of BatchNormalization "
            f"{names(trained)}, with which the other weights were trained; these have to be "
            "trained again. To keep a pre-trained model as it is, freeze its batch normalization "
            "instead: layer.trainable = False.",
            stacklevel=3,
        )


def _has_statistics(layer):
    return layer.built and (np.any(layer.moving_mean) or np.any(layer.moving_variance != 1))


def _copy(model):
    """A model of its own with the same layers, weights and trainable flags."""
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
            for part, same in zip(layers_of(layer), layers_of(other), strict=True):
                if same.trainable != part.trainable:  # of what the configuration leaves out
                    same.trainable = part.trainable
            other.set_weights(layer.get_weights())
    return copy


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


def _exchange(model, exchanged, made):
    """The graph of a model once more, on the same layers but for those that are exchanged.

    Args:
        model: a functional or Sequential model.
        exchanged: the layers, by their ids.
        made: what took the place of layers and nested models, by their ids.
    """

    def replacement(layer):
        if id(layer) not in made:
            if id(layer) in exchanged:
                made[id(layer)] = _group_normalization(layer)
            elif _is_graph(layer) and any(id(p) in exchanged for p in layers_of(layer)):
                made[id(layer)] = _exchange(layer, exchanged, made)
            else:
                made[id(layer)] = layer
        return made[id(layer)]

    options = {} if isinstance(model, keras.Sequential) else {"call_function": _call}
    return keras.models.clone_model(model, clone_function=replacement, **options)


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
    return keras.layers.GroupNormalization.from_config(config | {"groups": _groups(layer)})


def _groups(layer):
    """How many groups: of single numbers nothing would be left but zeros."""
    if not layer.built or layer.input_spec.ndim == 2:
        return 1
    channels = layer.moving_mean.shape[0]
    fitting = (n for n in range(1, 33) if channels % n == 0 and channels // n >= 4)
    return max(fitting, default=1)
