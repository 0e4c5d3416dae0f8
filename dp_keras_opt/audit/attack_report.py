"""What membership attacks find on a model that one has, without training it again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import keras
import numpy as np
import numpy.typing as npt
from keras import tree
from scipy import stats

from dp_keras_opt import plots
from dp_keras_opt.audit.bounds import membership_auc
from dp_keras_opt.audit.scores import SCORES, Examples, ScoreFunction, batches

_PROVES = "Attack result: proves no ε."
_PRIVATE = (
    "Computed from the members without noise: who publishes it releases more than the training did."
)

#: Of members and of others, one number per example each.
Pair: TypeAlias = tuple[npt.ArrayLike, npt.ArrayLike]
AttackScore: TypeAlias = Literal["loss", "confidence", "gradient_norm"] | ScoreFunction | Pair


@dataclasses.dataclass(frozen=True)
class Rate:
    """What the attack "a member, if the score is above the threshold" finds.

    Attributes:
        false_positive_rate: what was asked for.
        threshold: the score of which as many of the others as this rate allows lie above.
        false_positives, true_positives: how many of the others and of the members lie above.
        true_positive_rate: the share of the members above.
        interval: of the true-positive rate at this threshold, by Clopper and Pearson. The threshold
            depends on the others only, so the count of members is binomial, given it.
        false_positive_limit: an upper bound on the false-positive rate of this threshold among all
            whom the others are a sample of. It allows for the choice of the threshold on the same
            others: the share above the (k + 1)-th largest of n is Beta(k + 1, n − k), or less with
            ties.
    """

    false_positive_rate: float
    threshold: float
    false_positives: int
    true_positives: int
    true_positive_rate: float
    interval: tuple[float, float]
    false_positive_limit: float


@dataclasses.dataclass(frozen=True)
class AttackResult:
    """What one score finds among the examples of one slice.

    Attributes:
        score: its name.
        slice: its name, such as "class=3"; "all".
        members, others: how many.
        auc: the chance that a member's score is above that of another, ties counting half.
        auc_interval: of it. Wilson's for min(members, others) trials: by Hoeffding's averaging over
            pairings, the AUC varies no more than a share of so many independent pairs, whatever the
            scores' distributions. At most about a quarter wider than needed where there are as many
            members as others.
        advantage: the largest true-positive rate less false-positive rate over all thresholds.
        advantage_interval: of it, by the inequality of Dvoretzky, Kiefer and Wolfowitz for both
            distributions: valid for any sizes and distributions, and wide for small ones.
        rates: one `Rate` for each false-positive rate that the slice has enough others for.
        roc: (false-positive rates, true-positive rates) at all thresholds.
    """

    score: str
    slice: str
    members: int
    others: int
    auc: float
    auc_interval: tuple[float, float]
    advantage: float
    advantage_interval: tuple[float, float]
    rates: tuple[Rate, ...]
    roc: tuple[np.ndarray, np.ndarray] = dataclasses.field(repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class AttackReport:
    """What the attacks found. `print` shows a table.

    Guarantee: none of privacy. Who is a member was given and not drawn by coins, so that no ε is
    refuted: members and others may differ in more than membership, and where they do, the scores
    show that as well. A stronger attack might find more. Each interval, on its own, misses its
    figure with probability 1 − `confidence` at most (that of the AUC for large samples); of many,
    some do.

    The report itself is a function of the members' data without noise, outside of any guarantee.

    Attributes:
        results: one `AttackResult` for each slice and score, all examples first.
        false_positive_rates: what was asked for.
        confidence: of each interval.
    """

    results: tuple[AttackResult, ...]
    false_positive_rates: tuple[float, ...]
    confidence: float

    def to_dict(self) -> dict[str, Any]:
        """The report for `json.dumps`, without the curves and with None for infinite thresholds."""
        results = []
        for result in self.results:
            fields = {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
            del fields["roc"]
            rates = [_finite(dataclasses.asdict(rate)) for rate in result.rates]
            results.append(_finite(fields) | {"rates": rates})
        return {
            "what": _PROVES,
            "note": _PRIVATE,
            "confidence": self.confidence,
            "false_positive_rates": list(self.false_positive_rates),
            "results": results,
        }

    def to_markdown(self) -> str:
        """The report as a table for a model card."""
        head, *rows = self._table()
        lines = [head, ["---"] * len(head), *rows]
        table = "\n".join("| " + " | ".join(_escaped(line)) + " |" for line in lines)
        return f"{self._header()}\n\n{table}\n"

    def plot(self, slices: Sequence[str] = ("all",), axes: Any = None) -> Any:
        """The ROC curves of these slices on logarithmic axes; see `plots.roc`.

        Raises:
            ValueError: there is no such slice.
        """
        chosen = [result for result in self.results if result.slice in slices]
        missing = set(slices) - {result.slice for result in chosen}
        if missing:
            raise ValueError(f"There are no slices {sorted(missing)}.")
        several = len(slices) > 1
        curves = {f"{r.score}, {r.slice}" if several else r.score: r.roc for r in chosen}
        return plots.roc(curves, axes)

    def __str__(self):
        table = self._table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in table
        ]
        return "\n".join([self._header(), *lines])

    def _header(self):
        return f"{_PROVES} Intervals have confidence {self.confidence:g} each. {_PRIVATE}"

    def _table(self):
        asked = [f"TPR at FPR {rate:g}" for rate in self.false_positive_rates]
        table = [["score", "slice", "members", "others", "AUC", "advantage", *asked]]
        for r in self.results:
            rates = {rate.false_positive_rate: rate for rate in r.rates}
            cells = [
                _with_interval(rates[asked].true_positive_rate, rates[asked].interval)
                if asked in rates
                else f"needs {_needed(asked)} others"
                for asked in self.false_positive_rates
            ]
            auc = _with_interval(r.auc, r.auc_interval)
            advantage = _with_interval(r.advantage, r.advantage_interval)
            table.append([r.score, r.slice, str(r.members), str(r.others), auc, advantage, *cells])
        return table


def attack_report(
    model: keras.Model | None,
    members: Examples,
    others: Examples,
    *,
    scores: AttackScore | Sequence[Any] | Mapping[str, Any] = "loss",
    reference: keras.Model | None = None,
    slices: Literal["class"] | Mapping[str, Pair] | None = None,
    false_positive_rates: Sequence[float] = (0.001, 0.01, 0.1),
    confidence: float = 0.95,
    batch_size: int = 256,
) -> AttackReport:
    """Attacks a trained model: how well its training examples can be told from others.

    Any Keras model will do, private or not, new or loaded; nothing is trained. Each attack calls an
    example a member if its score is above a threshold. Of a model that was trained privately,
    the ledger bounds what any attack finds; these attacks show what simple ones do find.

    A score of cross-entropy and the confidence in the true class rank examples alike, as long as no
    digits are lost: then both give the same figures. With a `reference`, each score is less that
    of the reference model, so that examples that are easy for every model no longer look like
    members: a stronger attack.

    Args:
        model: the model. None if all scores are arrays.
        members: `(x, y)` that it was trained on, of arrays or nested structures of them with one
            row per example, or an iterable of such batches, as a `tf.data.Dataset`. Sample weights
            beside them are left out.
        others: likewise, not trained on, but otherwise a sample of the same population.
        scores: one score, several, or a dict from names to scores, each of which is one of

            - "loss": minus the loss with which the model was compiled;
            - "confidence": log(p/(1 − p)) of the probability of the true class, of classifiers;
            - "gradient_norm": minus the norm of the example's gradient, of a `DPModel`;
            - a function of (model, x, y) for a batch, one number per example, higher where more
              speaks for membership;
            - two arrays (in a dict only), what another attack gave to members and to others: of
              recorded releases by `matched_filter`, for instance.
        reference: None, or a model that has seen neither, such as that from which training began.
        slices: None, or "class" for one slice per class of a target with one class per example, or
            a dict from names to the pair of arrays of what members and others are, such as
            `{"region": (members_region, others_region)}`: one slice for each value.
        false_positive_rates: at which to look. A rate below 1/others cannot be seen: refused for
            all examples, and left out of slices that are too small.
        confidence: of each interval.
        batch_size: how many examples to look at at once.

    Returns:
        `AttackReport`.

    Raises:
        ValueError: scores of another shape, number or kind, or NaN; too few others for a rate, with
            the number that is needed; a slice without members or others; the model has no compiled
            loss for "loss", or is no classifier for "confidence".
        TypeError: "gradient_norm" of a model that is no `DPModel`.

    Reference: Carlini, Chien, Nasr, Song, Terzis and Tramèr, "Membership inference attacks from
    first principles", IEEE S&P 2022, arXiv:2112.03570 (rates at few false positives); Watson, Guo,
    Cormode and Sablayrolles, "On the importance of difficulty calibration in membership inference
    attacks", ICLR 2022, arXiv:2111.08440 (the reference model).
    """
    rates = tuple(float(rate) for rate in false_positive_rates)
    if not all(0 < rate < 1 for rate in rates):
        raise ValueError(f"false_positive_rates must lie between 0 and 1; received {rates}.")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1; received {confidence}.")
    named = _named(scores)
    functions = {name: score for name, score in named.items() if callable(score)}
    if functions and model is None:
        raise ValueError(f"The scores {sorted(functions)} need a model.")
    found, labels = [], []
    for examples in (members, others) if functions or slices == "class" else ():
        values, classes = _scored(model, reference, functions, examples, batch_size)
        found.append(values)
        labels.append(classes)
    pairs = {
        name: tuple(side[name] for side in found) if name in functions else score
        for name, score in named.items()
    }
    pairs = {name: _checked(name, pair) for name, pair in pairs.items()}
    all_sizes = {(len(of_members), len(of_others)) for of_members, of_others in pairs.values()}
    if len(all_sizes) != 1:
        raise ValueError(
            "All scores must be of the same members and others; received "
            f"{ {name: tuple(map(len, pair)) for name, pair in pairs.items()} }."
        )
    (sizes,) = all_sizes
    for rate in rates:
        if sizes[1] < _needed(rate):
            raise ValueError(
                f"A false-positive rate of {rate:g} needs at least {_needed(rate)} others; there "
                f"are {sizes[1]}. Give more, or leave that rate out of false_positive_rates."
            )
    if slices == "class":
        slices = {"class": _classes(*labels)}
    parts = [("all", tuple(np.ones(size, bool) for size in sizes)), *_parts(slices or {}, sizes)]
    results = tuple(
        _result(name, part, pair[0][inside[0]], pair[1][inside[1]], rates, confidence)
        for part, inside in parts
        for name, pair in pairs.items()
    )
    return AttackReport(results, rates, confidence)


def _named(scores) -> dict[str, Any]:
    """The scores by name, those with a name of the library's as functions."""
    if isinstance(scores, Mapping):
        named = dict(scores)
    else:
        one = isinstance(scores, str) or callable(scores)
        listed = [scores] if one else list(scores)
        named = {s if isinstance(s, str) else getattr(s, "__name__", str(s)): s for s in listed}
        if len(named) < len(listed):
            raise ValueError("Two scores have the same name: give a dict from names to scores.")
    if not named:
        raise ValueError("scores is empty: there is nothing to attack with.")
    for name, score in named.items():
        if isinstance(score, str) and score not in SCORES:
            raise ValueError(f"There is no score {score!r}; known are {sorted(SCORES)}.")
        if not (isinstance(score, str) or callable(score) or _is_pair(score)):
            raise ValueError(
                f"The score {name!r} is neither a name, nor a function of (model, x, y), nor a "
                "pair of arrays in a dict: {'name': (of members, of others)}."
            )
    return {name: SCORES.get(s, s) if isinstance(s, str) else s for name, s in named.items()}


def _is_pair(score):
    return isinstance(score, tuple | list) and len(score) == 2


def _scored(model, reference, functions, examples, batch_size):
    """(scores (examples,) by name, targets as a list of batches)."""
    values: dict[str, list[np.ndarray]] = {name: [] for name in functions}
    targets = []
    for x, y, _ in batches(examples, batch_size):
        rows = len(tree.flatten(x)[0])
        for name, function in functions.items():
            score = _one_each(name, function(model, x, y), rows)
            if reference is not None:
                score = score - _one_each(name, function(reference, x, y), rows)
            values[name].append(score)
        targets.append(y)
    return {name: np.concatenate(parts) for name, parts in values.items()}, targets


def _one_each(name, values, rows):
    values = _numbers(name, values)
    if values.shape != (rows,):
        raise ValueError(
            f"The score {name!r} must have one number per example, ({rows},); received shape "
            f"{values.shape}."
        )
    return values


def _numbers(name, values):
    values = np.asarray(values)
    if values.dtype.kind not in "fiub":
        raise ValueError(f"The score {name!r} must be of real numbers; received {values.dtype}.")
    return values.astype(np.float64)


def _checked(name, pair):
    pair = tuple(_numbers(name, side) for side in pair)
    for side, who in zip(pair, ("members", "others"), strict=True):
        if side.ndim != 1 or not len(side):
            raise ValueError(
                f"The score {name!r} must have one number for each of the {who}, and at least one; "
                f"received shape {side.shape}."
            )
        bad = int(np.isnan(side).sum())
        if bad:
            raise ValueError(
                f"The score {name!r} is NaN for {bad} of the {who}. Leave these examples out, and "
                "say so, or find out why the model's output is not finite."
            )
    return pair


def _classes(of_members, of_others) -> tuple[np.ndarray, np.ndarray]:
    """The class of each member and of each other."""
    sides = []
    for side in (of_members, of_others):
        if any(len(tree.flatten(y)) != 1 for y in side):
            raise ValueError("slices='class' needs one target; give a dict of arrays instead.")
        y = np.concatenate([np.asarray(tree.flatten(y)[0]) for y in side])
        if y.ndim == 2 and y.shape[1] > 1 and np.all((y == 0) | (y == 1)):
            one_hot = np.all(y.sum(axis=1) == 1)
            y = y.argmax(axis=1) if one_hot else y
        if y.size != len(y) or (y.dtype.kind == "f" and np.any(y % 1)):
            raise ValueError(
                "slices='class' needs targets with one class per example; received shape "
                f"{y.shape}. Give a dict of arrays instead."
            )
        y = y.reshape(-1)
        sides.append(y.astype(np.int64) if y.dtype.kind == "f" else y)
    return sides[0], sides[1]


def _parts(slices, sizes) -> Iterator[tuple[str, tuple[np.ndarray, ...]]]:
    """(name, which members and which others are in it)."""
    for name, pair in slices.items():
        if not _is_pair(pair):
            raise ValueError(f"The slice {name!r} must be a pair of arrays: (members, others).")
        pair = tuple(np.asarray(side) for side in pair)
        if tuple(side.shape for side in pair) != tuple((size,) for size in sizes):
            raise ValueError(
                f"The slice {name!r} must have one value for each of the {sizes[0]} members and "
                f"{sizes[1]} others; received shapes {tuple(side.shape for side in pair)}."
            )
        for value in np.unique(np.concatenate(pair)):
            inside = tuple(side == value for side in pair)
            counts = tuple(int(mask.sum()) for mask in inside)
            if not all(counts):
                raise ValueError(
                    f"The slice {name}={_text(value)} has {counts[0]} members and {counts[1]} "
                    "others, and needs some of both. Leave its examples out, or join it with "
                    "another."
                )
            yield f"{name}={_text(value)}", inside


def _text(value):
    return value.decode() if isinstance(value, bytes) else str(value)


def _result(score, part, members, others, rates, confidence):
    auc = membership_auc(members, others)
    roc = _roc(members, others)
    advantage = float(np.max(roc[1] - roc[0]))
    error = sum(math.sqrt(math.log(4 / (1 - confidence)) / (2 * len(s))) for s in (members, others))
    return AttackResult(
        score=score,
        slice=part,
        members=len(members),
        others=len(others),
        auc=auc,
        auc_interval=_wilson(auc, min(len(members), len(others)), confidence),
        advantage=advantage,
        advantage_interval=(max(0.0, advantage - error), min(1.0, advantage + error)),
        rates=tuple(
            _rate(members, others, rate, confidence)
            for rate in rates
            if len(others) >= _needed(rate)
        ),
        roc=roc,
    )


def _rate(members, others, rate, confidence):
    n = len(others)
    allowed = math.floor(rate * n * (1 + 1e-12))  # 0.1 · 30 is 3
    threshold = np.partition(others, n - 1 - allowed)[n - 1 - allowed]  # `allowed` lie above
    found = int(np.sum(members > threshold))
    exact = stats.binomtest(found, len(members)).proportion_ci(confidence, "exact")
    return Rate(
        false_positive_rate=rate,
        threshold=float(threshold),
        false_positives=int(np.sum(others > threshold)),
        true_positives=found,
        true_positive_rate=found / len(members),
        interval=(float(exact.low), float(exact.high)),
        false_positive_limit=float(stats.beta.ppf(confidence, allowed + 1, n - allowed)),
    )


def _roc(members, others):
    """(false, true)-positive rates of "score ≥ t" for all t, from (0, 0) to (1, 1)."""
    thresholds = np.unique(np.concatenate([members, others]))[::-1]
    rates = (
        np.concatenate([[0], len(s) - np.searchsorted(np.sort(s), thresholds, "left")]) / len(s)
        for s in (others, members)
    )
    return tuple(rates)


def _wilson(share, trials, confidence):
    """Wilson's interval of a share that need not be a whole number of the trials."""
    z2 = float(stats.norm.ppf((1 + confidence) / 2)) ** 2
    center = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = math.sqrt(z2 * (share * (1 - share) + z2 / (4 * trials)) / trials) / (1 + z2 / trials)
    return max(0.0, float(center - half)), min(1.0, float(center + half))


def _needed(rate):
    """How many others a false-positive rate needs at least."""
    return math.ceil(1 / rate - 1e-9)


def _with_interval(value, interval):
    return f"{value:.3f} ({interval[0]:.3f}-{interval[1]:.3f})"


def _finite(fields):
    """JSON has no infinities."""
    return {
        name: None if isinstance(value, float) and math.isinf(value) else value
        for name, value in fields.items()
    }


def _escaped(cells):
    return [cell.replace("|", "\\|") for cell in cells]
