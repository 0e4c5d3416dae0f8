"""Arguments that may be given as a name, a configuration or an object, as in Keras."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras


def resolve(
    identifier: Any,
    kind: type,
    names: Mapping[str, Callable[[], Any]],
    argument: str,
    others: str,
) -> Any:
    """The object that an argument means.

    Args:
        identifier: an object of `kind`, a name, or a serialised object.
        kind: the class that the object must be of.
        names: what is made by its name alone, by that name in lower case.
        argument: the argument's name, for errors.
        others: what else may be given, for errors: ends a sentence "use one of ..., or".

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(identifier, Mapping):
        identifier = keras.saving.deserialize_keras_object(dict(identifier))
    if isinstance(identifier, str) and identifier.lower() in names:
        identifier = names[identifier.lower()]()
    if not isinstance(identifier, kind):
        known = f"one of {sorted(names)}, or " if names else ""
        raise ValueError(f"{argument}={identifier!r} is not known; use {known}{others}.")
    return identifier
