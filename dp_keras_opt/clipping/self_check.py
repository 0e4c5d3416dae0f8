"""Before the first step: does the engine give each example's gradient? Asked on synthetic data.

Nothing here looks at the training data: what the check decides would otherwise depend on it.
"""

from __future__ import annotations

import concurrent.futures
import warnings
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf

from dp_keras_opt.clipping import book_keeping, per_example, validation
from dp_keras_opt.clipping.book_keeping import CallFailed
from dp_keras_opt.clipping.clipped_sum import Batch, per_example_gradients

if TYPE_CHECKING:
    from dp_keras_opt.clipping.book_keeping import Plan

#: (rows, magnitude of floats, whether the changed row is an outlier) of the independence check.
_DRAWS = ((3, 1.0, False), (17, 1.0, False), (17, 1.0, True), (17, 1e3, False), (5, 1e3, True))

#: Rows of the synthetic batch; unlikely as a size of anything else in a model.
ROWS = 3


def checked_plan(model: keras.Model, batch: Batch) -> Plan:
    """The engines that serve this model, each shown to be right on a synthetic batch.

    Args:
        model: a built and compiled `DPModel`.
        batch: a `Batch` whose shapes and dtypes the synthetic one takes; its values are not read.

    Returns:
        The book-keeping `Plan`, or, where that fails, the plan that runs the whole model one
        example at a time; a warning then names the variables.

    Raises:
        ValueError: the model mixes examples, or no engine reproduces its gradients.
    """
    validation.validate(model)
    generator = np.random.default_rng(0)

    def forward(rows):
        y_pred = model(rows.x, training=True)
        if model._compile_metrics is not None and not model._compile_metrics.built:
            model._compile_metrics.build(rows.y, y_pred)  # a later build would be in the trace
        return model.per_example_losses(rows.y, y_pred, rows.sample_weight)

    for rows, magnitude, outlier in _DRAWS:
        for row in (0, rows - 1):
            drawn = _synthetic_batches(batch, generator, rows, row, magnitude, outlier)
            synthetic, changed = drawn
            validation.check_independence(model, forward, synthetic, changed, row)
    synthetic, _ = _synthetic_batches(batch, generator)
    plan = book_keeping.plan(model)
    while True:
        wrong, layers, reason = _failures(model, synthetic, plan)
        if not layers:
            return plan
        if plan.general == (model,):
            raise ValueError(
                f"The per-example gradients of {wrong} cannot be computed, not even by running the "
                f"model one example at a time: {reason}."
            )
        plan = plan.demote(layers, model)
        if any(isinstance(layer, keras.Model) for layer in plan.general):
            warnings.warn(
                f"The per-layer engines do not cover every use of {wrong} ({reason}); the whole "
                "model is run one example at a time instead. This is exact, but slower and takes "
                "more memory.",
                stacklevel=2,
            )


def _failures(model, batch, plan):
    """Where the engines fail: (paths of variables, the planned layers they belong to, how)."""
    # In a thread of its own: while a training step is traced, `tf.init_scope` pauses the gradient
    # tapes of this one, all gradients would be None, and any plan would look right.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        try:
            # Vectorizing a loop takes tens of seconds outside of a traced function.
            loops = any(per_example.has_loops(layer) for layer in plan.general)
            asked = plan._replace(sequential=loops)
            wrong = pool.submit(_compare, model, batch, asked).result()
        except CallFailed as failure:
            paths = [variable.path for variable in failure.layer.trainable_variables]
            return paths, [failure.layer], str(failure)
    planned = (*plan.ruled, *plan.general)
    layers = [p for p in planned if any(v.path in wrong for v in p.trainable_variables)]
    layers = layers or [model] * bool(wrong)
    return wrong, layers, "the sum of their gradients is not that of the batch"


def _compare(model, batch, plan):
    half = any(layer.compute_dtype in ("float16", "bfloat16") for layer in model._flatten_layers())
    # Large gradients too: a backward pass may bound those of the batch as a whole.
    scales, tolerance = ((1.0,), 0.1) if half else ((1.0, 1e4), 1e-3)
    wrong = [path for s in scales for path in _compare_at(model, batch, plan, s, tolerance)]
    return list(dict.fromkeys(wrong))


def _compare_at(model, batch, plan, scale, tolerance):
    """`_compare` with the loss scaled up, and the gradients scaled down again."""
    variables = model.trainable_variables
    with tf.GradientTape(persistent=True) as tape:
        losses, _, factors = per_example_gradients(model, batch, plan, scale)
        # With random layers only the same pass has the same masks.
        if not validation.has_random_layers(model):
            y_pred = model(batch.x, training=True)
            losses = model.per_example_losses(batch.y, y_pred, batch.sample_weight)
    wrong, any_gradient = [], False
    for row in np.eye(ROWS, dtype=np.float32):
        upstream = tf.cast(row * scale, losses.dtype)
        expected = tape.gradient(losses, [v.value for v in variables], output_gradients=upstream)
        for variable, factor, reference in zip(variables, factors, expected, strict=True):
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


def _synthetic_batches(batch, generator, rows=ROWS, row=0, magnitude=1.0, outlier=False):
    """Two batches that differ in one row, shaped like `batch`.

    Floats are of the given magnitude, of both signs above 1; with `outlier` those of the changed
    row are a million times larger.
    """

    def synthetic(tensor):
        if tensor is None:
            return None, None
        shape = (rows, *(size or 2 for size in tensor.shape[1:]))
        if tensor.dtype == tf.string:
            return tf.fill(shape, ""), tf.fill(shape, "")
        if tensor.dtype.is_integer or tensor.dtype.is_bool:
            values = generator.integers(0, 2, shape).astype(tensor.dtype.as_numpy_dtype)
            changed = values.copy()
            changed[row] = 1 - changed[row].astype(np.int64)
        else:
            low = 0.1 if magnitude <= 1 else -magnitude
            values = generator.uniform(low, magnitude, shape).astype(tensor.dtype.as_numpy_dtype)
            changed = values.copy()
            changed[row] = generator.uniform(low, magnitude, shape[1:])
            if outlier:
                changed[row] *= 1e6 if tensor.dtype.size > 2 else 1e3
        return tf.constant(values), tf.constant(changed)

    structure = (batch.x, batch.y, batch.sample_weight)
    pairs = [synthetic(tensor) for tensor in tf.nest.flatten(structure)]
    return tuple(Batch(*tf.nest.pack_sequence_as(structure, [p[i] for p in pairs])) for i in (0, 1))
