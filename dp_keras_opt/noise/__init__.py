"""Step 3 of the pipeline: noise mechanisms and the privacy barrier."""

from dp_keras_opt.noise import schedules
from dp_keras_opt.noise.correlated import (
    BandedMatrix,
    Correlated,
    SquareRootFactorization,
    TreeAggregation,
    from_matrix,
    prefix_sum_rmse,
)
from dp_keras_opt.noise.gaussian import Gaussian
from dp_keras_opt.noise.identifiers import get
from dp_keras_opt.noise.laplace import Laplace
from dp_keras_opt.noise.mechanism import JointMoments, Mechanism, Release
from dp_keras_opt.noise.release import Released, release

__all__ = [
    "BandedMatrix",
    "Correlated",
    "Gaussian",
    "JointMoments",
    "Laplace",
    "Mechanism",
    "Release",
    "Released",
    "SquareRootFactorization",
    "TreeAggregation",
    "from_matrix",
    "get",
    "prefix_sum_rmse",
    "release",
    "schedules",
]
