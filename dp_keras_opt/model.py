"""The model: how it is compiled, trained and saved."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from dp_keras_opt import _keras, checksums, clipping, files, workers
from dp_keras_opt._keras import Functional, functional_init_arguments
from dp_keras_opt.accounting import Ledger, Sampling
from dp_keras_opt.accounting.budget import Budget
from dp_keras_opt.accounting.privacy_statement import statement
from dp_keras_opt.checks import whole_number
from dp_keras_opt.clipping import precision, state_changes, tensorflow_settings
from dp_keras_opt.data import Blocks, RowInfo, failures
from dp_keras_opt.optimizers import PrivateOptimizer
from dp_keras_opt.training import (
    fit_arguments,
    fit_data,
    losses,
    planned_noise,
    replicated,
    saved_run,
    step,
    weight_history,
)
from dp_keras_opt.training.batches import as_batch, blocks_of, by_row
from dp_keras_opt.training.fit_arguments import FitArguments
from dp_keras_opt.training.guard import PrivacyGuard, steps_taken
from dp_keras_opt.types import Accountant, Path

if TYPE_CHECKING:
    from dp_keras_opt.clipping.query import Query
    from dp_keras_opt.noise.released import Released

_CHANGED = (
    "The weights were changed since by something that is not a private step (set_weights, an "
    "assignment, training without privacy, quantization by a data set, weights loaded without "
    "their ledger). What that took from the data is not covered."
)


class _LedgerState(tf.train.experimental.PythonState):
    """Takes the ledger into `tf.train.Checkpoint`s: a restored model has spent what it had."""

    def __init__(self, model):
        self.model = model

    def serialize(self):
        return self.model._saved_ledger()

    def deserialize(self, string_value):
        self.model._guard.learn(self.model, string_value)


class DPModel(keras.Model):
    """A Keras model whose training step is differentially private.

    Used like `keras.Model`: `DPModel(inputs, outputs)` for a functional model, or as the base of a
    subclass with `call`. `make_private` wraps a model that exists.

    `compile` takes an optimizer of `dp_keras_opt.optimizers` and any Keras loss; the loss is taken
    per example itself, whatever its reduction: over sequences and images, the mean over the
    positions of an example. `sample_weight` multiplies an example's loss before clipping.

    Each training step clips every example's gradient, adds noise once per logical batch, and
    divides by the optimizer's expected `batch_size`. Before each step the wrapper around the train
    function checks sampling, schedule and budget, and enters the step in `ledger`.

    What is guaranteed: the weights (and all that is computed from them) are differentially private
    at the ε that `ledger.epsilon(delta)` says, if batches are sampled as `sampling` states.

    What is not: training metrics, the loss shown during training and y_pred are computed from raw
    data; they are for the owner of the data and must not be published.
    """

    train_function: Any

    def __new__(cls, *args, **kwargs):
        # Keras would make DPModel itself functional, by rewriting its bases for good.
        if cls is DPModel and functional_init_arguments(args, kwargs):
            return DPFunctional.__new__(DPFunctional, *args, **kwargs)
        return super().__new__(cls, *args, **kwargs)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if functional_init_arguments(args, kwargs) and not isinstance(self, Functional):
            raise TypeError(
                f"{type(self).__name__} subclasses DPModel and passes inputs and outputs to it. "
                "Build the functional model with dp_keras_opt.DPModel(inputs, outputs), or define "
                "`call` in the subclass."
            )
        own = frozenset(vars(self))  # of a subclass, set before
        super().__init__(*args, **kwargs)
        self._guard = PrivacyGuard()
        self._step = step.StepState()
        self._ledger_state = _LedgerState(self)  # tracked, for tf.train.Checkpoint
        self._step.engines.ignored = frozenset(vars(self)) - own  # what every model has

    def __reduce__(self):
        path = self.ledger.path
        if path is not None:
            warnings.warn(
                f"The ledger of this model is in a file, {path}, and that of a copy is not: what "
                "the copy spends, as in another process, is in no file. Assign it a ledger with a "
                "file of its own, and merge them.",
                stacklevel=2,
            )
        return super().__reduce__()

    # What is known of the privacy of the weights.

    @property
    def ledger(self) -> Ledger:
        """The `accounting.Ledger` of what the model has spent.

        Assign `Ledger("spent.jsonl")` to keep it in a file, or one ledger to several models that
        are trained on the same data; what the model has spent before is added to it.
        """
        return self._guard.ledger(self)

    @ledger.setter
    def ledger(self, ledger: Ledger) -> None:
        self._guard.exchange_ledger(self, ledger)

    @property
    def sampling(self) -> Sampling | None:
        """The `Sampling` of the batches, set by `fit`, and to be set before `train_on_batch`.

        What `fit` set holds for its own data alone: `train_on_batch` afterwards needs one that was
        set since. To set it again, also to an equal one, says that the data begin anew.
        """
        # A copy: Keras skips to assign what getattr already gives.
        return copy.copy(self._guard.sampling)

    @sampling.setter
    def sampling(self, sampling: Sampling) -> None:
        _keras.check_is_compiled(self, "sampling")
        if isinstance(sampling, Sampling):
            sampling = dataclasses.replace(sampling, is_stated=True)
        self._guard.refuse_within_fit("Another sampling")
        self._guard.sample_as(self, sampling, of_fit=False)

    @property
    def budget(self) -> Budget | None:
        """The `Budget` that no step may exceed: that of the last `PrivacyBudget` given to `fit`."""
        return self._guard.budget

    @budget.setter
    def budget(self, budget: Budget | None) -> None:
        budget = getattr(budget, "budget", budget)  # of a `PrivacyBudget`
        if not (budget is None or isinstance(budget, Budget)):
            raise ValueError(
                "budget must be a dp_keras_opt.accounting.Budget, a PrivacyBudget, or None; "
                f"received {budget!r}."
            )
        self._guard.budget = budget

    def statement(self, delta: float, accountant: Accountant = "auto", group_size: int = 1) -> str:
        """The guarantee of the weights in words; see `accounting.statement`.

        It covers what every private model has spent on these weights, and says so where they were
        changed since by something else, as far as that is known (`fit` notes what it leaves).

        Raises:
            ValueError: as `accounting.statement`.
        """
        notes = [_CHANGED] if checksums.are_changed(self.weights) else []
        return statement(self.ledger, delta, accountant, group_size, notes)

    @property
    def non_finite_examples(self) -> int:
        """How many examples contributed zero because their gradient was NaN or infinite.

        Of batches of `data.poisson_users` it counts users: one such example zeroes all of theirs.
        This count depends on the data without noise: it is for the owner of the data, and is in no
        log or saved file. With several workers, each counts its own examples.
        """
        if self._step.non_finite is None:
            return 0
        return workers.local_sum(self.distribute_strategy, self._step.non_finite)

    # Compiling.

    def compile(
        self,
        optimizer: PrivateOptimizer,
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: str | bool = "auto",
        auto_scale_loss: bool = False,
        *,
        physical_batch_size: int | None = None,
    ) -> None:
        """Configures the model for private training.

        Args:
            optimizer: an optimizer of `dp_keras_opt.optimizers`.
            loss: any Keras loss: a string, an object, a function, or a structure of them; or an
                `Objective`, for all that a loss of one output does not see.
            loss_weights, metrics, weighted_metrics, run_eagerly, steps_per_execution, jit_compile:
                as for `keras.Model.compile`.
            auto_scale_loss: refused where True: a float16 loss is scaled by a constant here.
            physical_batch_size: how many rows are processed at once; larger batches are taken in
                chunks of it that share one noise draw. None takes the batch as it comes.

        Raises:
            ValueError: the optimizer is not private, the model is known to mix examples, or an
                `Objective` names a layer that is not there.
            TypeError: the model overrides the training step or the loss.
        """
        for method in ("train_step", "compute_loss", "make_train_function"):
            if getattr(type(self), method) is not getattr(DPModel, method):
                raise TypeError(
                    f"{type(self).__name__} overrides `{method}`, so that its training would not "
                    "be private. Express the objective as a per-example loss in compile(loss=...); "
                    "what a loss of outputs does not see, as a dp_keras_opt.Objective."
                )
        if not isinstance(optimizer, PrivateOptimizer):
            if isinstance(getattr(optimizer, "inner_optimizer", None), PrivateOptimizer):
                raise ValueError(
                    f"{type(optimizer).__name__} skips steps depending on raw gradients. Pass the "
                    f"{type(optimizer.inner_optimizer).__name__} in it as it is: a float16 loss is "
                    "scaled by a constant, undone before the norm is taken."
                )
            raise ValueError(
                "DPModel.compile needs an optimizer of dp_keras_opt.optimizers, received "
                f"{optimizer!r}. Give an object, such as dp_keras_opt.optimizers.DPAdam(1e-3, "
                "clip_norm=1.0); one of Keras goes into DPOptimizer(optimizer, clip_norm=...)."
            )
        if physical_batch_size is not None:
            whole_number(physical_batch_size, "physical_batch_size")
        if auto_scale_loss:
            raise ValueError(
                "auto_scale_loss=True skips steps depending on raw gradients. Leave it out: a "
                "float16 loss is scaled by a constant, undone before the norm is taken."
            )
        if optimizer.refuses_xla is not None:
            if jit_compile is True:
                raise ValueError(
                    f"{optimizer.refuses_xla}, which XLA cannot compile. Compile the model with "
                    "jit_compile=False, or leave it out."
                )
            jit_compile = False
        clipping.validate(self)
        objective = _objective_of(self, loss, loss_weights)
        if objective is not None or isinstance(self.loss, clipping.Objective):
            _keras.forget_loss(self)
        with self.distribute_strategy.scope():  # metrics have variables
            super().compile(
                optimizer=optimizer,
                loss=None if objective is not None else loss,
                loss_weights=loss_weights,
                metrics=metrics,
                weighted_metrics=weighted_metrics,
                run_eagerly=run_eagerly,
                steps_per_execution=steps_per_execution,
                jit_compile=jit_compile,
                auto_scale_loss=False,
            )
        if objective is not None:
            self.loss = objective
        replicated.check_compiled(self, optimizer)
        self._step.physical_batch_size = physical_batch_size
        self._step.observers = ()
        self._guard.resumed = None
        options = loss_weights, metrics, weighted_metrics, physical_batch_size
        self._step.engines.expect(self, options)
        self.ledger.close()

    @property
    def physical_batch_size(self) -> int | None:
        """How many rows are processed at once, as `compile` was told."""
        return self._step.physical_batch_size

    def get_compile_config(self) -> dict[str, Any] | None:
        config = super().get_compile_config()
        if config and isinstance(self.loss, clipping.Objective):
            config = config | {"loss": keras.saving.serialize_keras_object(self.loss)}
        return config and config | {"physical_batch_size": self.physical_batch_size}

    def compile_from_config(self, config: dict[str, Any]) -> None:
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built and self.optimizer.is_settled:
            self.optimizer.build(self.trainable_variables)

    def observe_releases(
        self, observer: Callable[[tuple[Query, ...], list[Released]], Any]
    ) -> None:
        """Calls `observer(queries, released)` in every training step from now on, until `compile`.

        It is traced with the step, at the weights at which the gradients are taken, and is given
        nothing but what the step releases (`noise.Released`).
        """
        self._step.observers = (*self._step.observers, observer)
        self.train_function = None  # to be traced anew

    @property
    def release_observers(self) -> tuple[Callable[..., Any], ...]:
        """What `observe_releases` was given."""
        return self._step.observers

    # Training.

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int = 1,
    ) -> keras.callbacks.History:
        """Trains the model privately; takes the arguments of `keras.Model.fit`.

        A callback that steers by a training metric draws a warning: such metrics are raw.

        Args:
            x: a `dp_keras_opt.data.Batches` (from `poisson_batches` or `assume_sampling`), or
                arrays. These are sampled as balls in bins under `zero_out`
                (`dp_keras_opt.data.balls_in_bins`): each example comes once in every epoch, in a
                batch drawn at random, and the sizes of batches vary. Where the noise cannot be
                priced so (Laplace), the optimizer is calibrated for shuffled epochs, or
                shuffle=False, they are Keras's own epochs, without amplification by sampling.
            y, batch_size, class_weight, sample_weight, validation_split: as for Keras beside
                arrays; beside `Batches` each has another place, which the error names. Class
                weights that are computed from private data reveal them.
            callbacks: those of Keras, and of `dp_keras_opt.callbacks`. A `PrivacyBudget` holds for
                all later steps, too.
            epochs, initial_epoch, steps_per_epoch, verbose, shuffle: as for Keras.
            validation_data, validation_steps, validation_batch_size, validation_freq: as for Keras.

        Returns:
            The `History`.

        Raises:
            ValueError: the data declares no sampling, or one that does not match the optimizer; an
                argument has no meaning beside `Batches`, or beside a `PrivateValidation`; layers
                were frozen or unfrozen since `compile`.
            TypeError: `validation_data` are `Batches`, or nothing that Keras reads.
            PrivacyBudgetError: a budget affords not even the first step.
        """
        call = FitArguments(
            x=x,
            y=y,
            batch_size=batch_size,
            epochs=epochs,
            verbose=verbose,
            callbacks=callbacks,
            validation_split=validation_split,
            validation_data=validation_data,
            shuffle=shuffle,
            class_weight=class_weight,
            sample_weight=sample_weight,
            initial_epoch=initial_epoch,
            steps_per_epoch=steps_per_epoch,
            validation_steps=validation_steps,
            validation_batch_size=validation_batch_size,
            validation_freq=validation_freq,
        )
        _keras.check_is_compiled(self, "fit")
        self._guard.refuse_within_fit("Another fit")
        fit_arguments.check_validation_data(validation_data)
        call.validation_data = fit_arguments.readable(validation_data)
        scores = fit_arguments.private_scores(call)
        clipping.validate(self)  # layers may have been thawed since `compile`
        if self.built and self.optimizer.built:  # a step that is traced would go on as it is
            self.optimizer.ensure_built(self.trainable_variables)
        if self.run_eagerly:
            self._step.engines.look_again(self)
        guard, optimizer = self._guard, self.optimizer
        taken = fit_data.take(call, self)
        at_once = min(self.steps_per_execution, taken.pass_length or math.inf)
        sampling, steps_of_epoch = taken.sampling, taken.steps
        self._step.block = taken.block
        first, last = (max(number, 0) for number in (initial_epoch, epochs))
        planned = _product(max(last - first, 0), steps_of_epoch)
        self._step.shows_progress = bool(verbose)
        fit_arguments.refuse_bare_checkpoints(callbacks)
        fit_arguments.warn_of_monitors(callbacks)
        call.callbacks = fit_arguments.reports_first(callbacks)
        budget = fit_arguments.budget_of(callbacks) or guard.budget
        guard.check_filter(self, budget)
        # The last execution of an epoch is reserved in full, also where the data may end within it.
        overhang = -steps_of_epoch % at_once if 0 < planned < math.inf else 0
        if taken.pass_length:
            overhang = 0
        in_all = _product(last, steps_of_epoch) + overhang
        if scores is not None:  # what they cost is no longer there for the training
            scores.enter_evaluations(self, sampling, range(first, last), budget)
        found = self._settle_noise(callbacks, sampling, planned + overhang, budget, in_all)
        guard.sample_as(self, sampling, taken.order_seed)
        guard.budget = budget  # a run keeps its privacy filter
        guard.begin_run(self)
        before = steps_taken(optimizer)
        if taken.is_chosen and planned and not before:
            fit_data.warn_of_choice(sampling, optimizer, planned, budget, callbacks)
        if found is None and before and budget is not None and optimizer.plan is not None:
            found = planned_noise.what_is_left(optimizer, budget, self.ledger)
        if verbose and found:
            print(found, flush=True)
        if planned and not before:
            guard.check_beginning(at_once)
        if not fit_arguments.may_go_on(callbacks):
            guard.check_end(planned + overhang)
        guard.history.let_move(self.weights)
        try:
            with (
                guard.seeds.around_training(),
                guard.fitting(self, planned, taken.pass_length) as progress,
            ):
                if not guard.affords(at_once):
                    call.epochs = initial_epoch  # no epoch at all, not an empty one
                self.history = None  # of an earlier fit, where a CallbackList keeps none
                with workers.worker_lost(self.distribute_strategy), failures.as_raised():
                    history = super().fit(**vars(call))
                seen = [] if history is None else history.epoch
                ran = progress.ran  # callbacks may have set the optimizer's counter
                # All epochs to the last one, each to its last step or to the end of the data; or
                # the budget ended them. Whatever else did may have looked at results.
                to_the_last = call.epochs <= initial_epoch or seen[-1:] == [call.epochs - 1]
                number = len(seen)
                whole = ran >= number * steps_of_epoch or len(progress.ends) >= number
                progress.is_finished = progress.out_of_budget or (to_the_last and whole)
                went_to_the_end = seen and to_the_last and whole  # also what a backup brought
                if not (went_to_the_end or guard.affords(at_once)):
                    params = getattr(history, "params", None) or {}
                    length = params.get("steps")  # not of one's own CallbackList
                    of = None if length is None else length * (last - first)
                    guard.warn_of_end(ran, of, at_once)
            return history
        finally:
            if self.ledger.steps:
                checksums.register(self.weights)
            self._report_non_finite()

    def _settle_noise(self, callbacks, sampling, planned, budget, in_all):
        """Finds the noise that was left to be found for a `fit`; returns what to say of it."""
        ledger = self.ledger
        if self.optimizer.noise_multiplier is None:
            planned_noise.warn_of_search(fit_arguments.each(callbacks))
            ledger = self._guard.ledger_of_all(self)
        return planned_noise.settle(self.optimizer, sampling, planned, budget, ledger, [in_all])

    def _report_non_finite(self):
        if self.non_finite_examples:
            warnings.warn(
                f"{self.non_finite_examples} examples had a NaN or infinite loss or gradient and "
                "contributed zero. This count is private: do not publish it.",
                stacklevel=3,
            )
            self._step.non_finite.assign(0)

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: bool = False,
    ) -> Any:
        """One private step on a batch that was sampled as `model.sampling` says.

        Raises:
            PrivacyBudgetError: the step would exceed the budget.
            ValueError: `model.sampling` is not set, or by a `fit`, or states smaller batches; a
                `fit` runs; or what a step costs depends on the batches before it (correlated noise,
                groups that take turns, batch sizes that change), of which one could be left out;
                or examples come once a pass, and no batch was drawn since the last step.
        """
        _keras.check_is_compiled(self, "train_on_batch")
        self._guard.refuse_within_fit("train_on_batch")
        if workers.is_used(self.distribute_strategy):
            raise ValueError(
                "train_on_batch would give the same batch to every replica. Use fit, with "
                "dp_keras_opt.data.assume_sampling for batches of your own."
            )
        if not self._guard.is_of_fit:  # which is refused
            step.check_size(self._guard.sampling, x, sample_weight)
        self._step.block = None
        self._guard.history.let_move(self.weights)
        self._step.given = None if class_weight else (x, y, sample_weight)
        try:
            with self._guard.seeds.around_training():
                return super().train_on_batch(x, y, sample_weight, class_weight, return_dict)
        finally:
            self._step.given = None

    def make_train_function(self, force: bool = False) -> None:
        """Puts the privacy guard around Keras's train function."""
        if self.train_function is not None and not force:
            return
        self._step.engines.look_again(self)  # the step is traced as the model is now
        steps = by_blocks = replicated.train_function(self, self._step, self._local_sums)
        if not workers.is_used(self.distribute_strategy):
            super().make_train_function(force=True)
            by_keras = self.train_function

            def steps(iterator):
                of_blocks = isinstance(getattr(iterator, "element_spec", None), Blocks)
                return (by_blocks if of_blocks else by_keras)(iterator)

        steps = state_changes.unchanged(steps, self._step.engines.hidden_state)
        self._step.is_coarse = precision.is_coarse()
        self._step.has_begun = False
        self.train_function = self._guard.around(
            self, steps, self._check_before_tracing, self._step.steps_run
        )

    def _check_before_tracing(self, iterator):
        tensorflow_settings.check(self._step.is_coarse)
        specs = replicated.element_spec(iterator)
        step.check_before_tracing(self, self._step, specs, fitting=self._guard.is_fitting)

    def train_step(self, data: Any) -> dict[str, Any]:
        """One logical batch: clip each example, sum, add noise, update (docs: concepts).

        Raises:
            RuntimeError: it was not called by `fit` or `train_on_batch`, which keep the ledger.
        """
        parts, engines = step.admitted(self, self._step, self._guard, data)
        sums_of_all = functools.partial(self._sums, parts, engines=engines)
        return step.train_step(self, self._step, sums_of_all)

    def _sums(self, parts, queries, engines):
        sums = step.sums_in_chunks(self, self._step, parts, queries, engines)
        return sums, self.get_metrics_result()

    def _local_sums(self, data):
        """(clipped sums of the rows of one replica, its logs)."""
        parts, engines = step.admitted(self, self._step, self._guard, data)
        return self._sums(parts, self.optimizer.queries(), engines)

    def engines(self, batch: clipping.Batch) -> Any:
        """Which engine serves which layer in batches of this form, checked before."""
        return step.engines_for(self, self._step, batch)

    def known_engines(self) -> Any:
        """The engines of the last steps, None before the first."""
        return self._step.engines.last  # a method: Keras saves the layers that attributes hold

    def batch_specs(self, number: int) -> list[tf.TensorSpec]:
        """Specs of the first tensors in the batches of training so far, [] without any.

        Sizes in which the batches differed are open, as is the number of rows.
        """
        return self._step.engines.specs(number)

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        strategy = self.distribute_strategy
        if iterator is None or _keras.strategy_of_model(self) is None:
            return super()._maybe_symbolic_build(iterator, data_batch)
        specs = replicated.element_spec(_keras.distributed_data(iterator))
        if not workers.is_used(strategy) and not isinstance(specs, Blocks):
            return super()._maybe_symbolic_build(iterator, data_batch)
        with strategy.scope():
            _keras.build_from_specs(self, blocks_of(specs)[0])

    # Losses, metrics, evaluation.

    def per_example_losses(self, y: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        """The loss of each example, (B,), without regularizers and what layers add.

        Raises:
            ValueError: there is no loss, or no targets for it; or it is an `Objective`, which needs
                more than outputs.
        """
        if isinstance(self.loss, clipping.Objective):
            raise ValueError(
                f"The objective '{self.loss.name}' cannot be computed from outputs alone: it takes "
                "inputs and intermediates, too."
            )
        compiled = _keras.compiled_loss(self)
        if compiled is None:
            raise ValueError("No loss to compute. Pass `loss` to compile().")
        if y is None:
            raise ValueError(
                "The batches have no targets, and the loss is taken of each example and its "
                "target. Give (x, y), as in an autoencoder (x, x); a dp_keras_opt.Objective needs "
                "no targets."
            )
        return losses.per_example_losses(compiled, y, y_pred, sample_weight)[0]

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Keras's loss over a batch, for evaluation; training takes it per example.

        Raises:
            ValueError: it is an `Objective`, which needs more than outputs.
        """
        if isinstance(self.loss, clipping.Objective):
            raise ValueError(
                f"The objective '{self.loss.name}' cannot be computed from outputs alone. Call "
                "evaluate or test_on_batch."
            )
        if isinstance(sample_weight, RowInfo):
            sample_weight = sample_weight.sample_weight
        return super().compute_loss(x, y, y_pred, sample_weight, training)

    def _aggregate_additional_loss(self, loss):
        # Each example's own are added to the mean loss of the examples; Keras would sum them.
        return super()._aggregate_additional_loss(keras.ops.mean(loss))

    def compute_metrics(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
    ) -> dict[str, Any]:
        """Updates the compiled metrics; rows of padding count in none of them."""
        mask = None
        if isinstance(sample_weight, RowInfo):
            sample_weight, mask = sample_weight.sample_weight, by_row(sample_weight.mask)
        compiled = _keras.compiled_metrics(self)
        if compiled is not None:
            losses.update_metrics(compiled, y, y_pred, sample_weight, mask)
        return self.get_metrics_result()

    def test_step(self, data: Any) -> dict[str, Any]:
        """Keras's evaluation, with rows of padding counted in nothing."""
        batch = as_batch(data)
        by_keras = batch.mask is None and not isinstance(self.loss, clipping.Objective)
        if by_keras and not workers.is_used(self.distribute_strategy):
            return super().test_step(data)
        example_losses, y_pred = clipping.losses_and_outputs(self, batch, training=False)
        losses.update_figures(self, batch, example_losses, y_pred)
        return self.get_metrics_result()

    def make_test_function(self, force: bool = False) -> None:
        if not workers.is_used(self.distribute_strategy):
            return super().make_test_function(force)
        if self.test_function is None or force:
            self.test_function = replicated.test_function(self)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As `keras.Model.evaluate`; not of `Batches`, which are a random choice.

        Raises:
            TypeError: the data are `Batches`.
        """
        fit_arguments.refuse_batches(args[0] if args else kwargs.get("x"), "x of evaluate")
        with self._evaluating(kwargs.get("callbacks")):
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As `keras.Model.predict`; not of `Batches`, which are a random choice.

        Raises:
            TypeError: the data are `Batches`.
        """
        fit_arguments.refuse_batches(args[0] if args else kwargs.get("x"), "x of predict")
        with self._evaluating(kwargs.get("callbacks")):
            return super().predict(*args, **kwargs)

    def _evaluating(self, callbacks):
        """Accepts the rounding that `SwapEMAWeights` leaves when it swaps weights in and back.

        Within `fit`, where weights move anyhow, layers that take in what they are evaluated on
        are noticed here alone.
        """
        if self._guard.is_fitting:
            return checksums.noticed(self.non_trainable_weights)
        if callbacks is None:
            return contextlib.nullcontext()
        return checksums.taken_back(self.trainable_weights)

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
        _keras.check_is_compiled(self, "save_run")
        saved_run.save(self, self._guard, filepath)

    def resume_run(self, filepath: Path) -> int | None:
        """Goes on with a run of correlated noise that `save_run` saved, and deletes its file.

        The next `fit` continues the run: one mechanism, accounted as one. It must have the same
        optimizer and data, in the same order:
        `fixed_order_epochs(..., order_seed=model.resume_run(filepath))`.

        Returns:
            The seed of the order of the examples, for `fixed_order_epochs` or `cyclic_poisson`;
            None for batches of your own.

        Raises:
            ValueError: the model is not the one, or not of the time, at which the run was saved.
            OSError: the file is not there, or cannot be deleted.
        """
        _keras.check_is_compiled(self, "resume_run")
        return saved_run.resume(self, self._guard, filepath)

    # Saving and loading: what was spent goes with the weights.

    def save(self, filepath: Path, overwrite: bool = True, **kwargs: Any) -> None:
        """Saves the model, with what it has spent; the legacy format `.h5` cannot hold that.

        A file that is there already is replaced as a whole, so that whatever kills the process
        leaves the old one or the new one.

        Raises:
            ValueError: the file is a legacy `.h5`.
        """
        if str(filepath).endswith(".h5"):
            raise ValueError(
                f"{filepath} is in the legacy HDF5 format, which would lose the privacy ledger: a "
                "loaded model would count from zero. Save as .keras, or the weights as .weights.h5."
            )
        save = functools.partial(super().save, **kwargs)
        if kwargs.get("zipped") is False:  # a folder
            save(filepath, overwrite=overwrite)
        else:
            files.replaced(save, filepath, overwrite)

    def save_weights(self, filepath: Path, overwrite: bool = True, **kwargs: Any) -> None:
        """Saves the weights, with what they have spent; as `keras.Model.save_weights`."""
        save = functools.partial(super().save_weights, **kwargs)
        if kwargs.get("max_shard_size") is not None:  # several files
            save(filepath, overwrite=overwrite)
        else:
            files.replaced(save, filepath, overwrite)

    def quantize(self, mode: str | None = None, config: Any = None, **kwargs: Any) -> None:
        """As `keras.Model.quantize`; the statement says so where a data set decided the rounding.

        Weights that are rounded by themselves ("int8", "int4") cost nothing. GPTQ and AWQ fit them
        to the outputs on a calibration data set, without clipping and noise: give one that is
        public.
        """
        super().quantize(mode, config=config, **kwargs)
        if getattr(config, "dataset", None) is not None:
            checksums.mark(self.weights)

    def export(self, filepath: Path, *args: Any, **kwargs: Any) -> None:
        """As `keras.Model.export`; warns that the privacy statement is not in what it writes.

        `serving.export` writes a SavedModel with it, and of inference alone.
        """
        warn_of_export(self)
        with as_published(self):
            super().export(filepath, *args, **kwargs)

    def _saved_ledger(self) -> str:
        """The ledger as text, with checksums of the weights, as it is saved beside them."""
        with_lora = (x for x in _keras.layers_of(self) if getattr(x, "lora_enabled", False))
        merged = [variable for layer in with_lora for variable in layer.weights]  # when saved
        return weight_history.saved(self.ledger, self.weights, merged)

    def save_own_variables(self, store: Any) -> None:
        super().save_own_variables(store)
        if self.ledger.steps:
            weight_history.put(store, self._saved_ledger())

    def load_own_variables(self, store: Any) -> None:
        super().load_own_variables(self._without_ledger(store))

    def _without_ledger(self, store: Any) -> dict[str, Any]:
        """The arrays of a store, once the ledger among them has been taken."""
        own, spent = weight_history.taken(store)
        if spent is not None:
            self._guard.learn(self, spent)
        return own

    def load_weights(self, filepath: Path, skip_mismatch: bool = False, **kwargs: Any) -> None:
        """Loads weights, and what they have spent; as `keras.Model.load_weights`.

        An optimizer that is not built yet starts afresh, with a warning. `skip_mismatch` skips
        layers, and never the ledger.

        Raises:
            ValueError: the ledger beside the weights cannot be read or merged; or the state of the
                optimizer does not fit the one that is built.
        """
        self._guard.history.learned = False
        if not skip_mismatch:
            super().load_weights(filepath, skip_mismatch=False, **kwargs)
            return
        with checksums.still_changed(self.weights):  # where they are skipped
            super().load_weights(filepath, skip_mismatch=True, **kwargs)
            self._guard.ledger(self)  # raises where it was skipped
            if self._guard.history.learned:  # not all of what was saved may have been loaded
                checksums.forget(self.weights)
                checksums.register(self.weights)


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DPFunctional(DPModel, Functional):
    """What `DPModel(inputs, outputs)` makes: a functional model with the private training step."""

    def __init__(self, *args, **kwargs):  # by these names Keras knows a functional constructor
        super().__init__(*args, **kwargs)


def _objective_of(model, loss, loss_weights):
    """The `Objective` that a loss is, None where it is one of Keras.

    Raises:
        ValueError: it is one of several losses, has a weight, or names a layer that is not there.
    """
    if not isinstance(loss, clipping.Objective):
        if any(isinstance(part, clipping.Objective) for part in keras.tree.flatten(loss)):
            raise ValueError(
                "An Objective stands for the whole loss, since it is given all outputs: it cannot "
                "be one of several. Compute the others in its function."
            )
        return None
    if loss_weights is not None:
        raise ValueError(
            "loss_weights weigh losses of several outputs, and an Objective is one loss. Multiply "
            "its terms in its function."
        )
    if model.built:
        clipping.layers_named(model, loss.intermediates)
    return loss


def _product(epochs, steps):
    """epochs · steps, 0 for no epochs of infinitely many steps."""
    return epochs * steps if epochs else 0


@contextlib.contextmanager
def as_published(private: DPModel) -> Iterator[None]:
    """Around the writing of a SavedModel, which holds seeds and metrics of layers.

    Without seeds that are secret, and with metrics that have seen nothing: what they saw of the
    data has no noise.
    """
    metrics = [m for layer in _keras.layers_of(private) for m in _keras.own_metrics(layer)]
    states = [variable for metric in metrics for variable in metric.variables]
    with private._guard.seeds.hidden(), state_changes.restored(states):
        for metric in metrics:
            metric.reset_state()
        yield


def warn_of_export(private):
    """Warns that Keras's `export` leaves the statement out, where there is something to state."""
    if private.ledger.steps:
        warnings.warn(
            "The model was trained privately, but what `export` writes has no privacy statement, "
            "and as a SavedModel it may augment what it is asked, as in training. For a SavedModel "
            "use dp_keras_opt.serving.export(private_model, path, report); send other formats "
            "along with private_model.statement(delta).",
            stacklevel=3,
        )
