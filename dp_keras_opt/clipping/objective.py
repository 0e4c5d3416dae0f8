"""Objectives of one's own: each example's loss, from all that the model gives for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from dp_keras_opt._keras import compiled_loss, mask_of, set_mask
from dp_keras_opt.clipping.batch import Batch
from dp_keras_opt.clipping.observed import (
    NotPerExample,
    added_to,
    by_name,
    has_rows,
    observing,
)


@keras.saving.register_keras_serializable(package="dp_keras_opt")
@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss of each example, from inputs, targets, outputs and what layers give on the way.

    It takes the place of an overridden `train_step` or `compute_loss`, of a scalar `add_loss` and
    of an `activity_regularizer`::

        @keras.saving.register_keras_serializable()
        def elbo(inputs, targets, outputs, intermediates):
            mean, log_variance = intermediates["z_mean"], intermediates["z_log_var"]
            error = keras.ops.sum(keras.ops.square(inputs - outputs), axis=-1)
            spread = keras.ops.exp(log_variance) + keras.ops.square(mean) - 1 - log_variance
            return error + keras.ops.sum(spread, axis=-1) / 2

        model.compile(optimizer, loss=dp.Objective(elbo, intermediates=("z_mean", "z_log_var")))

    Args:
        function: function of (inputs, targets, outputs, intermediates) that returns one loss for
            each example, (B,). Inputs and targets are those of the batch, None where it has no
            targets; outputs are the model's; intermediates are a dict from the names below to what
            these layers gave: a tensor or a structure of them, and for a layer that is called
            several times the list of what it gave in each call, in this order. All have one row
            for each example, and floats come in `keras.config.floatx()`. It is traced, as the model
            is, and called in training and in evaluation.
        intermediates: names of layers of the model. A name that several layers have needs more of
            its path: "encoder/z_mean".

    The loss of an example is multiplied by its sample weight, if there are any, before its gradient
    is clipped. What layers add by `add_loss` is added to it, unweighted. Beside an objective there
    are no `loss_weights`.

    To be saved and loaded with a model, the function must be registered, as for losses of one's
    own: `keras.saving.register_keras_serializable`.

    Guarantee: that of `DPModel`, if an example's loss depends on nothing of the others. Before the
    first step this is tried on synthetic batches, as it is for the model; what such a test can miss
    is in the documentation (what is not protected). Not covered is what the function brings along:
    a teacher or a table that was computed from the private data without privacy, or what Python
    code in it keeps from one batch to the next.

    Raises:
        TypeError: `function` is not callable, or a name is not a string.
        ValueError: by `compile` or `fit`, before the first step: an intermediate is no layer of the
            model, or has no axis of the batch; the function returns something else than (B,); or it
            mixes the examples of a batch.
    """

    function: Callable[[Any, Any, Any, dict[str, Any]], Any]
    intermediates: Sequence[str] = ()

    def __post_init__(self) -> None:
        names = self.intermediates
        names = (names,) if isinstance(names, str) else tuple(names)
        if not callable(self.function):
            raise TypeError(f"function must be callable, received {self.function!r}.")
        if not all(isinstance(name, str) for name in names):
            raise TypeError(f"intermediates must be names of layers, received {names!r}.")
        object.__setattr__(self, "intermediates", names)

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def losses(self, batch: Batch, outputs: Any, intermediates: dict[str, Any]) -> tf.Tensor:
        """The weighted loss of each example, (B,).

        Raises:
            NotPerExample: the function returns something else; or weights are not one a row.
        """
        arguments = (batch.x, batch.y, outputs, intermediates)
        arguments = tf.nest.map_structure(_in_floatx, arguments)
        result = self.function(*arguments)
        if not tf.is_tensor(result):
            raise NotPerExample(
                f"The objective '{self.name}' returns {result!r}. Return a tensor (B,), one loss "
                "for each example."
            )
        losses = tf.cast(result, keras.config.floatx())
        if losses.shape.rank == 0:
            raise NotPerExample(
                f"The objective '{self.name}' returns a scalar, so that one example's loss depends "
                "on the others. Return one loss for each example, (B,), without the mean over the "
                "batch."
            )
        if losses.shape.rank != 1 or not has_rows(losses, batch.num_rows):
            of_rows = "" if batch.num_rows is None else f" for {batch.num_rows} examples"
            raise NotPerExample(
                f"The objective '{self.name}' returns the shape {losses.shape}{of_rows}. Return "
                "(B,), one loss for each example: the mean, or the sum, over its other axes."
            )
        return losses if batch.sample_weight is None else losses * self._weights(batch, losses)

    def _weights(self, batch, losses):
        weight = batch.sample_weight
        if not tf.is_tensor(weight) or weight.shape[1:] not in ([], [1]):
            raise NotPerExample(
                f"Sample weights beside the objective '{self.name}' must be one for each example, "
                "(B,). Give weights of positions or of outputs to it as inputs or targets instead."
            )
        return tf.cast(tf.reshape(weight, [-1]), losses.dtype)

    def get_config(self) -> dict[str, Any]:
        function = keras.saving.serialize_keras_object(self.function)
        return {"function": function, "intermediates": list(self.intermediates)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Objective:
        function = keras.saving.deserialize_keras_object(config["function"])
        return cls(function, config["intermediates"])


def losses_and_outputs(
    model: keras.Model,
    batch: Batch,
    training: bool = True,
    per_example_loss: Callable[..., tf.Tensor] | None = None,
) -> tuple[tf.Tensor, Any]:
    """One forward pass of a `DPModel`.

    Args:
        model: the model.
        batch: a `Batch` of tensors.
        training: the mode.
        per_example_loss: function of (y, y_pred, sample_weight) that gives losses (B,) in the place
            of those that the model was compiled with.

    Returns:
        (the loss of each example (B,), with what layers add and without regularizers; the outputs).

    Raises:
        NotPerExample: there is no loss of each example's own.
    """
    y_pred, intermediates = outputs_and_intermediates(model, batch, training, per_example_loss)
    # Before the objective, which may call layers of the model: they forget what they have added.
    added = added_to(model, batch.num_rows)
    if added and per_example_loss is None and model.loss is None and compiled_loss(model) is None:
        losses = tf.zeros_like(added[0], keras.config.floatx())
    else:
        losses = losses_of(model, batch, y_pred, intermediates, per_example_loss)
    return sum((tf.cast(loss, losses.dtype) for loss in added), losses), y_pred


def outputs_and_intermediates(model, batch, training=True, per_example_loss=None):
    """What a model gives for a batch: its outputs, and those of layers that its objective names."""
    objective = _objective(model, per_example_loss)
    names = () if objective is None else objective.intermediates
    with observing(model, names) as seen:
        y_pred = model(batch.x, training=training)
    return y_pred, by_name(names, seen, batch.num_rows)


def losses_of(model, batch, outputs, intermediates, per_example_loss=None):
    """The losses (B,) of what a model has given, without those that layers add."""
    objective = _objective(model, per_example_loss)
    if objective is not None:
        return objective.losses(batch, outputs, intermediates)
    loss = per_example_loss or model.per_example_losses
    return loss(batch.y, outputs, batch.sample_weight)


def _objective(model, per_example_loss):
    is_one = per_example_loss is None and isinstance(model.loss, Objective)
    return model.loss if is_one else None


def _in_floatx(tensor):
    """As Keras hands tensors to its losses: what is computed in half precision is too coarse."""
    if not tf.is_tensor(tensor) or not tensor.dtype.is_floating:
        return tensor
    converted = tf.cast(tensor, keras.config.floatx())
    if mask_of(tensor) is not None:
        set_mask(converted, mask_of(tensor))
    return converted
