"""Nesterov's method in stages of falling step size."""

import itertools
from typing import Any

import keras
import numpy as np
from keras import ops

from dp_keras_opt import theory
from dp_keras_opt.accounting.batch_sizes import BatchSizeLike
from dp_keras_opt.optimizers.accelerated.nesterov import DPNesterov
from dp_keras_opt.optimizers.settings import FilterLike, NoiseLike, NoiseScheduleLike
from dp_keras_opt.types import ClipNorm, ClippingStyle


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class Stages(keras.optimizers.schedules.LearningRateSchedule):
    """The step sizes of `DPMultistageNesterov`, which makes it; see there."""

    def __init__(self, strong_convexity, smoothness, c=1.0, p=1):
        self.arguments = {
            "strong_convexity": float(strong_convexity),
            "smoothness": float(smoothness),
            "c": float(c),
            "p": p,
        }
        stages = theory.stages(strong_convexity, smoothness, c, p)
        lengths, rates = zip(*itertools.islice(stages, 20), strict=True)  # of millions of steps
        self._ends, self._rates = np.cumsum(lengths), np.array([*rates, rates[-1]])

    def __call__(self, step):
        return ops.take(ops.cast(self._rates, "float32"), self._stage(step))

    def _stage(self, step):
        """The stage of a step, from 0."""
        return ops.sum(ops.cast(ops.cast(step, "int64") >= self._ends, "int32"))

    def starts_again(self, step):
        """Whether a stage other than the first begins at this step."""
        return ops.any(ops.equal(ops.cast(step, "int64"), self._ends))

    def get_config(self):
        return dict(self.arguments)


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DPMultistageNesterov(DPNesterov):
    """Nesterov in stages of falling step size, for noise that would otherwise set a floor.

    Stage 1 takes ⌈2√κ·ln √κ⌉ steps of size c/L, stage k ≥ 2 takes 2^k·⌈√κ·ln 2^{p+2}⌉ steps of size
    c/(2^{2k}·L), κ = L/μ; β = (1 − √(μα))/(1 + √(μα)) of the stage's α, and the momentum starts
    anew with each stage. `noise.schedules.multistage_optimal` makes the `noise_schedule` for it.

    Args:
        strong_convexity: μ > 0 of the objective.
        smoothness: L ≥ μ.
        c: in (0, 1], scales the step sizes. Defaults to 1.
        p: a positive integer, lengthens the stages. Defaults to 1.
        {{private_arguments}}
        {{keras_arguments}}

    Raises:
        ValueError: L < μ, or an argument is out of range.

    Reference: Kuru, Birbil, Gürbüzbalaban and Yıldırım, "Differentially private accelerated
    optimization algorithms", SIAM J. Optim. 32, 2022, doi:10.1137/20M1355847 (arXiv:2008.01989),
    DP-MASG; Aybat, Fallah, Gürbüzbalaban and Ozdaglar, "A universally optimal multistage
    accelerated stochastic gradient method", NeurIPS 2019, arXiv:1901.08022. The restarts are those
    of the authors' code.
    """

    takes_geometry = False  # noise and steps are those of the plain one's analysis

    def __init__(
        self,
        *,
        strong_convexity: float,
        smoothness: float,
        c: float = 1.0,
        p: int = 1,
        clip_norm: ClipNorm,
        batch_size: BatchSizeLike | None = None,
        noise_multiplier: float | None = None,
        noise: NoiseLike = "gaussian",
        noise_schedule: NoiseScheduleLike = None,
        clipping: ClippingStyle = "flat",
        normalize: bool = False,
        gradient_filter: FilterLike = None,
        secure_noise: bool = False,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        stages = Stages(strong_convexity, smoothness, c, p)
        super().__init__(
            learning_rate=stages,
            strong_convexity=strong_convexity,
            clip_norm=clip_norm,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            noise=noise,
            noise_schedule=noise_schedule,
            clipping=clipping,
            normalize=normalize,
            gradient_filter=gradient_filter,
            secure_noise=secure_noise,
            seed=seed,
            **kwargs,
        )
        self.stages = stages

    @property
    def _beta(self):
        return ops.where(self.stages.starts_again(self.iterations), 0.0, super()._beta)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        for name in ("learning_rate", "momentum"):
            del config[name]
        return config | self.stages.get_config()
