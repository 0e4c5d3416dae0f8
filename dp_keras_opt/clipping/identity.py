"""Whether a model is still the one that was checked before its first step."""

from __future__ import annotations

import types
import weakref
from typing import Any, NamedTuple

import keras
import numpy as np

from dp_keras_opt._keras import SET_BY_RUNS, TRAINABLE, layers_of

_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))


class Identity:
    """What a check depends on, besides the form of the batches and what is trained.

    These are the layers, their types of numbers and their attributes as far as these are plain
    values or functions, and the objective. Objects count as the same only if they are one, and are
    held weakly.
    """

    def __init__(
        self, model: keras.Model, objective: Any, ignored: frozenset[str] = frozenset()
    ) -> None:
        """
        Args:
            model: a `DPModel`.
            objective: a structure of all else, such as losses and options of `compile`.
            ignored: names of its attributes that do not count, such as those that all models have.
        """
        self._ignored = ignored
        paths = keras.tree.flatten_with_path(objective)
        self._parts = [(path, _held(leaf)) for path, leaf in paths]
        for layer in layers_of(model):
            self._parts += [(None, _held(layer)), (None, layer.compute_dtype)]
            for name, value in sorted(vars(layer).items()):
                if name == TRAINABLE or (layer is model and name in ignored):
                    continue
                if isinstance(layer, keras.Model) and name in SET_BY_RUNS:
                    continue
                if isinstance(value, _PLAIN) or callable(value):
                    self._parts.append((f"{layer.name}.{name}", _held(value)))

    def is_that_of(self, model: keras.Model, objective: Any) -> bool:
        """Whether this model and objective would be checked in the same way.

        What somebody else has written may do something else when it is traced again, and is not
        the same as anything: not even as itself.
        """
        others = Identity(model, objective, self._ignored)._parts
        return len(others) == len(self._parts) and all(map(_same, self._parts, others))

    def changed(self, model: keras.Model, objective: Any) -> list[str]:
        """What can be seen to be another than it was, also of what somebody else has written."""
        others = Identity(model, objective, self._ignored)._parts
        if len(others) != len(self._parts):
            one, other = ({_name(part) for part in parts} for parts in (self._parts, others))
            return sorted(one ^ other) or ["its layers"]
        pairs = zip(self._parts, others, strict=True)
        return list(dict.fromkeys(_name(one) for one, other in pairs if not _seem_same(one, other)))


def _name(part):
    place, value = part
    return place if isinstance(place, str) else "a layer" if place is None else "the objective"


class _Unknown(NamedTuple):
    """Of code that may do something else each time; what it was, where that can be held."""

    reference: Any


def _held(value):
    if isinstance(value, _PLAIN):
        return value
    try:
        is_method = isinstance(value, types.MethodType)  # made anew whenever one asks for it
        reference = weakref.WeakMethod(value) if is_method else weakref.ref(value)
    except TypeError:
        return _Unknown(None)
    return reference if is_of_libraries(value) else _Unknown(reference)


def is_of_libraries(value: Any) -> bool:
    """Whether what runs is code of Keras, KerasHub or this library alone."""
    home = getattr(value, "__module__", None) or type(value).__module__
    # Of a Keras loss or metric that calls a function; of an objective.
    names = ("fn", "_fn", "function")
    inner = next((each for name in names if (each := getattr(value, name, None))), None)
    libraries = ("keras", "keras_hub", "tensorflow", "dp_keras_opt", "builtins")
    return home.partition(".")[0] in libraries and (inner is None or is_of_libraries(inner))


def _same(one, other):
    (place, a), (other_place, b) = one, other
    if place != other_place or type(a) is not type(b) or isinstance(a, _Unknown):
        return False
    if isinstance(a, weakref.ref):
        return a() is not None and (a() is b() or isinstance(a, weakref.WeakMethod) and a == b)
    return a == b or (a != a and b != b)  # not a number, both


def _seem_same(one, other):
    if isinstance(one[1], _Unknown) and isinstance(other[1], _Unknown):
        one, other = ((place, unknown.reference) for place, unknown in (one, other))
    return _same(one, other)
