"""Keras's compiled losses and metrics, one value per example and blind to padding.

Keras reduces a loss over the whole batch. Differential privacy needs each example's own loss, so
the containers that `compile` builds are run here with every loss un-reduced.
"""

import keras
import tensorflow as tf


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
    parts = [_Recorded() for _ in compiled._flat_losses]
    container = object.__new__(type(compiled))  # copy.copy would serialise it
    vars(container).update(vars(compiled))
    container._flat_losses = [
        part._replace(loss=_Unreduced(part.loss)) for part in compiled._flat_losses
    ]
    container._metrics = parts
    total = container(y, y_pred, sample_weight)
    return total, [part.value for part in parts if part.value is not None]


def update_metrics(compiled, y, y_pred, sample_weight, mask):
    """Updates the metrics that Keras's `CompileMetrics` holds, with padding weighted zero in all.

    Raises:
        TypeError: a metric's `update_state` takes no `sample_weight`, so it would count padding.
    """
    if not compiled.built:
        compiled.build(y, y_pred)
    y, y_pred = compiled._flatten_y(y), compiled._flatten_y(y_pred)
    weights = [None] if sample_weight is None else compiled._flatten_y(sample_weight)
    weights = weights * len(y) if len(weights) < len(y) else weights
    unweighted = [None] * len(y)
    for groups, group_weights in (
        (compiled._flat_metrics, unweighted),
        (compiled._flat_weighted_metrics, weights),
    ):
        for group, target, prediction, weight in zip(
            groups, y, y_pred, group_weights, strict=False
        ):
            for metric in group.metrics if group else ():
                metric.update_state(target, prediction, sample_weight=_masked(weight, mask))


def _masked(weight, mask):
    """The weights of a metric: the user's, and zero for padding."""
    if mask is None:
        return weight
    mask = tf.cast(mask, keras.config.floatx())
    return mask if weight is None else _broadcast(mask, weight) * tf.cast(weight, mask.dtype)


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
        mask = getattr(y_pred, "_keras_mask", None)
        y_true, y_pred = tf.nest.map_structure(
            lambda t: tf.cast(t, self.loss.dtype), (y_true, y_pred)
        )
        values = tf.convert_to_tensor(self.loss.call(y_true, y_pred))
        if values.shape.rank == 0:
            raise ValueError(
                f"The loss '{self.loss.name}' reduces over the batch, so that one example's loss "
                "depends on the others. Return one value per example, without the mean."
            )
        if mask is not None:  # the mean is over the positions that count
            mask = _broadcast(tf.cast(mask, values.dtype), values)
            mask = tf.broadcast_to(mask, tf.shape(values))
            share = tf.reduce_mean(mask, axis=range(1, values.shape.rank), keepdims=True)
            values *= tf.math.divide_no_nan(mask, share)
        if sample_weight is not None:
            values *= _broadcast(tf.cast(sample_weight, values.dtype), values)
        return tf.reduce_mean(values, axis=range(1, values.shape.rank))


class _Recorded:
    """Stands in for the metric that tracks one output's loss."""

    value = None

    def update_state(self, value, sample_weight=None):
        self.value = value


def _broadcast(weight, values):
    """`weight` with the rank of `values`: a trailing axis of 1 dropped, or axes appended."""
    weight, rank = tf.convert_to_tensor(weight), len(values.shape)
    if weight.shape.rank == rank + 1 and weight.shape[-1] == 1:
        weight = tf.squeeze(weight, -1)
    return tf.reshape(weight, [*tf.unstack(tf.shape(weight)), *[1] * (rank - weight.shape.rank)])
