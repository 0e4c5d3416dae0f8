"""Mechanisms by name."""

from collections.abc import Mapping
from typing import Any

import keras

from dp_keras_opt.noise.gaussian import Gaussian
from dp_keras_opt.noise.laplace import Laplace
from dp_keras_opt.noise.mechanism import Mechanism

#: What needs no arguments.
_NAMES = {"gaussian": Gaussian, "laplace": Laplace}


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
        if identifier.lower() not in _NAMES:
            raise ValueError(
                f"noise={identifier!r} is not known; use one of {sorted(_NAMES)}. Correlated noise "
                "takes arguments: pass an object, as dp_keras_opt.noise.BandedMatrix(100, bands=8)."
            )
        identifier = _NAMES[identifier.lower()]()
    if not isinstance(identifier, Mechanism):
        raise ValueError(
            "noise must be a name such as 'gaussian' or a dp_keras_opt.noise.Mechanism; "
            f"received {identifier!r}."
        )
    return identifier
