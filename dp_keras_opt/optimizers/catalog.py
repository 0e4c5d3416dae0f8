"""What each optimizer asks for and costs, to choose one by."""

import dataclasses
import functools
import math

import keras
import numpy as np

from dp_keras_opt import optimizers

_SGD = "Abadi et al., Deep learning with differential privacy, 2016"
_ADAPTIVE = "Ganesh et al., On design principles for private adaptive optimizers"
_DELAYED = "Li et al., Differentially private adaptive optimization with delayed preconditioners"
_FILTERS = "Zhang et al., DOPPLER: differentially private optimizers with low-pass filter"
_UNEVEN = "Wu et al., Adaptive differentially private empirical risk minimization"
_ACCELERATED = "Kuru et al., Differentially private accelerated optimization algorithms"
_SIDE_INFORMATION = "Li et al., Private adaptive optimization with side information, 2022"
_MIRROR_DESCENT = "Amid et al., Public data-assisted mirror descent, 2022"
_SUBSPACE = "Kairouz et al., (Nearly) dimension independent private ERM with AdaGrad rates, 2021"

_PUBLIC = "public data"
_CLIP_NORMS = "a second clip norm"
_STEPS = "the number of steps"

_LAYER = (256, 256)  # whose optimizer's memory is counted


@dataclasses.dataclass(frozen=True)
class Entry:
    """An optimizer of the catalog.

    Attributes:
        name: of the class in `dp_keras_opt.optimizers`.
        paper: where the rule, or its private version, comes from.
        needs: what it asks for besides private data and a clip norm, in words.
        arguments: constructor arguments without a default, with values to make one by.
    """

    name: str
    paper: str
    needs: tuple = ()
    arguments: dict = dataclasses.field(default_factory=dict)

    def make(self):
        """An optimizer with all defaults."""
        cls = getattr(optimizers, self.name)
        return cls(clip_norm=1.0, batch_size=1, noise_multiplier=1.0, **self.arguments)

    @functools.cached_property
    def releases_per_step(self):
        """How many noisy answers a step publishes by default, each of which costs privacy."""
        return sum(not release.is_public for release in self.make().releases)

    @functools.cached_property
    def memory(self):
        """What it remembers by default, in copies of the weights, for one layer of 256 × 256."""
        optimizer = self.make()
        optimizer.build([keras.Variable(np.zeros(_LAYER, np.float32))])
        remembered = sum(math.prod(v.shape) for v in optimizer.variables if len(v.shape))
        return remembered / math.prod(_LAYER)


#: All optimizers, plain ones first.
CATALOG = (
    Entry("DPSGD", _SGD),
    Entry("DPAdam", _ADAPTIVE),
    Entry("DPRMSprop", _ADAPTIVE),
    Entry("DPAdagrad", _ADAPTIVE),
    Entry("DPYogi", _ADAPTIVE),
    Entry("DPOptimizer", _SGD, ("a Keras optimizer",), {"optimizer": "sgd"}),
    Entry("DP2RMSprop", _DELAYED, (_CLIP_NORMS,), {"adaptive_clip_norm": 1.0}),
    Entry("DP2Adagrad", _DELAYED, (_CLIP_NORMS,), {"adaptive_clip_norm": 1.0}),
    Entry("DP2Yogi", _DELAYED, (_CLIP_NORMS,), {"adaptive_clip_norm": 1.0}),
    Entry("DPGaLore", _FILTERS),
    Entry("ADPSGD", _UNEVEN, ("step sizes", _STEPS), {"learning_rate": 0.1, "steps": 1}),
    Entry("ADPAdagradNorm", _UNEVEN, (_STEPS,), {"steps": 1}),
    Entry("DPHeavyBall", _ACCELERATED),
    Entry("DPNesterov", _ACCELERATED),
    Entry(
        "DPMultistageNesterov",
        _ACCELERATED,
        ("strong convexity", "smoothness"),
        {"strong_convexity": 1.0, "smoothness": 10.0},
    ),
    Entry("AdaDPS", _SIDE_INFORMATION, (_PUBLIC,)),
    Entry("PDADPMD", _MIRROR_DESCENT, (_PUBLIC, _STEPS), {"steps": 1}),
    Entry("SubspaceAdagrad", _SUBSPACE, (_PUBLIC,)),
)
