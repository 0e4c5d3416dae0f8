"""The private training step, from a batch to new weights; the same on one device and on many.

prepare → queries → clipped sums → (sums of all replicas) → release → update
"""

import dataclasses
from typing import Any

import tensorflow as tf
from keras import tree

from dp_keras_opt import clipping, noise, workers
from dp_keras_opt.clipping import per_example
from dp_keras_opt.data import LOST_ROWS
from dp_keras_opt.training import losses
from dp_keras_opt.training.batches import as_batch, chunks_of
from dp_keras_opt.training.engines import CheckedEngines

#: Factor on a float16 loss: a power of two, undone before the norm is taken.
FLOAT16_LOSS_SCALE = 2.0**7


@dataclasses.dataclass
class StepState:
    """What is known before a step and holds for all of them, and what they count.

    Attributes:
        physical_batch_size: how many rows are processed at once, as `compile` was told; or None.
        block: the same, as the data say; or None.
        engines: which engine serves which layer.
        shows_progress: whether `fit` shows progress.
        observers: functions of (queries, released), called in every step.
        non_finite: a count of examples whose gradient was not finite; None before the first step.
    """

    physical_batch_size: int | None = None
    block: int | None = None
    shows_progress: bool = False
    engines: CheckedEngines = dataclasses.field(default_factory=CheckedEngines)
    observers: tuple[Any, ...] = ()
    non_finite: Any = None


def train_step(model, sums_of_all):
    """One logical batch: clip each example, sum, add noise, update.

    Args:
        model: the `DPModel`.
        sums_of_all: function of the queries that gives the clipped sums over the logical batch,
            from all replicas, and the logs.

    Returns:
        The logs.
    """
    optimizer = model.optimizer
    optimizer.prepare(model.trainable_variables)
    queries = optimizer.queries()
    sums, logs = sums_of_all(queries)
    released = noise.release(
        optimizer.releases,
        queries,
        sums,
        batch_size=optimizer.expected_batch_size,
        alpha=optimizer.noise_schedule.alpha(optimizer.iterations),
        source=optimizer.noise_source,
    )
    for observe in model.release_observers:
        observe(queries, released)
    # The step counter then proves that a batch was used: a graph would advance it without one.
    with tf.control_dependencies(tf.nest.flatten(sums)):
        optimizer.update(released)
    return logs


_OWN_BATCHES = (
    " If these are batches of your own, and not those of the last fit, say first how they are "
    "sampled: model.sampling = dp_keras_opt.accounting.Sampling..."
)


def admitted(model, state, guard, data):
    """(the `Batch`, the engines for it), once it may be used.

    Raises:
        RuntimeError: the ledger does not know of the step.
        ValueError: the batch is not as the sampling says, or as the optimizer needs it.
    """
    if not guard.is_stepping:
        raise RuntimeError(
            "train_step was called past the privacy ledger: its steps would be counted "
            "nowhere. In a training loop of your own, call train_on_batch."
        )
    batch = as_batch(data)
    if guard.sampling.is_padded and batch.mask is None:
        own = "" if guard.is_fitting else _OWN_BATCHES
        raise ValueError(LOST_ROWS + own)
    _check_unit(batch, guard.sampling)
    engines = engines_for(model, state, batch, fitting=guard.is_fitting)
    if model.optimizer.needs_public and batch.public is None:
        raise ValueError(
            f"{type(model.optimizer).__name__} needs public rows in every batch, as it is "
            "configured here. Add them: dp_keras_opt.data.with_public(batches, public)."
        )
    model.optimizer.ensure_built(model.trainable_variables)
    return batch, engines


def _check_unit(batch, sampling):
    """Refuses batches that are not clipped as the sampling says: by row, or by user."""
    mask = batch.mask
    if mask is not None and (mask.shape.rank not in (1, 2) or None in mask.shape[1:]):
        raise ValueError(
            f"The mask of a batch has the shape {mask.shape}; it must be [rows], or [users, K] "
            "with K known when the step is traced. Restore the shape with tf.ensure_shape."
        )
    stated, found = sampling.rows_per_unit, batch.rows_per_user
    if stated != found:
        raise ValueError(
            f"The sampling says that {_clipped_as(stated, sampling.unit)}, but in the batches "
            f"{_clipped_as(found, 'user')}, as the mask in their third element says: the "
            "statement would be false. Take the batches of dp_keras_opt.data.poisson_users as "
            "they are, with RowInfo as third element, or state the sampling that takes place."
        )


def _clipped_as(size, unit):
    return (
        "each row is clipped alone"
        if size is None
        else f"{size} rows of a {unit} are clipped as one"
    )


def check_before_tracing(model, state, specs, *, fitting):
    """Checks the engines and builds the optimizer before the step is traced.

    Variables that are made while it is traced have it traced a second time.
    """
    if state.engines or specs is None:
        return
    batch = as_batch(specs, convert=lambda spec: spec)
    engines_for(model, state, batch, fitting=fitting)
    with model.distribute_strategy.scope():
        model.optimizer.ensure_built(model.trainable_variables)


def engines_for(model, state, batch, *, fitting=False):
    """The engines that serve batches of this form."""
    announce = fitting and state.shows_progress
    engines = state.engines.of(
        model, batch, state.physical_batch_size, fitting=fitting, announce=announce
    )
    if state.non_finite is None:
        strategy = model.distribute_strategy
        state.non_finite = workers.without_strategy(workers.count_variable, strategy)
    return engines


def sums_in_chunks(model, state, batch, queries, engines):
    """The clipped sums over a logical batch, chunk by chunk where memory asks for it."""
    limits = (state.physical_batch_size or state.block, per_example.max_rows(engines.general))
    size = min((limit for limit in limits if limit is not None), default=None)
    if size is not None and batch.rows_per_user is not None:  # no user is cut in two
        size = max(1, size // batch.rows_per_user) * batch.rows_per_user
    if size is None or (batch.num_rows is not None and batch.num_rows <= size):
        return _sums_of_chunk(model, state, batch, queries, engines)
    if batch.num_rows is None and size != state.block:  # a batch is never padded beyond itself
        size = tf.clip_by_value(tf.shape(tree.flatten(batch.x)[0])[0], 1, size)
    chunks, count = chunks_of(batch, size)

    def sums_of(*chunk):
        return _sums_of_chunk(model, state, type(batch)(*chunk), queries, engines)

    if not model.run_eagerly:  # called at two places, traced once
        sums_of = tf.function(sums_of, autograph=False).get_concrete_function(*chunks(0))

    def add_next(index, sums):
        return index + 1, tf.nest.map_structure(tf.add, sums, sums_of(*chunks(index)))

    first = sums_of(*chunks(0))
    once = [tf.convert_to_tensor(variable) for variable in engines.moving]
    sums = tf.while_loop(lambda index, _: index < count, add_next, (1, first))[1]
    for variable, value in zip(engines.moving, once, strict=True):
        variable.assign(value)  # it is saved, and would tell how many rows the batches had
    return sums


def _sums_of_chunk(model, state, batch, queries, engines):
    scale = FLOAT16_LOSS_SCALE if model.compute_dtype == "float16" else 1.0
    loss = model.per_example_losses
    result = clipping.clipped_sums(model, batch, queries, engines, scale, per_example_loss=loss)
    state.non_finite.assign_add(result.non_finite)
    losses.update_figures(model, batch, result.losses, result.y_pred)
    return result.sums
