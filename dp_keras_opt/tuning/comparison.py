"""Several optimizers on one task at equal budgets: which one loses least to the noise?"""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import math
import numbers
import os
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras

from dp_keras_opt.counterpart import make_private
from dp_keras_opt.tuning import runs
from dp_keras_opt.tuning.candidates import CANDIDATES, get, three_digits
from dp_keras_opt.types import Accountant, Path

if TYPE_CHECKING:
    from dp_keras_opt.tuning.candidates import Candidate
    from dp_keras_opt.tuning.runs import Task

_KEY = ("task", "part", "candidate", "epsilon", "delta", "seed", "values")
_COLUMNS = (*_KEY, "score", "accountant")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The results of `compare`.

    Attributes:
        rows: dicts with `candidate`, `epsilon`, `values` (the setting chosen), `scores` (one a
            seed), `score` (their mean) and `standard_error` (of the mean; NaN with one seed), the
            best first within each epsilon.
        higher_is_better: whether larger scores are better.
    """

    rows: list[dict[str, Any]]
    higher_is_better: bool

    def leading(self, epsilon: float) -> list[str]:
        """The best candidate at an ε, and those within two standard errors of it, best first.

        The standard error is that of the difference of two means.
        """
        rows = [row for row in self.rows if row["epsilon"] == epsilon]
        best = rows[0]

        def is_near(row):
            error = math.hypot(row["standard_error"], best["standard_error"])
            return row is best or abs(row["score"] - best["score"]) <= 2 * error

        return [row["candidate"] for row in rows if is_near(row)]

    def markdown(self) -> str:
        """A table with a row for each candidate and a column for each epsilon; bold who leads."""
        epsilons = sorted({row["epsilon"] for row in self.rows})
        cells = {(row["candidate"], row["epsilon"]): row for row in self.rows}
        middle = epsilons[len(epsilons) // 2]
        names = [row["candidate"] for row in self.rows if row["epsilon"] == middle]
        lines = [["optimizer", *(f"ε = {epsilon:g}" for epsilon in epsilons)]]
        lines += [["---"] * len(lines[0])]
        leading = {(name, e) for e in epsilons for name in self.leading(e)}
        for name in names:
            at = [(name, epsilon) for epsilon in epsilons]
            lines.append([name, *(_cell(cells.get(place), place in leading) for place in at)])
        return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"

    def plot(self, axes: Any = None) -> Any:
        """Draws the scores; see `plots.scores`. Needs the extra `plots`."""
        from dp_keras_opt import plots

        return plots.scores(self.rows, self.higher_is_better, axes)


def compare(
    task: Task,
    candidates: Sequence[str | Candidate] | None = None,
    epsilons: float | Sequence[float] = (1.0, 3.0, 8.0),
    delta: float = 1e-6,
    *,
    trials: int = 5,
    seeds: int = 3,
    search_at: float | None = None,
    extend: bool = True,
    results: Path | None = None,
    name: str = "task",
    verbose: int = 1,
    accountant: Accountant = "auto",
) -> Comparison:
    """Trains each candidate at each ε, with hyper-parameters found by a small random search.

    For each candidate and at each ε, some settings are trained and the best by `task.validation` is
    chosen; with it, models from `seeds` other initial weights are trained and scored by
    `task.test`. A candidate gets `trials` settings for each of its hyper-parameters, so that none
    is searched more thinly than another. Where the best learning rate is the highest or the lowest
    of those tried, it is followed further, until the next one is no better: so that no candidate
    wins by a range that suits it.

    Guarantee: each model alone is private at its ε; *the comparison is not*. It publishes
    scores of many models trained on the same data. Do it on public data of the same kind, and
    take over what it shows; or `tune` within a budget.

    Args:
        task: a `Task` with a `test` part.
        candidates: names of `CANDIDATES`, or `Candidate` objects; by default, all those that the
            task has the data for, and whose epochs or rounds of groups are no longer than a run.
        epsilons: the budget, or several, each for one run.
        delta: their δ.
        trials: settings to try for each hyper-parameter: two have twice as many. 1 takes the middle
            of the space.
        seeds: runs by which the chosen setting is judged, at least 1.
        search_at: None, or the one ε at which settings are tried, to be used at all: it saves most
            of the runs, and the best learning rate is not the same at all ε.
        extend: whether learning rates are followed past the ends of their ranges.
        results: None, or a CSV file that every run is written to as it ends. What is there
            already is not run again, so that an interrupted comparison goes on.
        name: of the task, in that file.
        verbose: 0 or 1, whether a progress bar is shown.
        accountant: "auto", "rdp", "pld" or "pure", by which the noise is found.

    Returns:
        A `Comparison`.

    Raises:
        ValueError: a candidate is not known, needs public data that the task lacks, or trains for
            whole epochs that are longer than a run; the task has no test data; or its model has
            spent privacy on these data before.
    """
    if task.test is None:
        raise ValueError("compare judges by data that chose nothing: give the Task a `test` part.")
    if seeds < 1 or trials < 1:
        raise ValueError(f"trials={trials} and seeds={seeds} must be at least 1.")
    task = dataclasses.replace(task, build=_unspent(task.build))
    task.build()  # before any run
    candidates = _resolved(candidates, task)
    several = [epsilons] if isinstance(epsilons, numbers.Real) else epsilons
    epsilons = [float(epsilon) for epsilon in several]  # type: ignore[union-attr]
    searches = epsilons if search_at is None else [float(search_at)]
    runner = _Runner(task, name, delta, accountant, results)
    tried = {each.name: _settings(each, trials) for each in candidates}
    searched = sum(len(settings) for settings in tried.values() if len(settings) > 1)
    total = len(searches) * searched + len(candidates) * seeds * len(epsilons)
    bar = keras.utils.Progbar(total, unit_name="run") if verbose else None
    rows = []
    for each in candidates:
        settings, chosen = tried[each.name], {}
        for epsilon in searches if len(settings) > 1 else ():
            run = functools.partial(runner, "validation", each, epsilon=epsilon, seed=0, bar=bar)
            scores = [run(values) for values in settings]
            if extend:
                chosen[epsilon] = _followed(task, each, settings, scores, run)
            else:
                chosen[epsilon] = settings[task.better(scores)]
        for epsilon in epsilons:
            values = chosen.get(epsilon if search_at is None else searches[0], settings[0])
            scores = [runner("test", each, values, epsilon, s, bar) for s in range(1, seeds + 1)]
            rows.append(_row(each.name, epsilon, values, scores))
    sign = -1 if task.higher_is_better else 1
    rows.sort(key=lambda row: (row["epsilon"], _last(sign * row["score"])))
    return Comparison(rows, task.higher_is_better)


def _unspent(build):
    """`build`, of which each model is refused that has spent privacy, as in an earlier run."""

    def checked():
        model = make_private(build())
        if model.ledger.of_data_set():
            raise ValueError(
                "The model that the task builds has spent privacy before, on its weights or on "
                "layers that were adapted privately: no run would be private at its epsilon. Build "
                "one that has not, with all that is trained made anew in each call of `build` "
                "(dp-keras-opt compare --fresh), or `tune`, which counts what was spent."
            )
        return model

    return checked


def _followed(task, candidate, settings, scores, run):
    """The best setting, where learning rates at an end of those tried are followed further.

    Args:
        task: which says what is better.
        candidate: in whose space they are.
        settings, scores: what was tried, and what came out.
        run: function from values to their score.
    """
    place = task.better(scores)
    best, score = settings[place], scores[place]
    for name, (low, high) in candidate.space.items():
        if not name.endswith("learning_rate"):
            continue
        tried = [values[name] for values in settings]
        step = (high / low) ** (len(candidate.space) / len(settings))
        for end, factor in ((max(tried), step), (min(tried), 1 / step)):
            while best[name] == end:
                further = best | {name: three_digits(end * factor)}
                new = run(further)
                if task.better([score, new]) == 0:
                    break
                best, score, end = further, new, further[name]
    return best


class _Runner:
    """Scores of runs, each from the file of results if it is there."""

    def __init__(self, task, name, delta, accountant, path):
        self.task, self.name, self.delta, self.path = task, name, delta, path
        self.accountant = accountant
        self.known, self.done = {}, 0
        if path is not None and os.path.exists(path):
            with open(path, newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file, restkey="accountant"):
                    key = *(row[column] for column in _KEY), _accountant_of(row)
                    self.known[key] = float(row["score"])

    def __call__(self, part, candidate, values, epsilon, seed, bar):
        """The score of a run, by the part of the task's data with this name."""
        setting = json.dumps(values)
        key = (self.name, part, candidate.name, f"{epsilon:g}", f"{self.delta:g}", f"{seed}")
        key = (*key, setting, self.accountant)
        if key not in self.known:
            budget = {"accountant": self.accountant}
            model = runs.train(self.task, candidate, values, epsilon, self.delta, seed, **budget)
            self.known[key] = runs.score(self.task, model, getattr(self.task, part))
            self._write([*key[:-1], self.known[key], self.accountant])
        self.done += 1
        if bar:
            bar.target = max(bar.target, self.done)  # those that follow a rate were not foreseen
            bar.update(self.done)
        return self.known[key]

    def _write(self, row):
        if self.path is None:
            return
        with open(self.path, "a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if not file.tell():
                writer.writerow(_COLUMNS)
            writer.writerow(row)


def _accountant_of(row):
    """Files of before have no such column, except in rows that were added since: "rdp" is meant."""
    found = row.get("accountant") or "rdp"
    return found if isinstance(found, str) else found[0]


def _settings(candidate, trials):
    """What is tried of a candidate; one is not tried but taken."""
    return candidate.draw(trials * len(candidate.space)) if trials > 1 else [candidate.middle()]


def _resolved(candidates, task) -> list[Candidate]:
    """The `Candidate` objects meant."""
    if candidates is None:
        return [each for each in CANDIDATES.values() if task.takes(each)]
    found = [get(each) for each in candidates]
    for each in found:
        if each.needs_public:
            runs.need_public(task, each)
        task.steps_of(each)  # refuses rounds that are longer than a run
    return found


def _row(name, epsilon, values, scores):
    mean = statistics.fmean(scores)
    error = statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else math.nan
    return {
        "candidate": name,
        "epsilon": epsilon,
        "values": values,
        "scores": scores,
        "score": mean,
        "standard_error": error,
    }


def _last(number):
    return math.inf if math.isnan(number) else number


def _cell(row, leads):
    if row is None:
        return ""
    cell = f"{row['score']:.4f} ± {row['standard_error']:.4f}"
    return f"**{cell}**" if leads else cell
