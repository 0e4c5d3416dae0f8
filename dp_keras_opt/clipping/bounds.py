"""Which numbers bound a norm in float32."""

from __future__ import annotations

import math
from typing import Any

from dp_keras_opt.checks import is_number

#: Beyond them, squares of the gradients that they bound leave the range of float32.
LEAST, MOST = 1e-12, 1e18


def bound(name: str, value: Any) -> float:
    """A bound on a norm for which float32 suffices; infinity included.

    Raises:
        ValueError: it is none.
    """
    if not is_number(value) or math.isnan(value):
        raise ValueError(f"{name} must be a number, received {value!r}.")
    value = float(value)
    if value <= 0:
        raise ValueError(f"{name} must be positive, received {value}.")
    if value < LEAST:
        raise ValueError(
            f"{name}={value} is too small for the squares of float32 gradients, which would count "
            f"as 0: norms would not be bounded. Use at least {LEAST}, and scale the learning rate "
            "instead."
        )
    if MOST < value < math.inf:
        raise ValueError(
            f"{name}={value} is too large: gradients and noise of that size leave the range of "
            f"float32. Use at most {MOST}."
        )
    return value
