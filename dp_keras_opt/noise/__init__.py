"""Step 3 of the pipeline: noise mechanisms and the privacy barrier."""

from dp_keras_opt.noise import schedules
from dp_keras_opt.noise.gaussian import Gaussian
from dp_keras_opt.noise.laplace import Laplace
from dp_keras_opt.noise.mechanism import JointMoments, Mechanism, Release, get
from dp_keras_opt.noise.release import Released, release

__all__ = [
    "Gaussian",
    "JointMoments",
    "Laplace",
    "Mechanism",
    "Release",
    "Released",
    "get",
    "release",
    "schedules",
]
