"""Keras's compiled losses and metrics, one value per example and blind to padding.

Keras reduces a loss over the whole batch. Differential privacy needs each example's own loss, so
the containers that `compile` builds are run here with every loss un-reduced.
"""

import warnings

import keras
import tensorflow as tf

from dp_keras_opt import _keras
from dp_keras_opt.data import RowInfo
from dp_keras_opt.training.batches import by_row


def per_example_losses(compiled, y, y_pred, sample_weight=None):
    """The total loss of each example.

    Args:
        compiled: the `CompileLoss` that Keras made of `loss` and `loss_weights`.
        y, y_pred: targets and predictions, structures of tensors with one row per example.
        sample_weight: None, (B,), one weight per position, or a structure with one per output.

    Returns:
        (losses (B,), list of the unweighted losses (B,) of each output). Over sequences and images
        an example's loss is the mean over its positions; over the unmasked ones under a mask.
    """
    if not compiled.built:
        compiled.build(y, y_pred)
    parts = [_Recorded() for _ in _keras.flat_losses(compiled)]
    container = _keras.loss_container(compiled, _Unreduced, parts)
    total = container(y, y_pred, sample_weight)
    return total, [part.value for part in parts if part.value is not None]


def update_metrics(compiled, y, y_pred, sample_weight, mask):
    """Updates the metrics that Keras's `CompileMetrics` holds, with padding weighted zero in all.

    Raises:
        TypeError: a metric's `update_state` takes no `sample_weight`, so it would count padding.
        ValueError: a metric fails.
    """
    if not compiled.built:
        compiled.build(y, y_pred)
    y, y_pred = _keras.flat_targets(compiled, y), _keras.flat_targets(compiled, y_pred)
    weights = [None] if sample_weight is None else _keras.flat_targets(compiled, sample_weight)
    weights = weights * len(y) if len(weights) < len(y) else weights
    unweighted, weighted = _keras.flat_metrics(compiled)
    for groups, group_weights in ((unweighted, [None] * len(y)), (weighted, weights)):
        for group, target, prediction, weight in zip(
            groups, y, y_pred, group_weights, strict=False
        ):
            weight = _masked(weight, mask)
            positions = _keras.mask_of(prediction)
            if weight is not None and positions is not None:  # Keras multiplies them
                weight = _broadcast(weight, positions)
            for metric in group.metrics if group else ():
                _update(metric, target, prediction, weight, mask)


#: Those metrics of Keras that, like `IoU`, count each position by itself and want its weight.
_OF_POSITIONS = (
    keras.metrics.TruePositives, keras.metrics.TrueNegatives, keras.metrics.FalsePositives,
    keras.metrics.FalseNegatives, keras.metrics.Precision, keras.metrics.Recall, keras.metrics.AUC,
    keras.metrics.PrecisionAtRecall, keras.metrics.RecallAtPrecision,
    keras.metrics.SensitivityAtSpecificity, keras.metrics.SpecificityAtSensitivity,
)  # fmt: skip


def _update(metric, target, prediction, weight, mask):
    """Updates a metric, and warns of one that makes nothing of the weights."""
    weight = weight if weight is None else _weight_for(metric, target, prediction, weight)
    if mask is not None:
        weight = tf.identity(weight)
    try:
        metric.update_state(target, prediction, sample_weight=weight)
    except ValueError as error:
        advice = ""
        if isinstance(metric, keras.metrics.MeanMetricWrapper):
            advice = (
                " A metric that is a function returns a value for each example, without the mean: "
                "padding has the weight 0."
            )
        raise ValueError(
            f"The metric {metric.name!r} failed.{advice} What failed: {error}"
        ) from error
    if mask is not None and not tf.executing_eagerly() and not weight.consumers():
        warnings.warn(
            f"The metric {metric.name!r} makes nothing of `sample_weight`, so it counts the rows "
            "that batches are padded with, whose weight is 0. Multiply by `sample_weight` in its "
            "`update_state`, or leave it to `evaluate`, where nothing is padded.",
            stacklevel=2,
        )


def _weight_for(metric, target, prediction, weight):
    """The weights as a metric wants them: of each row, or of each position."""
    if isinstance(metric, keras.metrics.IoU):  # also one of somebody's that predicts otherwise
        elements = target
        if not metric.sparse_y_true:
            elements = tf.reduce_max(target, axis=metric.axis)
    elif type(metric) in _OF_POSITIONS and len(prediction.shape) > 2:
        elements = prediction[..., 0]
    else:
        return weight
    return tf.broadcast_to(_broadcast(weight, elements), tf.shape(elements))


def _masked(weight, mask):
    """The weights of a metric: the user's, and zero for padding."""
    if mask is None:
        return weight
    mask = tf.cast(mask, keras.config.floatx())
    return mask if weight is None else _broadcast(mask, weight) * tf.cast(weight, mask.dtype)


def update_figures(model, batch, losses, y_pred):
    """Updates all that `fit` shows of a batch: the loss, those of the outputs, and the metrics."""
    mask = by_row(batch.mask, tf.float32)
    regularization = sum(tf.reduce_sum(v.regularizer(v)) for v in model.trainable_variables
                         if v.regularizer is not None)  # fmt: skip
    _keras.loss_tracker(model).update_state(losses + regularization, sample_weight=mask)
    compiled = _keras.compiled_loss(model)
    if compiled is not None and compiled.metrics:
        _, parts = per_example_losses(compiled, batch.y, y_pred, batch.sample_weight)
        for metric, part in zip(compiled.metrics, parts, strict=True):
            metric.update_state(part, sample_weight=mask)
    model.compute_metrics(batch.x, batch.y, y_pred, RowInfo(batch.mask, batch.sample_weight))


class _Unreduced:
    """A Keras loss that returns one value per example."""

    def __init__(self, loss):
        if type(loss).__call__ is not keras.losses.Loss.__call__:
            raise ValueError(
                f"The loss {type(loss).__name__} overrides `__call__`, so it cannot be taken per "
                "example. Override `call(y_true, y_pred)` and return one value per example."
            )
        self.loss = loss

    def __call__(self, y_true, y_pred, sample_weight=None):
        mask = _keras.mask_of(y_pred)
        y_true, y_pred = tf.nest.map_structure(
            lambda t: tf.cast(t, self.loss.dtype), (y_true, y_pred)
        )
        values = tf.convert_to_tensor(self.loss.call(y_true, y_pred))
        if values.shape.rank == 0:
            advice = "Return one value per example, without the mean."
            if getattr(self.loss, "axis", 0) is None:  # as of Keras's Dice and Tversky
                axes = ", ".join(map(str, range(1, len(y_pred.shape)))) + ","
                advice = f"Pass axis=({axes}) to it: all axes but that of the batch."
            raise ValueError(
                f"The loss '{self.loss.name}' reduces over the batch, so that one example's loss "
                f"depends on the others. {advice}"
            )
        if mask is not None:
            values = of_unmasked(values, mask)
        if sample_weight is not None:
            values *= _broadcast(tf.cast(sample_weight, values.dtype), values)
        return tf.reduce_mean(values, axis=range(1, values.shape.rank))


class _Recorded:
    """Stands in for the metric that tracks one output's loss."""

    value = None

    def update_state(self, value, sample_weight=None):
        self.value = value


def of_unmasked(values, mask):
    """Values (B, ...), weighted so that their mean is that over the positions that count."""
    mask = _broadcast(tf.cast(mask, values.dtype), values)
    mask = tf.broadcast_to(mask, tf.shape(values))
    share = tf.reduce_mean(mask, axis=range(1, values.shape.rank), keepdims=True)
    return values * tf.math.divide_no_nan(mask, share)


def _broadcast(weight, values):
    """`weight` with the rank of `values`: a trailing axis of 1 dropped, or axes appended."""
    weight, rank = tf.convert_to_tensor(weight), len(values.shape)
    if weight.shape.rank == rank + 1 and weight.shape[-1] == 1:
        weight = tf.squeeze(weight, -1)
    return tf.reshape(weight, [*tf.unstack(tf.shape(weight)), *[1] * (rank - weight.shape.rank)])
