"""From what was released to the events that dp_accounting prices (spec: core.md).

`zero_out` and `add_or_remove_one` move a clipped sum by at most C, `replace_one` by at most 2C.
The noise is always σ·C, so under `replace_one` the events are told the multiplier σ/2. That is
the only place where the factor 2 appears: dp_accounting's own relation (see `accountant.py`)
never adds another.
"""

import dp_accounting
import numpy as np

#: More distinct schedule factors than this are rounded down to a geometric grid.
MAX_DISTINCT = 400


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
    releases, sampling, alphas, steps=None, max_distinct=MAX_DISTINCT, optimistic=False
):
    """The event of consecutive steps that share releases and sampling.

    Args:
        releases: tuple of `dp_keras_opt.noise.Release`, the same at each step.
        sampling: the `Sampling` of the steps.
        alphas: factors of the noise schedule, one a step; or one factor for all `steps`.
        steps: number of steps where `alphas` is a single factor.
        max_distinct: where more factors than this differ they are rounded down, which can only
            raise epsilon; fewer are quicker to price. None: never.
        optimistic: whether to round up instead, for a lower bound on epsilon.

    Returns:
        A `dp_accounting.DpEvent`, in which steps of equal factors are grouped.
    """
    private = [release for release in releases if not release.is_public]
    if any(release.mechanism.is_correlated for release in private):
        return _run_event(private, sampling, alphas, steps)
    values, counts = _factors(sampling, alphas, steps, max_distinct, optimistic)
    if not len(values):
        return dp_accounting.NoOpDpEvent()
    adjacency = sampling.noise_adjacency
    each_step = [step_event(releases, adjacency, float(value)) for value in values]
    if any(isinstance(event, dp_accounting.NonPrivateDpEvent) for event in each_step):
        return dp_accounting.NonPrivateDpEvent()
    composed = [
        dp_accounting.SelfComposedDpEvent(_sampled(event, sampling), int(count))
        for event, count in zip(each_step, counts, strict=True)
    ]
    return composed[0] if len(composed) == 1 else dp_accounting.ComposedDpEvent(composed)


def _run_event(releases, sampling, alphas, steps):
    """All steps of a run of correlated noise.

    One release for each of `releases`; with cyclic Poisson sampling, one for each round of the
    groups, of which each is amplified: an example's participations lie further apart than the
    bands, so that each shows in rows of C x of its own.
    """
    if not steps:
        return dp_accounting.NoOpDpEvent()
    if np.ndim(alphas) or alphas != 1:
        raise ValueError("Correlated noise is accounted at one level only: drop noise_schedule=.")
    for release in releases:
        release.mechanism.check_sampling(sampling)
    if any(release.multiplier == 0 for release in releases):
        return dp_accounting.NonPrivateDpEvent()
    once = sampling.is_poisson or sampling.separation >= steps
    event = _joint(
        [
            release.mechanism.event(
                release.multiplier
                / _sensitivity(release, sampling.noise_adjacency)
                / release.mechanism.sensitivity(steps, None if once else sampling.separation)
            )
            for release in releases
        ]
    )
    if sampling.is_poisson:
        rounds = -(-steps // sampling.groups)
        return dp_accounting.SelfComposedDpEvent(_sampled(event, sampling), rounds)
    return event


def _joint(events):
    """Several releases of one batch as one event: Gaussians add up as σ⁻² = Σ σ_j⁻²."""
    if len(events) == 1:
        return events[0]
    if all(isinstance(event, dp_accounting.GaussianDpEvent) for event in events):
        precision = sum(event.noise_multiplier**-2 for event in events)
        return dp_accounting.GaussianDpEvent(precision**-0.5)
    return dp_accounting.ComposedDpEvent(events)


def _sampled(event, sampling):
    """`event` on a batch drawn by `sampling`."""
    if sampling.is_poisson or sampling.kind == "shuffled_accounted_as_poisson":
        return dp_accounting.PoissonSampledDpEvent(sampling.sampling_probability, event)
    if sampling.kind == "without_replacement":
        return dp_accounting.SampledWithoutReplacementDpEvent(
            sampling.num_examples, sampling.batch_size, event
        )
    return event  # full batches; epochs, which `_factors` has made one release each


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


def _rounded(values, counts, max_distinct, optimistic):
    """At most `max_distinct` factors, none larger than before; or none smaller, if optimistic.

    The grids are nested and fixed, each twice as coarse as the one before, so that more steps
    never have a smaller epsilon.
    """
    width = 2.0**-10  # in powers of two: 0.07%. Cells meet at 1, so `max_distinct` is at least 2
    rounded = values
    while max_distinct is not None and len(np.unique(rounded)) > max_distinct:
        cells = np.floor(np.log2(values) / width)
        rounded = np.exp2((cells + optimistic) * width)
        width *= 2
    distinct, index = np.unique(rounded, return_inverse=True)
    return distinct, np.bincount(index, counts).astype(np.int64)
