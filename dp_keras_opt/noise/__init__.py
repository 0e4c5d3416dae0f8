"""Step 3 of the pipeline: noise mechanisms and the privacy barrier."""

from dp_keras_opt.noise import schedules
from dp_keras_opt.noise.correlated import (
    BandedMatrix,
    Correlated,
    SquareRootFactorization,
    TreeAggregation,
    from_matrix,
)
from dp_keras_opt.noise.gaussian import Gaussian
from dp_keras_opt.noise.identifiers import get
from dp_keras_opt.noise.laplace import Laplace
from dp_keras_opt.noise.mechanism import JointMoments, Mechanism, Release
from dp_keras_opt.noise.planner import Option, Planned, options
from dp_keras_opt.noise.release import release
from dp_keras_opt.noise.released import Released
from dp_keras_opt.noise.unbanded import BandedInverseSquareRoot, BufferedToeplitz, LambdaCGD
from dp_keras_opt.noise.workload import Workload, prefix_sum_rmse

__all__ = [
    "BandedInverseSquareRoot",
    "BandedMatrix",
    "BufferedToeplitz",
    "Correlated",
    "Gaussian",
    "JointMoments",
    "LambdaCGD",
    "Laplace",
    "Mechanism",
    "Option",
    "Planned",
    "Release",
    "Released",
    "SquareRootFactorization",
    "TreeAggregation",
    "Workload",
    "from_matrix",
    "get",
    "options",
    "prefix_sum_rmse",
    "release",
    "schedules",
]
