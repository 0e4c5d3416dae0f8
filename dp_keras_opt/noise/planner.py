"""Which noise leaves the least error in the weights, of those that certain batches allow.

Nothing here looks at data: the choice follows from how batches are sampled, the number of steps,
the rule's workload, and how much memory there is. Nor does it depend on ε, as long as the batches
are given: whatever ε is, the noise multiplier is proportional to the sensitivity. Where the batches
are still to be chosen, `accounting.plan_noise` compares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import keras

from dp_keras_opt.checks import whole_number
from dp_keras_opt.noise.correlated import BandedMatrix
from dp_keras_opt.noise.gaussian import Gaussian
from dp_keras_opt.noise.mechanism import Mechanism
from dp_keras_opt.noise.source import NoiseSource
from dp_keras_opt.noise.unbanded import BandedInverseSquareRoot, BufferedToeplitz, LambdaCGD
from dp_keras_opt.noise.workload import Workload
from dp_keras_opt.types import Batching

MOST_BANDS = 64  # of what is tried unasked: more would be as many copies of the model
_MOST_BUFFERS = 3  # of BLT; a fourth gains less than a hundredth


@dataclasses.dataclass(frozen=True)
class Option:
    """A mechanism that may be used, and what it does.

    Attributes:
        mechanism: the `Mechanism`.
        error: of the weights, √(mean_t ‖row t of A·C⁻¹‖²)·sensitivity, where one participation has
            the sensitivity 1.
        buffers: how many copies of the model it keeps.
    """

    mechanism: Mechanism
    error: float
    buffers: int


def options(
    sampling: Batching, steps: int, workload: Workload, max_buffers: int | None = None
) -> list[Option]:
    """The mechanisms that such batches allow, best first; of equally good ones the smaller first.

    Args:
        sampling: of the batches.
        steps: T.
        workload: the `Workload` of the rule.
        max_buffers: None, or how many copies of the model may be kept at most.
    """
    found = []
    for mechanism in _candidates(sampling, steps, workload, max_buffers):
        buffers = getattr(mechanism, "slots", 0)
        if max_buffers is None or buffers <= max_buffers:
            found.append(Option(mechanism, _error(mechanism, sampling, steps, workload), buffers))
    return sorted(found, key=lambda option: (round(option.error, 12), option.buffers))


def _error(mechanism, sampling, steps, workload):
    # Groups that take turns: what an example does in one round and in the next adds up in no row.
    apart = None if sampling.is_poisson else sampling.separation
    return workload.rmse(mechanism, steps, apart)


def _candidates(
    sampling: Batching, steps: int, workload: Workload, max_buffers: int | None
) -> Iterator[Mechanism]:
    yield Gaussian()
    apart = sampling.separation
    if apart is None:
        return
    apart, made_for = min(apart, steps), workload.constant
    most = MOST_BANDS if max_buffers is None else min(MOST_BANDS, max_buffers + 1)
    for bands in powers_of_two(min(most, apart)):
        yield BandedMatrix(steps, bands, **made_for)
    if sampling.is_poisson:
        return
    between = apart if apart < steps else None
    for buffers in range(1, _MOST_BUFFERS + 1):
        yield BufferedToeplitz(steps, buffers, separation=between, **made_for)
    if steps > 1:
        yield LambdaCGD(steps, separation=between, **made_for)
    for inverse_bands in powers_of_two(min(most, steps)):
        yield BandedInverseSquareRoot(steps, inverse_bands)


def powers_of_two(most):
    """2, 4, 8, … and the last number itself."""
    numbers = [2**k for k in range(1, most.bit_length()) if 2**k < most]
    return [*numbers, most] if most > 1 else []


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class Planned(Mechanism):
    """Noise to be chosen at the start of `fit`: `noise="planned"`.

    By then the batches, the steps and the rule are known, and the mechanism of least error of the
    weights that such batches allow takes this one's place: correlated noise on
    `data.cyclic_poisson` and `data.fixed_order_epochs`, independent noise on all others.

    Args:
        max_buffers: None, or how many copies of the model the noise may keep at most.
        horizon: None, or for how many steps the weights hold on to a gradient, as for
            `accounting.plan_noise`.
    """

    norm = "l2"
    is_open = True

    def __init__(self, max_buffers: int | None = None, horizon: float | None = None) -> None:
        if max_buffers is not None:
            max_buffers = whole_number(max_buffers, "max_buffers", 0, "0 keeps no copy at all.")
        self.max_buffers = max_buffers
        self.horizon = Workload(horizon=horizon).horizon

    def for_run(
        self, steps: int, sampling: Batching, workload: Workload | None = None
    ) -> Mechanism:
        workload = (workload or Workload()).within(self.horizon)
        return options(sampling, steps, workload, self.max_buffers)[0].mechanism

    def event(self, multiplier: float) -> Any:
        raise self._not_yet()

    def unit_noise(self, shapes: Any, source: NoiseSource, stream: Any = 0) -> Any:
        raise self._not_yet()

    def std(self, step: Any) -> Any:
        raise self._not_yet()

    def _not_yet(self):
        return ValueError(
            'noise="planned" is not chosen yet: fit does it at its start, and so does '
            "dp_keras_opt.accounting.calibrate."
        )

    def get_config(self) -> dict[str, Any]:
        return {"max_buffers": self.max_buffers, "horizon": self.horizon}
