"""The guard around the train function: no step without its entry in the ledger."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import secrets
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from dp_keras_opt import workers
from dp_keras_opt._keras import layers_of
from dp_keras_opt.accounting import Ledger, Sampling
from dp_keras_opt.accounting.accountant import composable, epsilon_of
from dp_keras_opt.accounting.budget import Budget
from dp_keras_opt.accounting.privacy_filters import check_held
from dp_keras_opt.accounting.sampling import check_sampling
from dp_keras_opt.accounting.segment import conditions_of, stated
from dp_keras_opt.noise import entropy
from dp_keras_opt.noise.schedules import Constant
from dp_keras_opt.training import saved_run
from dp_keras_opt.training.secret_seeds import SecretSeeds
from dp_keras_opt.training.weight_history import WeightHistory

#: So many clip norms of the steps to come are looked at when a `fit` begins, in about a second.
_CHECKED_AHEAD = 100_000


class PrivacyBudgetError(RuntimeError):
    """A step was asked for that the privacy budget does not allow."""


@dataclasses.dataclass
class FitProgress:
    """How far a `fit` has come with what it was to run.

    Attributes:
        to_run: steps that it has yet to run, unless results stop it; infinite if not known.
        pass_length: after how many steps the data end, also within an execution of several; None
            where that is not known.
        out_of_budget: whether the budget has ended it.
        ran: steps that it ran.
        ends: after how many steps the data came to their end.
        counter: the optimizer's, after the last of them; None before the first.
        is_finished: whether all that was planned ran, or the budget ended it, so that results had
            no say in when it stopped.
    """

    to_run: float
    pass_length: int | None = None
    out_of_budget: bool = False
    ran: int = 0
    ends: set[int] = dataclasses.field(default_factory=set)
    counter: int | None = None
    is_finished: bool = False


class PrivacyGuard:
    """Decides which steps of a model may run, and enters them in the ledger before they do.

    It checks that the data is sampled as it is accounted, that the noise schedule goes on where it
    stopped, and that the budget holds. Nothing inside of a compiled graph could refuse: assertions
    vanish under XLA. It sees no gradient and no batch.

    The model that is passed to its methods is the `DPModel` that has it: its optimizer, weights,
    strategy and the ledgers of models in it are read; `stop_training` is set, and `train_function`
    unset where it must be traced anew.

    Attributes:
        budget: the `Budget` that no step may exceed, or None.
        sampling: how batches are sampled, None where that is not known yet.
        order_seed: the seed of the order, or the groups, of the examples; None where there is none.
        run: the segment of the ledger that the last step belongs to.
        resumed: a `SavedRun` that the next step goes on with, or None.
        is_stepping: whether the train function runs, with its steps in the ledger.
        progress: of the `fit` that runs, None outside of one.
        history: what else the weights have cost.
        seeds: of the layers, while it trains.
        is_of_fit: whether the sampling is that of the data of a `fit`, and says nothing of others.
    """

    def __init__(self) -> None:
        self.budget: Budget | None = None
        self.sampling: Sampling | None = None
        self.order_seed: int | None = None
        self.run: str | None = None
        self.resumed: saved_run.SavedRun | None = None
        self.is_stepping = False
        self.progress: FitProgress | None = None
        self.history = WeightHistory()
        self.seeds = SecretSeeds()
        self._ledger = Ledger()
        self._exchanged: list[Ledger] = []  # those that were the model's before
        self.is_of_fit = False
        self._process = entropy.process()
        self._passes_begun = 0
        self._since_data_began = 0  # steps; whole passes, where they were not broken off
        self._handed = 0  # batches that loops had been given at the last step
        self._entered: int | None = None  # the step that this `fit` asked for last
        self._warned_of: Any = None  # the plan that a warning spoke of

    @property
    def is_fitting(self) -> bool:
        """Whether `fit` runs."""
        return self.progress is not None

    def ledger(self, model: Any) -> Ledger:
        """The ledger, with what other models have spent on the same weights, and its layers."""
        self.history.gather(self._ledger, model.weights)
        layers = layers_of(model, include_self=False)
        released_on = [getattr(layer, "_released_on", None) for layer in layers]  # adapt_privately
        for other in (*self._exchanged, *released_on):  # a `PrivateData` may count on in them
            if other is not None and other is not self._ledger:
                self._ledger.absorb(other)
        return self._ledger

    def ledger_of_all(self, model: Any) -> Ledger:
        """The ledger, the same at all workers: they must come to the same decisions."""
        self.ledger(model)
        strategy = model.distribute_strategy
        if workers.place(strategy)[1] > 1:
            for text in workers.gathered(self._ledger.to_json().encode(), strategy):
                self._ledger.merge(Ledger.from_json(text.decode()))
        return self._ledger

    def exchange_ledger(self, model: Any, ledger: Ledger) -> None:
        """Takes another ledger, to which what was spent so far is added."""
        if not isinstance(ledger, Ledger):
            raise ValueError(
                f"ledger must be a dp_keras_opt.accounting.Ledger, received {ledger!r}."
            )
        before = self.ledger(model)
        ledger.merge(before)
        self._exchanged.append(before)
        self._ledger = ledger

    def learn(self, model: Any, text: str) -> None:
        """Takes the ledger that was saved beside loaded weights."""
        # Of one's own, given to `load_model` as custom_objects, which no longer hold here.
        optimizer = getattr(model, "optimizer", None)  # of a model that is compiled
        names = ("noise", "noise_schedule")
        own = (type(getattr(optimizer, name)) for name in names if hasattr(optimizer, name))
        scope = contextlib.nullcontext()
        try:
            Ledger.from_json(text)
        except ValueError:  # Keras's scopes hide those around them, which may have what is missing
            scope = keras.saving.custom_object_scope({kind.__name__: kind for kind in own})
        with scope:
            self.history.learn(self._ledger, model.weights, text)

    def sample_as(
        self, model: Any, sampling: Sampling, order_seed: int | None = None, of_fit: bool = True
    ) -> None:
        """Checks and takes the sampling of the batches to come: of a `fit`, or those after it.

        Raises:
            ValueError: the optimizer or its calibration is for another one.
        """
        _check_conforms(model.optimizer, sampling)
        before = self.sampling
        if before is not None and before.rows_per_unit != sampling.rows_per_unit:
            model.train_function = None  # to be traced anew: tracing checks the batches against it
        self.sampling, self.order_seed, self.is_of_fit = sampling, order_seed, of_fit
        self._since_data_began = self._handed = 0
        self._place_next_pass(steps_taken(model.optimizer))
        self.ledger(model).close()

    def refuse_within_fit(self, what: str) -> None:
        """Refuses what would have its steps, or those to come, accounted as others are sampled.

        Raises:
            ValueError: a `fit` runs.
        """
        if self.is_fitting:
            raise ValueError(
                f"{what} was asked for while fit runs, as from a callback. Its steps are accounted "
                "as the data of that fit are sampled, and the batches of others are not. Do it "
                "when fit has returned."
            )

    # Around the train function.

    def around(
        self,
        model: Any,
        execute: Callable[[Any], Any],
        check: Callable[[Any], None],
        steps_run: Callable[[], int],
    ) -> Callable[[Any], Any]:
        """The train function, with its steps checked, reserved in the ledger, run and settled.

        Args:
            model: the `DPModel`.
            execute: Keras's train function, of an iterator.
            check: function of the iterator, called before each execution.
            steps_run: function that gives how many steps have run, which is not left to optimizers:
                what does not count as a step there may have released something.
        """
        steps, optimizer = model.steps_per_execution, model.optimizer
        traced = None  # what the step releases, as of the first time that it runs

        def train_function(iterator):
            nonlocal traced
            if model.optimizer is not optimizer or model.steps_per_execution != steps:
                raise ValueError(
                    "The optimizer or steps_per_execution was exchanged without compiling again; "
                    "the compiled training step would not notice. Call compile."
                )
            optimizer.noise_source.renew_after_fork()
            check(iterator)  # builds what is not built
            releases = optimizer.releases
            traced = traced or releases
            if releases != traced:
                raise ValueError(
                    "What the optimizer releases was changed since the training step was compiled, "
                    f"which would not notice: from {traced} to {releases}. Call compile."
                )
            self.seeds.draw(model)
            # Each reading costs a small model some of its time.
            before, run_before = steps_taken(optimizer), steps_run()
            reserved = self._enter(model, steps, before)
            if not reserved:
                model.stop_training = True
                raise StopIteration
            self.is_stepping, ended = True, None
            try:
                logs = execute(iterator)
            except (StopIteration, tf.errors.OutOfRangeError) as error:
                ended = error
            except BaseException:
                # It counts, but is no step of those to come: it drew noise that is in no release,
                # and a factor of the schedule that the next step has again.
                current = self._ledger.current
                if optimizer.noise.is_correlated or (current is not None and current.changes):
                    self._ledger.close()
                raise
            finally:
                self.is_stepping, executed = False, steps_run() - run_before
                if executed > reserved:
                    self._count_past(executed - reserved)
                self.history.record(self._ledger, self.run, model, has_run=executed > 0)
            self._settle(optimizer, reserved, before, executed)  # the data may have ended
            if ended is not None:
                raise ended
            if self.progress is not None and not self.affords(steps):
                self.progress.out_of_budget = True
                model.stop_training = True
            return logs

        return train_function

    def _enter(self, model, steps, now):
        """Reserves these steps in the ledger, and returns how many; 0 if the budget ends a `fit`.

        Fewer are reserved where the data end before. `now` steps were taken so far.

        Raises:
            PrivacyBudgetError: the budget does not afford them, outside of `fit`.
            ValueError: the noise schedule would not go on where it stopped; or, outside of `fit`,
                as `_check_loop`.
        """
        optimizer = model.optimizer
        if not self.is_fitting and self.sampling:
            self._check_loop(optimizer)
        if self._process != entropy.process():  # the process that it forked from has the run
            self._ledger.close()
            self._process = entropy.process()
        self.history.let_move(model.weights)  # such as callbacks have loaded
        self.history.gather_again(self._ledger, model.weights)
        self._notice_new_pass(now)
        self.begin_run(model)
        self.history.record(self._ledger, self.run, model, has_run=False)
        segment = self._ledger.current
        if segment.changes and segment.last_step != now:
            raise ValueError(
                f"The optimizer's step counter was set to {now}, but its "
                f"{segment.changes} is accounted up to step {segment.last_step}. Leave the counter "
                "alone, or compile again with a new optimizer."
            )
        if not self.affords(steps):
            if self.progress is None:
                raise PrivacyBudgetError(
                    f"{steps} more training steps would exceed the privacy budget {self.budget}."
                )
            self.progress.out_of_budget = True
            return 0
        steps = self._until_end(steps)
        optimizer.check_clip_norms(now, steps)
        to_run = self.progress and self.progress.to_run  # data may end within an execution
        self.warn_past_plan(optimizer, now, min(steps, to_run or steps))
        self._ledger.reserve(steps, self.run)
        return steps

    def _check_loop(self, optimizer):
        """Refuses a step outside of `fit` that cannot be accounted as the batches are sampled.

        Raises:
            ValueError: it is not known how they are, or where their passes begin; or what a step
                costs depends on its place among the others.
        """
        sampling = self.sampling
        if self.is_of_fit:
            raise ValueError(
                "How this batch is sampled is not known, so no ε can be stated: what fit knew of "
                "its data says nothing of others. Set model.sampling to what holds for the batches "
                "to come: batches.sampling of a sampler of dp_keras_opt.data, if each is drawn "
                "anew; Sampling.full(batch_size), if the same examples come in every step."
            )
        why = _needs_turns(optimizer, sampling)
        if why:
            raise ValueError(
                f"{why} needs fit, which takes every batch in its turn: here one could be left "
                "out, or go to another model, and the steps that run would cost more than is "
                "accounted. Call fit, several times if need be, or use Poisson sampling with "
                "independent noise and one batch_size."
            )
        if sampling.in_passes:
            handed = sampling.passes.handed if sampling.passes else 0
            if handed == self._handed:
                raise ValueError(
                    f"{sampling.kind!r} sampling is accounted in whole passes over the data, so "
                    "that each step needs a batch that was drawn for it, by what counts passes: "
                    "`for batch in batches: model.train_on_batch(*batch)`, after model.sampling = "
                    "batches.sampling, where batches are of a sampler of dp_keras_opt.data, or "
                    "assume_sampling(data, sampling). No batch was drawn since the last step."
                )
            self._handed = handed

    def _until_end(self, steps):
        """How many of so many steps there are data for, where a segment began with a pass."""
        length = self.progress and self.progress.pass_length
        current = self._ledger.current
        return min(steps, length - current.steps % length) if length and current else steps

    def _notice_new_pass(self, now):
        """Ends the segment where the data were begun anew within a pass: another draw, to be paid.

        In `fit` that cannot be: there Keras begins anew only where the data have come to their end,
        and the first batch is drawn after this.

        Raises:
            ValueError: the sizes of the batches were drawn as those of other steps.
        """
        passes = self.sampling and self.sampling.passes
        begun = passes.begun if passes else 0
        current = self._ledger.current
        if passes and begun != self._passes_begun:
            # A pass begins before a step, or with the first batch that the step asks for.
            if self.sampling.batch_sizes and passes.first_step not in (self._entered, now):
                raise ValueError(
                    f"The batches were drawn with the expected sizes from step {passes.first_step} "
                    f"on, but the optimizer has taken {now} steps. Pass the batches to fit as they "
                    "were made."
                )
            if not self.is_fitting:
                self._since_data_began = 0
                if current and current.breaks_off:
                    self._ledger.close()
        elif self._has_jumped(now) and self.sampling and self.sampling.batch_sizes:
            raise ValueError(
                f"The optimizer's step counter was set to {now} while fit runs, as by weights that "
                "were loaded, but the batches of this pass have the expected sizes from step "
                f"{self.progress.counter} on. Load weights when fit has returned."
            )
        self._passes_begun, self._entered = begun, now
        self._place_next_pass(now)

    def _has_jumped(self, now):
        """Whether something else than a step has moved the optimizer's counter within a `fit`."""
        return self.progress is not None and self.progress.counter not in (None, now)

    def _place_next_pass(self, now):
        """Tells the batches with which step of the training their next pass begins."""
        passes = self.sampling and self.sampling.passes
        if passes:
            passes.next_step = now

    def begin_run(self, model: Any) -> None:
        """Opens a segment of the ledger for the next steps, where none is open.

        Raises:
            ValueError: it is not known how batches are sampled; earlier steps ran under a privacy
                filter that is not the budget's, or without the budget's; the segment would begin
                within a pass, where the noise of two steps a pass apart is accounted by passes; or
                workers train in different ways.
        """
        current, optimizer = self._ledger.current, model.optimizer
        kept = None if self.budget is None else self.budget.filter
        correlated = optimizer.noise.is_correlated
        if (
            current is not None
            and current.run == self.run
            # Or the past noise is that of another model, with the same optimizer.
            and (not correlated or optimizer.noise_source.memory.run == self.run)
            and (
                (current.releases, current.schedule, current.clip_norm, current.filter)
                == (optimizer.releases, optimizer.noise_schedule, stated(optimizer.clip_norm), kept)
            )
        ):
            return
        if self.sampling is None:
            raise ValueError(
                "How batches are sampled is not known, so no ε can be stated. Set "
                "model.sampling = dp_keras_opt.accounting.Sampling.poisson(...) first."
            )
        _check_conforms(optimizer, self.sampling)  # again: the model may be compiled anew
        self.ledger(model).close()
        for layer in layers_of(model, include_self=False):
            if isinstance(getattr(layer, "_guard", None), PrivacyGuard):
                self._ledger.merge(layer.ledger)  # what it spent is in the weights, too
        self.ledger_of_all(model)
        if self.resumed is not None:
            conditions = self.sampling, self.order_seed, kept
            self.run = saved_run.go_on(self.resumed, self._ledger, *conditions, model)
            self.resumed = None
        else:
            self._refuse_within_pass(optimizer)
            run = workers.of_chief(secrets.token_bytes(16), model.distribute_strategy).hex()
            self._ledger.begin(
                optimizer.releases,
                self.sampling,
                schedule=optimizer.noise_schedule,
                clip_norm=optimizer.clip_norm,
                first_step=steps_taken(optimizer),
                run=run,
                plan=optimizer.plan,
                filter=kept,
                conditions=conditions_of(optimizer, self.sampling),
            )
            _check_alike(model, self._ledger.current)
            if correlated:
                optimizer.noise_source.memory.reset()  # a segment is a run of its own
            self.run = run
        if correlated:
            optimizer.noise_source.memory.run = self.run
        if self.progress is not None:
            self._enter_plan()

    def _refuse_within_pass(self, optimizer):
        """Refuses a segment that begins within a pass, where its noise follows the step.

        An example that comes once a pass is accounted by the noise of each, from where the segment
        begins.
        """
        sampling, steps = self.sampling, self._since_data_began
        varies = not isinstance(optimizer.noise_schedule, Constant)
        if sampling.in_passes and varies and steps % sampling.period:
            raise ValueError(
                f"After {steps} steps since the data began the ledger was closed, as by weights "
                f"that were loaded, within a pass of {sampling.period} steps, by which a noise "
                "schedule is accounted. Load weights at the end of a pass, or when fit has "
                "returned."
            )

    def _count_past(self, steps):
        """Counts steps past what was stated of the data, and maybe past the end of the noise."""
        (run,) = (segment for segment in self._ledger.segments if segment.run == self.run)
        self._ledger.absorb(Ledger.of_segments([run.without_noise(steps)]))

    def _settle(self, optimizer, reserved, before, executed):
        """Gives back the reserved steps that did not run.

        Args:
            optimizer: of the model.
            reserved: steps in the ledger.
            before: what the optimizer had counted.
            executed: how many steps ran.

        Raises:
            RuntimeError: more steps ran than were reserved, or the optimizer counts others.
        """
        if executed > reserved:
            raise RuntimeError(
                f"{reserved} training steps were accounted, but {executed} ran: the data have more "
                "batches than was stated of them. What is stated does not hold for the rest, which "
                "are counted as steps without noise; ε is infinite. State how these batches are "
                "sampled, and train anew."
            )
        self._ledger.settle(reserved, executed, self.run)
        now = steps_taken(optimizer)
        self._since_data_began += executed
        self._place_next_pass(now)
        if self.progress is not None:
            self.progress.ran += executed
            if executed < reserved:  # as also an execution after this one may find
                self.progress.ends.add(self.progress.ran)
            self.progress.counter = now
            self.progress.to_run = max(self.progress.to_run - executed, 0)
        if now - before != executed:
            raise RuntimeError(
                f"{executed} training step(s) ran, which the ledger has, but the optimizer's step "
                f"counter went from {before} to {now}. Noise, clip norms and batch sizes follow "
                "it, and those of the next steps would not be what is accounted. Leave "
                "`iterations` alone; a rule of your own that overrides `update` without "
                "super().update(...) ends with self._iterations.assign_add(1)."
            )

    # What a `fit` is to run.

    @contextlib.contextmanager
    def fitting(
        self, model: Any, steps: float, pass_length: int | None = None
    ) -> Iterator[FitProgress]:
        """Around a `fit`: tells the ledger what is planned, and at the end what became of it.

        Args:
            model: the `DPModel`.
            steps: how many steps it is to run, unless results stop it; infinite if not known.
            pass_length: as in `FitProgress`.
        """
        self.progress = progress = FitProgress(steps, pass_length)
        # Keras begins passes of its own, and callbacks may restore another step before the first.
        passes = self.sampling and self.sampling.passes
        self._passes_begun, self._entered = passes.begun if passes else 0, None
        try:
            self.ledger(model)
            self._enter_plan()
            now = steps_taken(model.optimizer)
            self.warn_past_plan(model.optimizer, now, steps)
            model.optimizer.check_clip_norms(now, int(min(steps, _CHECKED_AHEAD)))
            yield progress
        finally:
            self.progress = None
            ledger = self.ledger(model)
            if progress.is_finished and self.run is not None:
                with self._warning_of_disk():
                    ledger.fulfil(self.run)
            if ledger.current and ledger.current.breaks_off:
                ledger.close()  # `train_on_batch` may begin another pass
            with self._warning_of_disk():
                ledger.sync()

    def _enter_plan(self):
        """Tells the ledger how many steps are planned of its current segment."""
        steps, current = self.progress.to_run, self._ledger.current
        if self.budget is not None and not math.isinf(self.budget.epsilon):
            steps = min(steps, max(self.budget.limit(self._ledger) - current.steps, 0))
        self._ledger.plan(steps, self.run)

    @contextlib.contextmanager
    def _warning_of_disk(self):
        try:
            yield
        except OSError as error:
            warnings.warn(
                f"{self._ledger.path} could not be brought up to date ({error}): it counts more "
                "steps than ran, which is safe.",
                stacklevel=6,  # the caller of `fit`: two context managers lie between
            )

    # The budget.

    def affords(self, steps: int) -> bool:
        """Whether this many steps more keep the budget."""
        if self.budget is None or self._ledger.current is None:  # the next step begins a segment
            return True
        return self.budget.affords(self._ledger, self._until_end(steps))

    def check_beginning(self, steps: int) -> None:
        """Refuses to begin with an optimizer whose first steps exceed the budget.

        Raises:
            PrivacyBudgetError: they do.
            ValueError: it is their noise that ends.
        """
        if self.budget is None or self.affords(steps):
            return
        self._check_noise_of(self._until_end(steps))
        spent = self._ledger.epsilon(self.budget.delta, self.budget.accountant)
        raise PrivacyBudgetError(
            f"The privacy budget {self.budget} affords not even the first {steps} step(s), so "
            f"that nothing would be trained; ε = {spent:.4g} was spent before. "
            f"{'Add' if self.budget.filter else 'Raise epsilon or delta, or add'} noise: "
            "dp_keras_opt.accounting.calibrate finds how much."
        )

    def check_end(self, steps: float) -> None:
        """Refuses to begin what would pass the end of its noise, if no budget may end it before.

        Raises:
            ValueError: naming what ends.
        """
        if self.budget is None and steps < math.inf:
            self._check_noise_of(steps)

    def _check_noise_of(self, steps):
        if self._ledger.current is not None:
            self._ledger.current.check_end(steps)

    def check_filter(self, model: Any, budget: Budget | None) -> None:
        """Refuses a budget that is not that of the privacy filter under which earlier steps ran.

        Raises:
            ValueError: it is not; or its own filter would begin after the first step.
        """
        check_held(self.ledger(model).of_data_set(), None if budget is None else budget.filter)

    def warn_of_end(self, steps: int, planned: int | None, more: int) -> None:
        """Says that the budget, or what noise there is, ended a `fit` early, if it did.

        Args:
            steps: how many steps it ran.
            planned: how many it was to run, None if not known.
            more: how many more were not allowed.
        """
        if planned is None or steps < planned:
            of = "" if planned is None else f" of {planned}"
            current = self._ledger.current
            left, end = (math.inf, "") if current is None else current.end
            why = f"The privacy budget {self.budget} allows no further step"
            if left < self._until_end(more):
                why = f"No noise is left for further steps ({end})"
                on = "To train on, make the optimizer's noise for more."
            elif self.budget is not None and self.budget.filter:
                on = "It was fixed before the first step: only steps with more noise may be left."
            else:
                on = "To train on, pass a PrivacyBudget with a larger epsilon."
            warnings.warn(f"{why}: training stopped after {steps}{of} steps. {on}", stacklevel=3)

    def warn_past_plan(self, optimizer: Any, now: int, steps: float) -> None:
        """Says, once, that after `now` so many steps go past what the noise was found for."""
        plan = optimizer.plan
        if plan is None or plan is self._warned_of or self.budget is not None:
            return
        total = now + steps
        if plan.steps < total < math.inf:
            self._warned_of = plan
            *past, current = self._ledger.segments
            future = dataclasses.replace(
                current, steps=current.steps + min(steps, current.end[0]), planned=None
            )
            segments = [*(segment for segment in past if segment.steps), future]
            (composed,) = (group for group in composable(segments) if future in group)
            warnings.warn(
                f"The noise was calibrated for {plan.steps} steps, for ε = {plan.epsilon:g} at δ = "
                f"{plan.delta:g}, and training goes on to step {total}: ε will be "
                f"{epsilon_of(composed, plan.delta, plan.accountant):.4g}. Calibrate for as many "
                "steps as will run, or pass a PrivacyBudget, which ends training before it is "
                "exceeded.",
                stacklevel=5,  # the caller of `fit`: a context manager lies between
            )


def steps_taken(optimizer: Any) -> int:
    """How many steps the optimizer has taken."""
    return int(optimizer.iterations.numpy())


def _needs_turns(optimizer, sampling):
    """What makes a step's cost depend on which batches came before it, in words; "" if nothing."""
    if sampling.batch_sizes:
        return "An expected batch size that changes"
    if sampling.period == 1:
        return ""
    if optimizer.noise.is_correlated:
        return "Correlated noise"
    # What comes once a pass is accounted by whole passes, which are counted where they begin.
    return "" if sampling.in_passes else f"{sampling.kind!r} sampling"


def _check_alike(model, segment):
    """Refuses workers with other bounds, noise or sampling: one ledger speaks for all of them."""
    if workers.place(model.distribute_strategy)[1] == 1:
        return
    ours = segment.to_config() | model.optimizer.private_config()
    digests = {
        name: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
        for name, value in ours.items()
    }
    gathered = workers.gathered(json.dumps(digests).encode(), model.distribute_strategy)
    everyones = [set(json.loads(text).items()) for text in gathered]
    differing = {name for name, _ in set.union(*everyones) - set.intersection(*everyones)}
    if differing:
        raise ValueError(
            "The workers train in different ways, and the ledger of one would speak for all of "
            f"them: they differ in {', '.join(sorted(differing))}. This one has "
            f"{segment.sampling}, clip_norm={segment.clip_norm}, "
            f"noise_multiplier={model.optimizer.noise_multiplier!r}. Give all optimizers the same "
            "arguments, and sample batches alike at all workers."
        )


def _check_conforms(optimizer, sampling):
    """Refuses a sampling for which the optimizer, or its calibration, is not."""
    check_sampling(optimizer, sampling)
    accounted = optimizer.calibrated_for
    if accounted is not None and accounted.of_one_view != sampling.of_one_view:
        raise ValueError(
            f"The noise was calibrated for {accounted}, but the data is sampled as {sampling}. "
            "Calibrate for this sampling, or set noise_multiplier yourself."
        )
