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


@dataclasses.dataclass(frozen=True)
class Plan:
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
        make: function of a `Plan` and of the values drawn, by name, that returns a new optimizer
            whose noise multiplier is not set.
        space: (low, high) for each value, drawn uniformly in the logarithm.
        groups: groups of cyclic Poisson sampling, for correlated noise; 1 is Poisson sampling.
    """

    name: str
    make: Callable[..., optimizers.PrivateOptimizer]
    space: Mapping[str, tuple[float, float]]
    groups: int = 1

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
        return {name: float(f"{low * (high / low) ** x:.3g}") for (name, (low, high)), x in ranges}

    @property
    def needs_public(self) -> bool:
        """Whether it needs public data."""
        plan = Plan(steps=self.groups * 8, batch_size=64, clip_norm=1.0)
        return self.make(plan, **self.middle()).needs_public


def candidate(
    name: str,
    cls: str,
    *,
    space: Mapping[str, tuple[float, float]],
    groups: int = 1,
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
            (`adaptive_clip_norm` of DP²): share / `Plan.noise`, with which the noise in a scaled
            coordinate is `clip_share`. Without either, the clip norm is that of the plan.
        groups: as in `Candidate`.
        per_norm: whether the learning rates in `space` are for gradients in units of the clip norm.
            So it makes sense for rules that do not scale gradients themselves: the best learning
            rate is then nearly the same for every clip norm that binds.
        decay: whether the learning rate falls to a tenth by half a cosine.
        **arguments: of the class; functions are called with the `Plan`. `steps` is filled in where
            the class asks for it.
    """
    optimizer = getattr(optimizers, cls)
    parameters = inspect.signature(optimizer).parameters
    own_norm = "adaptive_clip_norm" if "DP2" in cls else "clip_norm"

    def make(plan, **values):
        fixed = {k: v(plan) if inspect.isfunction(v) else v for k, v in arguments.items()}
        every = {"clip_norm": plan.clip_norm} | fixed | values
        if "clip_share" in every:
            every[own_norm] = every.pop("clip_share") / plan.noise
        if per_norm:
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
        return optimizer(batch_size=plan.batch_size, **every)

    return Candidate(name, make, space, groups)


# Learning rates of rules that take steps along the gradient, of those that divide by a root of a
# running mean, and of those that divide by the root of a sum.
_PLAIN, _SCALED, _SUMMED = (0.1, 10.0), (1e-3, 3e-2), (1e-2, 0.3)
_SHARE = (0.1, 0.9)  # beyond 1, v̂ of scale-then-privatize would grow without end
_BANDS = 8


def _plain(low=_PLAIN[0], high=_PLAIN[1]):
    return {"learning_rate": (low, high)}


def _bound(plan):
    """A size that hardly any Poisson batch exceeds."""
    return optimizers.moments.Independent(int(plan.batch_size + 6 * plan.batch_size**0.5))


def _noise_floor(units):
    """Adam's ε in units of the noise in a coordinate."""
    return lambda plan: units * plan.noise * plan.clip_norm


def _bands(plan):
    return noise.BandedMatrix(plan.steps, min(_BANDS, plan.steps))


def _ending(plan):
    """Noise that falls: the last steps, whose noise no later step averages out, weigh more."""
    return noise.schedules.allocate(np.linspace(1, 10, plan.steps))


def _multistage(plan, learning_rate):
    smoothness = plan.clip_norm / learning_rate  # the first step size is 1/L
    return optimizers.DPMultistageNesterov(
        strong_convexity=0.1 * smoothness,
        smoothness=smoothness,
        clip_norm=plan.clip_norm,
        batch_size=plan.batch_size,
    )


_PER_NORM: dict[str, Any] = {"per_norm": True, "space": _plain()}
_MOMENTUM: dict[str, Any] = {"momentum": 0.9, "per_norm": True, "space": _plain(0.01, 1.0)}
_ADAM: dict[str, Any] = {"beta_2": 0.99, "space": {"learning_rate": _SCALED}}
_SCALE_FIRST: dict[str, Any] = {
    "second_moment": "scale_then_privatize",
    "epsilon": 1e-4,
    "beta_2": 0.99,
    "space": {"learning_rate": (3e-3, 6e-2), "clip_share": _SHARE},
}
_BIAS_CORRECTED: dict[str, Any] = {
    "second_moment": "bias_corrected",
    "epsilon": _noise_floor(1.0),
}
_GALORE: dict[str, Any] = {"rank": 8, "update_gap": 50, "space": {"learning_rate": _SCALED}}
_DELAYED: dict[str, Any] = {
    "per_norm": True,
    "space": {
        "learning_rate": _PLAIN,
        "adaptive_learning_rate": _SCALED,
        "clip_share": (0.02, 0.5),
        "delay": (0.02, 0.5),
    },
}

_FILTER: dict[str, Any] = {"gradient_filter": "first_order_v1"}
_BANDED: dict[str, Any] = {"noise": _bands, "groups": _BANDS}
_FALLING: dict[str, Any] = {"noise_schedule": _ending}

#: Every optimizer of the library, as it is compared, by name; then compositions of them.
CANDIDATES: dict[str, Candidate] = {
    each.name: each
    for each in (
        candidate("DPSGD", "DPSGD", **_PER_NORM),
        candidate("DPSGD, momentum", "DPSGD", **_MOMENTUM),
        candidate("DPAdam", "DPAdam", **_ADAM),
        candidate("DPAdam, bias-corrected", "DPAdam", **_BIAS_CORRECTED, **_ADAM),
        candidate(
            "DPAdam, independent",
            "DPAdam",
            second_moment=_bound,
            epsilon=_noise_floor(10.0),
            beta_2=0.99,
            space={"learning_rate": (3e-3, 1e-1)},
        ),
        candidate("DPAdam, scale-then-privatize", "DPAdam", **_SCALE_FIRST),
        candidate("DPRMSprop", "DPRMSprop", space={"learning_rate": _SCALED}),
        candidate("DPAdagrad", "DPAdagrad", space={"learning_rate": _SUMMED}),
        candidate("DPYogi", "DPYogi", space={"learning_rate": _SCALED}),
        candidate("DP2RMSprop", "DP2RMSprop", **_DELAYED),
        candidate("DP2Adagrad", "DP2Adagrad", **_DELAYED),
        candidate("DP2Yogi", "DP2Yogi", **_DELAYED),
        candidate("DPGaLore", "DPGaLore", **_GALORE),
        candidate("ADPSGD", "ADPSGD", decay=True, **_PER_NORM),
        candidate("ADPAdagradNorm", "ADPAdagradNorm", per_norm=True, space=_plain(1.0, 100.0)),
        candidate("DPHeavyBall", "DPHeavyBall", **_MOMENTUM),
        candidate("DPNesterov", "DPNesterov", **_MOMENTUM),
        Candidate("DPMultistageNesterov", _multistage, _plain()),
        candidate("AdaDPS", "AdaDPS", space={"learning_rate": _SCALED, "clip_share": (0.02, 0.5)}),
        candidate("PDADPMD", "PDADPMD", **_PER_NORM),
        candidate(  # its noisy v can be 0, which only ε keeps from making steps without bound
            "SubspaceAdagrad",
            "SubspaceAdagrad",
            rank=4,
            epsilon=_noise_floor(10.0),
            space={"learning_rate": _SUMMED},
        ),
        # Compositions of second moment, filter, schedule, and correlated or falling noise (the two
        # together are not accounted).
        candidate("DPSGD, filter", "DPSGD", **_FILTER, **_PER_NORM),
        candidate("DPSGD, filter, banded noise", "DPSGD", **_FILTER, **_BANDED, **_PER_NORM),
        candidate("DPSGD, momentum, banded noise", "DPSGD", **_BANDED, **_MOMENTUM),
        candidate("DPSGD, momentum, falling noise", "DPSGD", **_FALLING, **_MOMENTUM),
        candidate("DPSGD, momentum, decaying rate", "DPSGD", decay=True, **_MOMENTUM),
        candidate(
            "DPSGD, momentum, banded noise, decaying rate",
            "DPSGD",
            decay=True,
            **_BANDED,
            **_MOMENTUM,
        ),
        candidate("DPNesterov, banded noise", "DPNesterov", **_BANDED, **_MOMENTUM),
        candidate("DPYogi, banded noise", "DPYogi", **_BANDED, space={"learning_rate": _SCALED}),
        candidate("DPGaLore, banded noise", "DPGaLore", **_BANDED, **_GALORE),
        candidate("DPAdam, banded noise", "DPAdam", **_BANDED, **_ADAM),
        candidate(
            "DPAdam, bias-corrected, banded noise", "DPAdam", **_BANDED, **_BIAS_CORRECTED, **_ADAM
        ),
        candidate("DPAdam, scale-then-privatize, filter", "DPAdam", **_FILTER, **_SCALE_FIRST),
        candidate(
            "DPAdam, scale-then-privatize, falling noise", "DPAdam", **_FALLING, **_SCALE_FIRST
        ),
        candidate(
            "DPAdam, scale-then-privatize, banded noise", "DPAdam", **_BANDED, **_SCALE_FIRST
        ),
        candidate(
            "DPAdam, scale-then-privatize, filter, banded noise",
            "DPAdam",
            **_FILTER,
            **_BANDED,
            **_SCALE_FIRST,
        ),
    )
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
