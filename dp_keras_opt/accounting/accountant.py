"""Epsilon of what was released, by dp_accounting's accountants."""

import contextlib
import dataclasses
import logging
import math
import warnings

import dp_accounting

from dp_keras_opt.accounting.events import MAX_DISTINCT
from dp_keras_opt.accounting.pure import PureAccountant
from dp_keras_opt.accounting.replace_one import ReplaceOneAccountant
from dp_keras_opt.checks import is_number

_ACCOUNTANTS = {
    "rdp": dp_accounting.rdp.RdpAccountant,
    "pld": dp_accounting.pld.PLDAccountant,
    "pure": PureAccountant,
}


def make_accountant(name, sampling):
    """A fresh accountant for events of `sampling`.

    Args:
        name: "rdp" (Rényi divergences), "pld" (privacy loss distributions: tighter, slower), or
            "pure" (sums of pure epsilons, for Laplace noise).
        sampling: the `Sampling` of the events.

    Returns:
        A `dp_accounting.PrivacyAccountant` whose relation counts the sensitivity once: the
        events of `events.py` carry it already. RDP prices subsets of fixed size under
        REPLACE_ONE and does not double there; everything else goes as ADD_OR_REMOVE_ONE, since
        RDP refuses Poisson under REPLACE_ONE, and whether PLD doubles there depends on the
        version. A replaced example in a Poisson batch has under PLD a bound of its own
        (`replace_one.py`); RDP is told σ/2, which exceeded the truth wherever it was integrated.

    Raises:
        ValueError: the name is unknown, or the accountant cannot price this sampling.
    """
    _check_name(name)
    if name == "pld" and sampling.kind == "without_replacement":
        raise ValueError(
            "accountant='pld' cannot price sampling without replacement: dp_accounting has no "
            "privacy loss distribution for it. Use accountant='rdp', or Poisson sampling."
        )
    replaced = name == "pld" and sampling.adjacency == "replace_one"
    kind = ReplaceOneAccountant if replaced else _ACCOUNTANTS[name]
    return kind(neighboring_relation=_relation(sampling))


def epsilon_of(segments, delta, accountant="rdp", exact=False):
    """Epsilon of the composition of `segments` at `delta`.

    Args:
        segments: iterable of `segment.Segment`; they may differ in noise and sampling, but must
            share one adjacency and one privacy unit.
        delta: probability that the guarantee fails, in (0, 1); should be well below 1/n. 0 where
            all noise is Laplace noise.
        accountant: "rdp", which prices Laplace noise by adding pure epsilons; "pld"; or "pure".
        exact: whether each of more than 400 distinct noise levels is priced by itself, which can
            take minutes, instead of being rounded down.

    Returns:
        A float: 0.0 if nothing was released, `math.inf` if something was without noise.

    Raises:
        ValueError: delta is not a number in (0, 1), the accountant is unknown or cannot price
            the noise or the sampling, or the segments do not share adjacency and unit.
    """
    segments = [segment for segment in segments if segment.steps]
    check_delta(delta, segments, accountant)
    return compose(segments, delta, accountant, None if exact else MAX_DISTINCT)


def epsilon_bracket(segments, delta, accountant="rdp"):
    """Two bounds on what `epsilon_of(..., exact=True)` would give, in the time of two that round.

    Returns:
        (lower, upper): upper is what `epsilon_of` gives; they are equal where nothing was rounded.
    """
    upper = epsilon_of(segments, delta, accountant)
    segments = [segment for segment in segments if segment.steps]
    if not any(segment.is_rounded for segment in segments):
        return upper, upper
    return compose(segments, delta, accountant, optimistic=True), upper


def check_delta(delta, segments, accountant="rdp"):
    """Refuses a delta that is not a number in (0, 1), warns where it is not below 1/n."""
    if is_number(delta) and delta == 0 and accountant != "pld":
        if all(segment.is_pure for segment in segments):
            return
        raise ValueError(
            f"delta must be a number in (0, 1) for this noise; received {delta!r}. Only steps "
            "that all have Laplace noise are private at delta=0. Choose delta well below "
            "1/num_examples."
        )
    if not (is_number(delta) and 0 < delta < 1):
        raise ValueError(
            f"delta must be a number in (0, 1), e.g. 1e-6; received {delta!r}. "
            "Choose it well below 1/num_examples."
        )
    n = max((segment.sampling.num_examples for segment in segments), default=1)
    if delta * n >= 1 and n > 1:
        warnings.warn(
            f"delta={delta:g} is not below 1/num_examples = {1 / n:.3g}: publishing a random "
            "example in the clear would satisfy such a guarantee. Choose a smaller delta.",
            stacklevel=3,
        )


def name_for(accountant, segment):
    """The accountant that prices a segment: "rdp" leaves Laplace noise to "pure"."""
    return "pure" if accountant == "rdp" and segment.is_pure else accountant


def compose(segments, delta, accountant="rdp", max_distinct=MAX_DISTINCT, optimistic=False):
    """`epsilon_of` for arguments that have been checked; see `events.segment_event`."""
    _check_name(accountant)
    _check_composable(segments)
    accountants = {}
    with quiet():
        for segment in segments:
            name = name_for(accountant, segment)
            key = name, _relation(segment.sampling)
            if key not in accountants:
                accountants[key] = make_accountant(name, segment.sampling)
            try:
                accountants[key].compose(segment.event(max_distinct, optimistic))
            except dp_accounting.UnsupportedEventError as error:
                what = "a private selection of" if segment.selection else "this noise with"
                raise ValueError(
                    f"accountant={name!r} cannot price {what} {segment.sampling.kind!r} sampling: "
                    f"{error}"
                ) from error
    # Subsets of fixed size need an accountant of their own in dp_accounting: beside another
    # sampling, the two guarantees are added, each at its share of delta. Pure ones need none.
    share = delta / max(sum(name != "pure" for name, _ in accountants), 1)
    return float(sum(each.get_epsilon(share) for each in accountants.values()))


def check_budget(epsilon, delta, accountant, segments=()):
    """Refuses what cannot be a budget for these segments, or for none that have begun yet."""
    if not (is_number(epsilon) and epsilon >= 0):
        raise ValueError(f"epsilon must be a number >= 0; received {epsilon!r}.")
    check_delta(delta, segments, accountant)
    _check_name(accountant)


def affordable_steps(past, current, limit, epsilon, delta, accountant="rdp"):
    """How many further steps of the segment `current`, at most `limit`, keep within epsilon.

    See `Ledger.affordable_steps`; `past` are the segments before it.
    """
    check_budget(epsilon, delta, accountant, (*past, current))
    past = [segment for segment in past if segment.steps]

    def fits(more):
        longer = dataclasses.replace(current, steps=current.steps + more)
        return compose([*past, longer], delta, accountant) <= epsilon

    if math.isinf(epsilon):
        return limit
    if not limit or not fits(1):
        return 0
    fit, too_many = 1, None  # doubles until it no longer fits, then bisects
    while too_many is None or too_many - fit > 1:
        if too_many is None and fit == limit:
            return limit
        middle = min(2 * fit, limit) if too_many is None else (fit + too_many) // 2
        if fits(middle):
            fit = middle
        else:
            too_many = middle
    return fit


def _check_name(name):
    if not isinstance(name, str) or name not in _ACCOUNTANTS:
        raise ValueError(f"accountant must be one of {list(_ACCOUNTANTS)}; received {name!r}.")


@contextlib.contextmanager
def quiet():
    """Drops the log line for each Rényi order that does not converge.

    dp_accounting leaves such orders out, which can only raise epsilon, and says so at every
    evaluation; at small noise that is hundreds of lines.
    """

    def keep(record):
        return "failed to converge" not in record.getMessage()

    logger = logging.getLogger("absl")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _relation(sampling):
    relations = dp_accounting.NeighboringRelation
    if sampling.kind == "without_replacement":
        return relations.REPLACE_ONE
    return relations.ADD_OR_REMOVE_ONE


def composable(segments):
    """The segments in groups that each compose to one guarantee, in the order in which they began.

    Returns:
        A list of lists of segments of one privacy unit and one adjacency.
    """
    groups = {}
    for segment in segments:
        key = segment.sampling.unit, segment.sampling.adjacency
        groups.setdefault(key, []).append(segment)
    return list(groups.values())


def _check_composable(segments):
    for name, why in (
        ("adjacency", "they speak of different neighbouring data sets"),
        ("unit", "they protect different units"),
    ):
        found = sorted({getattr(segment.sampling, name) for segment in segments})
        if len(found) > 1:
            raise ValueError(
                f"Steps with {name} {' and '.join(map(repr, found))} do not compose to one "
                f"guarantee: {why}. Train all of them with the same {name}, or read the "
                "statement, which lists them apart."
            )
