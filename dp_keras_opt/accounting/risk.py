"""What a training may reveal of one person, in the terms in which attacks are measured.

An ε at one δ is a single point of what is known: read as odds it says that ε = 3 lets an attack be
right at 19 to 1, which no attack on a noisy sum comes near. The whole distribution of privacy
losses bounds each figure of an attack by itself.

Every figure here is an upper bound for whoever knows everything but whether this one person took
part: all other data, the settings, and each released step. It is one for whatever is computed from
these, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from dp_keras_opt.accounting import accountant as accountants
from dp_keras_opt.accounting.early_stops import is_unknown, scenarios
from dp_keras_opt.accounting.privacy_filters import is_lost, kept_filter
from dp_keras_opt.accounting.segment import CONDITIONS, TRAINING, conditions
from dp_keras_opt.accounting.trade_off import TradeOff, of_losses, of_pairs
from dp_keras_opt.checks import is_number, whole_number
from dp_keras_opt.types import Accountant

#: At these δ a training without a loss distribution is asked for its ε.
DELTAS = tuple(10.0**-k for k in range(1, 13))
#: The false-positive rates that texts name.
RATES = (0.001, 0.01, 0.1)
#: And the least rate of errors at which a Gaussian's μ is stated.
FLOOR = 1e-3

#: What the bounds follow from.
Basis: TypeAlias = Literal[
    "loss distribution", "epsilon and delta", "budget of a filter", "no release", "unbounded"
]

_QUESTIONS = {
    "add_or_remove_one": "whether one {unit} was in the {data_set} data",
    "zero_out": "whether one {unit} was in the {data_set} data",
    "replace_one": "which of two candidates was the {unit} in the {data_set} data",
}


@dataclasses.dataclass(frozen=True)
class Risk:
    """Bounds on what any attack gains, from all that a training released.

    Guarantee: no test, whatever it computes, exceeds the rates that are given here, if the sampling
    and the noise were those of the ledger. They hold for one unit and one attack on it: whoever
    attacks many people will find some, at these rates.

    Attributes:
        curves: bounds on the true-positive rate over the false-positive rate; the largest counts.
        basis: "loss distribution", of the whole training; "epsilon and delta", which is all that is
            known of it and says less; "budget of a filter", which a privacy filter kept, whatever
            was chosen under it; "no release"; or "unbounded", as without noise.
        unit: what is protected, such as "example" or "user".
        adjacency: which data sets are neighbours.
        is_heuristic: whether the sampling is accounted for by a heuristic, without proof.
        is_open: whether results may have stopped the training, and its plan is not known.
        data_set: which data the unit is in.
        conditions: what the bounds rest on besides, such as a seed that nobody knows; see
            `Ledger.begin`.
    """

    curves: tuple[TradeOff, ...] = dataclasses.field(repr=False)
    basis: Basis
    unit: str = "example"
    adjacency: str = "add_or_remove_one"
    is_heuristic: bool = False
    is_open: bool = False
    data_set: str = TRAINING
    conditions: tuple[str, ...] = ()

    def true_positive_rate(self, false_positive_rate: npt.ArrayLike) -> Any:
        """The highest share of members that an attack finds, where it takes so many others for one.

        Args:
            false_positive_rate: a number in [0, 1], or an array of them.
        """
        rates = np.asarray(false_positive_rate, np.float64)
        if not np.all((rates >= 0) & (rates <= 1)):
            raise ValueError(
                f"false_positive_rate must be in [0, 1]; received {false_positive_rate!r}."
            )
        found = np.max([curve(rates) for curve in self.curves], axis=0)
        return found if rates.ndim else float(found)

    @property
    def advantage(self) -> float:
        """The most that a true-positive rate exceeds its false-positive rate by: 0 is guessing."""
        return max(curve.advantage for curve in self.curves)

    def gaussian_mu(self, floor: float = FLOOR) -> float:
        """μ of a Gaussian mechanism that is no more private, at errors of `floor` and more.

        That is N(0, 1) against N(μ, 1). It speaks of tests whose false-positive and false-negative
        rates are both at least `floor`; infinite where there are none. At smaller errors subsampled
        noise may be less private than any Gaussian.
        """
        floor = _probability(floor, "floor", "e.g. 0.001")
        if floor >= 0.5:
            raise ValueError(f"floor must be below 0.5; received {floor!r}.")
        return max(curve.gaussian_mu(floor) for curve in self.curves)

    def precision(self, false_positive_rate: float, prior: float) -> float:
        """The highest share of members among those that an attack names.

        Args:
            false_positive_rate: at which it works, in (0, 1).
            prior: the share of members among those who may be one, in (0, 1).
        """
        rate = _probability(false_positive_rate, "false_positive_rate", "e.g. 0.01")
        prior = _probability(prior, "prior", "the share of members, e.g. 0.01")
        found = prior * self.true_positive_rate(rate)
        return found / (found + (1 - prior) * rate)

    def probability_of_posterior(self, posterior: float, prior: float) -> float:
        """How likely it is, at most, that what was released makes a member this certain to be one.

        Under Gaussian noise nothing bounds what the release may say; but this bounds how often.

        Args:
            posterior: the certainty of membership after the release, in (0, 1).
            prior: before it, in (0, 1).
        """
        posterior = _probability(posterior, "posterior", "e.g. 0.9")
        prior = _probability(prior, "prior", "the certainty before the release, e.g. 0.5")
        if posterior <= prior:
            return 1.0
        ratio = math.exp(_logit(prior) - _logit(posterior))
        return max(curve.most_with_ratio(ratio) for curve in self.curves)

    def reconstruction(self, candidates: int) -> float:
        """How likely a record is found, at most, of so many candidates that are equally likely."""
        candidates = whole_number(candidates, "candidates", 2, "Give the number of candidates.")
        return self.true_positive_rate(1 / candidates)

    @property
    def sentence(self) -> str:
        """The risk in one sentence, rounded up."""
        question = _QUESTIONS[self.adjacency].format(unit=self.unit, data_set=self.data_set)
        if self.basis == "no release":
            return "Nothing was released: no attack does better than guessing."
        if self.basis == "unbounded":
            return (
                "No bound is known, as of a release without noise: it may tell for certain "
                f"{question}."
            )
        return (
            "Whoever sees all that was released, knows all other data and wants to tell "
            f"{question} gains at most {_points(self.advantage)} over guessing; with a "
            "false-positive rate of 1% their true-positive rate is at most "
            f"{_percent(self.true_positive_rate(0.01))}."
        )

    def to_dict(self) -> dict[str, Any]:
        """The figures for a model card, as values of JSON."""
        return {
            "basis": self.basis,
            "unit": self.unit,
            "adjacency": self.adjacency,
            "proven": not self.is_heuristic,
            "conditions": list(self.conditions),
            "sentence": self.sentence,
            "membership_advantage": self.advantage,
            "true_positive_rate": {str(rate): self.true_positive_rate(rate) for rate in RATES},
            "gaussian_mu": _finite(self.gaussian_mu()),
            "gaussian_mu_at_errors_from": FLOOR,
            "precision_at_false_positive_rate_0.01_and_prior_0.01": self.precision(0.01, 0.01),
            "probability_of_posterior_0.9_at_prior_0.5": self.probability_of_posterior(0.9, 0.5),
            "reconstruction_among_10": self.reconstruction(10),
        }

    def __str__(self) -> str:
        mu = self.gaussian_mu()
        rows = [
            ("membership advantage", f"at most {_points(self.advantage)}"),
            *(
                (f"true-positive rate at {rate:.1%} false positives",
                 f"at most {_percent(self.true_positive_rate(rate))}")
                for rate in RATES
            ),
            (f"Gaussian DP, at errors of {FLOOR:.1%} and more",
             f"mu at most {math.ceil(mu * 1e3) / 1e3}" if math.isfinite(mu) else "no mu"),
            ("precision at 1% false positives, 1% members",
             f"at most {_percent(self.precision(0.01, 0.01))}"),
            ("probability that 50% certainty becomes 90%",
             f"at most {_percent(self.probability_of_posterior(0.9, 0.5))}"),
            ("reconstruction among 10 candidates",
             f"at most {_percent(self.reconstruction(10))}"),
        ]  # fmt: skip
        width = max(len(name) for name, _ in rows)
        lines = [self.sentence, "", *(f"{name:<{width}}  {value}" for name, value in rows)]
        return "\n".join([*lines, "", *self.remarks, *map(CONDITIONS.__getitem__, self.conditions)])

    @property
    def remarks(self) -> list[str]:
        """What the figures rest on, sentences."""
        is_training = self.data_set == TRAINING
        whole = "the whole training" if is_training else "all that was released of these data"
        found = {
            "loss distribution": f"Bounds from the privacy losses of {whole}.",
            "epsilon and delta": (
                "Bounds from epsilon and delta alone, since this training has no distribution of "
                "privacy losses here: the truth may be far below."
            ),
            "budget of a filter": (
                "Bounds from the budget of the privacy filter, whatever was chosen after looking "
                "at results."
            ),
        }.get(self.basis)
        remarks = [found] if found else []
        if self.is_heuristic:
            remarks.append("HEURISTIC, not proven: the sampling is accounted for as another.")
        if self.is_open:
            remarks.append(
                "Results may have stopped the training, whose plan is not known: the figures are "
                "those of the steps that ran."
            )
        return remarks


def risk_of(segments: Sequence[Any], accountant: Accountant = "auto") -> Risk:
    """The `Risk` of segments that compose to one guarantee; see `Ledger.risk`."""
    segments = [segment for segment in segments if segment.steps]
    if not segments:
        return Risk((of_pairs([(0.0, 0.0)]),), "no release")
    accountants.check_composable(segments)
    accountant = accountants.chosen(segments, accountant)
    kept, about = kept_filter(segments), whom(segments)
    if kept is not None:
        return Risk(_of_budget(kept), "budget of a filter", **about)
    if is_lost(segments):
        return of_guarantee(math.inf, 1.0, **about)
    curves, bases = [], set()
    for history in scenarios(segments):
        found, basis = _curves(history, accountant)
        curves += found
        bases.add(basis)
    worst: Sequence[Basis] = ("unbounded", "epsilon and delta", "loss distribution")
    return Risk(
        tuple(curves),
        next(basis for basis in worst if basis in bases),
        is_heuristic=any(segment.sampling.is_heuristic for segment in segments),
        is_open=any(is_unknown(segment) for segment in segments),
        **about,
    )


def whom(segments: Sequence[Any]) -> dict[str, Any]:
    """Whom a `Risk` of segments that compose is about, and on which conditions."""
    first = segments[0]
    return {
        "unit": first.sampling.unit,
        "adjacency": first.sampling.adjacency,
        "data_set": first.data_set,
        "conditions": tuple(conditions(segments)),
    }


def of_guarantee(epsilon: float, delta: float, **what: Any) -> Risk:
    """The `Risk` that follows from one (ε, δ) alone."""
    basis: Basis = "epsilon and delta" if math.isfinite(epsilon) else "unbounded"
    return Risk((of_pairs([(epsilon, delta)]),), basis, **what)


def _of_budget(kept):
    """Never of what was spent: of choices that looked at results no loss distribution is known."""
    losses = kept.loss_distribution()
    if losses is not None:
        return tuple(of_losses(losses))
    return (of_pairs([(kept.epsilon_at(delta), delta) for delta in (*DELTAS, kept.delta)]),)


def _curves(segments, accountant):
    losses = None
    if accountant in ("auto", "pld"):
        losses = accountants.loss_distribution(segments)
    if losses is not None:
        return of_losses(losses), "loss distribution"
    pairs = [(_price(segments, delta, accountant), delta) for delta in DELTAS]
    if all(segment.is_pure for segment in segments):
        pairs.append((_price(segments, 0.0, accountant), 0.0))
    is_lost = all(math.isinf(epsilon) for epsilon, _ in pairs)
    return [of_pairs(pairs)], "unbounded" if is_lost else "epsilon and delta"


def _price(segments, delta, accountant):
    return accountants.compose(segments, delta, accountant)


def _probability(value, name, what):
    if not (is_number(value) and 0 < value < 1):
        raise ValueError(f"{name} must be a probability in (0, 1), {what}; received {value!r}.")
    return float(value)


def _logit(probability):
    return math.log(probability) - math.log1p(-probability)


def _finite(number):
    return number if math.isfinite(number) else "infinite"


def _percent(share):
    """Rounded up, so that no text claims less than was found: to two digits where it is small."""
    digits = 1 if share >= 0.01 else 2 if share >= 0.001 else 4
    found = math.ceil(100 * share * 10**digits - 1e-9) / 10**digits
    return "100%" if found >= 100 else f"{found:.{digits}f}%"


def _points(share):
    return f"{_percent(share)[:-1]} percentage points"
