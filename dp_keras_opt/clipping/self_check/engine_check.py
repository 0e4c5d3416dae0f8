"""Whether engines give each example's gradient: held against the tape, row by row."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from dp_keras_opt.clipping.batch import Batch
from dp_keras_opt.clipping.book_keeping import per_example_gradients
from dp_keras_opt.clipping.engines import Engines
from dp_keras_opt.clipping.self_check.passes import is_in_half_precision
from dp_keras_opt.clipping.state_changes import Snapshot


def wrong_variables(
    model: keras.Model,
    per_example_loss: Callable[..., tf.Tensor],
    engines: Engines,
    batches: Sequence[Batch],
    before: Snapshot,
    is_random: bool,
) -> list[str]:
    """Paths of the variables for which the engines give another gradient than the tape.

    Args:
        model: a built and compiled `DPModel`.
        per_example_loss: function of (y, y_pred, sample_weight) that gives the losses (B,).
        engines: which engine serves which layer.
        batches: two synthetic batches.
        before: the model's state at which each pass begins.
        is_random: whether a pass in training mode draws random numbers.

    Raises:
        CallFailed: an engine cannot serve a call of a layer.
        ValueError: the loss depends on no trainable variable.
    """
    # Large gradients too: a backward pass may bound those of the batch as a whole.
    scales, tolerance = (1.0, 1e4), 1e-3
    if is_in_half_precision(model):
        scales, tolerance = (1.0, 1.0), 0.1
    wrong = [
        path
        for scale, batch in zip(scales, batches, strict=True)
        for path in _wrong_at(
            model, per_example_loss, engines, batch, before, is_random, scale, tolerance
        )
    ]
    return list(dict.fromkeys(wrong))


def _wrong_at(model, per_example_loss, engines, batch, before, is_random, scale, tolerance):
    """Those for one batch, with the loss scaled up, and the gradients scaled down again."""
    variables = model.trainable_variables
    before.put_back()
    with contextlib.ExitStack() as tapes:
        tape = tf.GradientTape(persistent=True)
        if is_random:  # only the same pass has the same masks
            tapes.enter_context(tape)
        losses, _, gradients = per_example_gradients(model, batch, per_example_loss, engines, scale)
        if not is_random:
            tapes.enter_context(tape)
            before.put_back()
            y_pred = model(batch.x, training=True)
            losses = per_example_loss(batch.y, y_pred, batch.sample_weight)
    wrong, any_gradient = [], False
    for row in np.eye(len(losses), dtype=np.float32):
        upstream = tf.cast(row * scale, losses.dtype)
        expected = tape.gradient(losses, [v.value for v in variables], output_gradients=upstream)
        for variable, factor, reference in zip(variables, gradients, expected, strict=True):
            any_gradient |= reference is not None
            zeros = np.zeros(variable.shape, np.float32)
            if reference is None:
                reference = zeros
            reference = tf.convert_to_tensor(reference).numpy() / scale
            result = zeros if factor is None else factor.weighted_sum(row).numpy()
            error = np.abs(result - reference).max(initial=0.0)
            if not error <= tolerance * np.abs(reference).max(initial=0.0) + 1e-6:
                wrong.append(variable.path)
    if variables and not any_gradient:
        raise ValueError("The loss depends on no trainable variable: there is nothing to train.")
    return wrong
