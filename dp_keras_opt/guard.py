"""The guard around the train function: no step without its entry in the ledger."""

import secrets
import warnings

import tensorflow as tf

from dp_keras_opt import replicas
from dp_keras_opt.accounting import Ledger, Sampling
from dp_keras_opt.accounting.sampling import check_sampling
from dp_keras_opt.clipping import state_changes
from dp_keras_opt.noise import resume
from dp_keras_opt.types import Path


class PrivacyBudgetError(RuntimeError):
    """A step was asked for that the privacy budget does not allow."""


class Guard:
    """Mixin over `keras.Model`: checks sampling, schedule and budget, and enters each step.

    It reads `optimizer`, `budget` and `_fitting`, and keeps `_ledger`, `_run`, `_stepping`,
    `_sampling`, `_arrangement` and `_resumed`; `DPModel` has them.
    """

    @property
    def ledger(self) -> Ledger:
        """The `accounting.Ledger` of what the model has spent.

        Assign `Ledger("spent.jsonl")` to keep it in a file, or one ledger to several models that
        are trained on the same data; what the model has spent before is added to it.
        """
        return self._ledger

    @ledger.setter
    def ledger(self, ledger: Ledger) -> None:
        if not isinstance(ledger, Ledger):
            raise ValueError(
                f"ledger must be a dp_keras_opt.accounting.Ledger, received {ledger!r}."
            )
        ledger.merge(self._ledger)
        object.__setattr__(self, "_ledger", ledger)
        self._ledger_state.ledger = ledger

    def _sync_ledger(self):
        try:
            self.ledger.sync()
        except OSError as error:
            warnings.warn(
                f"{self.ledger.path} could not be brought up to date ({error}): it counts more "
                "steps than ran, which is safe.",
                stacklevel=3,
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
                self.stop_training = True
            return logs

        self.train_function = train_function

    def _enter(self, steps, iterator):
        """Checks that these steps may run on this data, and reserves them in the ledger."""
        self._prepare(iterator)
        self._begin_segment()
        segment = self.ledger.current
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
            self.stop_training = True
            raise StopIteration
        self.ledger.reserve(steps)

    def _begin_segment(self):
        """Opens a segment of the ledger for the next steps, where none is open."""
        current, optimizer = self.ledger.current, self.optimizer
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
                stacklevel=4,
            )

    def _affordable(self, steps):
        if self.budget is None or self.ledger.current is None:  # the next step begins a segment
            return True
        return self.budget.affords(self.ledger, steps)

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
        self.ledger.settle(reserved, executed)
