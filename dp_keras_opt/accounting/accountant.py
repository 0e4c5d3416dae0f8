"""Epsilon of what was released, by the accountants that apply.

References: "rdp": Mironov, "Rényi differential privacy", CSF 2017, arXiv:1702.07476, with the
conversion to (ε, δ) of Canonne, Kamath and Steinke, "The discrete Gaussian for differential
privacy", NeurIPS 2020, arXiv:2004.00010, proposition 12, by dp_accounting. "pld": see
`loss_distributions.py`; "pure": see `pure.py`; for balls in bins: see `random_allocation.py`.
"""

import contextlib
import dataclasses
import functools
import logging
import math
import warnings
from typing import NamedTuple

import dp_accounting
from scipy import optimize

from dp_keras_opt.accounting.early_stops import scenarios
from dp_keras_opt.accounting.events import MAX_DISTINCT
from dp_keras_opt.accounting.loss_distributions import LossDistributionAccountant
from dp_keras_opt.accounting.privacy_filters import (
    PrivacyFilter,
    common_filter,
    is_lost,
    kept_filter,
)
from dp_keras_opt.accounting.pure import PureAccountant
from dp_keras_opt.accounting.random_allocation import UnamplifiedRdpAccountant
from dp_keras_opt.accounting.replace_one import ProvedRdpAccountant
from dp_keras_opt.checks import is_number

_ACCOUNTANTS = ("auto", "rdp", "pld", "pure")

#: How many distinct levels of noise RDP is given for a first look, and then a second.
_ROUGHLY = (8, 32)
#: A run that was calibrated for a budget keeps it, on whatever machine: relative.
_TOLERANCE = 1e-6


class _Unpriced(ValueError):
    """An accountant cannot price some steps."""


def make_accountant(name, sampling):
    """A fresh accountant for events of `sampling`.

    Args:
        name: "rdp" (Rényi divergences), "pld" (privacy loss distributions), or "pure" (sums of
            pure epsilons, for Laplace noise).
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
    if name in sampling.unpriced_by:
        raise _Unpriced(
            f"accountant={name!r} cannot price {sampling.kind!r} sampling: "
            f"{sampling.unpriced_by[name]}"
        )
    relation = sampling.neighboring_relation
    if name == "pld":
        return LossDistributionAccountant(relation, sampling.adjacency == "replace_one")
    return {"rdp": UnamplifiedRdpAccountant, "pure": PureAccountant}[name](
        neighboring_relation=relation
    )


def epsilon_of(segments, delta, accountant="auto", exact=False):
    """Epsilon of the composition of `segments` at `delta`.

    Args:
        segments: iterable of `segment.Segment`; they may differ in noise and sampling, but must
            share one adjacency and one privacy unit.
        delta: probability that the guarantee fails, in (0, 1); should be well below 1/n. 0 where
            all noise is Laplace noise.
        accountant: "auto", the smallest of the bounds that apply; "rdp", which prices Laplace
            noise by adding pure epsilons; "pld"; or "pure".
        exact: whether each of more than 400 distinct noise levels is priced by itself, which can
            take minutes, instead of being rounded down.

    Returns:
        A float: 0.0 if nothing was released, `math.inf` if something was without noise.

    Raises:
        ValueError: delta is not a number in (0, 1), the accountant is unknown or cannot price
            the noise or the sampling, or the segments do not share adjacency and unit.
    """
    segments, accountant = _spent(segments, accountant)
    check_delta(delta, segments, accountant)
    return compose(segments, delta, accountant, None if exact else MAX_DISTINCT)


def price_of(segments, delta, accountant="auto"):
    """What `epsilon_of` gives, as a `Price`."""
    segments, accountant = _spent(segments, accountant)
    check_delta(delta, segments, accountant)
    return price(segments, delta, accountant)


def _spent(segments, accountant):
    """The segments with steps, and the accountant for them, which those without may have set."""
    segments = list(segments)
    return [segment for segment in segments if segment.steps], chosen(segments, accountant)


def promised(segments, delta, accountant="auto"):
    """The `Price` that is guaranteed where results may have decided when to stop.

    That of the budget of a privacy filter, which covers all other choices, too; else of the
    dearest that was planned.
    """
    segments, accountant = _spent(segments, accountant)
    kept = kept_filter(segments)
    if kept is not None:
        check_delta(delta, segments, accountant)
        return Price(kept.epsilon_at(delta), (str(kept.filter),), (str(kept.filter),))
    if is_lost(segments):
        return Price(math.inf, (accountant,) if isinstance(accountant, str) else (), ())
    prices = (price_of(each, delta, accountant) for each in scenarios(segments))
    return max(prices, key=lambda each: each.epsilon)


def chosen(segments, accountant):
    """The accountant of these segments: that of the privacy filter, if they ran under one.

    Raises:
        ValueError: they did, and another accountant was asked for.
    """
    held = common_filter(segments)
    if held is None or accountant == held.filter:
        return accountant
    if accountant == "auto":  # the smallest bound that is proved, and no other one is
        return held.filter
    raise ValueError(
        f"accountant={str(accountant)!r} does not bound steps that ran under a privacy filter "
        f"({held}), since they may have been chosen by looking at results. Give that filter, or "
        "leave accountant out."
    )


def epsilon_bracket(segments, delta, accountant="auto"):
    """Two bounds on what `epsilon_of(..., exact=True)` would give, in the time of two that round.

    Returns:
        (lower, upper): upper is what `epsilon_of` gives; they are equal where nothing was rounded.
    """
    upper = epsilon_of(segments, delta, accountant)
    return lower_bound(segments, delta, accountant, upper), upper


def lower_bound(segments, delta, accountant, upper):
    """The lower bound of `epsilon_bracket`, where the upper one is known."""
    segments = [segment for segment in segments if segment.steps]
    if not any(segment.is_rounded for segment in segments):
        return upper
    return compose(segments, delta, accountant, optimistic=True)


def check_delta(delta, segments, accountant="auto"):
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


class Price(NamedTuple):
    """Epsilon, and who computed it.

    Attributes:
        epsilon: an upper bound.
        accountants: the names of the accountants that gave it, "rdp", "pld" or "pure", or the
            privacy filter in words.
        asked: of which accountants it is the smallest.
    """

    epsilon: float
    accountants: tuple[str, ...]
    asked: tuple[str, ...]


def compose(segments, delta, accountant="auto", max_distinct=MAX_DISTINCT, optimistic=False):
    """`epsilon_of` for arguments that have been checked; see `events.segment_event`."""
    return price(segments, delta, accountant, max_distinct, optimistic).epsilon


def price(segments, delta, accountant="auto", max_distinct=MAX_DISTINCT, optimistic=False):
    """The `Price` of the composition of segments; arguments as of `compose`.

    "auto" is the smallest of the bounds that hold for all of the segments together. It is never
    the sum of what is smallest for each: where segments need different accountants, delta is
    divided between these beforehand.
    """
    _check_name(accountant)
    check_composable(segments)
    accountant = chosen(segments, accountant)
    with quiet():
        if isinstance(accountant, PrivacyFilter):
            epsilon = accountant.epsilon(segments, delta, max_distinct, optimistic)
            return Price(epsilon, (str(accountant),), (str(accountant),))
        if accountant != "auto":
            return _priced_by(accountant, segments, delta, max_distinct, optimistic)
        return _smallest(segments, delta, max_distinct, optimistic)


def _smallest(segments, delta, max_distinct, optimistic):
    """The smallest of the bounds that are proved."""
    levels = max_distinct, optimistic
    by_rdp = functools.partial(_priced_by, "rdp", is_proved=True)
    with_losses = [segment for segment in segments if _has_losses(segment)]
    others = [segment for segment in segments if not _has_losses(segment)]
    if not with_losses:
        return by_rdp(segments, delta, *levels)
    # Each of the accountants that must be told apart has its share of delta, as in `_priced_by`.
    shares = 1 + len({_key("rdp", segment) for segment in others if not segment.is_pure})
    found = _priced_by("pld", with_losses, delta / shares, *levels)
    if others:
        rest = by_rdp(others, delta * (shares - 1) / shares, *levels)
        names = dict.fromkeys(found.accountants + rest.accountants)
        found = Price(found.epsilon + rest.epsilon, tuple(names), ())
    try:
        # RDP is slow for many levels of noise. Fewer that are no less tell that it is not needed.
        looks = (by_rdp(segments, delta, most, True) for most in _ROUGHLY)
        if all(look.epsilon < found.epsilon for look in looks):
            found = min(found, by_rdp(segments, delta, *levels), key=lambda each: each.epsilon)
    except _Unpriced:
        return found
    return found._replace(asked=("pld", *_names("rdp", segments)))


def loss_distribution(segments, max_distinct=MAX_DISTINCT):
    """The `PrivacyLossDistribution` of the composition of segments; None where it has none."""
    if not all(map(_has_losses, segments)):
        return None
    accountants = {}
    for segment in segments:
        made = make_accountant("pld", segment.sampling)
        found = accountants.setdefault(segment.sampling.neighboring_relation, made)
        found.compose(segment.event(max_distinct))
    return next(iter(accountants.values())).composed() if len(accountants) == 1 else None


def _has_losses(segment):
    """Whether PLD can price a segment."""
    if "pld" in segment.sampling.unpriced_by:
        return False
    return make_accountant("pld", segment.sampling).supports(segment.event(2))


def _key(accountant, segment):
    """What must be the same for segments to be composed by one of dp_accounting's accountants.

    "rdp" leaves Laplace noise to "pure".
    """
    name = "pure" if accountant == "rdp" and segment.is_pure else accountant
    return name, segment.sampling.neighboring_relation


def _priced_by(accountant, segments, delta, max_distinct, optimistic, is_proved=False):
    """The `Price` by one accountant."""
    accountants = {}
    for segment in segments:
        key = name, relation = _key(accountant, segment)
        if key not in accountants:
            accountants[key] = make_accountant(name, segment.sampling)
            if is_proved and name == "rdp" and segment.sampling.adjacency == "replace_one":
                accountants[key] = ProvedRdpAccountant(neighboring_relation=relation)
        try:
            accountants[key].compose(segment.event(max_distinct, optimistic))
        except dp_accounting.UnsupportedEventError as error:
            what = "a private selection of" if segment.selection else "this noise with"
            raise _Unpriced(
                f"accountant={name!r} cannot price {what} {segment.sampling.kind!r} sampling: "
                f"{error}"
            ) from error
    # Subsets of fixed size need an accountant of their own in dp_accounting: beside another
    # sampling, the two guarantees are added, each at its share of delta. Pure ones need none.
    share = delta / max(sum(name != "pure" for name, _ in accountants), 1)
    epsilon = float(sum(each.get_epsilon(share) for each in accountants.values()))
    names = _names(accountant, segments)
    return Price(epsilon, names, names)


def _names(accountant, segments):
    """The names of those that price the segments if "rdp" leaves Laplace noise to "pure"."""
    return tuple(dict.fromkeys(_key(accountant, each)[0] for each in segments)) or (accountant,)


def check_budget(epsilon, delta, accountant, segments=()):
    """Refuses what cannot be a budget for these segments, or for none that have begun yet."""
    if not (is_number(epsilon) and epsilon >= 0):
        raise ValueError(f"epsilon must be a number >= 0; received {epsilon!r}.")
    check_delta(delta, segments, accountant)
    _check_name(accountant)


def affordable_steps(past, current, limit, epsilon, delta, accountant="auto"):
    """How many further steps of the segment `current`, at most `limit`, keep within epsilon.

    See `Ledger.affordable_steps`; `past` are the segments before it.
    """
    accountant = chosen([*past, current], accountant)
    check_budget(epsilon, delta, accountant, (*past, current))
    past = [segment for segment in past if segment.steps]
    # The limit of a privacy filter is the guarantee, so that nothing may exceed it.
    tolerance = 0.0 if isinstance(accountant, PrivacyFilter) else _TOLERANCE

    if math.isinf(epsilon):
        return limit

    fit, too_many = 0, None

    @functools.cache
    def spent(more):
        nonlocal fit, too_many
        longer = dataclasses.replace(current, steps=current.steps + more)
        found = compose([*past, longer], delta, accountant)
        if found <= epsilon * (1 + tolerance):
            fit = max(fit, more)
        else:
            too_many = more if too_many is None else min(too_many, more)
        return found

    def excess(log_more):
        found = spent(round(math.exp(log_more)))
        return math.log(min(max(found, epsilon / 16), epsilon * 16) / epsilon)

    if not limit:
        return 0
    spent(1)
    more = min(current.sampling.steps_per_epoch, limit)
    while too_many is None and fit < limit:  # by leaps, then by interpolation, then by halves
        more = min(more, limit)
        spent(more)
        more *= 4
    if fit and epsilon and too_many is not None and too_many - fit > 1:
        low, high = math.log(fit), math.log(too_many)
        if excess(low) < 0 < excess(high):
            optimize.brentq(excess, low, high, xtol=0.25 / too_many)
    while too_many is not None and too_many - fit > 1:
        spent((fit + too_many) // 2)
    return fit


def _check_name(name):
    if isinstance(name, PrivacyFilter):
        return
    if not isinstance(name, str) or name not in _ACCOUNTANTS:
        raise ValueError(
            f"accountant must be one of {list(_ACCOUNTANTS)}, or a privacy filter "
            f"(RenyiFilter(order), GaussianFilter()); received {name!r}."
        )


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


def composable(segments):
    """The segments in groups that each compose to one guarantee, in the order in which they began.

    Returns:
        A list of lists of segments of one data set, one privacy unit and one adjacency.
    """
    groups = {}
    for segment in segments:
        key = segment.data_set, segment.sampling.unit, segment.sampling.adjacency
        groups.setdefault(key, []).append(segment)
    return list(groups.values())


def check_composable(segments):
    """Refuses segments that do not compose to one guarantee."""
    for name, why in (
        ("adjacency", "they speak of different neighbouring data sets"),
        ("unit", "they protect different units"),
    ):
        found = sorted({getattr(segment.sampling, name) for segment in segments})
        if len(found) > 1:
            raise ValueError(
                f"Steps with {name} {' and '.join(map(repr, found))} do not compose to one "
                f"guarantee: {why}. Train all of them with the same {name}, or read the "
                "statement, which lists them apart. A budget is kept for later fits: where that is "
                "what asks, model.budget = None."
            )
    data_sets = sorted({segment.data_set for segment in segments})
    if len(data_sets) > 1:
        raise ValueError(
            f"Releases of the data sets {' and '.join(map(repr, data_sets))} do not add up: no "
            "unit is in two of them. Ask for one, or read the statement, which lists them apart."
        )
