"""Expected batch sizes that change during the training, as a public function of the step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from dp_keras_opt.checks import whole_number


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """Expected batch sizes B_t that are fixed before the training: stages of one size each.

        BatchSizes({0: 128, 500: 256, 2000: 512})

    For Poisson sampling, whose probability at step t is then B_t/n. Noise and sum of step t are
    divided by B_t. What decides about the sizes must not be the data: they are published.

    Args:
        stages: the size of each stage by the step with which it begins, counted from 0 as the
            optimizer counts them; or pairs of both. The last stage has no end.

    Raises:
        ValueError: there is no stage from step 0 on, or a step or a size is no whole number.
    """

    stages: tuple[tuple[int, int], ...]

    def __init__(self, stages: Mapping[int, int] | Sequence[Sequence[int]]) -> None:
        pairs = stages.items() if isinstance(stages, Mapping) else stages
        try:
            given = [(first, size) for first, size in pairs]
        except (TypeError, ValueError) as error:
            raise ValueError(
                "batch_size must be an integer, or the sizes of stages by their first steps, such "
                f"as {{0: 128, 500: 256}}; received {stages!r}. Of a function of the step make "
                "dp_keras_opt.accounting.BatchSizes.from_function(function, steps)."
            ) from error
        checked = {
            whole_number(first, "batch_size", 0, "Its keys are steps, counted from 0."):
            whole_number(size, "batch_size", 1, "Give the expected batch size of each stage.")
            for first, size in given
        }  # fmt: skip
        if len(checked) < len(given) or 0 not in checked:
            raise ValueError(
                "batch_size needs one size for each stage, the first from step 0 on; received "
                f"stages from the steps {[first for first, _ in given]}."
            )
        joined: list[tuple[int, int]] = []
        for first, size in sorted(checked.items()):
            if not joined or joined[-1][1] != size:
                joined.append((first, size))
        object.__setattr__(self, "stages", tuple(joined))

    @classmethod
    def from_function(cls, function: Callable[[int], Any], steps: int) -> BatchSizes:
        """B_t = function(t), rounded, for t = 0, …, steps − 1; later steps have the last one's.

        Args:
            function: of an integer, such as a Keras `LearningRateSchedule`; evaluated now.
            steps: how many steps the training will have.

        Raises:
            ValueError: a value is not a finite number that rounds to at least 1.
        """
        sizes = []
        for step in range(whole_number(steps, "steps", 1)):
            value = float(function(step))
            if not math.isfinite(value):
                raise ValueError(f"The batch size is {value} at step {step}.")
            sizes.append(round(value))
        return cls(list(enumerate(sizes)))

    @property
    def largest(self) -> int:
        """The largest of all stages."""
        return max(size for _, size in self.stages)

    @property
    def smallest(self) -> int:
        """The smallest of all stages."""
        return min(size for _, size in self.stages)

    def sizes(self, start: int, steps: int) -> np.ndarray:
        """B of steps start .. start + steps − 1, int64."""
        firsts, sizes = np.array(self.stages, np.int64).T
        at = np.arange(start, start + steps)
        return sizes[np.searchsorted(firsts, at, side="right") - 1]

    def __str__(self) -> str:
        if len(self.stages) > 6:
            return f"{len(self.stages)} stages of {self.smallest} to {self.largest}"
        return ", ".join(f"{size} from step {first} on" for first, size in self.stages)


#: What is taken as `batch_size`: one, or that of each stage by the step with which it begins.
BatchSizeLike: TypeAlias = int | BatchSizes | Mapping[int, int] | Sequence[Sequence[int]]


def resolve(name: str, value: Any, fix: str, maximum: int | None = None) -> int | BatchSizes:
    """One size, or `BatchSizes`; stages of one size are that size.

    Raises:
        ValueError: it is neither, or a size is beyond `maximum`.
    """
    if not isinstance(value, BatchSizes | Mapping | list | tuple):
        return whole_number(value, name, 1, fix, maximum=maximum)
    sizes = value if isinstance(value, BatchSizes) else BatchSizes(value)
    whole_number(sizes.largest, name, 1, fix, maximum=maximum)
    return sizes if len(sizes.stages) > 1 else sizes.largest
