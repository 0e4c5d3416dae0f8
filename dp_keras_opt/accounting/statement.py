"""The guarantee in words: what is protected, on which assumptions, and what is not."""

import decimal
import importlib.metadata
import math
import textwrap

from dp_keras_opt.accounting.accountant import epsilon_bracket, name_for
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

_NOT_COVERED = (
    "metrics and losses shown during training, which are computed from the data without noise;",
    "choices driven by validation data that are not public, such as early stopping;",
    "hyper-parameter tuning: each further training run on the same data adds to epsilon;",
    "preprocessing computed from the data (vocabularies, Normalization.adapt);",
    "the number of {unit}s, and the count of {unit}s with non-finite gradients;",
    "floating-point effects: the proofs are about real numbers, the noise is drawn in float32.",
)


def statement(ledger, delta, accountant="rdp", group_size=1):
    """The privacy guarantee of a ledger as readable text.

    Follows the reporting recommendations of Ponomareva et al. 2023, "How to DP-fy ML", 5.3.

    Args:
        ledger: a `Ledger`, planned (`Ledger.of`) or recorded.
        delta: probability that the guarantee fails, in (0, 1); 0 with Laplace noise.
        accountant: "rdp", "pld" or "pure".
        group_size: k, to add the guarantee for any k units together.

    Returns:
        Text of several paragraphs. Epsilons are rounded up to the digits shown.

    Raises:
        ValueError: an argument is out of range, or the ledger's steps do not compose.
    """
    group_size = whole_number(group_size, "group_size", 1, "Give the number of units in a group.")
    lower, epsilon = epsilon_bracket(ledger.segments, delta, accountant)
    segments = [segment for segment in ledger.segments if segment.steps]
    if not segments:
        return "Privacy statement\n\nNo training step was taken: nothing was released.\n"

    sampling = segments[0].sampling
    unit = sampling.unit
    neighbours = _NEIGHBOURS[sampling.adjacency].format(unit=unit)
    if sampling.examples_per_unit is not None:
        neighbours += f"; one {unit} stands for all examples of that {unit}"
    paragraphs = [
        "Privacy statement",
        _guarantee(segments, epsilon, delta),
        f"Neighbouring data sets: {neighbours} ({sampling.adjacency}).",
        *_public(segments),
        "Protected: every intermediate model, the final one, and all that is computed from them.",
        *(_training(segment, place, segments) for place, segment in enumerate(segments, 1)),
        _accounting(segments, accountant, lower, epsilon),
    ]
    if group_size > 1:
        paragraphs.append(_group(unit, epsilon, delta, group_size))
    filled = [textwrap.fill(paragraph, 80) for paragraph in paragraphs]
    not_covered = [line.format(unit=unit) for line in _NOT_COVERED]
    return "\n\n".join([*filled, _bullets("Not covered:", not_covered)]) + "\n"


def group_privacy(epsilon, delta, size):
    """(epsilon, delta) for `size` units together (Vadhan 2017, lemma 2.2), delta at most 1."""
    if math.isinf(epsilon):
        return math.inf, 1.0
    try:
        growth = math.expm1(size * epsilon) / math.expm1(epsilon) if epsilon else size
    except OverflowError:
        growth = math.inf
    return size * epsilon, min(delta * growth, 1.0)


def _guarantee(segments, epsilon, delta):
    unit = segments[0].sampling.unit
    if math.isinf(epsilon):
        return f"NO DIFFERENTIAL PRIVACY: epsilon is infinite at delta = {delta:g}. " + " ".join(
            f"Steps {segment.first_step} to {segment.last_step - 1} released the "
            f"{_in_words(release)} of query {release.query} without noise (multiplier 0)."
            for segment in segments
            for release in segment.releases
            if release.multiplier == 0 and not release.is_public
        )
    heuristic = " (HEURISTIC, not proven: see the sampling below)"
    return (
        f"Guarantee: differential privacy for one {unit} with epsilon = {rounded_up(epsilon)} at "
        f"delta = {delta:g}{heuristic if any(s.sampling.is_heuristic for s in segments) else ''}."
    )


def _training(segment, place, segments):
    sampling = segment.sampling
    title = "Training" if len(segments) == 1 else f"Training, part {place} of {len(segments)}"
    noises = ", ".join(
        f"{type(release.mechanism).__name__} noise on the {_in_words(release)} with noise "
        f"multiplier sigma = {release.multiplier:.6g}"
        for release in segment.releases
        if not release.is_public
    )
    alphas = segment.schedule.alphas(segment.first_step, min(segment.steps, 10**6))
    if alphas.min() != alphas.max():
        noises += f" times schedule factors from {alphas.min():.4g} to {alphas.max():.4g}"
    clipping = "" if segment.clip_norm is None else f", clip norm C = {segment.clip_norm:.6g}"
    selection = f" {segment.selection.describe()}" if segment.selection else ""
    return (
        f"{title}: {segment.steps} steps, {noises}{clipping}, expected batch size "
        f"B = {sampling.batch_size}, n = {sampling.num_examples} {sampling.unit}s. "
        f"{sampling.describe()}{selection}"
    )


def _accounting(segments, accountant, lower, epsilon):
    names = dict.fromkeys(_ACCOUNTANTS[name_for(accountant, segment)] for segment in segments)
    version = importlib.metadata.version("dp-accounting")
    text = f"Accounting: {' and '.join(names)}, dp-accounting {version}."
    if lower < epsilon:
        text += (
            f" The noise schedule's many levels were rounded down for it: priced one by one, "
            f"epsilon would lie between {lower:.6g} and {epsilon:.6g}."
        )
    return text


def _in_words(release):
    return release.statistic.replace("_", " ")


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
            "Public data: the training also used side information (a second moment) that was "
            "given as public. Nothing is claimed about the data that it was computed from."
        )


def _group(unit, epsilon, delta, size):
    group_epsilon, group_delta = group_privacy(epsilon, delta, size)
    if group_delta >= 1:
        return (
            f"Groups: for {size} {unit}s together delta would be 1 (capped): no guarantee "
            "follows. Choose a smaller delta or more noise."
        )
    return (
        f"Groups: for any {size} {unit}s together, epsilon = {rounded_up(group_epsilon)} at "
        f"delta = {decimal.Context(3, decimal.ROUND_CEILING).create_decimal(group_delta):.2e}."
    )


def rounded_up(epsilon):
    """Three decimals, rounded up, so that a text never claims less than was spent."""
    return str(decimal.Decimal(epsilon).quantize(decimal.Decimal("0.001"), decimal.ROUND_CEILING))


def _bullets(title, lines):
    filled = (
        textwrap.fill(line, 80, initial_indent="- ", subsequent_indent="  ") for line in lines
    )
    return "\n".join([title, *filled])
