"""One private training: a task, a candidate, its values, a budget."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from dp_keras_opt import accounting, data
from dp_keras_opt.accounting.segment import Segment
from dp_keras_opt.checks import whole_number
from dp_keras_opt.counterpart import make_private
from dp_keras_opt.training.fit_arguments import readable
from dp_keras_opt.tuning.candidates import RunInfo

if TYPE_CHECKING:
    from dp_keras_opt.tuning.candidates import Candidate


@dataclasses.dataclass(frozen=True)
class Task:
    """What is to be learned: a model, data, and the score by which runs are compared.

    Attributes:
        build: function without arguments that returns a new Keras model, private or plain.
        train: `(x, y)`, the private examples.
        validation: `(x, y)`, by which settings are chosen. No ε covers these examples: they must
            need no protection, or be protected otherwise.
        loss: as for `compile`.
        batch_size: expected number of examples in a batch.
        steps: training steps of a run.
        score: None for the loss; or a Keras metric, or its name.
        higher_is_better: whether larger scores are better.
        test: None, or `(x, y)`, by which the chosen setting is judged.
        public: None, or `(x, y)` of data declared public, for optimizers that use them.
        clip_norm: C for gradients as they are; those who clip in a geometry of their own choose
            their own.
        physical_batch_size: as for `data.poisson_batches`.
        unit: what is protected, as for `accounting.Sampling`.
        steps_per_execution: as for `compile`, or the largest divisor of it that divides an epoch.
            Small models train faster with more than one, at the same cost in privacy.
        jit_compile: as for `compile`.

    Raises:
        ValueError: `steps_per_execution` is no integer of 1 or more.
    """

    build: Callable[[], keras.Model]
    train: tuple[Any, Any]
    validation: tuple[Any, Any]
    loss: Any
    batch_size: int
    steps: int
    score: Any = None
    higher_is_better: bool = False
    test: tuple[Any, Any] | None = None
    public: tuple[Any, Any] | None = None
    clip_norm: float = 1.0
    physical_batch_size: int | None = None
    unit: str = "example"
    steps_per_execution: int = 1
    jit_compile: bool | str = "auto"

    def __post_init__(self) -> None:
        whole_number(self.steps_per_execution, "steps_per_execution")

    def better(self, scores: Sequence[float]) -> int:
        """The place of the best of these scores; a NaN is never it, if there is another."""
        signed = np.asarray(scores, np.float64) * (-1 if self.higher_is_better else 1)
        return int(np.argmin(np.where(np.isnan(signed), np.inf, signed)))

    def batches(self, candidate: Candidate) -> data.Batches:
        """Batches sampled as the candidate's noise needs it."""
        common: dict[str, Any] = {
            "physical_batch_size": self.physical_batch_size,
            "unit": self.unit,
        }
        size, steps = self.batch_size, self.steps_of(candidate)
        if candidate.balls_in_bins:
            return data.balls_in_bins(self.train, size, **common)
        if candidate.groups == 1:
            return data.poisson_batches(self.train, size, steps, **common)
        return data.cyclic_poisson(self.train, size, candidate.groups, steps, **common)

    def steps_of(self, candidate: Candidate) -> int:
        """How many steps a run takes: whole rounds of the groups, or whole epochs.

        Of steps with several passes there are as many times fewer.

        Raises:
            ValueError: one of these has more steps than a run.
        """
        unit, steps = self._round_of(candidate), self._most_steps(candidate)
        if unit > steps:
            raise ValueError(
                f"{candidate.name} trains for whole rounds of {unit} steps (of the groups, or of "
                f"an epoch), and a run has {steps}: it would train longer than others. Leave "
                "it out, or give the Task more steps."
            )
        return steps // unit * unit

    def takes(self, candidate: Candidate) -> bool:
        """Whether the task has the data, the steps and the embeddings that a candidate needs."""
        has_data = self.public is not None or not candidate.needs_public
        has_steps = self._round_of(candidate) <= self._most_steps(candidate)
        return has_data and has_steps and self._has_tables(candidate)

    def _has_tables(self, candidate):
        if candidate.sparse_embeddings is None:
            return True
        try:
            candidate.sparse_embeddings.tables(self.build().trainable_variables)
        except ValueError:
            return False
        return True

    def _most_steps(self, candidate):
        return self.steps // candidate.passes

    def _round_of(self, candidate):
        if not candidate.balls_in_bins:
            return candidate.groups
        count = len(keras.tree.flatten(self.train)[0])
        return accounting.Sampling.balls_in_bins(count, self.batch_size).steps_per_epoch


def optimizer_for(task, candidate, values, sampling, epsilon, delta, **budget):
    """The optimizer of a candidate, with the noise that the budget asks for.

    It is made twice, since clip norms can be in units of the noise.
    """
    steps = task.steps_of(candidate)
    info = RunInfo(steps, task.batch_size, task.clip_norm)
    for _ in range(2):
        optimizer = candidate.make(info, **values)
        _calibrate(optimizer, sampling, steps, epsilon, delta, **budget)
        info = dataclasses.replace(info, noise_multiplier=optimizer.noise_multiplier)
    return optimizer


def _calibrate(optimizer, sampling, steps, epsilon, delta, **budget):
    """As `accounting.calibrate`, but what was found once is looked up and only checked."""
    optimizer.settle(sampling, steps)
    releases, schedule = optimizer.releases_for(1.0), optimizer.noise_schedule
    config = Segment("", releases, schedule, sampling).to_config()
    key = json.dumps(config, sort_keys=True), steps, epsilon, delta, repr(budget)
    if key not in _found:
        accounting.calibrate(optimizer, sampling, steps, epsilon, delta, **budget)
        _found[key] = optimizer.plan
    optimizer.noise_multiplier = _found[key].noise_multiplier
    optimizer.plan = _found[key]


_found = {}


def train(task, candidate, values, epsilon, delta, seed=0, ledger=None, verbose=0, **budget):
    """One run.

    Args:
        task: the `Task`.
        candidate: the `Candidate`.
        values: of its space.
        epsilon, delta: the budget.
        seed: of the initial weights; the noise and the batches stay unpredictable.
        ledger: None, or the `accounting.Ledger` that the run is entered in.
        verbose: as for `fit`.
        **budget: `num_trainings`, `selection` or `accountant` of `accounting.calibrate`.

    Returns:
        The trained `DPModel`.
    """
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    batches = task.batches(candidate)
    optimizer = optimizer_for(task, candidate, values, batches.sampling, epsilon, delta, **budget)
    if optimizer.needs_public:
        need_public(task, candidate)
        batches = data.with_public(batches, task.public)
    model = make_private(task.build())
    if ledger is not None:
        model.ledger = ledger
    metric = task.score
    if isinstance(metric, keras.metrics.Metric):  # a model keeps its state: each has its own
        metric = type(metric).from_config(metric.get_config())
    metrics = [] if metric is None else [metric]
    model.compile(
        optimizer=optimizer,
        loss=task.loss,
        metrics=metrics,
        steps_per_execution=math.gcd(task.steps_per_execution, len(batches)),
        jit_compile=task.jit_compile,
    )
    model.fit(batches, epochs=task.steps_of(candidate) // len(batches), verbose=verbose)
    return model


def need_public(task, candidate):
    """Refuses a task without public data."""
    if task.public is None:
        raise ValueError(f"{candidate.name} needs public data: give the Task some as `public`.")


def score(task, model, part):
    """The score of a model on `(x, y)`."""
    x, y = readable(part)
    result = model.evaluate(x, y, batch_size=1024, verbose=0, return_dict=True)
    if task.score is None:
        return float(result["loss"])
    return float(next(value for name, value in result.items() if name != "loss"))
