"""Steps 1 and 2 of the pipeline: per-example gradients, clipped and summed."""

from dp_keras_opt import deprecation
from dp_keras_opt.clipping.batch import Batch
from dp_keras_opt.clipping.clipped_sum import ClippedSums, clipped_sums
from dp_keras_opt.clipping.explanation import Explanation, Served, explain
from dp_keras_opt.clipping.groups import clip_groups  # noqa: F401  (for other rooms)
from dp_keras_opt.clipping.normalization import fix
from dp_keras_opt.clipping.norms import clip_fraction, per_example_norms
from dp_keras_opt.clipping.objective import Objective, losses_and_outputs  # noqa: F401
from dp_keras_opt.clipping.observed import layers_named  # noqa: F401  (for other rooms)
from dp_keras_opt.clipping.quantile import Quantile
from dp_keras_opt.clipping.query import Point, Query, Tables
from dp_keras_opt.clipping.self_check import checked_engines
from dp_keras_opt.clipping.validation import Problem, problems, validate

__all__ = [
    "Batch",
    "ClippedSums",
    "Explanation",
    "Point",
    "Problem",
    "Quantile",
    "Query",
    "Served",
    "Tables",
    "clip_fraction",
    "clipped_sums",
    "explain",
    "fix",
    "per_example_norms",
    "problems",
    "validate",
]

__getattr__ = deprecation.renamed_names(__name__, {"checked_plan": checked_engines})
