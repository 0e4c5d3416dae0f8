"""What is compared and tuned: an optimizer, and the hyper-parameters to search over."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from scipy.stats import qmc

from dp_keras_opt import noise, optimizers
from dp_keras_opt.checks import is_number, whole_number
from dp_keras_opt.optimizers import catalog, moments


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """What a candidate knows of the run that its optimizer is for.

    Attributes:
        steps: how many there will be.
        batch_size: expected.
        noise_multiplier: σ, None as long as it is not calibrated; whatever is made then must
            release the same as what is made later.
        clip_norm: C for gradients as they are.
    """

    steps: int
    batch_size: int
    clip_norm: float
    noise_multiplier: float | None = None

    @property
    def noise(self) -> float:
        """Std of the noise in one coordinate of the mean gradient, in units of the clip norm."""
        return (1.0 if self.noise_multiplier is None else self.noise_multiplier) / self.batch_size


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An optimizer by name, what is fixed of it, and what is searched for.

    Attributes:
        name: shown in tables.
        make: function of a `RunInfo` and of the values drawn, by name, that returns a new optimizer
            whose noise multiplier is not set.
        space: (low, high) for each value, drawn uniformly in the logarithm.
        groups: groups of cyclic Poisson sampling, for correlated noise; 1 is Poisson sampling.
        balls_in_bins: whether batches are those of `data.balls_in_bins`, whole epochs, instead.
        passes: forward and backward passes of a step, as of a filter with several points. A run has
            as many times fewer steps, so that all candidates get the same compute.

    Raises:
        ValueError: batches are to be both, or `passes` is no integer of 1 or more.
    """

    name: str
    make: Callable[..., optimizers.PrivateOptimizer]
    space: Mapping[str, tuple[float, float]]
    groups: int = 1
    balls_in_bins: bool = False
    passes: int = 1

    def __post_init__(self):
        whole_number(self.passes, "passes")
        if self.balls_in_bins and self.groups > 1:
            raise ValueError(
                f"{self.name}: batches are balls in bins, or sampled from {self.groups} groups "
                "that take turns; give one of the two."
            )

    def draw(self, trials: int, seed: int = 0) -> list[dict[str, float]]:
        """So many settings, spread evenly over the space (a scrambled Halton sequence).

        Returns:
            A list of dicts from names to values of three digits.
        """
        if not self.space:
            return [{}]
        points = qmc.Halton(len(self.space), rng=seed).random(trials)
        return [self._at(point) for point in points]

    def sample(self, generator: np.random.Generator) -> dict[str, float]:
        """A random setting, independent of any other."""
        return self._at(generator.random(len(self.space)))

    def middle(self) -> dict[str, float]:
        """The setting in the middle of the space."""
        return self._at([0.5] * len(self.space))

    def _at(self, point):
        """The values at a point of the unit cube."""
        ranges = zip(self.space.items(), point, strict=True)
        return {name: three_digits(low * (high / low) ** x) for (name, (low, high)), x in ranges}

    @property
    def needs_public(self) -> bool:
        """Whether it needs public data."""
        return self._typical().needs_public

    @property
    def sparse_embeddings(self) -> optimizers.SparseEmbeddings | None:
        """How it chooses rows of tables, where it does: then it needs a model that has some."""
        return self._typical().sparse_embeddings

    def _typical(self):
        plan = RunInfo(steps=self.groups * 8, batch_size=64, clip_norm=1.0)
        return self.make(plan, **self.middle())


def three_digits(value: float) -> float:
    """A value as it is tried, and written to files: rounded to three digits."""
    return float(f"{value:.3g}")


def candidate(
    name: str,
    cls: str,
    *,
    space: Mapping[str, tuple[float, float]],
    groups: int = 1,
    balls_in_bins: bool = False,
    passes: int = 1,
    per_norm: bool = False,
    decay: bool = False,
    **arguments: Any,
) -> Candidate:
    """A `Candidate` that is an optimizer class with arguments.

    Args:
        name: shown in tables.
        cls: name of the class.
        space: ranges of further arguments. Two have units of their own: `delay` is a share of the
            steps, and `clip_share` stands for the clip norm in the optimizer's own geometry
            (`adaptive_clip_norm` of DP²): share / `RunInfo.noise`, with which the noise in a scaled
            coordinate is `clip_share`. Without either, the clip norm is that of the run.
        groups, balls_in_bins, passes: as in `Candidate`.
        per_norm: whether the learning rates in `space` are for gradients in units of the clip norm.
            So it makes sense for rules that do not scale gradients themselves: the best learning
            rate is then nearly the same for every clip norm that binds.
        decay: whether the learning rate falls to a tenth by half a cosine.
        **arguments: of the class; functions are called with the `RunInfo`. `steps` is filled in
            where the class asks for it, and `smoothness` and `strong_convexity` follow from the
            learning rate.
    """
    optimizer = getattr(optimizers, cls)
    parameters = inspect.signature(optimizer).parameters
    own_norm = "adaptive_clip_norm" if "adaptive_clip_norm" in parameters else "clip_norm"

    def make(plan, **values):
        fixed = {k: v(plan) if inspect.isfunction(v) else v for k, v in arguments.items()}
        every = {"clip_norm": plan.clip_norm} | fixed | values
        if "clip_share" in every:
            every[own_norm] = every.pop("clip_share") / plan.noise
        if per_norm:
            if not is_number(every["clip_norm"]):
                raise ValueError(
                    f"{name}: learning rates in units of the clip norm need a clip norm that is a "
                    f"number; received {every['clip_norm']}. Give the candidate per_norm=False and "
                    "a space for gradients as they are."
                )
            every["learning_rate"] /= every["clip_norm"]
        if decay:
            rate = every["learning_rate"]
            every["learning_rate"] = keras.optimizers.schedules.CosineDecay(
                rate, plan.steps, alpha=0.1
            )
        if "delay" in every:
            every["delay"] = max(1, round(every["delay"] * plan.steps))
        if "steps" in parameters:
            every["steps"] = plan.steps
        if "smoothness" in parameters:  # the first step size is 1/L
            smoothness = 1 / every.pop("learning_rate")
            every |= {"smoothness": smoothness, "strong_convexity": 0.1 * smoothness}
        return optimizer(batch_size=plan.batch_size, **every)

    return Candidate(name, make, space, groups, balls_in_bins, passes)


_SHARE = (0.1, 0.9)  # beyond 1, v̂ of scale-then-privatize would grow without end
_BANDS = 8


def _bound(plan):
    """A size that hardly any Poisson batch exceeds."""
    return moments.Independent(int(plan.batch_size + 6 * plan.batch_size**0.5))


def _noise_floor(units):
    """Adam's ε in units of the noise in a coordinate."""
    return lambda plan: units * plan.noise * plan.clip_norm


def _bands(plan):
    return noise.BandedMatrix(plan.steps, min(_BANDS, plan.steps))


def _planned(plan):
    """For a training that forgets: see the page on correlated noise."""
    return noise.Planned(horizon=plan.steps / 8)


def _second_half(plan):
    return plan.steps // 2


def _ending(plan):
    """Noise that falls: the last steps, whose noise no later step averages out, weigh more."""
    return noise.schedules.allocate(np.linspace(1, 10, plan.steps))


_SEARCHES = {entry.name: entry.search for entry in catalog.CATALOG if entry.search}


def _variant(cls, *changes, name=None):
    """A candidate from the catalogue, with changes to what is fixed and searched for."""
    search = _SEARCHES[cls]
    options = dataclasses.asdict(search)
    arguments = options.pop("arguments")
    for change in changes:
        arguments = arguments | change
    return candidate(name or cls, cls, **options | arguments)


_MOMENTUM: dict[str, Any] = {"momentum": 0.9, "space": {"learning_rate": (0.01, 1.0)}}
_SCALE_FIRST: dict[str, Any] = {
    "second_moment": "scale_then_privatize",
    "epsilon": 1e-4,
    "space": {"learning_rate": (3e-3, 6e-2), "clip_share": _SHARE},
}
_BIAS_CORRECTED: dict[str, Any] = {"second_moment": moments.BiasCorrected(floor=1.0)}
_INDEPENDENT: dict[str, Any] = {
    "second_moment": _bound,
    "epsilon": _noise_floor(10.0),
    "space": {"learning_rate": (3e-3, 1e-1)},
}
_FILTER: dict[str, Any] = {"gradient_filter": "first_order_v1"}
_BANDED: dict[str, Any] = {"noise": _bands, "groups": _BANDS}
_PLANNED: dict[str, Any] = {"noise": _planned, "groups": _BANDS}
_AVERAGE: dict[str, Any] = {"average_from": _second_half}
_BALLS_IN_BINS: dict[str, Any] = {"balls_in_bins": True}
_FALLING: dict[str, Any] = {"noise_schedule": _ending}
_DECAY: dict[str, Any] = {"decay": True}
#: Between what was best on the tasks of the page on sparse embeddings.
_CHOSEN_ROWS: dict[str, Any] = {
    "sparse_embeddings": optimizers.SparseEmbeddings(1.0, noise_ratio=2.0)
}

#: Compositions of second moment, filter, schedule, and correlated or falling noise, by name: the
#: class, and how they differ from it as it is tuned.
_COMPOSITIONS: dict[str, tuple[Any, ...]] = {
    "DPSGD, momentum": ("DPSGD", _MOMENTUM),
    "DPAdam, bias-corrected": ("DPAdam", _BIAS_CORRECTED),
    "DPAdam, independent": ("DPAdam", _INDEPENDENT),
    "DPAdam, scale-then-privatize": ("DPAdam", _SCALE_FIRST),
    "DPSGD, filter": ("DPSGD", _FILTER),
    "DPSGD, filter, banded noise": ("DPSGD", _FILTER, _BANDED),
    "DPSGD, momentum, banded noise": ("DPSGD", _MOMENTUM, _BANDED),
    "DPSGD, momentum, falling noise": ("DPSGD", _MOMENTUM, _FALLING),
    "DPSGD, momentum, decaying rate": ("DPSGD", _MOMENTUM, _DECAY),
    "DPSGD, momentum, banded noise, decaying rate": ("DPSGD", _MOMENTUM, _BANDED, _DECAY),
    "DPSGD, momentum, average": ("DPSGD", _MOMENTUM, _AVERAGE),
    "DPSGD, momentum, balls in bins": ("DPSGD", _MOMENTUM, _BALLS_IN_BINS),
    "DPSGD, momentum, planned noise": ("DPSGD", _MOMENTUM, _PLANNED),
    "DPSGD, momentum, planned noise, average": ("DPSGD", _MOMENTUM, _PLANNED, _AVERAGE),
    "DPNesterov, planned noise": ("DPNesterov", _PLANNED),
    "DPAdam, bias-corrected, planned noise": ("DPAdam", _BIAS_CORRECTED, _PLANNED),
    "DPAdam, scale-then-privatize, planned noise": ("DPAdam", _SCALE_FIRST, _PLANNED),
    "DPNesterov, banded noise": ("DPNesterov", _BANDED),
    "DPYogi, banded noise": ("DPYogi", _BANDED),
    "DPGaLore, banded noise": ("DPGaLore", _BANDED),
    "DPAdam, banded noise": ("DPAdam", _BANDED),
    "DPAdam, bias-corrected, banded noise": ("DPAdam", _BIAS_CORRECTED, _BANDED),
    "DPSGD, chosen rows": ("DPSGD", _CHOSEN_ROWS),
    "DPAdam, bias-corrected, chosen rows": ("DPAdam", _BIAS_CORRECTED, _CHOSEN_ROWS),
    "DPAdam, scale-then-privatize, filter": ("DPAdam", _SCALE_FIRST, _FILTER),
    "DPAdam, scale-then-privatize, falling noise": ("DPAdam", _SCALE_FIRST, _FALLING),
    "DPAdam, scale-then-privatize, banded noise": ("DPAdam", _SCALE_FIRST, _BANDED),
    "DPAdam, scale-then-privatize, filter, banded noise": (
        "DPAdam",
        _SCALE_FIRST,
        _FILTER,
        _BANDED,
    ),
}

#: Every optimizer of the catalogue as it is compared, by name; then the compositions.
CANDIDATES: dict[str, Candidate] = {name: _variant(name) for name in _SEARCHES} | {
    name: _variant(cls, *changes, name=name) for name, (cls, *changes) in _COMPOSITIONS.items()
}


def get(identifier: str | Candidate) -> Candidate:
    """The `Candidate` of a name; one that is given comes back.

    Raises:
        ValueError: there is none by that name.
    """
    if isinstance(identifier, Candidate):
        return identifier
    if identifier not in CANDIDATES:
        raise ValueError(f"There is no candidate {identifier!r}; use one of {list(CANDIDATES)}.")
    return CANDIDATES[identifier]
