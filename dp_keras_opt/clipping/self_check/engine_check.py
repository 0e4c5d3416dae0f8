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
from dp_keras_opt.clipping.objective import losses_and_outputs
from dp_keras_opt.clipping.self_check.passes import is_in_half_precision
from dp_keras_opt.clipping.state_changes import Snapshot

_BLOCK = 2**20  # numbers that are compared at a time


def wrong_variables(
    model: keras.Model,
    per_example_loss: Callable[..., tf.Tensor] | None,
    engines: Engines,
    batches: Sequence[Batch],
    before: Snapshot,
    is_random: bool,
) -> list[str]:
    """Paths of the variables for which the engines give another gradient than the tape.

    Args:
        model: a built and compiled `DPModel`.
        per_example_loss: function of (y, y_pred, sample_weight) that gives the losses (B,); None
            for the objective that the model was compiled with.
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
            losses, _ = losses_and_outputs(model, batch, True, per_example_loss)
    wrong, any_gradient = [], False
    for row in np.eye(len(losses), dtype=np.float32):
        upstream = tf.cast(row * scale, losses.dtype)
        expected = tape.gradient(losses, [v.value for v in variables], output_gradients=upstream)
        for variable, factor in zip(variables, gradients, strict=True):
            reference = expected.pop(0)  # none is kept longer than it is needed
            any_gradient |= reference is not None
            zeros = np.zeros(variable.shape, np.float32)
            reference = zeros if reference is None else tf.convert_to_tensor(reference).numpy()
            result = zeros if factor is None else factor.weighted_sum(row).numpy()
            error, largest = _error(result, reference, scale)
            if not error <= tolerance * largest + 1e-6:
                wrong.append(variable.path)
    if variables and not any_gradient:
        raise ValueError("The loss depends on no trainable variable: there is nothing to train.")
    return wrong


def _error(result, reference, scale):
    """(the largest error of a gradient; its largest entry), where the reference is scaled up.

    Block by block: of a large table, no second copy is made. NaN where there is one.
    """
    result, reference, error, largest = result.ravel(), reference.ravel(), 0.0, 0.0
    for start in range(0, reference.size, _BLOCK):
        right = reference[start : start + _BLOCK] / scale
        error = np.maximum(error, np.abs(result[start : start + _BLOCK] - right).max())
        largest = np.maximum(largest, np.abs(right).max())
    return error, largest
