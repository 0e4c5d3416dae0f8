"""One statistic as a release: the noise that keeps its ε, and its entry in the ledger."""

from __future__ import annotations

import functools
import math
import secrets

import numpy as np

from dp_keras_opt.accounting.accountant import epsilon_of
from dp_keras_opt.accounting.budget import Budget
from dp_keras_opt.accounting.calibration import least_multiplier
from dp_keras_opt.accounting.ledger import Ledger
from dp_keras_opt.accounting.sampling import Sampling
from dp_keras_opt.accounting.segment import Segment
from dp_keras_opt.checks import is_number
from dp_keras_opt.noise import numbers
from dp_keras_opt.noise.mechanism import Mechanism, Release
from dp_keras_opt.noise.schedules import Constant


def planned(
    statistic: str,
    mechanism: Mechanism,
    sampling: Sampling,
    epsilon: float,
    delta: float,
    *,
    sensitivity: float,
    purpose: str,
    data_set: str,
    times: int = 1,
    budget: Budget | None = None,
) -> Segment:
    """What the ledger is to say of a release: with the least noise that keeps ε at δ.

    Args:
        statistic: its name, of one word.
        mechanism: whose noise it gets.
        sampling: whose data it is about: a `Sampling.full`.
        epsilon: the budget at `delta`, positive and finite, of all times together.
        delta: in (0, 1); 0 with Laplace noise.
        sensitivity: by how much one unit more or fewer moves what is released.
        purpose: what it is, in words.
        data_set: which data it is about, by name.
        times: how often it is released.
        budget: None, or the `Budget` of all releases, which a privacy filter keeps.

    Raises:
        ValueError: epsilon or delta is none, or cannot be met.
    """
    if not (is_number(epsilon) and 0 < epsilon < math.inf):
        raise ValueError(f"epsilon must be positive and finite, e.g. 0.5; received {epsilon!r}.")

    multiplier = _multiplier(statistic, mechanism, sampling, epsilon, delta, times)
    releases = (Release(0, statistic, multiplier, mechanism),)
    return Segment(
        secrets.token_hex(16), releases, Constant(), sampling, float(sensitivity),
        steps=times, purpose=purpose, data_set=data_set,
        filter=None if budget is None else budget.filter,
    )  # fmt: skip


@functools.lru_cache
def _multiplier(statistic, mechanism, sampling, epsilon, delta, times):
    """The least noise multiplier with which so many releases keep ε at δ."""

    def spent(multiplier):
        releases = (Release(0, statistic, multiplier, mechanism),)
        return epsilon_of([Segment("planned", releases, Constant(), sampling, steps=times)], delta)

    return least_multiplier(spent, epsilon)


def noisy(total: np.ndarray, segment: Segment) -> tuple[np.ndarray, float]:
    """(total with noise, the noise's standard deviation), of what the ledger knows already.

    Args:
        total: a sum over units of which one moves it by at most `segment.clip_norm`.
        segment: what was planned, entered in a ledger.
    """
    (release,) = segment.releases
    scale = release.multiplier, float(segment.clip_norm or 0.0)
    std = math.prod(scale) * float(release.mechanism.std(0))
    return numbers.released(total, release.mechanism, *scale), std


def released(total: np.ndarray, segment: Segment, ledger: Ledger) -> tuple[np.ndarray, float]:
    """As `noisy`, once the release is entered in a ledger."""
    ledger.enter(segment)
    return noisy(total, segment)
