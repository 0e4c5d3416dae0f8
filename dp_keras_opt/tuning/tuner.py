"""Hyper-parameters from private data, within a budget that covers the search."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import keras

from dp_keras_opt.accounting import Ledger, RandomRepetitions
from dp_keras_opt.accounting.segment import conditions_of
from dp_keras_opt.checks import whole_number
from dp_keras_opt.model import DPModel
from dp_keras_opt.noise.entropy import numpy_generator
from dp_keras_opt.tuning import runs
from dp_keras_opt.tuning.candidates import get
from dp_keras_opt.types import Accountant

if TYPE_CHECKING:
    from dp_keras_opt.tuning.candidates import Candidate
    from dp_keras_opt.tuning.runs import Task


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What `tune` found.

    Attributes:
        model: the best model, trained; its ledger covers the search.
        values: its hyper-parameters.
        score: its score on the validation data.
        trials: dicts of `values` and `score`, all that were tried; None after a private selection,
            which publishes nothing of the others.
        delta: at which ε is stated.
        accountant: by which ε is stated.
    """

    model: DPModel
    values: dict[str, float]
    score: float
    trials: list[dict[str, Any]] | None
    delta: float
    accountant: Accountant = "auto"

    @property
    def epsilon(self) -> float:
        """ε of the search, the model included (and of what was in the ledger before)."""
        return self.model.ledger.epsilon(self.delta, self.accountant)

    def statement(self) -> str:
        """The guarantee in words; see `accounting.statement`."""
        return self.model.statement(self.delta, self.accountant)


def tune(
    task: Task,
    candidate: str | Candidate,
    epsilon: float,
    delta: float,
    *,
    trials: int = 8,
    repetitions: RandomRepetitions | None = None,
    ledger: Ledger | None = None,
    verbose: int = 1,
    accountant: Accountant = "auto",
) -> Tuned:
    """Searches hyper-parameters at random and returns the best model; ε covers all of it.

    Each trial trains on the same private data, so that each costs. Two ways of paying:

    - `trials`: that many trainings share the budget by composition. All their results may be
      published.
    - `repetitions`: a random number of runs, of which only the best is published. For the same ε it
      takes less noise, the more so the more runs there are; with a mean of 3 or fewer it may not.

    Either is dearer than one run with settings known from public data or from the literature: look
    at docs/how_to/hyperparameters.md before.

    Guarantee: the returned model, its values and its score are private as `model.ledger` states, if
    the validation data need no protection. With `repetitions`, do not publish how long it took
    or how many runs there were; the progress bar is for you alone.

    Args:
        task: a `Task`.
        candidate: the name of one of `CANDIDATES`, or a `Candidate`. Its noise must not depend on
            the values drawn.
        epsilon, delta: the budget for the whole search.
        trials: number of runs; ignored with `repetitions`.
        repetitions: None, or an `accounting.RandomRepetitions`.
        ledger: None, or the `accounting.Ledger` to enter the search in. A private selection is
            entered as a whole before its first run.
        verbose: 0 or 1, whether a progress bar is shown.
        accountant: "auto", "rdp", "pld" or "pure".

    Returns:
        A `Tuned`.

    Raises:
        ValueError: the candidate is not known, its noise depends on the values drawn, or the budget
            cannot be met.

    Reference: Papernot and Steinke, "Hyperparameter tuning with Rényi differential privacy", ICLR
    2022, arXiv:2110.03620.
    """
    candidate = get(candidate)
    if repetitions is not None and not isinstance(repetitions, RandomRepetitions):
        raise ValueError(
            "repetitions must be None or a dp_keras_opt.accounting.RandomRepetitions, received "
            f"{repetitions!r}."
        )
    generator = numpy_generator()
    ledger = Ledger() if ledger is None else ledger
    budget: dict[str, Any]
    if repetitions is None:
        count = whole_number(trials, "trials", 1, "Give the number of runs.")
        budget = {"num_trainings": count, "accountant": accountant}
    else:
        count = repetitions.draw(generator)
        budget = {"selection": repetitions, "accountant": accountant}

    sampling = task.batches(candidate).sampling

    def optimizer(values):
        return runs.optimizer_for(task, candidate, values, sampling, epsilon, delta, **budget)

    expected = optimizer(candidate.middle())
    if repetitions is not None:
        _enter(expected, sampling, task.steps_of(candidate), repetitions, ledger)
    bar = keras.utils.Progbar(count, unit_name="run") if verbose else None
    best: Any = None
    place, tried, spent = 0, [], None
    for number in range(count):
        values = candidate.sample(generator)
        if _noise(optimizer(values)) != _noise(expected):
            raise ValueError(
                f"The noise of {candidate.name} depends on the values drawn, so that the runs are "
                "not private in the same way. Search over values that leave the noise alone."
            )
        seed, entered_in = int(generator.integers(2**31)), None if repetitions else ledger
        model = runs.train(task, candidate, values, epsilon, delta, seed, entered_in, **budget)
        if repetitions:
            before = {segment.run for segment in model.ledger.segments[:-1]}
            spent = before if spent is None else spent
            if before != spent:
                raise ValueError(
                    "build releases something anew in each run, such as a vocabulary that is "
                    "adapted: the runs then differ in more than their values, and what the others "
                    "released would be in no ledger. Release it once, before tune, and have build "
                    "use it."
                )
        tried.append({"values": values, "score": runs.score(task, model, task.validation)})
        place = task.better([each["score"] for each in tried])
        best = model if place == number else best
        if bar:
            bar.update(number + 1)
    if repetitions is not None:
        # What the ledger says of the selection covers the last run, and nothing before it: `build`
        # may give a model that has spent something already.
        best.ledger._drop_last()
        best.ledger = ledger
    shown = tried if repetitions is None else None
    values, score = tried[place]["values"], tried[place]["score"]
    return Tuned(best, values, score, shown, delta, accountant)


def _enter(optimizer, sampling, steps, repetitions, ledger):
    """Enters a whole selection in the ledger, before any of its runs."""
    ledger.begin(
        optimizer.releases,
        sampling,
        optimizer.noise_schedule,
        clip_norm=optimizer.clip_norm,
        selection=repetitions,
        conditions=conditions_of(optimizer, sampling),
    )
    ledger.reserve(steps)
    ledger.close()


def _noise(optimizer):
    return optimizer.releases, optimizer.noise_schedule
