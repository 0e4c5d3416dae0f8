"""What samplers draw from."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class Source(Protocol):
    """What samplers draw from: anything with a length and rows that can be read by their numbers.

    A class of one's own needs these two methods. With a third, `check()`, it can raise before each
    batch where what it reads is no longer what it was. Where its attribute `is_thread_safe` is
    true, several batches are read at once.
    """

    def __len__(self) -> int:
        """The number of examples, which never changes."""

    def __getitem__(self, indices: np.ndarray) -> Any:
        """The examples of these indices, in their order.

        Args:
            indices: int64 [k], from 0 to len - 1, increasing, each once.

        Returns:
            A structure (tuple, dict) of arrays whose first dimension is k; a column of examples of
            different shapes is an array of objects, each an array.
        """
