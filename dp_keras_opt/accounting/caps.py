"""What a cap on the size of batches costs, and the least that costs next to nothing."""

import dataclasses
import math
import warnings

import dp_accounting
from scipy import stats

from dp_keras_opt.accounting.sampling import Sampling
from dp_keras_opt.accounting.segment import Segment

_DEAR = 0.01  # of epsilon
_INTERVAL = 1e-3  # of the losses, and
_DISTINCT = 16  # noise levels: enough to compare two caps by


def warn_of_cap(segment: Segment, delta: float, stacklevel: int = 3) -> None:
    """Warns where steps cost over 1% more epsilon for the cap of their `TruncatedPoisson` batches.

    Args:
        segment: the `Segment` of the steps.
        delta: probability that the guarantee fails, in (0, 1).
        stacklevel: of the warning.
    """
    sampling = segment.sampling
    if sampling.max_batch_size is None or not segment.steps:
        return
    uncut = _epsilon(segment, sampling.uncut, delta)
    if not 0 < uncut < math.inf:
        return

    def costs(cap):
        capped = dataclasses.replace(sampling, max_batch_size=cap)
        return _epsilon(segment, capped, delta) / uncut - 1

    cost = costs(sampling.max_batch_size)
    if cost <= _DEAR:
        return
    n, q = sampling.num_examples, sampling.sampling_probability
    # From there on, some step is cut with less than a thousandth of delta.
    rarely = int(stats.binom.isf(1e-3 * delta / segment.steps, n, q)) + 1
    dear, free = sampling.max_batch_size, rarely
    while free - dear > 1:
        middle = (dear + free) // 2
        dear, free = (middle, free) if costs(middle) > _DEAR else (dear, middle)
    warnings.warn(
        f"max_batch_size={sampling.max_batch_size} cuts so many draws that epsilon is "
        f"{cost:.0%} larger than without a cap. From max_batch_size={free} on it is at most "
        f"{_DEAR:.0%} larger.",
        stacklevel=stacklevel,
    )


def _epsilon(segment: Segment, sampling: Sampling, delta: float) -> float:
    """Of the steps, if they were sampled this way; roughly."""
    event = dataclasses.replace(segment, sampling=sampling).event(_DISTINCT)
    accountant = dp_accounting.pld.PLDAccountant(
        sampling.neighboring_relation, value_discretization_interval=_INTERVAL
    )
    return accountant.compose(event).get_epsilon(delta)
