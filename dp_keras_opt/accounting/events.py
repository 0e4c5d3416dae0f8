"""From what was released to the events that dp_accounting prices.

`zero_out` and `add_or_remove_one` move a clipped sum by at most C, `replace_one` by at most 2C.
The noise is always σ·C, so under `replace_one` the events are told the multiplier σ/2. That is
the only place where the factor 2 appears: dp_accounting's own relation
(`Sampling.neighboring_relation`) never adds another.

Several releases of one batch are one event inside one sampled event: Gaussians with multipliers
σ_j as a single Gaussian with (Σ σ_j⁻²)^(−1/2), since they are one Gaussian vector once each is
scaled to unit noise. A release without noise makes a step, and all that it is composed with, not
private.

References: events and their composition: Abadi et al., "Deep learning with differential privacy",
CCS 2016, arXiv:1607.00133; a run of correlated noise as one Gaussian release: Choquette-Choo et
al., "(Amplified) banded matrix factorization: a unified approach to private training", NeurIPS
2023, arXiv:2306.08153.
"""

import collections

import dp_accounting
import numpy as np

#: More distinct schedule factors than this are rounded down to a geometric grid.
MAX_DISTINCT = 400
#: The same for passes that are priced as a whole: of the factors of each distinct pass, together.
MAX_DISTINCT_IN_PASSES = 128


def step_event(releases, adjacency, alpha=1.0):
    """The event of all that one batch releases, before amplification by sampling.

    Args:
        releases: tuple of `dp_keras_opt.noise.Release`.
        adjacency: the neighbouring relation, as in `Sampling`.
        alpha: factor of the noise schedule at this step.

    Returns:
        A `dp_accounting.DpEvent`; a non-private one where a release has no noise.

    Raises:
        ValueError: there is no release, or a noise multiplier is negative or not a number.
    """
    if not releases:
        raise ValueError("releases is empty: a step that releases nothing cannot be accounted.")
    releases = [release for release in releases if not release.is_public]
    multipliers = [
        release.multiplier * alpha / _sensitivity(release, adjacency) for release in releases
    ]
    if not all(multiplier >= 0 for multiplier in multipliers):
        raise ValueError(
            f"Noise multipliers must be numbers >= 0; received "
            f"{[release.multiplier for release in releases]} with schedule factor {alpha}."
        )
    if 0 in multipliers:
        return dp_accounting.NonPrivateDpEvent()
    return _joint(
        [
            release.mechanism.event(multiplier)
            for release, multiplier in zip(releases, multipliers, strict=True)
        ]
    )


def _sensitivity(release, adjacency):
    """By how many times what its noise is scaled for a neighbouring batch moves a release."""
    if release.joint is None:
        return 2.0 if adjacency == "replace_one" else 1.0
    if release.joint.adjacency != adjacency:
        raise ValueError(
            f"The noise on the squared gradient is scaled for adjacency="
            f"{release.joint.adjacency!r}, but the steps are accounted under {adjacency!r}. Give "
            f"the second moment adjacency={adjacency!r}."
        )
    return 1.0  # the joint sensitivity is that of the adjacency already


def segment_event(
    releases, sampling, alphas, steps=None, max_distinct=MAX_DISTINCT, optimistic=False, sizes=None
):
    """The event of consecutive steps that share releases and sampling.

    Args:
        releases: tuple of `dp_keras_opt.noise.Release`, the same at each step.
        sampling: the `Sampling` of the steps.
        alphas: factors of the noise schedule, one a step; or one factor for all `steps`. Where the
            sampling `draws_passes`, those of whole passes.
        steps: number of steps where `alphas` is a single factor.
        max_distinct: where more factors than this differ they are rounded down, which can only
            raise epsilon; fewer are quicker to price. None: never.
        optimistic: whether to round up instead, for a lower bound on epsilon.
        sizes: None, or the expected batch size of each step, where they differ.

    Returns:
        A `dp_accounting.DpEvent`, in which steps of equal factors are grouped.
    """
    private = [release for release in releases if not release.is_public]
    if any(release.mechanism.is_correlated for release in private):
        return _run_event(private, sampling, alphas, steps, max_distinct, optimistic)
    if sampling.draws_passes and np.ndim(alphas):
        return _passes_event(releases, sampling, alphas, max_distinct, optimistic)
    if sizes is not None:
        alike = _alike(alphas, sizes, max_distinct, optimistic)
    else:
        values, counts = _factors(sampling, alphas, steps, max_distinct, optimistic)
        alike = [(value, None, count) for value, count in zip(values, counts, strict=True)]
    composed = []
    for alpha, size, count in alike:
        event = step_event(releases, sampling.noise_adjacency, float(alpha))
        if isinstance(event, dp_accounting.NonPrivateDpEvent):
            return event
        drawn = sampling.sampled(event) if size is None else sampling.sampled_at(event, size)
        composed.append(dp_accounting.SelfComposedDpEvent(drawn, int(count)))
    if not composed:
        return dp_accounting.NoOpDpEvent()
    return composed[0] if len(composed) == 1 else dp_accounting.ComposedDpEvent(composed)


def _passes_event(releases, sampling, alphas, max_distinct, optimistic):
    """Whole passes, of each of which one draw assigns the units to all batches.

    Which batch a unit is in is not known, so each batch of a pass counts with its own factor.
    """
    composed = []
    for factors, count in passes(alphas, sampling.period, max_distinct, optimistic).items():
        adjacency = sampling.noise_adjacency
        event = sampling.epoch(
            [(step_event(releases, adjacency, factor), steps) for factor, steps in factors]
        )
        if isinstance(event, dp_accounting.NonPrivateDpEvent):
            return event
        composed.append(dp_accounting.SelfComposedDpEvent(event, count))
    if not composed:
        return dp_accounting.NoOpDpEvent()
    return composed[0] if len(composed) == 1 else dp_accounting.ComposedDpEvent(composed)


def passes(alphas, period, max_distinct=MAX_DISTINCT, optimistic=False):
    """The distinct passes over the data, whose price does not depend on the order of the steps.

    Args:
        alphas: factors of the noise schedule, one a step, of whole passes.
        period: steps of a pass.
        max_distinct, optimistic: as for `segment_event`; at most `MAX_DISTINCT_IN_PASSES` factors
            of distinct passes are told apart.

    Returns:
        A dict from ((factor, number of steps), ...) to the number of such passes.
    """
    most = None if max_distinct is None else min(max_distinct, MAX_DISTINCT_IN_PASSES)
    alphas = np.sort(np.reshape(np.asarray(alphas, np.float64), (-1, period)), axis=1)

    for width, rounded in _grids(alphas, optimistic):
        if width > 1:  # passes that differ in how many steps have which factor: the extreme of each
            extreme = np.max if optimistic else np.min
            rounded = np.repeat(extreme(rounded, axis=1, keepdims=True), period, axis=1)
        found = collections.Counter()
        for row, count in zip(*np.unique(rounded, axis=0, return_counts=True), strict=True):
            factors, steps = np.unique(row, return_counts=True)
            found[tuple(zip(factors.tolist(), steps.tolist(), strict=True))] = int(count)
        if most is None or sum(map(len, found)) <= most:
            return found
    raise AssertionError("The grids have no end.")


def is_rounded(sampling, alphas, sizes=None):
    """Whether `segment_event` rounds these factors."""
    if sizes is not None:
        return len(_distinct(alphas, sizes)[0]) > MAX_DISTINCT
    if sampling.draws_passes and np.ndim(alphas):
        return passes(alphas, sampling.period) != passes(alphas, sampling.period, None)
    return len(np.unique(alphas)) > MAX_DISTINCT


def _run_event(releases, sampling, alphas, steps, max_distinct, optimistic):
    """All steps of a run of correlated noise.

    With levels α the noise of the steps is diag(α)·C⁻¹z, so that C·diag(α)⁻¹ takes the place of C.
    One release for each of `releases`; with cyclic Poisson sampling, one for each round of the
    groups, of which each is amplified: an example's participations lie further apart than the
    bands, so that each shows in rows of C x of its own.
    """
    if not steps:
        return dp_accounting.NoOpDpEvent()
    for release in releases:
        release.mechanism.check_sampling(sampling)
    if any(release.multiplier == 0 for release in releases):
        return dp_accounting.NonPrivateDpEvent()

    def event(alpha, levels, separation):
        return _joint(
            [
                release.mechanism.event(
                    release.multiplier
                    * alpha
                    / _sensitivity(release, sampling.noise_adjacency)
                    / release.mechanism.sensitivity(steps, separation, levels)
                )
                for release in releases
            ]
        )

    if not sampling.is_poisson:
        once = sampling.separation >= steps
        levels = np.float64(alphas) if np.ndim(alphas) else None
        return event(
            1.0 if levels is not None else alphas, levels, None if once else sampling.separation
        )
    rounds = [
        dp_accounting.SelfComposedDpEvent(
            sampling.sampled(event(float(alpha), None, None)), int(count)
        )
        for alpha, count in zip(
            *_factors(sampling, alphas, steps, max_distinct, optimistic), strict=True
        )
    ]
    return rounds[0] if len(rounds) == 1 else dp_accounting.ComposedDpEvent(rounds)


def _joint(events):
    """Several releases of one batch as one event: Gaussians add up as σ⁻² = Σ σ_j⁻²."""
    if len(events) == 1:
        return events[0]
    if all(isinstance(event, dp_accounting.GaussianDpEvent) for event in events):
        precision = sum(event.noise_multiplier**-2 for event in events)
        return dp_accounting.GaussianDpEvent(precision**-0.5)
    return dp_accounting.ComposedDpEvent(events)


def _factors(sampling, alphas, steps, max_distinct, optimistic):
    """The distinct schedule factors, and how many releases each of them has."""
    if np.ndim(alphas) == 0:
        steps = -(-steps // sampling.period)  # every period that was begun counts
        return ([alphas], [steps]) if steps else ([], [])
    alphas = np.asarray(alphas, np.float64)
    if sampling.period > 1 and len(alphas):
        # An example is in one step of the period, at worst in the one with the least noise.
        alphas = np.minimum.reduceat(alphas, np.arange(0, len(alphas), sampling.period))
    return _rounded(*np.unique(alphas, return_counts=True), max_distinct, optimistic)


def _distinct(alphas, sizes):
    """The distinct pairs of a step's factor and expected batch size, and how many have each."""
    pairs = np.stack(np.broadcast_arrays(alphas, np.asarray(sizes, np.float64)), axis=-1)
    return np.unique(pairs, axis=0, return_counts=True)


def _alike(alphas, sizes, max_distinct, optimistic):
    """(factor, expected batch size, number of steps) of steps that are priced alike.

    At most `max_distinct`, of no larger factors and no smaller batches than before; or the other
    way round, if optimistic.
    """
    pairs, counts = _distinct(alphas, sizes)
    of_factors, of_sizes = _grids(pairs[:, 0], optimistic), _grids(pairs[:, 1], not optimistic)
    for (_, factors), (_, rounded_sizes) in zip(of_factors, of_sizes, strict=True):
        rounded = np.stack([factors, rounded_sizes], axis=-1)
        distinct, index = np.unique(rounded, axis=0, return_inverse=True)
        if max_distinct is None or len(distinct) <= max_distinct:
            steps = np.bincount(index.ravel(), counts).astype(np.int64)
            return [(*pair, count) for pair, count in zip(distinct.tolist(), steps, strict=True)]
    raise AssertionError("The grids have no end.")


def _rounded(values, counts, max_distinct, optimistic):
    """At most `max_distinct` factors, none larger than before; or none smaller, if optimistic."""
    for _, rounded in _grids(values, optimistic):
        distinct, index = np.unique(rounded, return_inverse=True)
        if max_distinct is None or len(distinct) <= max_distinct:
            return distinct, np.bincount(index, counts).astype(np.int64)
    raise AssertionError("The grids have no end.")


def _grids(values, optimistic):
    """The values, then on coarser and coarser grids: none larger, or none smaller if optimistic.

    The grids are nested and fixed, each twice as coarse as the one before, so that more steps
    never have a smaller epsilon.

    Yields:
        (width of a cell in powers of two, the values), without end.
    """
    yield 0.0, values
    width = 2.0**-10  # 0.07%. Cells meet at 1, so at least two are left in the end
    while True:
        cells = np.floor(np.log2(values) / width)
        yield width, np.exp2((cells + optimistic) * width)
        width *= 2
