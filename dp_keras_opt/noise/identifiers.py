"""Mechanisms by name."""

from collections.abc import Mapping
from typing import Any

import keras

from dp_keras_opt.noise.mechanism import Mechanism


def get(identifier: Mechanism | str | Mapping[str, Any]) -> Mechanism:
    """Resolves a mechanism as Keras resolves strings, configurations and objects.

    Args:
        identifier: a `Mechanism`, the name of one ("gaussian"), or a serialised one.

    Raises:
        ValueError: nothing is known by that name.
    """
    if isinstance(identifier, dict):
        identifier = keras.saving.deserialize_keras_object(identifier)
    if isinstance(identifier, str):
        known = {cls.__name__.lower(): cls for cls in Mechanism.__subclasses__()}
        if identifier.lower() not in known:
            raise ValueError(f"noise={identifier!r} is not known; use one of {sorted(known)}.")
        identifier = known[identifier.lower()]()
    if not isinstance(identifier, Mechanism):
        raise ValueError(
            "noise must be a name such as 'gaussian' or a dp_keras_opt.noise.Mechanism; "
            f"received {identifier!r}."
        )
    return identifier
