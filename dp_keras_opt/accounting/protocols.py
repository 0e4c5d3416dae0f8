"""What accounting asks of others, so that it imports nothing above it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from dp_keras_opt.accounting.sampling import Sampling
from dp_keras_opt.noise.mechanism import Release
from dp_keras_opt.noise.schedules import NoiseSchedule
from dp_keras_opt.noise.workload import Workload


class Optimizer(Protocol):
    """An optimizer of `dp_keras_opt.optimizers`, as far as accounting knows it.

    `calibrate` also sets `noise_multiplier` and `plan`.
    """

    noise_multiplier: Any
    batch_size: Any
    plan: Any

    @property
    def clip_norm(self) -> Any:
        """C, or its schedule."""

    @property
    def noise_schedule(self) -> NoiseSchedule:
        """The factors on the noise multiplier."""

    @property
    def releases(self) -> Sequence[Release]:
        """What each step publishes."""

    def releases_for(self, noise_multiplier: float) -> Sequence[Release]:
        """What each step would publish with this noise multiplier."""

    def check_sampling(self, sampling: Sampling) -> None:
        """Refuses a `Sampling` for which its noise cannot be accounted."""

    def settle(self, sampling: Sampling, steps: int) -> None:
        """Sets what was left open, for so many steps: batch size, noise and noise schedule."""

    def workload(self, steps: int) -> Workload:
        """How the weights add the gradients of so many steps up."""

    def get_config(self) -> dict[str, Any]:
        """Constructor arguments."""


class SampledBatches(Protocol):
    """Batches that say how they are sampled, such as `data.Batches`."""

    @property
    def sampling(self) -> Sampling:
        """How they are sampled."""

    @property
    def steps_per_epoch(self) -> int | None:
        """How many there are in an iteration, None where that is not known."""
