"""The checks that many arguments share."""

import numbers
import operator
from typing import Any


def is_number(value: Any) -> bool:
    """Whether it is a real number, NaN and infinities included, and no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def whole_number(
    value: Any, name: str, minimum: int = 1, fix: str = "", *, maximum: int | None = None
) -> int:
    """`value` as an int.

    Raises:
        ValueError: it is no integer, or below the minimum or above the maximum; the message names
            the argument and the `fix`.
    """
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or value < minimum or (maximum is not None and value > maximum):
        limits = f">= {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise ValueError(f"{name} must be an integer {limits}; received {value!r}. {fix}".rstrip())
    return operator.index(value)
