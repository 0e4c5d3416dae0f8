"""The model: how it is compiled, trained, saved and made from others."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.models.functional import Functional
from keras.src.models.model import functional_init_arguments

from dp_keras_opt import checksums, clipping, data, files, fit_arguments, replicas
from dp_keras_opt.accounting import Ledger
from dp_keras_opt.checks import whole_number
from dp_keras_opt.data import Batches
from dp_keras_opt.guard import Guard, PrivacyBudgetError
from dp_keras_opt.noise import entropy
from dp_keras_opt.optimizers import PrivateOptimizer
from dp_keras_opt.step import PrivateStep
from dp_keras_opt.types import Path

if TYPE_CHECKING:
    from dp_keras_opt.clipping.query import Query
    from dp_keras_opt.noise.release import Released


class _LedgerState(tf.train.experimental.PythonState):
    """Takes the ledger into `tf.train.Checkpoint`s: a restored model has spent what it had."""

    def __init__(self, model):
        self.model = model

    def serialize(self):
        return self.model._saved_ledger()

    def deserialize(self, string_value):
        self.model._learn(string_value)


class DPModel(Guard, PrivateStep, keras.Model):
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

    def __new__(cls, *args, **kwargs):
        # Keras would make DPModel itself functional, by rewriting its bases, for all time.
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
        super().__init__(*args, **kwargs)
        # Plain attributes past Keras's tracking: none of them is a weight.
        for name, value in {
            "_ledger": Ledger(),
            "_run": None,
            "budget": None,
            "_sampling": None,
            "_arrangement": None,
            "_resumed": None,
            "_process": entropy.process(),
            "_plans": {},
            "_checked": None,
            "_objective": None,
            "_is_heard": False,
            "physical_batch_size": None,
            "_block": None,
            "_fitting": False,
            "_to_run": None,
            "_out_of_budget": False,
            "_ends": 0,
            "_shaped_in": None,
            "_others": (None, ()),
            "_moving_since": None,
            "_learned": False,
            "_unreadable": None,
            "_stepping": False,
            "_non_finite": None,
            "_warned_of": None,
            "release_observers": (),
        }.items():
            object.__setattr__(self, name, value)
        self._ledger_state = _LedgerState(self)  # tracked, for tf.train.Checkpoint
        object.__setattr__(self, "_born_with", {*vars(self), "_born_with"})

    # Compiling.

    def compile(
        self,
        optimizer: PrivateOptimizer,
        loss: Any = None,
        *,
        physical_batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Configures the model for private training.

        Args:
            optimizer: an optimizer of `dp_keras_opt.optimizers`.
            loss: any Keras loss: a string, an object, a function, or a structure of them.
            physical_batch_size: how many rows are processed at once; larger batches are taken in
                chunks of it that share one noise draw. None takes the batch as it comes.
            **kwargs: those of `keras.Model.compile`.

        Raises:
            ValueError: the optimizer is not private, or the model is known to mix examples.
            TypeError: the model overrides the training step or the loss.
        """
        for method in ("train_step", "compute_loss", "make_train_function"):
            if getattr(type(self), method) is not getattr(DPModel, method):
                raise TypeError(
                    f"{type(self).__name__} overrides `{method}`, so that its training would not "
                    "be private. Express the objective as a per-example loss in compile(loss=...)."
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
                f"{optimizer!r}. Wrap a Keras optimizer: DPOptimizer(optimizer, clip_norm=..., "
                "noise_multiplier=..., batch_size=...)."
            )
        if physical_batch_size is not None:
            whole_number(physical_batch_size, "physical_batch_size")
        if kwargs.pop("auto_scale_loss", False):
            raise ValueError(
                "auto_scale_loss=True skips steps depending on raw gradients. Leave it out: a "
                "float16 loss is scaled by a constant, undone before the norm is taken."
            )
        if optimizer.secure_noise:  # its random bits come from outside of the graph
            if kwargs.get("jit_compile") is True:
                raise ValueError(
                    "secure_noise=True takes its random bits from outside of the graph, which XLA "
                    "cannot compile. Compile the model with jit_compile=False, or leave "
                    "secure_noise out."
                )
            kwargs["jit_compile"] = False
        clipping.validate(self)
        with self.distribute_strategy.scope():  # metrics have variables
            super().compile(optimizer=optimizer, loss=loss, auto_scale_loss=False, **kwargs)
        replicas.check_compiled(self, optimizer)
        object.__setattr__(self, "physical_batch_size", physical_batch_size)
        object.__setattr__(self, "release_observers", ())
        object.__setattr__(self, "_resumed", None)
        self._expect_the_same(loss, kwargs, physical_batch_size)
        self.ledger.close()

    def _expect_the_same(self, loss, options, physical_batch_size):
        """Forgets what was checked, unless the model and what it minimises are what they were."""
        asked = ("loss_weights", "metrics", "weighted_metrics")
        ran = physical_batch_size, self.jit_compile, self.run_eagerly
        objective = (loss, *(options.get(name) for name in asked), *ran)
        object.__setattr__(self, "_objective", objective)
        if self._checked is None or not self._checked.is_that_of(self, objective):
            self._plans.clear()

    def get_compile_config(self) -> dict[str, Any] | None:
        config = super().get_compile_config()
        return config and config | {"physical_batch_size": self.physical_batch_size}

    def compile_from_config(self, config: dict[str, Any]) -> None:
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built:
            self.optimizer.build(self.trainable_variables)

    def observe_releases(
        self, observer: Callable[[tuple[Query, ...], list[Released]], Any]
    ) -> None:
        """Calls `observer(queries, released)` in every training step from now on, until `compile`.

        It is traced with the step, at the weights at which the gradients are taken, and is given
        nothing but what the step releases (`noise.Released`).
        """
        object.__setattr__(self, "release_observers", (*self.release_observers, observer))
        self.train_function = None  # to be traced anew

    # Training.

    def fit(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Trains the model privately; takes the arguments of `keras.Model.fit`.

        `x` is a `dp_keras_opt.data.Batches` (from `poisson_batches` or `assume_sampling`), or
        arrays, which count as shuffled: no amplification by sampling is claimed for them.

        A callback that steers by a training metric draws a warning: such metrics are raw.

        Raises:
            ValueError: the data declares no sampling, or one that does not match the optimizer; an
                argument has no meaning beside `Batches`; layers were frozen or unfrozen since
                `compile`.
            TypeError: `validation_data` are `Batches`, or nothing that Keras reads.
            PrivacyBudgetError: a budget affords not even the first step.
        """
        bound = inspect.signature(super().fit).bind(*args, **kwargs)
        bound.apply_defaults()
        call = bound.arguments
        self._assert_compile_called("fit")
        fit_arguments.check_validation_data(call["validation_data"])
        clipping.validate(self)  # layers may have been thawed since `compile`
        if self.built and self.optimizer.built:  # a step that is traced would go on as it is
            self.optimizer.serve(self.trainable_variables)
        arrays = not (replicas.is_used(self.distribute_strategy) or isinstance(call["x"], Batches))
        if not arrays:
            batches = self._checked_batches(call["x"])
            data.check_rows(batches)
            fit_arguments.check_beside(batches, call)
            self._sample_as(batches.sampling, batches.arrangement)
            call["x"], call["shuffle"] = data.for_keras(batches.dataset), False
            endless = replicas.is_used(self.distribute_strategy)  # `distributed` repeats the data
            fit_arguments.check_steps(batches, call["steps_per_epoch"], endless)
            call["steps_per_epoch"] = call["steps_per_epoch"] or batches.steps_per_epoch
            object.__setattr__(self, "_block", batches.physical_batch_size)
            if replicas.is_used(self.distribute_strategy):
                if call["steps_per_epoch"] is None:
                    raise ValueError(
                        "Several replicas need to know how many batches an epoch has: pass "
                        "steps_per_epoch to fit."
                    )
                strategy = self.distribute_strategy
                dataset = data.deal(batches, replicas.local(strategy))
                call["x"] = replicas.distributed(strategy, dataset)
                self.optimizer.noise_source.share(strategy)
        else:
            self._sample_as(fit_arguments.sampling_of_arrays(call, self.optimizer))
            object.__setattr__(self, "_block", None)
        object.__setattr__(self, "_is_heard", bool(call["verbose"]))
        fit_arguments.warn_of_monitors(call["callbacks"])
        call["callbacks"] = fit_arguments.reports_first(call["callbacks"])
        self._begin_segment()
        object.__setattr__(
            self, "budget", fit_arguments.budget_of(call["callbacks"]) or self.budget
        )
        epochs, before = call["epochs"] - call["initial_epoch"], self._iterations()
        finished, steps_of_epoch = False, self._steps_of_epoch(call, arrays)
        if epochs > 0 and not self._affordable(self.steps_per_execution) and not before:
            raise PrivacyBudgetError(self._nothing_affordable())
        self._let_weights_move()
        try:
            self._plan_steps(max(epochs, 0), steps_of_epoch)
            self._warn_past_calibration(self._to_run)
            if not self._affordable(self.steps_per_execution):
                call["epochs"] = call["initial_epoch"]  # no epoch at all, not an empty one
            object.__setattr__(self, "_fitting", True)
            with replicas.worker_lost(self.distribute_strategy):
                history = super().fit(*bound.args, **bound.kwargs)
            # All epochs to the last one ran, each to its last step or to the end of the data; or
            # the budget ended them. Whatever else did may have looked at results.
            whole = call["epochs"] <= call["initial_epoch"] or history.epoch[-1:] == [
                call["epochs"] - 1
            ]
            each = self._iterations() - before >= len(history.epoch) * steps_of_epoch
            each = each or self._ends >= len(history.epoch)
            finished = self._out_of_budget or (whole and each)
            if not self._affordable(self.steps_per_execution):
                length = (history.params or {}).get("steps")  # none of a CallbackList of one's own
                planned = None if length is None else length * epochs
                self._warn_of_budget(self._iterations() - before, planned)
            return history
        finally:
            object.__setattr__(self, "_fitting", False)
            self._end_plan(finished)
            if self.ledger.steps:
                checksums.register(self.weights)
            current = self.ledger.current
            if current and current.breaks_off:  # `train_on_batch` may begin another pass
                self.ledger.close()
            self._report_non_finite()
            self._sync_ledger()

    def _steps_of_epoch(self, call, arrays):
        """How many steps an epoch of `fit` has at most, infinite where that is not known."""
        if arrays:
            return -(-self.sampling.num_examples // call["batch_size"])
        length = data.number_of_batches(call["x"])
        length = math.inf if length is None else length
        if call["steps_per_epoch"] is None:
            return length
        at_once = self.steps_per_execution  # whole executions, until the data end
        return min(-(-call["steps_per_epoch"] // at_once) * at_once, length)

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
            ValueError: `model.sampling` is not set.
        """
        self._assert_compile_called("train_on_batch")
        if replicas.is_used(self.distribute_strategy):
            raise ValueError(
                "train_on_batch would give the same batch to every replica. Use fit, with "
                "dp_keras_opt.data.assume_sampling for batches of your own."
            )
        object.__setattr__(self, "_block", None)
        self._let_weights_move()
        return super().train_on_batch(x, y, sample_weight, class_weight, return_dict)

    def _trained_on(self, number):
        """Specs of the first tensors in the batches of training so far, [] without any.

        Sizes in which the batches differed are open, as is the number of rows.
        """
        forms = [form[:number] for _, form in self._plans]
        return [functools.reduce(_common_spec, specs) for specs in zip(*forms, strict=True)]

    def _let_weights_move(self):
        """Before private steps: notes what others did until now, and expects no values any more."""
        if self._moving_since != checksums.last_registration():
            checksums.are_changed(self.weights)
            checksums.forget(self.weights)
            object.__setattr__(self, "_moving_since", checksums.last_registration())

    def _checked_batches(self, batches):
        """`Batches` as they are, once it is clear which rows come to which replica.

        Raises:
            ValueError: it is not.
        """
        strategy = self.distribute_strategy
        replicas.check_compiled(self, self.optimizer)  # again: `fit` may be in another scope
        workers = replicas.place(strategy)[1]
        if not isinstance(batches, Batches) or (
            replicas.is_used(strategy) and not isinstance(batches.dataset, tf.data.Dataset)
        ):
            raise ValueError(
                f"Several replicas need Batches of a tf.data.Dataset, received {batches!r}. Use "
                "dp_keras_opt.data.poisson_batches."
            )
        if batches.workers != workers:
            raise ValueError(
                f"The model is trained by {workers} workers, and the batches were made for "
                f"{batches.workers}. Make them within `with strategy.scope():`, too."
            )
        return batches

    def _check(self, batch, form):
        try:
            super()._check(batch, form)
        except ValueError as error:
            quantized = {
                layer.path: layer.quantization_mode
                for layer in self._flatten_layers()
                if getattr(layer, "quantization_mode", None) and layer.trainable_variables
            }
            if not quantized:
                raise
            raise ValueError(
                f"Layers are quantized, {quantized}: their weights are rounded and not trained, "
                "and what of them is still trainable cannot be trained privately. Train first, and "
                "quantize the trained model; or freeze these layers (layer.trainable = False). "
                f"What failed: {error}"
            ) from error

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        strategy = self.distribute_strategy
        if iterator is None or not replicas.is_used(strategy):
            return super()._maybe_symbolic_build(iterator, data_batch)
        with strategy.scope():
            self._symbolic_build(data_batch=replicas.element_spec(iterator._distributed_dataset))

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As `keras.Model.evaluate`; not of `Batches`, which are a random choice.

        Raises:
            TypeError: the data are `Batches`.
        """
        fit_arguments.refuse_batches(args[0] if args else kwargs.get("x"), "x of evaluate")
        with self._swapping(kwargs.get("callbacks")):
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As `keras.Model.predict`; not of `Batches`, which are a random choice.

        Raises:
            TypeError: the data are `Batches`.
        """
        fit_arguments.refuse_batches(args[0] if args else kwargs.get("x"), "x of predict")
        with self._swapping(kwargs.get("callbacks")):
            return super().predict(*args, **kwargs)

    def _swapping(self, callbacks):
        """Around what may swap other weights in and back, with a rounding, as `SwapEMAWeights`."""
        if callbacks is None or self._fitting:
            return contextlib.nullcontext()
        return checksums.taken_back(self.weights)

    def make_test_function(self, force: bool = False) -> None:
        if not replicas.is_used(self.distribute_strategy):
            return super().make_test_function(force)
        if self.test_function is None or force:
            self.test_function = replicas.test_function(self)

    def _report_non_finite(self):
        if self._non_finite is not None and self.non_finite_examples:
            warnings.warn(
                f"{self.non_finite_examples} examples had a NaN or infinite loss or gradient and "
                "contributed zero. This count is private: do not publish it.",
                stacklevel=3,
            )
            self._non_finite.assign(0)

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

    def export(self, filepath: Path, *args: Any, **kwargs: Any) -> None:
        """As `keras.Model.export`; warns that the privacy statement is not in what it writes.

        `serving.export` writes a SavedModel with it, and of inference alone.
        """
        _warn_of_export(self)
        super().export(filepath, *args, **kwargs)

    def save_own_variables(self, store: Any) -> None:
        super().save_own_variables(store)
        self._store_ledger(store)

    def _store_ledger(self, store):
        if self.ledger.steps:
            store["privacy_ledger"] = np.frombuffer(self._saved_ledger().encode(), np.uint8)

    def load_own_variables(self, store: Any) -> None:
        super().load_own_variables(self._without_ledger(store))

    def _without_ledger(self, store):
        """The arrays of a store, once the ledger among them has been taken."""
        own = {key: np.array(store[key]) for key in list(store.keys())}
        spent = own.pop("privacy_ledger", None)
        if spent is not None:
            self._learn(spent.astype(np.uint8).tobytes().decode())
        return own

    def load_weights(self, filepath: Path, skip_mismatch: bool = False, **kwargs: Any) -> None:
        """Loads weights, and what they have spent; as `keras.Model.load_weights`.

        An optimizer that is not built yet starts afresh, with a warning. `skip_mismatch` skips
        layers, and never the ledger.

        Raises:
            ValueError: the ledger beside the weights cannot be read or merged; or the state of the
                optimizer does not fit the one that is built.
        """
        object.__setattr__(self, "_learned", False)
        super().load_weights(filepath, skip_mismatch=skip_mismatch, **kwargs)
        if skip_mismatch:
            self._gather()  # raises where the ledger was skipped
            if self._learned:  # not all of what was saved may have been loaded
                checksums.forget(self.weights)
                checksums.register(self.weights)


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DPFunctional(DPModel, Functional):
    """What `DPModel(inputs, outputs)` makes: a functional model with the private training step."""

    def __init__(self, *args, **kwargs):  # by these names Keras knows a functional constructor
        super().__init__(*args, **kwargs)


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class PrivateWrapper(DPModel):
    """What `make_private` makes of a subclassed or unbuilt model: it calls the model.

    Args:
        model: the model that is trained.
        **kwargs: those of `keras.Model`.
    """

    def __init__(self, model, **kwargs):
        super().__init__(**kwargs)
        self.model = model
        _tie(model, self)

    def call(self, inputs, training=None):
        return self.model(inputs, training=training)

    def get_config(self):
        return super().get_config() | {"model": keras.saving.serialize_keras_object(self.model)}

    @classmethod
    def from_config(cls, config):
        return cls(**config | {"model": keras.saving.deserialize_keras_object(config["model"])})


def _common_spec(one, two):
    one = tf.TensorSpec([None, *one.shape[1:]], one.dtype)
    return one.most_specific_compatible_type(two) if one.dtype == two.dtype else two


def make_private(model: keras.Model) -> DPModel:
    """The private counterpart of a Keras model, sharing its layers and weights.

    Args:
        model: a functional, Sequential or subclassed `keras.Model`.

    Returns:
        A `DPModel`, to be compiled with an optimizer of `dp_keras_opt.optimizers`; the same one
        whenever it is called with the same model, since both train the same weights.

    Raises:
        TypeError: the model overrides `train_step` or `compute_loss`, whose code would see raw
            gradients or mix examples.
    """
    if isinstance(model, DPModel):
        return model
    if not isinstance(model, keras.Model):
        raise TypeError(f"make_private needs a keras.Model, received {model!r}.")
    for method in ("train_step", "compute_loss"):
        if getattr(type(model), method) is not getattr(keras.Model, method):
            raise TypeError(
                f"{type(model).__name__} overrides `{method}`, which cannot be made private. "
                "Express the objective as a per-example loss in compile(loss=...)."
            )
    # One private counterpart a model: they share the weights, so they must share the ledger.
    if "_private_counterpart" not in vars(model):
        _tie(model, _counterpart(model))
    return vars(model)["_private_counterpart"]()


def _tie(model, private):
    """Has a model know its private counterpart, and saved as it once that was trained.

    Saved as it is, it would lose the ledger. Weights alone are saved with the ledger beside them,
    which only a private model loads.
    """
    kind = type(model)

    def save(filepath, *args, **kwargs):
        if private.ledger.steps:
            private.save(filepath, *args, **kwargs)
        else:
            kind.save(model, filepath, *args, **kwargs)

    def export(filepath, *args, **kwargs):
        _warn_of_export(private)
        kind.export(model, filepath, *args, **kwargs)

    def reduce():  # of `copy` and `pickle`
        return private.__reduce__() if private.ledger.steps else kind.__reduce__(model)

    def save_own_variables(store):
        kind.save_own_variables(model, store)
        if getattr(store, "_h5_entry_path", None) == "":  # not as a part of another model
            private._store_ledger(store)

    def load_own_variables(store):
        kind.load_own_variables(model, private._without_ledger(store))

    for name, value in {
        "_private_counterpart": lambda: private,  # a function: Keras saves what attributes hold
        "save": save,
        "export": export,
        "__reduce__": reduce,
        "save_own_variables": save_own_variables,
        "load_own_variables": load_own_variables,
    }.items():
        object.__setattr__(model, name, value)


def _warn_of_export(private):
    if private.ledger.steps:
        warnings.warn(
            "The model was trained privately, but what `export` writes has no privacy statement, "
            "and as a SavedModel it may augment what it is asked, as in training. For a SavedModel "
            "use dp_keras_opt.serving.export(private_model, path, report); send other formats "
            "along with private_model.statement(delta).",
            stacklevel=3,
        )


def _counterpart(model):
    if isinstance(model, keras.Sequential) and model.built:
        return DPModel(model.inputs[0], model.outputs[0], name=model.name)
    if isinstance(model, Functional) and type(model).call is Functional.call:
        return DPModel(model.input, model.output, name=model.name)
    return PrivateWrapper(model, name=model.name)
