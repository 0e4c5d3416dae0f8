"""Objects that are what their constructor arguments are: compared, hashed and saved by them."""

from __future__ import annotations

import abc
from typing import Any, TypeVar

import keras
import numpy as np

_Self = TypeVar("_Self", bound="Serializable")


class _FixedOnceMade(abc.ABCMeta):
    """Closes an object once its constructor has returned, and copies the arrays in it."""

    def __call__(cls, *args, **kwargs):
        made = super().__call__(*args, **kwargs)
        _close(made)
        return made


def _close(made):
    copies = {}  # of an array that has two names, one
    for name, value in list(vars(made).items()):
        if isinstance(value, np.ndarray):
            vars(made)[name] = copy = copies.setdefault(id(value), value.copy())
            copy.setflags(write=False)
    object.__setattr__(made, "_is_made", True)  # past the lock of a frozen dataclass


class Serializable(metaclass=_FixedOnceMade):
    """A plain object whose class is registered with `keras.saving.register_keras_serializable`.

    Its attributes are fixed once it is made: a step that is traced, and what was computed of them,
    would not notice a change, and the ledger would.
    """

    __slots__ = ("__dict__", "__weakref__", "_is_made")  # not among `vars`

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_is_made", False):
            raise AttributeError(
                f"{type(self).__name__} is fixed once it is made, as the noise of a training and "
                f"its price follow from it: {name} cannot be set. Make a new one. What is computed "
                "later, in a class of your own, goes in a functools.cached_property, or in a dict "
                "that __init__ makes."
            )
        super().__setattr__(name, value)

    def __getstate__(self):
        return dict(vars(self))

    def __setstate__(self, state):
        vars(self).update(state)
        _close(self)

    def get_config(self) -> dict[str, Any]:
        """Constructor arguments, as in Keras."""
        return {}

    @classmethod
    def from_config(cls: type[_Self], config: dict[str, Any]) -> _Self:
        """The object with these constructor arguments."""
        return cls(**config)

    def to_json(self) -> dict[str, Any]:
        """The object as JSON-able values, for ledgers, which later versions must read."""
        return keras.saving.serialize_keras_object(self)

    @classmethod
    def from_json(cls: type[_Self], values: dict[str, Any]) -> _Self:
        """The object that `to_json` described, of this class or one that inherits from it.

        Raises:
            ValueError: it is of another class.
            TypeError: its class is not known here.
        """
        found = keras.saving.deserialize_keras_object(values)
        if not isinstance(found, cls):
            raise ValueError(f"{values!r} is no {cls.__name__}.")
        return found

    def __eq__(self, other):
        return type(self) is type(other) and self.get_config() == other.get_config()

    def __hash__(self):
        return hash((type(self), repr(self.get_config())))
