"""Steps 1 and 2 of the pipeline: per-example gradients, clipped and summed."""

from dp_keras_opt.clipping.clipped_sum import Batch, ClippedSums, clip_groups, clipped_sums
from dp_keras_opt.clipping.explain import explain
from dp_keras_opt.clipping.fix import fix
from dp_keras_opt.clipping.norms import clip_fraction, per_example_norms
from dp_keras_opt.clipping.query import Query
from dp_keras_opt.clipping.self_check import checked_plan
from dp_keras_opt.clipping.validation import validate

__all__ = [
    "Batch",
    "ClippedSums",
    "Query",
    "checked_plan",
    "clip_fraction",
    "clip_groups",
    "clipped_sums",
    "explain",
    "fix",
    "per_example_norms",
    "validate",
]
