"""The guard around the train function: no step without its entry in the ledger."""

import contextlib
import dataclasses
import json
import math
import secrets
import warnings

import tensorflow as tf

from dp_keras_opt import checksums, provenance, replicas
from dp_keras_opt.accounting import Ledger, Sampling
from dp_keras_opt.accounting.accountant import composable, epsilon_of
from dp_keras_opt.accounting.sampling import check_sampling
from dp_keras_opt.accounting.statement import statement
from dp_keras_opt.clipping import state_changes
from dp_keras_opt.noise import entropy, resume
from dp_keras_opt.types import Accountant, Path

_CHANGED = (
    "The weights were changed since by something that is not a private step (set_weights, an "
    "assignment, training without privacy, weights loaded without their ledger). What that took "
    "from the data is not covered."
)


class PrivacyBudgetError(RuntimeError):
    """A step was asked for that the privacy budget does not allow."""


class Guard:
    """Mixin over `keras.Model`: checks sampling, schedule and budget, and enters each step.

    It reads `optimizer`, `budget` and `_fitting`, and keeps `_ledger`, `_run`, `_stepping`,
    `_sampling`, `_arrangement`, `_resumed` and `_process`; `_to_run` (how many steps `fit` has yet
    to run; None outside of it), `_out_of_budget` and `_ends` (how often the data ended);
    `_shaped_in` (the run that the weights are known to be shaped by) and `_others` (the ledgers of
    shared weights, as of which record); `_warned_of` (the calibration that a warning spoke of);
    `_learned` (whether loaded weights brought a ledger) and `_unreadable` (why theirs could not be
    read). `DPModel` has them.
    """

    @property
    def ledger(self) -> Ledger:
        """The `accounting.Ledger` of what the model has spent.

        Assign `Ledger("spent.jsonl")` to keep it in a file, or one ledger to several models that
        are trained on the same data; what the model has spent before is added to it.
        """
        self._gather()
        return self._ledger

    @ledger.setter
    def ledger(self, ledger: Ledger) -> None:
        if not isinstance(ledger, Ledger):
            raise ValueError(
                f"ledger must be a dp_keras_opt.accounting.Ledger, received {ledger!r}."
            )
        ledger.merge(self.ledger)
        object.__setattr__(self, "_ledger", ledger)

    def _gather(self):
        """Adds to the ledger what other models have spent on the weights that this one shares."""
        if self._unreadable is not None:
            raise ValueError(
                "Weights were loaded into this model whose privacy ledger could not be read, so "
                "what they cost is not known. Load into a new model."
            ) from self._unreadable
        others = [each for each in provenance.ledgers_of(self.weights) if each is not self._ledger]
        object.__setattr__(self, "_others", (provenance.last_record(), others))
        self._absorb_others()

    def _absorb_others(self):
        for other in self._others[1]:
            self._ledger.absorb(other)

    def _learn(self, text):
        """Takes what the ledger beside saved weights says, once `_saved_ledger` has written it."""
        try:
            self._ledger.merge(Ledger.from_json(text))
        except ValueError as error:  # which Keras swallows with skip_mismatch=True
            object.__setattr__(self, "_unreadable", error)
            raise
        provenance.record(self.weights, self._ledger)
        checksums.from_config(self.weights, json.loads(text).get("weights", ()))
        object.__setattr__(self, "_learned", True)

    def _saved_ledger(self):
        """The ledger as text, with the checksums of the weights that it speaks of."""
        ledger = json.loads(self.ledger.to_json())
        with_lora = (x for x in self._flatten_layers() if getattr(x, "lora_enabled", False))
        merged = [variable for layer in with_lora for variable in layer.weights]  # when saved
        return json.dumps(ledger | {"weights": checksums.to_config(self.weights, merged)}, indent=1)

    def statement(self, delta: float, accountant: Accountant = "rdp", group_size: int = 1) -> str:
        """The guarantee of the weights in words; see `accounting.statement`.

        It covers what every private model has spent on these weights, and says so where they were
        changed since by something else, as far as that is known (`fit` notes what it leaves).

        Raises:
            ValueError: as `accounting.statement`.
        """
        notes = [_CHANGED] if checksums.are_changed(self.weights) else []
        return statement(self.ledger, delta, accountant, group_size, notes)

    def _sync_ledger(self):
        with self._warning_of_disk():
            self.ledger.sync()

    @contextlib.contextmanager
    def _warning_of_disk(self):
        try:
            yield
        except OSError as error:
            warnings.warn(
                f"{self.ledger.path} could not be brought up to date ({error}): it counts more "
                "steps than ran, which is safe.",
                stacklevel=5,
            )

    # How batches are sampled.

    @property
    def sampling(self) -> Sampling | None:
        """The `Sampling` of the batches, set by `fit`, and to be set before `train_on_batch`."""
        return self._sampling

    @sampling.setter
    def sampling(self, sampling: Sampling) -> None:
        self._sample_as(sampling)

    def _sample_as(self, sampling, arrangement=None):
        """Checks and takes a sampling. A method, because assigning an attribute the object that it
        holds already is skipped (by TensorFlow's tracking), and the ledger would not be closed."""
        self._assert_compile_called("sampling")
        check_sampling(self.optimizer, sampling)
        accounted = self.optimizer.calibrated_for
        if accounted is not None and accounted != sampling:
            raise ValueError(
                f"The noise was calibrated for {accounted}, but the data is sampled as {sampling}. "
                "Calibrate for this sampling, or set noise_multiplier yourself."
            )
        before = self._sampling
        if before is not None and before.examples_per_unit != sampling.examples_per_unit:
            self.train_function = None  # to be traced anew: tracing checks the batches against it
        object.__setattr__(self, "_sampling", sampling)
        object.__setattr__(self, "_arrangement", arrangement)
        self.ledger.close()

    # The wrapper around the train function.

    def make_train_function(self, force: bool = False) -> None:
        """Wraps Keras's train function: check, reserve in the ledger, run, settle.

        Nothing inside the graph can refuse: assertions vanish under XLA.
        """
        if self.train_function is not None and not force:
            return
        if replicas.is_used(self.distribute_strategy):
            self.train_function = replicas.train_function(self)
        else:
            super().make_train_function(force=True)
        run = state_changes.unchanged(self.train_function, self._hidden_state)
        steps, optimizer = self.steps_per_execution, self.optimizer

        def train_function(iterator):
            if self.optimizer is not optimizer or self.steps_per_execution != steps:
                raise ValueError(
                    "The optimizer or steps_per_execution was exchanged without compiling again; "
                    "the compiled training step would not notice. Call compile."
                )
            self._enter(steps, iterator)
            before = self._iterations()
            object.__setattr__(self, "_stepping", True)
            try:
                logs = run(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                self._settle(steps, before)
                raise
            finally:
                object.__setattr__(self, "_stepping", False)
            self._settle(steps, before)  # the data may have ended in between
            if self._fitting and not self._affordable(steps):
                self._stop_for_budget()
            return logs

        self.train_function = train_function

    def _enter(self, steps, iterator):
        """Checks that these steps may run on this data, and reserves them in the ledger."""
        if self._process != entropy.process():  # the process that it forked from has the run
            self._ledger.close()
            object.__setattr__(self, "_process", entropy.process())
        self.optimizer.noise_source.renew_after_fork()
        self._prepare(iterator)
        if self._others[0] == provenance.last_record():  # walking the weights takes a millisecond
            self._absorb_others()
        else:
            self._gather()
        self._begin_segment()
        if self._shaped_in != self._run:
            provenance.record(provenance.moved_by(self), self._ledger)
            object.__setattr__(self, "_shaped_in", self._run)
        segment = self._ledger.current
        if segment.schedule.length is not None and segment.last_step != self._iterations():
            raise ValueError(
                f"The optimizer's step counter was set to {self._iterations()}, but the noise "
                f"schedule is accounted up to step {segment.last_step}. Leave the counter alone, "
                "or compile again with a new optimizer."
            )
        if not self._affordable(steps):
            if not self._fitting:
                raise PrivacyBudgetError(
                    f"{steps} more training steps would exceed the privacy budget {self.budget}."
                )
            self._stop_for_budget()
            raise StopIteration
        self._warn_past_calibration(steps)
        self._ledger.reserve(steps, self._run)

    def _stop_for_budget(self):
        self.stop_training = True
        object.__setattr__(self, "_out_of_budget", True)

    # What `fit` planned: how many steps it runs, unless results stop it.

    def _plan_steps(self, epochs, steps):
        """Begins the plan of a `fit`: so many epochs, or as much of them as the budget affords."""
        object.__setattr__(self, "_to_run", epochs * steps if epochs else 0)
        object.__setattr__(self, "_out_of_budget", False)
        object.__setattr__(self, "_ends", 0)
        self._enter_plan()

    def _enter_plan(self):
        """Tells the ledger what is planned of its current segment."""
        steps, current = self._to_run, self.ledger.current
        if self.budget is not None and not math.isinf(self.budget.epsilon):
            steps = min(steps, max(self.budget.limit(self.ledger) - current.steps, 0))
        self.ledger.plan(steps)

    def _end_plan(self, finished):
        """Ends the plan: it is what ran, unless the `fit` may have been stopped by results."""
        object.__setattr__(self, "_to_run", None)
        if finished:
            with self._warning_of_disk():
                self.ledger.fulfil(self._run)

    def _begin_segment(self):
        """Opens a segment of the ledger for the next steps, where none is open."""
        current, optimizer = self._ledger.current, self.optimizer
        if (
            current is not None
            and current.run == self._run
            and (
                (current.releases, current.schedule, current.clip_norm)
                == (optimizer.releases, optimizer.noise_schedule, optimizer.clip_norm)
            )
        ):
            return
        if self._sampling is None:
            raise ValueError(
                "How batches are sampled is not known, so no ε can be stated. Set "
                "model.sampling = dp_keras_opt.accounting.Sampling.poisson(...) first."
            )
        # Checked again: the model may be compiled anew.
        self._sample_as(self._sampling, self._arrangement)
        for layer in self._flatten_layers(include_self=False):
            if isinstance(layer, Guard):  # what it spent is in the weights, too
                self.ledger.merge(layer.ledger)
        strategy = self.distribute_strategy
        if replicas.place(strategy)[1] > 1:  # all workers must come to the same decisions
            for spent in replicas.gathered(self.ledger.to_json().encode(), strategy):
                self.ledger.merge(Ledger.from_json(spent.decode()))
        if self._resumed is not None:
            self._go_on_with_run()
        else:
            self.ledger.begin(
                self.optimizer.releases,
                self._sampling,
                schedule=self.optimizer.noise_schedule,
                clip_norm=self.optimizer.clip_norm,
                first_step=self._iterations(),
                run=replicas.of_chief(secrets.token_bytes(16), strategy).hex(),
            )
            if self.optimizer.noise.is_correlated:
                self.optimizer.noise_source.restart()  # a segment of the ledger is a run of its own
        object.__setattr__(self, "_run", self.ledger.current.run)
        if self._to_run is not None:
            self._enter_plan()

    # Runs of correlated noise that outlive the process.

    def save_run(self, filepath: Path) -> None:
        """Hands the current run of correlated noise over to a file, which is secret.

        The model itself begins a new run if it is trained on; save it too (`save`), before or
        after. Call this between epochs.

        Guarantee: the run goes on in one place only, since `resume_run` deletes the file. Against
        copies of the file nothing can be done here; do not make any.

        Args:
            filepath: a new file, whose name ends in ".secret.npz". It holds past noise: whoever has
                it and what was released has the raw gradients.

        Raises:
            ValueError: there is no run of correlated noise, or it broke off in the midst of an
                epoch (of a round of groups), after which its batches cannot go on as accounted; or
                several workers train the model.
            OSError: the file exists, or cannot be written.
        """
        self._assert_compile_called("save_run")
        self._refuse_workers()
        segment = self.ledger.current
        correlated = self.optimizer.noise.is_correlated
        if segment is None or not correlated or not segment.steps:
            raise ValueError(
                "There is no run to save: only correlated noise, once training has begun, has a "
                "past that the next steps need. Save the model."
            )
        if segment.breaks_off:
            raise ValueError(
                f"The run broke off after {segment.steps} steps, which are no whole rounds of "
                f"{segment.sampling.period}: its batches cannot go on as accounted."
            )
        source = self.optimizer.noise_source
        resume.write(
            filepath,
            resume.SavedRun(segment.run, segment.steps, self._arrangement, source.export()),
        )
        self.ledger.close()
        source.restart()

    def resume_run(self, filepath: Path) -> int | None:
        """Goes on with a run of correlated noise that `save_run` saved, and deletes its file.

        The next `fit` continues the run: one mechanism, accounted as one. It must have the same
        optimizer and data, in the same arrangement:
        `fixed_order_epochs(..., arrangement=model.resume_run(filepath))`.

        Returns:
            The arrangement of the examples, for `fixed_order_epochs` or `cyclic_poisson`; None for
            batches of your own.

        Raises:
            ValueError: the model is not the one, or not of the time, at which the run was saved.
            OSError: the file is not there, or cannot be deleted.
        """
        self._assert_compile_called("resume_run")
        self._refuse_workers()
        saved = resume.read(filepath)
        self.ledger.segment(saved.run, saved.steps)
        resume.delete(filepath)
        object.__setattr__(self, "_resumed", saved)
        return saved.arrangement

    def _refuse_workers(self):
        if replicas.place(self.distribute_strategy)[1] > 1:
            raise ValueError(
                "A run of correlated noise cannot be handed over by several workers: each would "
                "write the same secret. Train within one process, or begin a new run."
            )

    def _go_on_with_run(self):
        """Makes the resumed run that of the next steps, if they are as they were."""
        saved, optimizer = self._resumed, self.optimizer
        segment = self.ledger.segment(saved.run, saved.steps)
        different = [
            name
            for name, before, now in (
                ("releases (noise)", segment.releases, optimizer.releases),
                ("clip norm", segment.clip_norm, optimizer.clip_norm),
                ("sampling", segment.sampling, self._sampling),
                ("arrangement of the data", saved.arrangement, self._arrangement),
            )
            if before != now
        ]
        if different:
            raise ValueError(
                f"The resumed run had another {' and another '.join(different)}. Go on as it was, "
                "with what resume_run returned as the data's arrangement; or compile the model "
                "anew, which begins a new run."
            )
        optimizer.serve(self.trainable_variables)
        optimizer.noise_source.restore(saved.memories, saved.steps)
        self.ledger.resume(saved.run, saved.steps)
        object.__setattr__(self, "_resumed", None)

    def _iterations(self):
        return int(self.optimizer.iterations.numpy())

    def _warn_of_budget(self, steps, planned):
        """Says that `fit` ended early, unless it came to the end of what was planned."""
        if planned is None or steps < planned:
            of = "" if planned is None else f" of {planned}"
            warnings.warn(
                f"The privacy budget {self.budget} allows no further step: training stopped after "
                f"{steps}{of} steps. To train on, pass a PrivacyBudget with a larger epsilon.",
                stacklevel=3,
            )

    def _nothing_affordable(self):
        """Why `fit` cannot begin."""
        spent = self.ledger.epsilon(self.budget.delta, self.budget.accountant)
        return (
            f"The privacy budget {self.budget} affords not even the first "
            f"{self.steps_per_execution} step(s), so that nothing would be trained; "
            f"ε = {spent:.4g} was spent before. Raise epsilon or delta, or add noise: "
            "dp_keras_opt.accounting.calibrate finds how much."
        )

    def _warn_past_calibration(self, steps):
        """Before so many steps, says once that they go past what the noise was calibrated for."""
        plan = self.optimizer.calibration
        if plan is None or plan is self._warned_of or self.budget is not None:
            return
        total = self._iterations() + steps
        if plan.steps < total < math.inf:
            object.__setattr__(self, "_warned_of", plan)
            *past, current = self.ledger.segments
            future = dataclasses.replace(
                current, steps=current.steps + min(steps, current.end[0]), planned=None
            )
            segments = [*(segment for segment in past if segment.steps), future]
            (together,) = (group for group in composable(segments) if future in group)
            warnings.warn(
                f"The noise was calibrated for {plan.steps} steps, for ε = {plan.epsilon:g} at δ = "
                f"{plan.delta:g}, and training goes on to step {total}: ε will be "
                f"{epsilon_of(together, plan.delta, plan.accountant):.4g}. Calibrate for as many "
                "steps as will run, or pass a PrivacyBudget, which ends training before it is "
                "exceeded.",
                stacklevel=3,
            )

    def _affordable(self, steps):
        if self.budget is None or self._ledger.current is None:  # the next step begins a segment
            return True
        return self.budget.affords(self._ledger, steps)

    def _settle(self, reserved, before):
        """Gives back the reserved steps that did not run, as the optimizer's counter proves.

        Raises:
            RuntimeError: the counter says that more steps ran, so the ledger would be wrong.
        """
        executed = self._iterations() - before
        if not 0 <= executed <= reserved:
            raise RuntimeError(
                f"{reserved} training steps were accounted, but the optimizer counts {executed}. "
                "Did something set its step counter?"
            )
        self._ledger.settle(reserved, executed)
        if executed < reserved:
            object.__setattr__(self, "_ends", self._ends + 1)
        if self._to_run is not None:
            object.__setattr__(self, "_to_run", max(self._to_run - executed, 0))
