"""Every private name of Keras that this library uses, and why no public one does.

A release of Keras that renames one of them breaks this file, and `tests/test_private_names.py` says
which it was. All of them are in Keras 3.12 to 3.15; `since` is the first release that was seen to
have it. Not listed are hooks that Keras documents for subclasses, such as `build` and
`update_step`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.export.export_utils import get_input_signature
from keras.src.layers.rnn.conv_lstm import ConvLSTMCell
from keras.src.models.functional import Functional
from keras.src.models.model import functional_init_arguments
from keras.src.trainers.compile_utils import is_binary_or_sparse_categorical
from keras.src.trainers.data_adapters import (
    is_grain_dataset,
    is_tf_dataset,
    is_torch_dataloader,
)
from keras.src.trainers.data_adapters.array_data_adapter import can_convert_arrays
from keras.src.trainers.data_adapters.array_slicing import train_validation_split
from keras.src.utils.dataset_utils import index_directory
from keras.src.utils.naming import to_snake_case

__all__ = [
    "ATTRIBUTES",
    "ConvLSTMCell",
    "FUNCTIONS",
    "SET_BY_RUNS",
    "TRAINABLE",
    "Functional",
    "can_convert_arrays",
    "functional_init_arguments",
    "get_input_signature",
    "is_grain_dataset",
    "is_tf_dataset",
    "is_torch_dataloader",
    "index_directory",
    "is_binary_or_sparse_categorical",
    "to_snake_case",
    "train_validation_split",
]


class Private(NamedTuple):
    """A private name.

    Attributes:
        owner: the class or function that has it.
        name: how it is called.
        since: the first release of Keras that was seen to have it.
        why: what it is used for, for which there is no public name.
    """

    owner: str
    name: str
    since: str
    why: str


#: What is imported from `keras.src`.
FUNCTIONS = (
    Private("backend.common.stateless_scope", "get_stateless_scope", "3.0",
            "to know whether something stands for a variable's value"),
    Private("layers.rnn.conv_lstm", "ConvLSTMCell", "3.0", "to know the cell of these layers"),
    Private("models.functional", "Functional", "3.0",
            "to be its subclass, so that a private functional model is saved and loaded as one"),
    Private("models.model", "functional_init_arguments", "3.0",
            "to tell DPModel(inputs, outputs) from the constructor of a subclass as Keras does"),
    Private("trainers.compile_utils", "is_binary_or_sparse_categorical", "3.0",
            "to take the accuracy that compile would take for these targets"),
    Private("trainers.data_adapters", "is_tf_dataset", "3.0", "what Keras reads batches of"),
    Private("trainers.data_adapters", "is_torch_dataloader", "3.0", "the same"),
    Private("trainers.data_adapters", "is_grain_dataset", "3.12", "the same"),
    Private("trainers.data_adapters.array_data_adapter", "can_convert_arrays", "3.0",
            "to refuse validation data before an epoch is spent, and not after it"),
    Private("trainers.data_adapters.array_slicing", "train_validation_split", "3.0",
            "to cut the validation data off arrays before they are sampled, as Keras does"),
    Private("utils.dataset_utils", "index_directory", "3.0",
            "to find the files of a folder and their classes, in Keras's order"),
    Private("export.export_utils", "get_input_signature", "3.8",
            "to serve a model by the signature that Keras would export"),
    Private("utils.naming", "to_snake_case", "3.0",
            "to name the outputs of a served model as Keras names layers"),
)  # fmt: skip

#: Attributes and methods of Keras's objects.
ATTRIBUTES = (
    Private("Layer", "_flatten_layers", "3.0", "to walk a model, layers of layers included"),
    Private("Layer", "_trainable_variables", "3.0", "the weights of a layer without its parts'"),
    Private("Layer", "_non_trainable_variables", "3.0", "its states without its parts'"),
    Private("Layer", "_losses", "3.0", "to find who calls add_loss: `losses` evaluates them"),
    Private("Layer", "_metrics", "3.0", "to tell metrics in a layer from state that it keeps"),
    Private("Layer", "_seed_generators", "3.0", "to seed a layer alike for each of its examples"),
    Private("Layer", "_remat_mode", "3.10", "rematerialized layers are called twice: no rule"),
    Private(
        "GroupNormalization", "_create_broadcast_shape", "3.0",
        "to lay weights of each example along the groups",
    ),
    Private("TextVectorization", "_preprocess", "3.0", "to count the words that it looks up"),
    Private("Layer", "_trainable", "3.0", "to leave it out where models are compared"),
    Private("Layer", "_tracker", "3.0", "to exchange a part of a layer that is built"),
    Private("Variable", "_value", "3.0", "the resource of TensorFlow behind a variable"),
    Private("StatelessScope", "add_update", "3.0",
            "overridden: what is assigned in a scope goes to its variable"),
    Private("Model", "_assert_compile_called", "3.0", "to say the same as Keras before compile"),
    Private("Model", "_compile_loss", "3.0", "the loss that compile made, to take it per example"),
    Private("Model", "_compile_metrics", "3.0", "its metrics, to leave padding out of them"),
    Private(
        "Model", "_aggregate_additional_loss", "3.12",
        "overridden: a vector that a layer added is each example's own",
    ),
    Private("Model", "_loss_tracker", "3.0", "to show a loss without padding"),
    Private("Model", "_symbolic_build", "3.0", "to build from what a replica gets"),
    Private("Model", "_maybe_symbolic_build", "3.6", "overridden: Keras reduces a batch first"),
    Private("Model", "_distribute_strategy", "3.0", "under which strategy a model was made"),
    Private("Optimizer", "_distribution_strategy", "3.0", "under which an optimizer was made"),
    Private("Optimizer", "_learning_rate", "3.0", "the schedule that learning_rate evaluates"),
    Private("Optimizer", "_trainable_variables", "3.0", "for which variables it was built"),
    Private("Optimizer", "_get_variable_index", "3.0", "as Keras's own optimizers use it"),
    Private(
        "Optimizer", "_update_model_variables_moving_average", "3.0",
        "overridden: an average that is uniform",
    ),
    Private("Optimizer", "_model_variables_moving_average", "3.0", "the averages that it updates"),
    Private("Optimizer", "_use_weight_decay", "3.0", "which variables decay"),
    Private("Optimizer", "_apply_weight_decay", "3.0", "overridden: Keras's needs a replica"),
    Private("Optimizer", "_backend_update_step", "3.0", "overridden: Keras's needs a replica"),
    Private("CompileLoss", "_flat_losses", "3.8", "to run each loss without its reduction"),
    Private("CompileLoss", "_metrics", "3.0", "to record the loss of each output"),
    Private("CompileMetrics", "_flat_metrics", "3.0", "to weight all metrics by the mask"),
    Private("CompileMetrics", "_flat_weighted_metrics", "3.0", "the same"),
    Private("CompileMetrics", "_flatten_y", "3.0", "the targets in the order of the metrics"),
    Private("tensor", "_keras_mask", "3.0", "the mask that a layer computed"),
    Private("H5IOStore", "_h5_entry_path", "3.10", "to tell a model that is saved from its parts"),
    Private("TFEpochIterator", "_distributed_dataset", "3.0", "what a replica gets"),
)  # fmt: skip


#: Where a layer keeps whether it trains.
TRAINABLE = "_trainable"

#: Attributes of a model that `compile`, `fit`, `evaluate` and `predict` set.
SET_BY_RUNS = frozenset(
    {
        "_compile_loss",
        "_compile_metrics",
        "_eval_epoch_iterator",
        "_jit_compile",
        "_loss_tracker",
        "predict_function",
        "stop_evaluating",
        "stop_predicting",
        "stop_training",
        "test_function",
        "train_function",
    }
)


def layers_of(
    layer: keras.layers.Layer, include_self: bool = True, recursive: bool = True
) -> list[Any]:
    """A layer and all layers in it, each once; without `recursive` those that it holds itself."""
    return list(layer._flatten_layers(include_self=include_self, recursive=recursive))


def words_of(layer: keras.layers.Layer) -> Callable[[Any], Any] | None:
    """The function by which a layer makes words of strings; None where it takes words."""
    return getattr(layer, "_preprocess", None)


def exchange_part(owner: keras.layers.Layer, old: Any, new: Any) -> None:
    """Puts a layer in the place of another one wherever a layer that is built keeps it."""
    owner._tracker.replace_tracked_value("layers", old, new)
    for name, value in list(vars(owner).items()):
        if name != "_layers":  # the list that the tracker has changed
            changed = _exchanged(value, old, new)
            if changed is not value:
                object.__setattr__(owner, name, changed)  # past the tracker, which has it


def _exchanged(value, old, new):
    """The value with `new` for `old`; lists and dicts are changed as they stand."""
    if value is old:
        return new
    if isinstance(value, list):
        for place, part in enumerate(value):
            list.__setitem__(value, place, _exchanged(part, old, new))
    elif isinstance(value, dict):
        for key, part in value.items():
            dict.__setitem__(value, key, _exchanged(part, old, new))
    elif type(value) is tuple and any(part is old for part in value):
        return tuple(_exchanged(part, old, new) for part in value)
    return value


def own_weights(layer: keras.layers.Layer) -> list[keras.Variable]:
    """The variables of a layer that are not of layers in it: trainable ones, then states."""
    return [*own_trained(layer), *own_states(layer)]


def own_trained(layer: keras.layers.Layer) -> list[keras.Variable]:
    """The trainable variables of a layer that are not of layers in it."""
    return layer._trainable_variables


def trained_in(layer: keras.layers.Layer) -> list[keras.Variable]:
    """The variables of a layer that a model around it trains.

    `layer.trainable_variables` is empty where the layer is frozen, also if a layer in it has been
    made trainable again. A model asks each variable, past the layers in between.
    """
    return [variable for variable in layer.variables if variable.trainable]


def own_states(layer: keras.layers.Layer) -> list[keras.Variable]:
    """The variables of a layer that are not trained, and not of layers in it."""
    return layer._non_trainable_variables


def own_metrics(layer: keras.layers.Layer) -> Sequence[keras.metrics.Metric]:
    """The metrics that are attributes of a layer."""
    return getattr(layer, "_metrics", ())


def added_losses(layer: keras.layers.Layer) -> list[Any]:
    """The losses that the layer itself added in the last call of the model, by `add_loss`."""
    return list(layer._get_own_losses())


def seed_generators(layer: keras.layers.Layer) -> Sequence[keras.random.SeedGenerator]:
    """The generators of random numbers that are attributes of a layer."""
    return getattr(layer, "_seed_generators", ())


def method_of_call(layer: keras.layers.Layer) -> str:
    """The name of the method that a call of the layer runs."""
    return "quantized_call" if getattr(layer, "quantization_mode", None) else "call"


@contextlib.contextmanager
def patched(layer: keras.layers.Layer, name: str, value: Any) -> Iterator[None]:
    """Shadows an attribute, past Keras's attribute tracking, until the end of the block."""
    shadowed = vars(layer).get(name)
    object.__setattr__(layer, name, value)
    try:
        yield
    finally:
        if shadowed is None:
            object.__delattr__(layer, name)
        else:
            object.__setattr__(layer, name, shadowed)


def variable_itself(variable: keras.Variable) -> Any:
    """The `tf.Variable` of a Keras variable, whatever stands for its value in a scope."""
    return variable._value


def value_in_scope(variable: keras.Variable) -> Any:
    """What stands for a variable's value in the `keras.StatelessScope` around; None if nothing."""
    scope = get_stateless_scope()
    return None if scope is None else scope.get_current_value(variable)


def is_rematerialized(layer: keras.layers.Layer) -> bool:
    """Whether a layer is computed a second time in the backward pass."""
    return bool(getattr(layer, "_remat_mode", None))


def can_broadcast(layer: keras.layers.Layer) -> bool:
    """Whether `broadcast_by_row` knows how this layer lays its weights along its inputs."""
    return hasattr(layer, "_create_broadcast_shape")


def broadcast_by_row(layer: keras.layers.Layer) -> dict[str, Any]:
    """What to patch in a `GroupNormalization` whose weights have one row per example."""
    shape_for = layer._create_broadcast_shape
    return {"_create_broadcast_shape": lambda shape: [-1, *shape_for(shape)[1:]]}


def value_of(variable: Any) -> Any:
    """The variable of TensorFlow behind one of Keras."""
    return getattr(variable, "_value", variable)


def mask_of(tensor: Any) -> Any:
    """The mask that a layer computed for this output of its, or None."""
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: Any, mask: Any) -> None:
    """Gives a tensor a mask, as a layer does."""
    tensor._keras_mask = mask


def rows_with_attached(tensor: Any, rows_of: Any) -> Any:
    """Rows of a tensor, with those of what Keras attached to it: a mask, the logits of a softmax.

    Args:
        tensor: of one row for each example.
        rows_of: function that takes the rows of any such tensor.
    """
    rows = rows_of(tensor)
    for name in ("_keras_mask", "_keras_logits"):
        if getattr(tensor, name, None) is not None:
            setattr(rows, name, rows_of(getattr(tensor, name)))
    return rows


def compiled_loss(model: keras.Model) -> Any:
    """The container of losses that `compile` made, None without a loss."""
    return model._compile_loss


def compiled_metrics(model: keras.Model) -> Any:
    """The container of metrics that `compile` made, None without metrics."""
    return model._compile_metrics


def forget_loss(model: keras.Model) -> None:
    """Forgets the loss that was compiled before: `compile(loss=None)` would leave it."""
    model._compile_loss = model.loss = None


def loss_tracker(model: keras.Model) -> keras.metrics.Mean:
    """The metric that is shown as "loss"."""
    return model._loss_tracker


def flat_losses(compiled: Any) -> Sequence[Any]:
    """The losses of a `compiled_loss` that is built, one for each output that has one."""
    return compiled._flat_losses


def loss_container(compiled: Any, wrap: Any, recorders: Sequence[Any]) -> Any:
    """A copy of a `compiled_loss` whose losses are wrapped.

    Args:
        compiled: the container, built.
        wrap: function of a loss that gives the one in its place.
        recorders: in the place of the metrics that track each output's loss.
    """
    container = object.__new__(type(compiled))  # copy.copy would serialise it
    container.__dict__.update(compiled.__dict__)
    container._flat_losses = [part._replace(loss=wrap(part.loss)) for part in flat_losses(compiled)]
    container._metrics = recorders
    return container


def flat_metrics(compiled: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """The groups of metrics of a `compiled_metrics` by output: without and with sample weights."""
    return compiled._flat_metrics, compiled._flat_weighted_metrics


def flat_targets(compiled: Any, targets: Any) -> Sequence[Any]:
    """Targets or predictions in the order of the groups of `flat_metrics`."""
    return compiled._flatten_y(targets)


def distributed_data(iterator: Any) -> Any:
    """The distributed data set that the iterator of an epoch goes through."""
    return iterator._distributed_dataset


def build_from_specs(model: keras.Model, specs: Any) -> None:
    """Builds a model and its metrics for batches of these specs."""
    model._symbolic_build(data_batch=specs)


def check_is_compiled(model: keras.Model, method: str) -> None:
    """Raises what Keras raises where a model is used before `compile`."""
    model._assert_compile_called(method)


def strategy_of_model(model: keras.Model) -> Any:
    """The strategy under which a model was made, None outside of one."""
    return model._distribute_strategy


def strategy_of_optimizer(optimizer: keras.optimizers.Optimizer) -> Any:
    """The strategy under which an optimizer was made, None outside of one."""
    return optimizer._distribution_strategy


def schedule_of(
    optimizer: keras.optimizers.Optimizer,
) -> keras.optimizers.schedules.LearningRateSchedule | None:
    """The schedule of an optimizer's learning rate, None where it has none."""
    rate = optimizer._learning_rate
    return rate if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) else None


def is_part_of_a_store(store: Any) -> bool:
    """Whether a store of weights is that of a part, and not of the model that is saved."""
    return getattr(store, "_h5_entry_path", None) != ""
