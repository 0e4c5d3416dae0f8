"""What one run released: consecutive steps alike, and the event that prices them."""

import dataclasses
import math

import keras
import numpy as np

from dp_keras_opt import noise
from dp_keras_opt.accounting.events import MAX_DISTINCT, segment_event
from dp_keras_opt.accounting.repetitions import RandomRepetitions
from dp_keras_opt.accounting.sampling import Sampling
from dp_keras_opt.checks import whole_number
from dp_keras_opt.noise import schedules

#: How a plan of unknown length is written, since JSON has no infinity.
_UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive steps that share their releases, noise schedule and sampling.

    Attributes:
        run: random hexadecimal name, by which copies of one history are recognised.
        releases: tuple of `dp_keras_opt.noise.Release`, what each step publishes.
        schedule: `NoiseSchedule`; step t of the segment has factor α_(first_step + t).
        sampling: the `Sampling` of the batches.
        clip_norm: C, for the statement only; None where there is not one.
        first_step: place of the segment's first step in the schedule.
        steps: number of steps.
        selection: None, or the `RandomRepetitions` of runs like this one of which it was the best.
        planned: number of steps that it was to have, infinite where that was not known in advance;
            None where there was no plan. It stays where results may have stopped the training.
        after: the `state` of each run that was over, short of its plan, when this one began.
    """

    run: str
    releases: tuple
    schedule: schedules.NoiseSchedule
    sampling: Sampling
    clip_norm: float | None = None
    first_step: int = 0
    steps: int = 0
    selection: RandomRepetitions | None = None
    planned: float | None = None
    after: tuple = ()

    def __post_init__(self):
        whole_number(self.first_step, "first_step", 0, "Steps count from 0.")
        whole_number(self.steps, "steps", 0, "Give the number of steps.")

    @property
    def last_step(self):
        """Where the segment ends in the schedule (exclusive)."""
        return self.first_step + self.steps

    @property
    def plan(self):
        """How many steps were planned, at least those that ran."""
        return max(self.planned or 0, self.steps)

    @property
    def state(self):
        """(run, steps): a run of which nothing more is known has ended there."""
        return self.run, self.steps

    @property
    def end(self):
        """(how many more steps it can have, what ends then); infinitely many where nothing ends."""
        ends = [(math.inf, "")]
        if self.schedule.length is not None:
            length = self.schedule.length
            ends.append((length - self.last_step, f"noise schedule: it has {length} steps"))
        for mechanism in (release.mechanism for release in self.releases):
            length = getattr(mechanism, "length", None)
            if length is not None:  # a segment is a run of correlated noise
                words = f"noise: {type(mechanism).__name__} covers {length} steps of a run"
                ends.append((length - self.steps, words))
        left, words = min(ends)
        return max(left, 0), words

    def check_end(self, more):
        """Refuses more further steps than there is noise for.

        Raises:
            ValueError: naming what ends.
        """
        left, words = self.end
        if more > left:
            raise ValueError(
                f"steps={more} would pass the end of the {words}, of which {left} are left. Train "
                "fewer steps, or make the optimizer's noise for more."
            )

    @property
    def breaks_off(self):
        """Whether it ends within a period: the next pass over the data may start afresh."""
        return self.steps % self.sampling.period > 0

    @property
    def is_pure(self):
        """Whether its noise gives pure epsilons, which hold at delta = 0."""
        return all(part.mechanism.is_pure for part in self.releases if not part.is_public)

    @property
    def is_rounded(self):
        """Whether there are so many noise levels that `event` rounds them down."""
        return len(np.unique(self._alphas)) > MAX_DISTINCT

    @property
    def _alphas(self):
        constant = isinstance(self.schedule, schedules.Constant)
        return 1.0 if constant else self.schedule.alphas(self.first_step, self.steps)

    def event(self, max_distinct=MAX_DISTINCT, optimistic=False):
        """The `dp_accounting.DpEvent` of all its steps; see `events.segment_event`."""
        event = segment_event(
            self.releases, self.sampling, self._alphas, self.steps, max_distinct, optimistic
        )
        return self.selection.event(event) if self.selection and self.steps else event

    def to_config(self):
        """The segment as JSON-able values."""
        releases = [
            vars(release)
            | {
                "multiplier": float(release.multiplier),
                "mechanism": keras.saving.serialize_keras_object(release.mechanism),
                "joint": release.joint and dataclasses.asdict(release.joint),
            }
            for release in self.releases
        ]
        return vars(self) | {
            "releases": releases,
            "schedule": keras.saving.serialize_keras_object(self.schedule),
            "sampling": self.sampling.get_config(),
            "clip_norm": None if self.clip_norm is None else float(self.clip_norm),
            "selection": self.selection and dataclasses.asdict(self.selection),
            "planned": _UNKNOWN if self.planned == math.inf else self.planned,
            "after": [list(state) for state in self.after],
        }

    @classmethod
    def from_config(cls, config):
        """The segment that `to_config` described."""
        releases = [
            release
            | {
                "mechanism": noise.get(release["mechanism"]),
                "joint": release["joint"] and noise.JointMoments(**release["joint"]),
            }
            for release in config["releases"]
        ]
        selection = config.get("selection")  # ledgers of before have none, and no plans
        read = {
            "releases": tuple(noise.Release(**release) for release in releases),
            "schedule": schedules.get(config["schedule"]),
            "sampling": Sampling.from_config(config["sampling"]),
            "selection": selection and RandomRepetitions(**selection),
            "planned": math.inf if config.get("planned") == _UNKNOWN else config.get("planned"),
            "after": tuple((run, steps) for run, steps in config.get("after", ())),
        }
        return cls(**config | read)
