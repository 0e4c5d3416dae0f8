"""Names for the types that several public functions take."""

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TypeAlias

import keras


class Filter(Protocol):
    """A privacy filter: `accounting.RenyiFilter` or `accounting.GaussianFilter`."""

    @property
    def kind(self) -> str: ...

    def get_config(self) -> dict[str, Any]: ...

    def limit(self, epsilon: float, delta: float) -> float: ...


#: How ε is computed; see `accounting.epsilon`, and for choices `accounting.RenyiFilter`.
Accountant: TypeAlias = Literal["auto", "rdp", "pld", "pure"] | Filter

#: Which data sets are neighbours; see `accounting.Sampling`.
Adjacency: TypeAlias = Literal["add_or_remove_one", "zero_out", "replace_one"]

#: The norm in which an example's gradient is bounded.
Norm: TypeAlias = Literal["l1", "l2"]

#: Which variables are clipped together; see `optimizers.PrivateOptimizer`.
ClippingStyle: TypeAlias = Literal["flat", "per_layer"] | Mapping[str, float]

#: What Keras's optimizers take as a learning rate.
LearningRate: TypeAlias = (
    float | keras.optimizers.schedules.LearningRateSchedule | Callable[[], Any]
)


class StepSchedule(Protocol):
    """A `keras.optimizers.schedules.LearningRateSchedule`; Keras has no types."""

    def __call__(self, step: Any) -> Any: ...

    def get_config(self) -> dict[str, Any]: ...


class FoundClipNorm(Protocol):
    """A `clipping.Quantile`."""

    def next(self, bounds: Any, shares: Any) -> Any: ...


#: What bounds an example's gradient: a number, a schedule of the step, or what finds it.
ClipNorm: TypeAlias = float | StepSchedule | FoundClipNorm

#: A function of one example; see the samplers of `data`.
Map: TypeAlias = Callable[..., Any]

Path: TypeAlias = os.PathLike[str] | str


class Batching(Protocol):
    """What noise asks of an `accounting.Sampling`: when an example takes part again."""

    @property
    def kind(self) -> str: ...

    @property
    def is_poisson(self) -> bool: ...

    @property
    def groups(self) -> int: ...

    @property
    def separation(self) -> int | None: ...
