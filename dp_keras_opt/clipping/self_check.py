"""Before the first step: does the engine give each example's gradient? Asked on synthetic data.

Nothing here looks at the training data: what the check decides would otherwise depend on it.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
import warnings
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf

from dp_keras_opt.clipping import book_keeping, per_example, state_changes, validation
from dp_keras_opt.clipping.book_keeping import CallFailed
from dp_keras_opt.clipping.clipped_sum import Batch, per_example_gradients
from dp_keras_opt.clipping.lengths import check_lengths, losses_and_gradients, require_length
from dp_keras_opt.clipping.synthetic import Synthetic

if TYPE_CHECKING:
    from dp_keras_opt.clipping.book_keeping import Plan

#: (rows, magnitude of floats, whether the changed row is an outlier, style of floats) of the
#: independence check.
_DRAWS = (
    (3, 1.0, False, "real"),
    (17, 1.0, False, "whole"),
    (17, 1.0, True, "real"),
    (17, 1.0, False, "missing"),
    (17, 1e3, False, "real"),
    (5, 1e3, True, "real"),
)

#: Rows of the synthetic batch; unlikely as a size of anything else in a model.
ROWS = 3

#: Why a batch is of no use with which a model runs all the same.
NOT_FINITE = "its loss is not finite"

#: What a model raises for ids, words or sizes that it has no place for.
_DOES_NOT_RUN = (
    ArithmeticError,
    AssertionError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    tf.errors.OpError,
)


def checked_plan(model: keras.Model, batch: Batch) -> Plan:
    """The engines that serve this model, each shown to be right on a synthetic batch.

    Args:
        model: a built and compiled `DPModel`.
        batch: a `Batch` whose shapes and dtypes the synthetic one takes; its values are not read.

    Returns:
        The book-keeping `Plan`, or, where that fails, the plan that runs the whole model one
        example at a time; a warning then names the variables.

    Raises:
        ValueError: the model mixes examples, keeps what it saw of them, or changes what a row gives
            with the length of its batch; or no engine reproduces its gradients.
    """
    validation.validate(model)

    def forward(rows, training=True):
        y_pred = model(rows.x, training=training)
        return model.per_example_losses(rows.y, y_pred, rows.sample_weight)

    _build(model, forward, batch)
    eager = model.run_eagerly or tf.config.functions_run_eagerly()
    assignments = _with_tapes(state_changes.check_assignments, model, forward, batch, eager)
    weights = [*model.trainable_variables, *assignments.other]
    before = state_changes.Snapshot(model, assignments, weights)
    try:
        plan = _checked(model, batch, forward, before, weights, assignments)
    finally:
        before.shift = 0
        before.put_back()
    return plan._replace(hidden=tuple(assignments.hidden), moving=tuple(assignments.moving))


def _build(model, forward, batch):
    """Makes what the first call makes: a later one would be in the trace of a step."""
    metrics = model._compile_metrics
    built = all(layer.built for layer in model._flatten_layers())
    if built and (metrics is None or metrics.built):
        return
    synthetic, _ = Synthetic(batch).pair(np.random.default_rng(0), ROWS)
    before = state_changes.Snapshot(model)
    forward(synthetic)  # building calls layers more often, and makes variables and layers
    if metrics is not None and not metrics.built:
        metrics.build(synthetic.y, model(synthetic.x, training=True))
    before.put_back()
    validation.validate(model)


def _checked(model, batch, forward, before, weights, assignments):
    """`checked_plan`, once the model is built and its state is known to be none of the data's."""

    def why_not(rows, before=before):
        before.put_back()
        try:
            if synthetic.open_leaves:  # of some lengths, kernels have no gradient
                losses, *_ = _with_tapes(losses_and_gradients, model, forward, rows)
            else:
                losses = np.asarray(forward(rows))
        except _DOES_NOT_RUN as error:
            return f"{type(error).__name__}: {error}"
        return None if np.isfinite(losses).all() else NOT_FINITE

    synthetic = Synthetic(batch)
    synthetic.widen(model, why_not)
    require_length(synthetic)
    random = np.random.default_rng(0)
    wide = _usable(synthetic, random, why_not, True)
    narrow = _usable(synthetic, random, why_not, False)
    if why_not(narrow) is not None:  # words that the model does not know may be masked, all of them
        narrow = wide
    is_random = validation.is_random(model, forward, wide, before)

    away = _elsewhere(model, assignments, weights, before, lambda at: why_not(wide, at))

    def losses_of(rows, at):
        at.put_back()
        return forward(rows, training=not is_random)

    signed, _ = synthetic.pair(random, ROWS, magnitude=2.0)
    for rows, at in ((wide, before), (signed, before), (wide, away), (signed, away)):
        if why_not(rows, at) is None or rows is wide:
            losses = functools.partial(losses_of, at=at)
            _with_tapes(check_lengths, model, losses, why_not, synthetic, rows)
    for number, (rows, magnitude, outlier, style) in enumerate(_DRAWS):
        for row, at in ((0, before), (rows - 1, away)):
            drawn = synthetic.pair(random, rows, row, magnitude, outlier, style=style)
            at.shift = 2 * number + (row > 0)  # other random numbers each time, the same for both
            reason = why_not(drawn[1], at)
            if reason is not None and (style == "missing" or reason != NOT_FINITE):
                continue  # the model has no place for such floats
            validation.check_independence(model, forward, *drawn, row, at)
    before.shift = 0
    compare = functools.partial(_compare, model, (narrow, wide), is_random, before)
    plan = book_keeping.plan(model)
    while True:
        wrong, layers, reason = _failures(model, compare, plan)
        if not layers:
            return plan
        if plan.general == (model,):
            raise ValueError(
                f"The per-example gradients of {wrong} cannot be computed, not even by running the "
                f"model one example at a time: {reason}."
            )
        plan = plan.demote(layers, model, reason)
        if any(isinstance(layer, keras.Model) for layer in plan.general):
            warnings.warn(
                f"The per-layer engines do not cover every use of {wrong} ({reason}); the whole "
                "model is run one example at a time instead. This is exact, but slower and takes "
                "more memory.",
                stacklevel=2,
            )


def _elsewhere(model, assignments, weights, before, why_not):
    """The model's state at other weights: what is 0 at the first step is not so later.

    Weights are moved by random numbers of their own size, or of that of an initial value; other
    numbers that a loss holds, such as the weight of a penalty, upwards.
    """
    random, trained = np.random.default_rng(1), {id(v) for v in model.trainable_variables}
    for size in (1.0, 0.1):
        before.put_back()
        for variable in weights:
            value = np.asarray(tf.convert_to_tensor(variable), np.float64)
            usual = max(1, math.prod(value.shape[:-1])) ** -0.5 if value.ndim > 1 else 0.5
            moved = random.normal(size=value.shape) * max(usual, np.sqrt(np.mean(value**2)))
            moved = moved if id(variable) in trained else abs(moved)
            variable.assign(tf.cast(value + size * moved, variable.dtype))
        away = state_changes.Snapshot(model, assignments, weights)
        if why_not(away) is None:
            return away
    return before


def _usable(synthetic, random, why_not, wide):
    """A batch with finite losses, if that can be had: where masks are, not all may be masked."""
    for _ in range(20):
        batch, _ = synthetic.pair(random, ROWS, wide=wide)
        if why_not(batch) is None:
            break
    return batch


def _with_tapes(function, *args):
    """Calls a function in a thread of its own.

    While a training step is traced, `tf.init_scope` pauses the gradient tapes of this thread, all
    gradients would be None, and any plan would look right.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def _failures(model, compare, plan):
    """Where the engines fail: (paths of variables, the planned layers they belong to, how)."""
    try:
        # Vectorizing a loop takes tens of seconds outside of a traced function.
        loops = any(per_example.has_loops(layer) for layer in plan.general)
        wrong = _with_tapes(compare, plan._replace(sequential=loops))
    except CallFailed as failure:
        paths = [variable.path for variable in failure.layer.trainable_variables]
        return paths, [failure.layer], str(failure)
    planned = (*plan.ruled, *plan.general)
    layers = [p for p in planned if any(v.path in wrong for v in p.trainable_variables)]
    layers = layers or [model] * bool(wrong)
    return wrong, layers, "the sum of their gradients is not that of the batch"


def _compare(model, batches, is_random, before, plan):
    narrow, wide = batches
    half = any(layer.compute_dtype in ("float16", "bfloat16") for layer in model._flatten_layers())
    # Large gradients too: a backward pass may bound those of the batch as a whole.
    cases, tolerance = [(1.0, narrow), (1.0, wide)], 0.1
    if not half:
        cases, tolerance = [(1.0, narrow), (1e4, wide)], 1e-3
    wrong = [
        path
        for scale, batch in cases
        for path in _compare_at(model, batch, plan, scale, tolerance, is_random, before)
    ]
    return list(dict.fromkeys(wrong))


def _compare_at(model, batch, plan, scale, tolerance, is_random, before):
    """`_compare` with the loss scaled up, and the gradients scaled down again."""
    variables = model.trainable_variables
    before.put_back()
    with tf.GradientTape(persistent=True) as tape:
        losses, _, factors = per_example_gradients(model, batch, plan, scale)
        if not is_random:  # otherwise only the same pass has the same masks
            before.put_back()
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
