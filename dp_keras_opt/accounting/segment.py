"""What one run released: consecutive steps alike, and the event that prices them."""

import dataclasses
import math
import numbers
import secrets

import numpy as np

from dp_keras_opt.accounting.events import MAX_DISTINCT, is_rounded, segment_event
from dp_keras_opt.accounting.plan import Plan
from dp_keras_opt.accounting.privacy_filters import FilterBudget
from dp_keras_opt.accounting.repetitions import RandomRepetitions
from dp_keras_opt.accounting.sampling import Sampling
from dp_keras_opt.checks import whole_number
from dp_keras_opt.noise.mechanism import JointMoments, Mechanism, Release
from dp_keras_opt.noise.row_selection import RowSelection
from dp_keras_opt.noise.schedules import Constant, NoiseSchedule

#: The data set that a model is trained on; others have names of their own.
TRAINING = "training"

#: On what a guarantee may rest besides, by name, in words.
CONDITIONS = {
    "noise seed": (
        "Seed of the noise: it was given. Whoever knows it can subtract the noise: against them "
        "there is NO DIFFERENTIAL PRIVACY."
    ),
    "batch seed": (
        "Seed of the batches: it was given. Whoever knows it knows who is in which batch: against "
        "them sampling amplifies nothing, and epsilon is larger; under add_or_remove_one, where "
        "one more changes what is drawn for all, there is NO DIFFERENTIAL PRIVACY."
    ),
    "stated sampling": (
        "Batches: somebody's own. Epsilon rests on their word for how these were sampled, which "
        "nothing has checked."
    ),
}

#: How a plan of unknown length is written, since JSON has no infinity.
_UNKNOWN = "unknown"


def conditions_of(optimizer, sampling):
    """The names of the `CONDITIONS` that hold for steps of an optimizer on batches in hand."""
    holds = (optimizer.seed is not None, sampling.has_known_seed, sampling.is_stated)
    return tuple(name for name, each in zip(CONDITIONS, holds, strict=True) if each)


def conditions(segments):
    """The names of the `CONDITIONS` of any of these segments, in their order."""
    return [name for name in CONDITIONS if any(name in each.conditions for each in segments)]


def stated(clip_norm):
    """A clip norm as ledgers keep it: a number, or a schedule in words."""
    if clip_norm is None:
        return None
    return float(clip_norm) if isinstance(clip_norm, numbers.Real) else str(clip_norm)


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive steps that share their releases, noise schedule and sampling.

    Attributes:
        run: random hexadecimal name, by which copies of one history are recognised.
        releases: tuple of `dp_keras_opt.noise.Release`, what each step publishes.
        schedule: `NoiseSchedule`; step t of the segment has factor α_(first_step + t).
        sampling: the `Sampling` of the batches.
        clip_norm: C, for the statement only; in words where it changes with the step, None where
            there is not one.
        first_step: place of the segment's first step in the schedule.
        steps: number of steps.
        selection: None, or the `RandomRepetitions` of runs like this one of which it was the best.
        planned: number of steps that it was to have, infinite where that was not known in advance;
            None where nobody said. It stays where results may have stopped the training.
        after: the `state` of each run that was over, short of what was planned of it, when this
            one began.
        plan: None, or the `Plan` that its noise was found for.
        purpose: what was released, in words, where it is no training: a statistic, a score.
        data_set: which data it is about. No unit is in two data sets of different names.
        filter: None, or the budget of the privacy filter under which it ran.
        conditions: those of `CONDITIONS` on which the guarantee rests besides.
    """

    run: str
    releases: tuple
    schedule: NoiseSchedule
    sampling: Sampling
    clip_norm: float | str | None = None
    first_step: int = 0
    steps: int = 0
    selection: RandomRepetitions | None = None
    planned: float | None = None
    after: tuple = ()
    plan: Plan | None = None
    purpose: str | None = None
    data_set: str = TRAINING
    filter: FilterBudget | None = None
    conditions: tuple = ()

    def __post_init__(self):
        whole_number(self.first_step, "first_step", 0, "Steps count from 0.")
        whole_number(self.steps, "steps", 0, "Give the number of steps.")

    @property
    def last_step(self):
        """Where the segment ends in the schedule (exclusive)."""
        return self.first_step + self.steps

    @property
    def planned_steps(self):
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
    def changes(self):
        """What of the accounting depends on the step, in words; "" where all steps are alike."""
        if not isinstance(self.schedule, Constant):
            return "noise schedule"
        return "" if self.sampling.batch_sizes is None else "batch size"

    @property
    def breaks_off(self):
        """Whether it ends within a period: the next pass over the data may start afresh."""
        return self.steps % self.sampling.period > 0

    def without_noise(self, steps):
        """A segment of so many steps like its own, as if what they released had no noise."""
        bare = (
            part if part.is_public else dataclasses.replace(part, multiplier=0.0)
            for part in self.releases
        )
        return Segment(
            secrets.token_hex(16), tuple(bare), Constant(), self.sampling, self.clip_norm,
            steps=steps, data_set=self.data_set, conditions=self.conditions,
        )  # fmt: skip

    @property
    def is_pure(self):
        """Whether its noise gives pure epsilons, which hold at delta = 0."""
        return all(part.mechanism.is_pure for part in self.releases if not part.is_public)

    @property
    def is_rounded(self):
        """Whether `event` rounds its noise levels down, because there are too many."""
        return is_rounded(self.sampling, self._alphas, self._sizes)

    @property
    def _sizes(self):
        """The expected batch size of each step, where they differ."""
        sizes = self.sampling.batch_sizes
        return None if sizes is None else sizes.sizes(self.first_step, self.steps)

    @property
    def _alphas(self):
        if isinstance(self.schedule, Constant):
            return 1.0
        if self.sampling.draws_passes and self.steps:
            return self._alphas_of_passes
        return self.schedule.alphas(self.first_step, self.steps)

    @property
    def _alphas_of_passes(self):
        """Of the passes that were begun, to their ends: a unit may be in a step yet to come.

        A pass that the schedule does not reach the end of goes on with the largest of its factors:
        steps that will not run count as if they did, with as much noise as any.
        """
        period = self.sampling.period
        length = -(-self.steps // period) * period
        known = length
        if self.schedule.length is not None:
            known = max(min(length, self.schedule.length - self.first_step), self.steps)
        alphas = self.schedule.alphas(self.first_step, known)
        largest = alphas[(length - period) :].max()
        return np.pad(alphas, (0, length - known), constant_values=largest)

    def event(self, max_distinct=MAX_DISTINCT, optimistic=False):
        """The `dp_accounting.DpEvent` of all its steps; see `events.segment_event`."""
        levels = self._alphas, self.steps, max_distinct, optimistic, self._sizes
        event = segment_event(self.releases, self.sampling, *levels)
        return self.selection.event(event) if self.selection and self.steps else event

    def to_config(self):
        """The segment as JSON-able values."""
        releases = [
            vars(release)
            | {
                "multiplier": float(release.multiplier),
                "mechanism": release.mechanism.to_json(),
                "joint": release.joint and dataclasses.asdict(release.joint),
                "rows": release.rows and dataclasses.asdict(release.rows),
            }
            for release in self.releases
        ]
        for release in releases:
            for name in ("count_noise", "rows"):
                if release[name] is None:
                    del release[name]  # which libraries of before do not know
        config = vars(self) | {
            "releases": releases,
            "schedule": self.schedule.to_json(),
            "sampling": self.sampling.get_config(),
            "selection": self.selection and dataclasses.asdict(self.selection),
            "planned": _UNKNOWN if self.planned == math.inf else self.planned,
            "after": [list(state) for state in self.after],
        }
        for name in ("plan", "filter"):
            if config[name] is not None:
                config[name] = config[name].get_config()
        usual = {
            "plan": None, "purpose": None, "data_set": TRAINING, "filter": None, "conditions": (),
        }  # fmt: skip
        for name, value in usual.items():
            if config[name] == value:
                del config[name]  # which libraries of before do not know
        return config

    @classmethod
    def from_config(cls, config):
        """The segment that `to_config` described."""
        releases = [
            release
            | {
                "mechanism": Mechanism.from_json(release["mechanism"]),
                "joint": release["joint"] and JointMoments(**release["joint"]),
                "rows": RowSelection(**release["rows"]) if "rows" in release else None,
            }
            for release in config["releases"]
        ]
        # Ledgers of before have no selections, no plans and no filters.
        selection, plan, kept = map(config.get, ("selection", "plan", "filter"))
        read = {
            "releases": tuple(Release(**release) for release in releases),
            "schedule": NoiseSchedule.from_json(config["schedule"]),
            "sampling": Sampling.from_config(config["sampling"]),
            "selection": selection and RandomRepetitions(**selection),
            "planned": math.inf if config.get("planned") == _UNKNOWN else config.get("planned"),
            "after": tuple((run, steps) for run, steps in config.get("after", ())),
            "plan": plan and Plan.from_config(plan),
            "filter": kept and FilterBudget.from_config(kept),
            "conditions": tuple(config.get("conditions", ())),
        }
        return cls(**config | read)
