"""Every optimizer of the library: where it comes from, what it needs, how it is tuned.

Whoever adds an optimizer adds its class to the imports, to `__all__` and to `CATALOG`. The public
names of `dp_keras_opt.optimizers`, the candidates of `dp_keras_opt.tuning`, the table of the
command line, the API page and the nightly audits follow.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from dp_keras_opt.optimizers.accelerated import DPHeavyBall, DPMultistageNesterov, DPNesterov
from dp_keras_opt.optimizers.adagrad import DPAdagrad
from dp_keras_opt.optimizers.adam import DPAdam
from dp_keras_opt.optimizers.adp import ADPSGD, ADPAdagradNorm
from dp_keras_opt.optimizers.delayed import DP2Adagrad, DP2RMSprop, DP2Yogi
from dp_keras_opt.optimizers.galore import DPGaLore
from dp_keras_opt.optimizers.muon import DPMuon
from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer
from dp_keras_opt.optimizers.public_data import PDADPMD, AdaDPS, SubspaceAdagrad
from dp_keras_opt.optimizers.rmsprop import DPRMSprop
from dp_keras_opt.optimizers.sgd import DPSGD
from dp_keras_opt.optimizers.wrapper import DPOptimizer
from dp_keras_opt.optimizers.yogi import DPYogi
from dp_keras_opt.references import REFERENCES

__all__ = [
    "ADPAdagradNorm",
    "ADPSGD",
    "AdaDPS",
    "DP2Adagrad",
    "DP2RMSprop",
    "DP2Yogi",
    "DPAdagrad",
    "DPAdam",
    "DPGaLore",
    "DPHeavyBall",
    "DPMultistageNesterov",
    "DPMuon",
    "DPNesterov",
    "DPOptimizer",
    "DPRMSprop",
    "DPSGD",
    "DPYogi",
    "PDADPMD",
    "SubspaceAdagrad",
]

_PUBLIC = "public data"
_CLIP_NORMS = "a second clip norm"
_STEPS = "the number of steps"

_LAYER = (256, 256)  # whose optimizer's memory is counted


@dataclasses.dataclass(frozen=True)
class Search:
    """How the hyper-parameters of an optimizer are searched; see `tuning.candidate`.

    Attributes:
        space: (low, high) for each argument that is searched for.
        arguments: what is fixed; functions are called with the `tuning.RunInfo` of the run.
        per_norm: whether the learning rates in `space` are for gradients in units of the clip norm.
        decay: whether the learning rate falls to a tenth by half a cosine.
    """

    space: Mapping[str, tuple[float, float]]
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    per_norm: bool = False
    decay: bool = False


@dataclasses.dataclass(frozen=True)
class Entry:
    """An optimizer of the catalog.

    Attributes:
        cls: its class.
        references: keys of `dp_keras_opt.references.REFERENCES`: where the rule, or its private
            version, comes from.
        search: how it is tuned; None where that depends on what it is given.
        needs: what it asks for besides private data and a clip norm, in words.
        arguments: constructor arguments without a default, with values to make one by.
    """

    cls: type[PrivateOptimizer]
    references: tuple[str, ...]
    search: Search | None
    needs: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the class in `dp_keras_opt.optimizers`."""
        return self.cls.__name__

    @property
    def paper(self) -> str:
        """The first of the references, in one line."""
        return REFERENCES[self.references[0]].short

    def make(self) -> PrivateOptimizer:
        """An optimizer with all defaults."""
        return self.cls(clip_norm=1.0, batch_size=1, noise_multiplier=1.0, **self.arguments)

    @functools.cached_property
    def releases_per_step(self) -> int:
        """How many noisy answers a step publishes by default, each of which costs privacy."""
        return sum(not release.is_public for release in self.make().releases)

    @functools.cached_property
    def memory(self) -> float:
        """What it remembers by default, in copies of the weights, for one layer of 256 × 256."""
        optimizer = self.make()
        optimizer.build([keras.Variable(np.zeros(_LAYER, np.float32))])
        remembered = sum(math.prod(v.shape) for v in optimizer.variables if len(v.shape))
        return remembered / math.prod(_LAYER)


# Learning rates of rules that take steps along the gradient, of those that take them with momentum,
# of those that divide by a root of a running mean, and of those that divide by the root of a sum.
_PLAIN = {"learning_rate": (0.1, 10.0)}
_MOMENTUM = {"learning_rate": (0.01, 1.0)}
_SCALED = {"learning_rate": (1e-3, 3e-2)}
_SUMMED = {"learning_rate": (1e-2, 0.3)}

_ALONG_GRADIENT = Search(_PLAIN, per_norm=True)
_WITH_MOMENTUM = Search(_MOMENTUM, {"momentum": 0.9}, per_norm=True)
_DELAYED = Search(
    _PLAIN
    | {
        "adaptive_learning_rate": _SCALED["learning_rate"],
        "clip_share": (0.02, 0.5),
        "delay": (0.02, 0.5),
    },
    per_norm=True,
)


def _ten_noises(run):
    """An ε above nearly all of the noise: a noisy v can be 0, and ε alone bounds the step then."""
    return 10.0 * run.noise * run.clip_norm


#: All optimizers, plain ones first.
CATALOG = (
    Entry(DPSGD, ("abadi2016",), _ALONG_GRADIENT),
    Entry(DPAdam, ("ganesh2025", "kingma2015", "reddi2018"), Search(_SCALED, {"beta_2": 0.99})),
    Entry(DPRMSprop, ("ganesh2025", "tieleman2012"), Search(_SCALED)),
    Entry(DPAdagrad, ("ganesh2025", "duchi2011"), Search(_SUMMED)),
    Entry(DPYogi, ("ganesh2025", "zaheer2018"), Search(_SCALED)),
    Entry(DPOptimizer, ("abadi2016",), None, ("a Keras optimizer",), {"optimizer": "sgd"}),
    Entry(DP2RMSprop, ("li2023",), _DELAYED, (_CLIP_NORMS,), {"adaptive_clip_norm": 1.0}),
    Entry(DP2Adagrad, ("li2023", "duchi2011"), _DELAYED, (_CLIP_NORMS,),
          {"adaptive_clip_norm": 1.0}),
    Entry(DP2Yogi, ("li2023", "zaheer2018"), _DELAYED, (_CLIP_NORMS,),
          {"adaptive_clip_norm": 1.0}),
    Entry(DPGaLore, ("zhang2024", "zhao2024"), Search(_SCALED, {"rank": 8, "update_gap": 50})),
    Entry(ADPSGD, ("wu2021",), Search(_PLAIN, per_norm=True, decay=True), ("step sizes", _STEPS),
          {"learning_rate": 0.1, "steps": 1}),
    Entry(ADPAdagradNorm, ("wu2021", "ward2019"),
          Search({"learning_rate": (1.0, 100.0)}, per_norm=True), (_STEPS,), {"steps": 1}),
    Entry(DPHeavyBall, ("kuru2022", "polyak1964"), _WITH_MOMENTUM),
    Entry(DPNesterov, ("kuru2022", "nesterov2004"), _WITH_MOMENTUM),
    Entry(DPMultistageNesterov, ("kuru2022", "aybat2019"), _ALONG_GRADIENT,
          ("strong convexity", "smoothness"), {"strong_convexity": 1.0, "smoothness": 10.0}),
    Entry(DPMuon, ("kim2026",), Search({"learning_rate": (1e-3, 0.1)})),
    Entry(AdaDPS, ("li2022",), Search(_SCALED | {"clip_share": (0.02, 0.5)}), (_PUBLIC,)),
    Entry(PDADPMD, ("amid2022",), _ALONG_GRADIENT, (_PUBLIC, _STEPS), {"steps": 1}),
    Entry(SubspaceAdagrad, ("kairouz2021_subspaces",),
          Search(_SUMMED, {"rank": 4, "epsilon": _ten_noises}), (_PUBLIC,)),
)  # fmt: skip
