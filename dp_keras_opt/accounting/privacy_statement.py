"""The guarantee in words: what is protected, on which assumptions, and what is not."""

import decimal
import importlib.metadata
import math
import textwrap
from typing import NamedTuple

from dp_keras_opt.accounting.accountant import (
    check_delta,
    composable,
    lower_bound,
    price_of,
    promised,
)
from dp_keras_opt.accounting.caps import warn_of_cap
from dp_keras_opt.accounting.early_stops import is_unknown, scenarios
from dp_keras_opt.accounting.groups import group_epsilon
from dp_keras_opt.accounting.privacy_filters import FilterBudget, is_lost, kept_filter
from dp_keras_opt.accounting.risk import Risk, of_guarantee, risk_of, whom
from dp_keras_opt.accounting.segment import CONDITIONS, TRAINING, conditions
from dp_keras_opt.checks import whole_number

_NEIGHBOURS = {
    "add_or_remove_one": "one is the other with one {unit} added or removed",
    "zero_out": "they differ in one {unit}, whose clipped gradient is replaced by zero in one",
    "replace_one": "they have the same size and differ in one {unit}",
}

_ACCOUNTANTS = {
    "rdp": "Renyi differential privacy (RDP)",
    "pld": "privacy loss distributions (PLD)",
    "pure": "sums of pure epsilons",
}

_NOTHING = (
    "No step is in this ledger: as far as it knows, nothing was released. What the weights were "
    "trained on before, or copied from, it does not know."
)

_OPTIMISTIC = (
    "Of several such scores the best is optimistic, as is that of a model that was chosen by them: "
    "what is chosen for being high is high by its noise, too."
)

_ADDED = "what was added to a training after looking at its results, such as another fit;"

_NOT_COVERED = (
    "the starting weights, as given when training began: what they were trained on before;",
    "metrics and losses shown during training, which are computed from the data without noise;",
    _ADDED,
    "choices driven by validation data that are not public, such as early stopping{but_scores}: "
    "what they reveal of these data;",
    "hyper-parameter tuning: each further training run on the same data adds to epsilon;",
    "preprocessing computed from the data (vocabularies, Normalization.adapt){but_statistics};",
    "the number of {unit}s, and the count of {unit}s with non-finite gradients;",
    "floating-point effects: the proofs are about real numbers, the noise is drawn in float32.",
)


def statement(ledger, delta, accountant="auto", group_size=1, notes=()):
    """The privacy guarantee of a ledger as readable text.

    Follows the reporting recommendations of Ponomareva et al., "How to DP-fy ML: a practical guide
    to machine learning with differential privacy", JAIR 2023, arXiv:2303.00654, section 5.3.

    Args:
        ledger: a `Ledger`, planned (`Ledger.of`) or recorded.
        delta: probability that the guarantee fails, in (0, 1); 0 with Laplace noise.
        accountant: "auto", "rdp", "pld" or "pure".
        group_size: k, to add the guarantee for any k units together.
        notes: further paragraphs, about the weights.

    Returns:
        Text of several paragraphs. Epsilons are rounded up to the digits shown. The guarantee is
        that of what was planned, where results may have stopped the training (`Ledger.plan`), and
        that of the budget, where a privacy filter kept it. Steps
        that do not compose to one guarantee have one for each unit and adjacency.

    Raises:
        ValueError: an argument is out of range, or the accountant cannot price the steps.
    """
    group_size = whole_number(group_size, "group_size", 1, "Give the number of units in a group.")
    segments = [segment for segment in ledger.segments if segment.steps]
    if not segments:
        check_delta(delta, segments, accountant)
        paragraphs = ["Privacy statement", textwrap.fill(_NOTHING, 80), *notes]
        return "\n\n".join(paragraphs) + "\n"

    found = claims(ledger, delta, accountant)
    for segment in segments:
        warn_of_cap(segment, delta)
    paragraphs = [
        "Privacy statement",
        *(text for claim in found for text in _claimed(claim, delta)),
        *_apart(found),
        *map(CONDITIONS.get, conditions(segments)),
        *_public(segments),
        _protected(segments),
        *_parts(segments),
        *dict.fromkeys(_accounting(claim) for claim in found),
    ]
    if group_size > 1:
        paragraphs += [_group(claim, group_size, delta, accountant) for claim in found]
    filled = [textwrap.fill(paragraph, 80) for paragraph in (*paragraphs, *notes)]
    return "\n\n".join([*filled, _bullets("Not covered:", not_covered(found))]) + "\n"


class Claim(NamedTuple):
    """One guarantee: of steps on one privacy unit, under one adjacency."""

    segments: list
    lower: float  # of the steps that ran, with exact schedules
    epsilon: float  # of the steps that ran
    promised: float  # of the steps that were planned: the guarantee
    accountants: tuple  # that gave it
    asked: tuple  # of which it is the smallest
    risk: Risk  # of the steps that were planned
    filter: FilterBudget | None = None  # whose guarantee it is: of no steps, but of its budget

    @property
    def unit(self):
        return self.segments[0].sampling.unit

    @property
    def adjacency(self):
        return self.segments[0].sampling.adjacency

    @property
    def data_set(self):
        return self.segments[0].data_set

    @property
    def is_heuristic(self):
        """Whether its sampling is one for which epsilon is not proven."""
        return any(segment.sampling.is_heuristic for segment in self.segments)


def claims(ledger, delta, accountant="auto"):
    """The `Claim`s that `statement` puts into words; none where no step was taken."""
    segments = [segment for segment in ledger.segments if segment.steps]
    return [_claim(group, delta, accountant) for group in composable(segments)]


def not_covered(found):
    """What these claims do not speak of, a list of phrases."""
    units = dict.fromkeys(claim.unit for claim in found)
    beside = [segment for claim in found for segment in claim.segments if segment.purpose]
    words = {
        "unit": " or ".join(units),
        "but_scores": " (but by the scores above)" if any(map(_are_scores, beside)) else "",
        "but_statistics": ", but for the statistics above"
        if not all(map(_are_scores, beside))
        else "",
    }
    # By a privacy filter, which covers it.
    held = bool(found) and all(claim.filter is not None for claim in found)
    lines = (line for line in _NOT_COVERED if not (held and line is _ADDED))
    return [line.format(**words) for line in lines]


def _are_scores(segment):
    """Whether what was released says how good a model is."""
    return any(release.statistic == "scores" for release in segment.releases)


def _claim(segments, delta, accountant):
    kept = kept_filter(segments)
    if kept is not None:
        guarantee = promised(segments, delta, accountant)
        epsilon, risk = guarantee.epsilon, risk_of(segments, accountant)
        return Claim(segments, epsilon, epsilon, *guarantee, risk, kept)
    spent = price_of(segments, delta, accountant)
    lower = lower_bound(segments, delta, accountant, spent.epsilon)
    states = [segment.state for segment in segments]
    planned = [each for each in scenarios(segments) if [s.state for s in each] != states]
    prices = [spent, *(price_of(each, delta, accountant) for each in planned)]
    dearest = max(prices, key=lambda price: price.epsilon)
    if is_lost(segments):
        dearest = dearest._replace(epsilon=math.inf)
    if accountant in ("auto", "pld"):
        risk = risk_of(segments, accountant)
    else:
        risk = of_guarantee(dearest.epsilon, delta, **whom(segments))
    return Claim(segments, lower, spent.epsilon, *dearest, risk)


def _claimed(claim, delta):
    """The paragraphs of a guarantee: ε, the neighbours, and whether it is that of a plan."""
    sampling, unit = claim.segments[0].sampling, claim.unit
    neighbours = _NEIGHBOURS[claim.adjacency].format(unit=unit)
    if sampling.examples_per_unit is not None:
        neighbours += f"; one {unit} stands for all examples of that {unit}"
    yield _guarantee(claim, delta)
    yield f"Neighbouring data sets: {neighbours} ({claim.adjacency})."
    if math.isfinite(claim.promised):
        yield " ".join(["What it means:", claim.risk.sentence, *claim.risk.remarks])
    yield from _choices(claim, delta)
    if claim.promised > claim.epsilon:
        yield (
            "Stopped early: the training ended before it had run all of the steps that were "
            "planned, for another reason than the end of its data or of its budget. Such a stop "
            "may have looked at results, so the guarantee is that of the plan. If the number of "
            f"steps had been fixed beforehand: epsilon = {rounded_up(claim.epsilon)} at delta = "
            f"{delta:g}."
        )
    if claim.filter is None and any(is_unknown(segment) for segment in claim.segments):
        yield (
            "Stopped early: the training was ended by something else than its data or its budget, "
            "and how many steps were planned is not known. Epsilon is that of the steps that ran: "
            "the guarantee holds only if the stop was fixed beforehand."
        )


def _choices(claim, delta):
    """Which choices may have looked at results."""
    if claim.filter is not None:
        text = (
            "Choices: this is the budget of a privacy filter "
            f"({claim.filter}), fixed before the first step, and not what was spent. It holds "
            "whatever was chosen after looking at what earlier steps released: noise, sampling, "
            "number of steps, when to stop."
        )
        if delta != claim.filter.delta:
            text += f" At delta = {delta:g} it is converted from the limit of the filter's sum."
        yield text
        return
    if any(segment.filter is not None for segment in claim.segments):
        yield (
            "Choices: steps ran under a privacy filter, but not all of them were held against one "
            "limit together and kept it, as of ledgers that were merged, so that its guarantee is "
            "lost."
        )
    kinds = ((each.releases, each.schedule, each.sampling) for each in claim.segments)
    first = next(kinds)
    several = sum(segment.purpose is not None for segment in claim.segments) > 1
    if several or any(kind != first for kind in kinds):
        yield (
            "Choices: not all that was released has the same noise and sampling. Noise, sampling, "
            "number and order of the releases count as fixed beforehand: the guarantee does not "
            "cover a choice of them that looked at earlier results."
        )


def _apart(found):
    """What several guarantees mean for who is in all of the data."""
    data_sets = {claim.data_set for claim in found}
    if len(data_sets) > 1:
        yield (
            f"No {found[0].unit} is in two of these data sets, as was stated: for each the "
            "guarantee of its own holds. For one who is in several the epsilons add up, and so do "
            "the deltas."
        )
    if len(found) > len(data_sets):
        yield (
            f"These are {len(found)} guarantees, of steps that protect different units or speak "
            "of different neighbouring data sets. Each holds for its own steps. If they are about "
            "the same people, each first becomes that of a group (group_size): of as many units as "
            "a person has in the data, and of two where add_or_remove_one is beside replace_one. "
            "Then the epsilons add up, and so do the deltas."
        )


def _guarantee(claim, delta):
    if math.isinf(claim.promised):
        return f"NO DIFFERENTIAL PRIVACY: epsilon is infinite at delta = {delta:g}. " + " ".join(
            f"Steps {segment.first_step} to {segment.last_step - 1} released the "
            f"{_in_words(release)} of query {release.query} without noise (multiplier 0)."
            for segment in claim.segments
            for release in segment.releases
            if release.multiplier == 0 and not release.is_public
        )
    heuristic = " (HEURISTIC, not proven: see the sampling below)"
    seeds = [name for name in conditions(claim.segments) if name.endswith("seed")]
    secret = f" against those who do not know the {' or the '.join(seeds)}" if seeds else ""
    return (
        f"Guarantee: differential privacy for one {claim.unit}{_of(claim.data_set)} with epsilon = "
        f"{rounded_up(claim.promised)} at delta = {delta:g}"
        f"{heuristic if claim.is_heuristic else ''}{secret}."
    )


def _of(data_set):
    return "" if data_set == TRAINING else f" of the {data_set} data"


def _protected(segments):
    released = ["every intermediate model, the final one"] * any(not s.purpose for s in segments)
    released += ["the statistics and scores below"] * any(s.purpose for s in segments)
    return f"Protected: {', '.join(released)}, and all that is computed from them."


def _parts(segments):
    """The paragraphs on what was done: the training, and what was released beside it."""
    trained = [segment for segment in segments if segment.purpose is None]
    yield from (_training(segment, place, trained) for place, segment in enumerate(trained, 1))
    beside = [segment for segment in segments if segment.purpose is not None]
    yield from map(_beside, beside)
    if any(map(_are_scores, beside)):
        yield _OPTIMISTIC


def _beside(segment):
    """What was released beside the training, in words."""
    sampling = segment.sampling
    often = "once" if segment.steps == 1 else f"{segment.steps} times"
    title = "Scores" if _are_scores(segment) else "Statistic"
    norm = segment.releases[0].mechanism.norm.upper()
    return (
        f"{title}: {segment.purpose}, released {often}; {_noises(segment)}, times the {norm} "
        f"sensitivity {segment.clip_norm:.6g}; of n = {sampling.num_examples} {sampling.unit}s"
        f"{_of(segment.data_set)}."
    )


def _noises(segment):
    return ", ".join(
        f"{type(release.mechanism).__name__} noise on the {_in_words(release)} with noise "
        f"multiplier sigma = {release.multiplier:.6g}{_of_counts(release, segment.sampling.unit)}"
        for release in segment.releases
        if not release.is_public
    )


def _training(segment, place, segments):
    sampling = segment.sampling
    title = "Training" if len(segments) == 1 else f"Training, part {place} of {len(segments)}"
    noises = _noises(segment)
    alphas = segment.schedule.alphas(segment.first_step, min(segment.steps, 10**6))
    if alphas.min() != alphas.max():
        noises += f" times schedule factors from {alphas.min():.4g} to {alphas.max():.4g}"
    if isinstance(segment.clip_norm, str):
        clipping = f", clip norm C that changes with the step, {segment.clip_norm}"
    else:
        clipping = "" if segment.clip_norm is None else f", clip norm C = {segment.clip_norm:.6g}"
    selection = f" {segment.selection.describe()}" if segment.selection else ""
    changes = sampling.batch_sizes is not None
    size = "B that changes with the step" if changes else f"B = {sampling.batch_size}"
    open_plan = segment.steps < segment.planned_steps < math.inf
    of_planned = f" of {segment.planned_steps} planned" if open_plan else ""
    return (
        f"{title}: {segment.steps} steps{of_planned}, {noises}{clipping}, expected batch size "
        f"{size}, n = {sampling.num_examples} {sampling.unit}s. "
        f"{sampling.describe()}{selection}"
    )


def _accounting(claim):
    version = importlib.metadata.version("dp-accounting")
    names = " and ".join(_ACCOUNTANTS.get(name, name) for name in claim.accountants)
    text = f"Accounting: {names}, dp-accounting {version}."
    if len(claim.asked) > len(claim.accountants):
        asked = " and ".join(name if name == "pure" else name.upper() for name in claim.asked)
        text += f" It is the smallest of the bounds by {asked}."
    if claim.lower < claim.epsilon:
        text += (
            f" The noise schedule's many levels were rounded down for it: priced one by one, "
            f"epsilon would lie between {claim.lower:.6g} and {claim.epsilon:.6g}."
        )
    return text


def _in_words(release):
    return release.statistic.replace("_", " ")


def _of_counts(release, unit):
    """How the noise is divided between gradients and counts, if there are counts."""
    if release.rows is not None:
        return _of_rows(release, unit)
    if release.count_noise is None:
        return ""
    return (
        f" for both (the counts are of {unit}s whose gradient is not clipped, with noise of std "
        f"{release.count_noise:.6g} on each)"
    )


def _of_rows(release, unit):
    """How the rows of tables are chosen."""
    text = ""
    if release.rows.threshold is not None:
        on_counts, on_sum = release.rows.multipliers(release.multiplier)
        text = (
            f" for both (rows of tables are chosen by counts of the {unit}s that touch them, with "
            f"{on_counts:.6g} on the counts and {on_sum:.6g} on the gradients)"
        )
    if release.rows.given:
        text += (
            ", of rows that were said to be public, or to have been released; if they were found "
            "in the private data, this statement does not hold"
        )
    return text


def _public(segments):
    """What was declared public, if anything."""
    used = {release.statistic for segment in segments for release in segment.releases}
    if "public_mean" in used:
        yield (
            "Public data: the training also used rows that were declared public. They are not "
            "protected, neither clipped nor noised, and nothing is claimed about them."
        )
    if "public_values" in used:
        yield (
            "Public data: the training also used side information (a second moment or a geometry) "
            "that was given as public. Nothing is claimed about the data that it was computed "
            "from."
        )


def _group(claim, size, delta, accountant):
    who = f"for any {size} {claim.unit}s together"
    histories = [claim.segments]
    if claim.filter is None:
        histories += scenarios(claim.segments)
    found = [group_epsilon(each, size, delta, accountant) for each in histories]
    epsilon = max(group.epsilon for group in found)
    if math.isinf(epsilon):
        return (
            f"Groups: {who} no guarantee follows at delta = {delta:g}. Choose more noise or a "
            "larger delta."
        )
    text = f"Groups: {who}, epsilon = {rounded_up(epsilon)} at delta = {delta:g}"
    if any(group.is_joint for group in found):
        return f"{text}, where all of them take part or none does."
    return f"{text}."


def rounded_up(epsilon):
    """Three decimals, rounded up, so that a text never claims less than was spent."""
    return str(decimal.Decimal(epsilon).quantize(decimal.Decimal("0.001"), decimal.ROUND_CEILING))


def _bullets(title, lines):
    filled = (
        textwrap.fill(line, 80, initial_indent="- ", subsequent_indent="  ") for line in lines
    )
    return "\n".join([title, *filled])
