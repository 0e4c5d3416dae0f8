"""Objects that are what their constructor arguments are: compared, hashed and saved by them."""

from __future__ import annotations

from typing import Any, TypeVar

import keras

_Self = TypeVar("_Self", bound="Serializable")


class Serializable:
    """A plain object whose class is registered with `keras.saving.register_keras_serializable`."""

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
