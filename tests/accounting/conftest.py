"""Stand-ins for an optimizer and a ledger: accounting knows an optimizer by its attributes only."""

import dataclasses

import pytest

from dp_keras_opt.accounting import Ledger
from dp_keras_opt.noise import Gaussian, Release, schedules


@dataclasses.dataclass
class FakeOptimizer:
    noise_multiplier: float | None = None
    batch_size: int = 64
    clip_norm: float = 1.0
    noise_schedule: schedules.NoiseSchedule = dataclasses.field(default_factory=schedules.Constant)
    ratios: tuple = (1.0,)  # noise multiplier of each release over the optimizer's

    def check_sampling(self, sampling):
        pass

    def settle(self, sampling, steps):
        self.batch_size = self.batch_size or sampling.batch_size

    def releases_for(self, noise_multiplier):
        return tuple(
            Release(query, "mean", ratio * noise_multiplier, Gaussian())
            for query, ratio in enumerate(self.ratios)
        )

    @property
    def releases(self):
        if self.noise_multiplier is None:
            raise ValueError("noise_multiplier is not set.")
        return self.releases_for(self.noise_multiplier)


@pytest.fixture
def make_optimizer():
    return FakeOptimizer


@pytest.fixture
def gaussians():
    """Makes a tuple of Gaussian releases from noise multipliers."""

    def make(*multipliers):
        return tuple(
            Release(query, "mean", multiplier, Gaussian())
            for query, multiplier in enumerate(multipliers)
        )

    return make


@pytest.fixture
def make_ledger(gaussians):
    """Makes a ledger of one segment; `steps` of it have run."""

    def make(sampling, steps, multiplier=1.0, **kwargs):
        ledger = Ledger()
        ledger.begin(gaussians(multiplier), sampling, **kwargs)
        ledger.reserve(steps)
        ledger.settle(steps, steps)
        return ledger

    return make
