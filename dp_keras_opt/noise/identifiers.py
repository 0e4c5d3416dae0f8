"""Mechanisms by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dp_keras_opt import identifiers
from dp_keras_opt.noise.gaussian import Gaussian
from dp_keras_opt.noise.laplace import Laplace
from dp_keras_opt.noise.mechanism import Mechanism
from dp_keras_opt.noise.planner import Planned

#: Those that need no arguments.
_NAMES = {"gaussian": Gaussian, "laplace": Laplace, "planned": Planned}


def get(identifier: Mechanism | str | Mapping[str, Any]) -> Mechanism:
    """Resolves a mechanism as Keras resolves strings, configurations and objects.

    Args:
        identifier: a `Mechanism`, the name of one ("gaussian"), or a serialised one.

    Raises:
        ValueError: nothing is known by that name.
    """
    others = (
        "a mechanism of dp_keras_opt.noise, such as BandedMatrix(100, bands=8): correlated noise "
        "takes arguments"
    )
    # A class of mechanisms, such as the abstract one of all correlated noise, is not a name.
    return identifiers.resolve(identifier, Mechanism, _NAMES, "noise", others)
