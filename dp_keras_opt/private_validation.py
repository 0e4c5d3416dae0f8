"""Scores on private validation data while a model trains: a curve that may be published."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import keras

from dp_keras_opt import workers
from dp_keras_opt.accounting import Ledger, Sampling
from dp_keras_opt.accounting.accountant import epsilon_of
from dp_keras_opt.accounting.budget import Budget
from dp_keras_opt.accounting.segment import TRAINING, Segment
from dp_keras_opt.checks import whole_number
from dp_keras_opt.model import DPModel
from dp_keras_opt.noise import entropy
from dp_keras_opt.statistics.evaluation import Rows, Scores
from dp_keras_opt.statistics.private_data import Estimate, PrivateData
from dp_keras_opt.statistics.release import noisy
from dp_keras_opt.training.guard import PrivacyBudgetError

#: The name of validation data of which nobody is in the training.
_VALIDATION = "validation"


class PrivateValidation(keras.callbacks.Callback):
    """Scores on private data at the ends of epochs, with noise for ε at δ in all.

        scores = dp.callbacks.PrivateValidation((x_val, y_val), "accuracy", 0.5, 1e-6)
        stop = keras.callbacks.EarlyStopping("private_accuracy", mode="max", patience=3)
        model.fit(batches, epochs=20, callbacks=[scores, stop])

    They are in `logs` as `private_<name>`, before any other callback reads them, and so in
    `History`, TensorBoard and `CSVLogger`. All that follows from them (an early stop, the schedule
    of the learning rate, which checkpoint is kept) is covered by their price. Of several scores the
    best is optimistic: what is chosen for being high is high by its noise, too.

    The price is that of all evaluations that `fit` plans, whether it reaches them or not. The
    ledger has it before the first step, so that `fit` finds the noise of the training for what is
    left of a `PrivacyBudget`. A later `fit` with the same callback goes on with evaluations that
    are left, and is refused where it plans more. A copy, or a callback in another process, pays
    anew.

    Scored are the weights that an epoch ends with, in inference mode; where the optimizer averages
    weights (`use_ema`, `average_from`), those of the training and not the average, which `fit` puts
    in their place at its end: score that one with `statistics.evaluate`.

    Formal guarantee: the scores of a `fit` together are (ε, δ)-differentially private for one unit
    of `data`, beside anything else that the ledger says of it. What is tried and what is assumed of
    model and metrics is as for `statistics.evaluate`; a unit's rows share its contribution.

    By default the data count as part of the training data: the price adds to the ε of the training.
    With `disjoint_from_training=True` it stands beside it, under the data set "validation", also
    where training and scores answer to each other. Proof: let s₁, v₁, s₂, v₂, … be the steps and
    the scores in their order. Each is a mechanism on one of the two data sets, chosen by what was
    released before; its noise, and how many there are at most, were fixed beforehand. A change of
    one unit of the validation data leaves the training data as they are. Given what was released
    before, each s is then a random function that does not depend on this unit, so that the sequence
    is an adaptive composition of the v alone, with processing in between, and costs what they cost.
    The same holds the other way around for a unit of the training data, at the price of the steps
    that were planned. This needs that whether a unit is in one set or in the other depends on that
    unit alone: on an independent draw, on a hash of its id, and not on its place among others. The
    last tenth of the rows, as `validation_split` takes it, is other rows where one row more moves
    the boundary.

    Args:
        data: (x, y) of arrays, in memory or on disk, or a finite `tf.data.Dataset` of batches
            (x, y); as for `statistics.evaluate`.
        metrics: one or several of `statistics.metrics`, or "accuracy", "auc".
        epsilon, delta: what all evaluations may cost together.
        every: an evaluation after every so many epochs.
        users: None, where each row is a unit; or the ids of whose rows they are, one for each row
            in their order. Needed where the training protects users.
        disjoint_from_training: whether no unit is in both; see above.
        evaluations: None, or how many are paid for: as many as all `fit`s with this callback have.
            By default those of the first `fit`.
        batch_size: how many rows are processed at once; a `tf.data.Dataset` has its own.
        weights: None, or how much of the noise budget each metric gets, as for
            `statistics.evaluate`.
        noise: "gaussian"; or "laplace", for δ = 0.

    Attributes:
        epochs: after which it was evaluated, a list.
        history: for each figure, by name, a list of `statistics.Estimate`, with the noise's
            standard deviation. It may be published.

    Raises:
        TypeError, ValueError: an argument is out of range, or a metric has no bounded form.
    """

    private_logs = ("private_*",)

    def __init__(
        self,
        data: Any,
        metrics: Any,
        epsilon: float,
        delta: float,
        *,
        every: int = 1,
        users: Any = None,
        disjoint_from_training: bool = False,
        evaluations: int | None = None,
        batch_size: int = 256,
        weights: Sequence[float] | None = None,
        noise: Literal["gaussian", "laplace"] = "gaussian",
    ) -> None:
        super().__init__()
        self.epsilon, self.delta = epsilon, delta
        self.every = whole_number(every, "every", 1, "It is a number of epochs.")
        if evaluations is not None:
            whole_number(evaluations, "evaluations", 1, "Give how many are paid for.")
        self.evaluations = evaluations
        self.disjoint_from_training = disjoint_from_training
        self.noise = noise
        self._of_users = users is not None
        # Refuses what is wrong now, and not in `fit`; the ledger is another one then.
        self._private = PrivateData(Ledger(), users, noise=noise)
        self._private._plan_scores(2, epsilon, delta, "scores")
        self._scores = Scores(metrics, self._private._norm, weights)
        self._rows = Rows(data, batch_size)
        self.epochs: list[int] = []
        self.history: dict[str, list[Estimate]] = {}
        self._forget_price()

    def _forget_price(self):
        self._segment: Segment | None = None  # what the ledger has
        self._left = 0  # evaluations that are paid for
        self._process = entropy.process()

    def __getstate__(self):
        # A copy has no evaluations that are paid for: two would take them twice.
        users = self._private.users  # which has a ledger, and is not copied
        return vars(self) | {"_segment": None, "_left": 0, "_private": users}

    def __setstate__(self, state):
        private = PrivateData(Ledger(), state["_private"], noise=state["noise"])
        vars(self).update(state | {"_private": private})

    def enter_evaluations(
        self, model: DPModel, sampling: Sampling, epochs: range, budget: Budget | None
    ) -> None:
        """Pays for the evaluations of a `fit`, which calls this before it looks for its noise.

        Raises:
            ValueError: there are none, or more than are paid for; units or ledgers do not fit.
            PrivacyBudgetError: they would exceed the budget.
        """
        planned = sum(self._is_due(epoch) for epoch in epochs)
        if not epochs:
            return
        if not planned:
            raise ValueError(
                f"PrivateValidation scores after every {self.every} epochs, which none of epochs "
                f"{epochs.start} to {epochs.stop} is. Choose a smaller `every`."
            )
        if self._process != entropy.process():  # the process that it forked from has them
            self._forget_price()
        if model.built:
            self._scores.check(model, self._rows)  # before an epoch is spent
        if self._segment is None:
            self._pay(model, sampling, self.evaluations or planned, budget)
        elif all(known.run != self._segment.run for known in model.ledger.segments):
            raise ValueError(
                "This PrivateValidation is paid for in the ledger of another model. Make a new "
                "one, or give the model that ledger."
            )
        if planned > self._left:
            raise ValueError(
                f"PrivateValidation is paid for {self._left} more evaluations, and this fit plans "
                f"{planned}. Pay for all of them at once, PrivateValidation(..., evaluations=...); "
                "or make a new callback, which costs its own ε."
            )

    def _is_due(self, epoch):
        return (epoch + 1) % self.every == 0

    def _pay(self, model, sampling, times, budget):
        if workers.place(model.distribute_strategy)[1] > 1:
            raise ValueError(
                "PrivateValidation is not for several workers, each of which would draw noise of "
                "its own for the same scores. Score the trained model with statistics.evaluate."
            )
        if self._of_users:
            self._rows.check_order()
        units = self._private._units()
        units.rows(self._rows.count())
        shared = None if self.disjoint_from_training else budget
        private = dataclasses.replace(
            self._private,
            unit=self._unit(sampling),
            adjacency=sampling.adjacency,
            data_set=_VALIDATION if self.disjoint_from_training else TRAINING,
            budget=shared if shared is not None and shared.filter else None,
        )
        purpose = f"{self._scores} of {model.name!r} while it was trained"
        segment = private._plan_scores(units.number, self.epsilon, self.delta, purpose, times)
        if shared is not None:
            _check_budget(shared, [*model.ledger.of_data_set(), segment])
        model.ledger.enter(segment)
        self._segment, self._left = segment, times

    def _unit(self, sampling):
        """What is protected, in the word of the training.

        Raises:
            ValueError: the training protects something else.
        """
        if sampling.examples_per_unit is not None and not self._of_users:
            raise ValueError(
                f"The training protects {sampling.unit}s with all of their rows, and here each row "
                f"would count as one. Give PrivateValidation(..., users=ids), of whose rows they "
                "are."
            )
        if self._of_users and sampling.unit == "example":
            if not self.disjoint_from_training:
                raise ValueError(
                    "The training protects examples, and PrivateValidation was given users: their "
                    "guarantees do not add up. Train with data.poisson_users, or leave out users."
                )
            return "user"
        return sampling.unit

    def on_train_begin(self, logs: Any = None) -> None:
        if not isinstance(self.model, DPModel):
            raise TypeError(
                "PrivateValidation needs a dp_keras_opt.DPModel, whose ledger counts the scores; "
                f"received a {type(self.model).__name__}. Score it with statistics.evaluate."
            )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self._is_due(epoch):
            return
        segment = self._segment
        if segment is None or not self._left:
            raise RuntimeError(
                f"No evaluation is left for the end of epoch {epoch + 1}: what fit had planned is "
                "released. Pay for more with PrivateValidation(..., evaluations=...)."
            )
        self._left -= 1  # before anything is released
        units, number = self._private._units(), segment.sampling.num_examples
        total = self._scores.total(self.model, self._rows, units)
        if units.number != number:
            raise ValueError(
                f"There are {units.number} {segment.sampling.unit}s in the validation data, and "
                f"{number} when fit began. Give data that are the same at each iteration."
            )
        found = self._scores.estimates(*noisy(total, segment), number)
        self.epochs.append(epoch)
        for name, estimate in found.items():
            self.history.setdefault(name, []).append(estimate)
            if logs is not None and isinstance(estimate.value, float):
                logs[f"private_{name}"] = estimate.value


def _check_budget(budget, segments):
    spent = epsilon_of(segments, budget.delta, budget.accountant)
    if spent > budget.epsilon * (1 + 1e-6):  # as calibration takes it
        raise PrivacyBudgetError(
            f"The scores of PrivateValidation would exceed the privacy budget {budget}: with what "
            f"was spent before they have ε = {spent:.4g}. Lower their epsilon, or raise the budget."
        )
