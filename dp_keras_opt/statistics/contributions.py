"""What each unit adds to a sum, bounded; and the sum, exactly.

A unit's rows share its contribution: each of m rows counts 1/m. So the unit's is a mean of vectors
of norm 1 at most, and has norm 1 at most itself, however many rows it has.

Sums are of integers, multiples of 2⁻²⁴, of which each is rounded towards 0. Floating-point numbers
would be added with roundings that depend on all others and on their order, and one unit more could
move their sum by more than its contribution.

Reference: Casacuberta, Shoemate, Vadhan and Wagaman, "Widespread underestimation of sensitivity in
differentially private libraries and how to fix it", CCS 2022, arXiv:2207.10635.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from dp_keras_opt.types import Norm

_GRID = 2**24
#: So many contributions add up to integers that float64 has.
MOST_UNITS = 2**29


class Units:
    """Whose rows they are.

    Args:
        users: None, where each row is a unit; or the unit of each row, as integers 0, 1, ….
    """

    def __init__(self, users: np.ndarray | None = None) -> None:
        self._users = users
        self._shares = None if users is None else 1 / np.bincount(users)[users]
        self._rows = 0  # seen so far

    @property
    def number(self) -> int:
        """n: how many units there are, once all rows were seen."""
        if self._users is None:
            found = self._rows
        elif self._rows != len(self._users):
            raise ValueError(
                f"`users` names {len(self._users)} rows, but there are {self._rows}. Give one id "
                "for each row, in their order."
            )
        else:
            found = int(self._users.max()) + 1
        if found > MOST_UNITS:
            raise ValueError(f"There are {found} units; at most {MOST_UNITS} are counted exactly.")
        return found

    def rows(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(the units, the shares) of the next rows, of which there are `count`."""
        part = slice(self._rows, self._rows + count)
        self._rows += count
        if self._users is None or self._shares is None:
            return np.arange(part.start, part.stop), np.ones(count)
        if self._rows > len(self._users):
            raise ValueError(
                f"`users` names {len(self._users)} rows, but there are more. Give one id for each "
                "row, in their order."
            )
        return self._users[part], self._shares[part]


def vector_sum(
    chunks: Iterable[Any], units: Units, vectors: Callable[[Any], np.ndarray], norm: Norm
) -> np.ndarray:
    """Σ over the units of the mean of their rows' vectors, each clipped to norm 1.

    Args:
        chunks: arrays of rows.
        units: whose they are.
        vectors: function of such an array that gives (rows, d), each of its own row alone. What is
            not finite counts as 0.
        norm: "l2" or "l1".
    """
    total: Any = 0
    for rows in chunks:
        found = np.asarray(vectors(rows), np.float64)
        _, shares = units.rows(len(found))
        found = np.where(np.isfinite(found).all(axis=1, keepdims=True), found, 0.0)
        length = np.linalg.norm(found, ord=1 if norm == "l1" else 2, axis=1)
        total = total + _on_grid(found * (shares / np.maximum(length, 1.0))[:, None]).sum(axis=0)
    return np.asarray(total) / _GRID


def counts(
    chunks: Iterable[Any], units: Units, bins: Callable[[Any], np.ndarray], number: int
) -> np.ndarray:
    """How many units are in each of `number` bins, by the share of their rows.

    Args:
        chunks, units: as for `vector_sum`.
        bins: function of an array of rows that gives the bin of each, −1 for none.
        number: how many bins there are.
    """
    total = np.zeros(number)
    for rows in chunks:
        found = np.asarray(bins(rows))
        _, shares = units.rows(len(found))
        is_in = (found >= 0) & (found < number)
        total += np.bincount(found[is_in], _on_grid(shares)[is_in], number)  # whole numbers
    return total / _GRID


def totals(chunks: Iterable[Any], units: Units) -> np.ndarray:
    """The sum of the rows of each unit, which is not bounded; rows that are not finite count 0."""
    found, owners = [], []
    for rows in chunks:
        rows = np.asarray(rows, np.float64)
        if rows.ndim != 1:
            raise ValueError(f"There must be one number a row; received the shape {rows.shape}.")
        found.append(np.where(np.isfinite(rows), rows, 0.0))
        owners.append(units.rows(len(rows))[0])
    return np.bincount(np.concatenate(owners), np.concatenate(found), units.number)


def _on_grid(values):
    return np.trunc(values * _GRID)
