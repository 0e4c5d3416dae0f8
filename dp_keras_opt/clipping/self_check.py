"""Before the first step: does the engine give each example's gradient? Asked on synthetic data.

Nothing here looks at the training data: what the check decides would otherwise depend on it.
"""

import concurrent.futures
import warnings

import numpy as np
import tensorflow as tf

from dp_keras_opt.clipping import book_keeping, validation
from dp_keras_opt.clipping.book_keeping import Plan
from dp_keras_opt.clipping.clipped_sum import Batch, per_example_gradients

#: Rows of the synthetic batch; unlikely as a size of anything else in a model.
ROWS = 3


def checked_plan(model, batch):
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
    synthetic, changed = _synthetic_batches(batch, generator)

    def forward(rows):
        y_pred = model(rows.x, training=True)
        return model.per_example_losses(rows.y, y_pred, rows.sample_weight)

    validation.check_independence(model, forward, synthetic, changed)
    plan = book_keeping.plan(model)
    wrong = _wrong_variables(model, synthetic, plan)
    if not wrong:
        return plan
    warnings.warn(
        f"The per-layer engines do not cover every use of {wrong}; the whole model is run one "
        "example at a time instead. This is exact, but slower and takes more memory.",
        stacklevel=2,
    )
    plan = Plan((), (model,))
    wrong = _wrong_variables(model, synthetic, plan)
    if wrong:
        raise ValueError(
            f"The per-example gradients of {wrong} cannot be computed: run one example at a time, "
            "the model gives other gradients than on a batch."
        )
    return plan


def _wrong_variables(model, batch, plan):
    """Paths of the variables whose per-example gradients differ from those of `tape.gradient`."""
    # In a thread of its own: while a training step is traced, `tf.init_scope` pauses the gradient
    # tapes of this one, all gradients would be None, and any plan would look right.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(_compare, model, batch, plan).result()


def _compare(model, batch, plan):
    variables = model.trainable_variables
    half = any(layer.compute_dtype in ("float16", "bfloat16") for layer in model._flatten_layers())
    tolerance = 0.1 if half else 1e-3
    try:
        with tf.GradientTape(persistent=True) as tape:
            losses, _, factors = per_example_gradients(model, batch, plan)
            if not _has_random_layers(model):  # else only the same pass has the same masks
                y_pred = model(batch.x, training=True)
                losses = model.per_example_losses(batch.y, y_pred, batch.sample_weight)
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        if plan.general == (model,):
            raise ValueError(f"The model cannot be run one example at a time: {error}") from error
        return [str(error)]
    wrong, any_gradient = [], False
    for row in np.eye(ROWS, dtype=np.float32):
        expected = tape.gradient(losses, [v.value for v in variables], output_gradients=row)
        for variable, factor, reference in zip(variables, factors, expected, strict=True):
            any_gradient |= reference is not None
            zeros = np.zeros(variable.shape, np.float32)
            reference = zeros if reference is None else tf.convert_to_tensor(reference).numpy()
            result = zeros if factor is None else factor.weighted_sum(row).numpy()
            error = np.abs(result - reference).max(initial=0.0)
            if not error <= tolerance * np.abs(reference).max(initial=0.0) + 1e-6:
                wrong.append(variable.path)
    if variables and not any_gradient:
        raise ValueError("The loss depends on no trainable variable: there is nothing to train.")
    return list(dict.fromkeys(wrong))


def _has_random_layers(model):
    return any(getattr(layer, "_seed_generators", ()) for layer in model._flatten_layers())


def _synthetic_batches(batch, generator):
    """Two batches of `ROWS` rows that differ in the first, shaped like `batch`."""

    def synthetic(tensor):
        if tensor is None:
            return None, None
        shape = (ROWS, *(size or 2 for size in tensor.shape[1:]))
        if tensor.dtype == tf.string:
            return tf.fill(shape, ""), tf.fill(shape, "")
        if tensor.dtype.is_integer or tensor.dtype.is_bool:
            values = generator.integers(0, 2, shape).astype(tensor.dtype.as_numpy_dtype)
            changed = values.copy()
            changed[0] = 1 - changed[0].astype(np.int64)
        else:
            values = generator.uniform(0.1, 1.0, shape).astype(tensor.dtype.as_numpy_dtype)
            changed = values.copy()
            changed[0] = generator.uniform(0.1, 1.0, shape[1:])
        return tf.constant(values), tf.constant(changed)

    structure = (batch.x, batch.y, batch.sample_weight)
    pairs = [synthetic(tensor) for tensor in tf.nest.flatten(structure)]
    return tuple(Batch(*tf.nest.pack_sequence_as(structure, [p[i] for p in pairs])) for i in (0, 1))
