"""The private training step, from a batch to new weights; the same on one device and on many.

prepare → queries → clipped sums → (sums of all replicas) → release → update
"""

import dataclasses
import math
from typing import Any

import tensorflow as tf
from keras import tree

from dp_keras_opt import clipping, noise, workers
from dp_keras_opt.clipping import per_example, table_rows
from dp_keras_opt.data import LOST_ROWS
from dp_keras_opt.training import losses
from dp_keras_opt.training.batches import as_batch, blocks_of, chunks_of, of_any_length
from dp_keras_opt.training.engines import CheckedEngines
from dp_keras_opt.training.secret_seeds import SeedsOfChunks

#: Factor on a float16 loss: a power of two, undone before the norm is taken.
FLOAT16_LOSS_SCALE = 2.0**7


@dataclasses.dataclass
class StepState:
    """What is known before a step and holds for all of them, and what they count.

    Attributes:
        physical_batch_size: how many rows are processed at once, as `compile` was told; or None.
        block: the same, as the data say; or None.
        given: the (x, y, sample_weight) that `train_on_batch` was given, while it runs; or None.
        engines: which engine serves which layer.
        is_coarse: whether the step allows for products in TF32; None before it is made.
        has_begun: whether the optimizer was told that the step which was made begins.
        shows_progress: whether `fit` shows progress.
        observers: functions of (queries, released), called in every step.
        non_finite: a count of examples whose gradient was not finite; None before the first step.
        released: a count of the steps that released something; None before the first.
    """

    physical_batch_size: int | None = None
    block: int | None = None
    given: tuple[Any, ...] | None = None
    is_coarse: bool | None = None
    has_begun: bool = False
    shows_progress: bool = False
    engines: CheckedEngines = dataclasses.field(default_factory=CheckedEngines)
    observers: tuple[Any, ...] = ()
    non_finite: Any = None
    released: Any = None

    def steps_run(self) -> int:
        """How many steps have run, whatever the optimizer counts."""
        return 0 if self.released is None else int(self.released.numpy())


def train_step(model, state, sums_of_all):
    """One logical batch: clip each example, sum, add noise, update.

    Args:
        model: the `DPModel`.
        state: its `StepState`.
        sums_of_all: function of the queries that gives the clipped sums over the logical batch,
            from all replicas, and the logs.

    Returns:
        The logs.
    """
    optimizer = model.optimizer
    optimizer.prepare(model.trainable_variables)
    queries = optimizer.queries()
    sums, logs = sums_of_all(queries)
    optimizer.noise_source.settle(model.distribute_strategy, model.jit_compile)
    released = noise.release(
        optimizer.releases,
        queries,
        sums,
        batch_size=optimizer.expected_batch_size,
        alpha=optimizer.noise_schedule.alpha(optimizer.iterations),
        source=optimizer.noise_source,
    )
    # The counters then prove that a batch was used: a graph would advance them without one. One
    # node stands for all sums, or each operation of the update would have an edge to each of them.
    with tf.control_dependencies([tf.group(*tf.nest.flatten(sums, expand_composites=True))]):
        counted = state.released.assign_add(1)
    with tf.control_dependencies([counted]):  # what fails here has seen what was released
        for observe in model.release_observers:
            observe(queries, released)
        optimizer.update(released)
        optimizer.adapt_clip_norm(released)
    return logs


_OWN_BATCHES = (
    " If these are batches of your own, and not those of the last fit, say first how they are "
    "sampled: model.sampling = dp_keras_opt.accounting.Sampling..."
)


def admitted(model, state, guard, data):
    """(the parts of a batch, each a `Batch`; the engines for them), once it may be used.

    Raises:
        RuntimeError: the ledger does not know of the step.
        ValueError: the batch is not as the sampling says, or as the optimizer needs it.
    """
    if not guard.is_stepping:
        raise RuntimeError(
            "train_step was called past the privacy ledger: its steps would be counted "
            "nowhere. In a training loop of your own, call train_on_batch."
        )
    parts = [as_batch(block) for block in blocks_of(data)]
    for batch in parts:
        if guard.sampling.is_padded and batch.mask is None:
            own = "" if guard.is_fitting else _OWN_BATCHES
            raise ValueError(LOST_ROWS + own)
        _check_unit(batch, guard.sampling)
        if model.optimizer.needs_public and batch.public is None:
            raise ValueError(
                f"{type(model.optimizer).__name__} needs public rows in every batch, as it is "
                "configured here. Add them: dp_keras_opt.data.with_public(batches, public)."
            )
    engines = engines_for(model, state, of_any_length(parts), fitting=guard.is_fitting)
    model.optimizer.ensure_built(model.trainable_variables)
    return parts, engines


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


def check_size(sampling, x, sample_weight):
    """Refuses more rows than a batch of this sampling has; with a mask, some are none.

    Raises:
        ValueError: there are more.
    """
    if sampling is None or getattr(sample_weight, "mask", None) is not None:
        return
    shape = tuple(getattr(tree.flatten(x)[0], "shape", ()))
    rows = shape[0] if shape else 0
    if rows > sampling.largest_batch * (sampling.rows_per_unit or 1):
        raise ValueError(
            f"A batch has {rows} rows, but model.sampling states at most "
            f"{sampling.largest_batch:g} {sampling.unit}s in each: {sampling}. More of them would "
            "be drawn than is accounted. State the sampling that takes place."
        )


def check_before_tracing(model, state, specs, *, fitting):
    """Checks the engines and builds the optimizer before the step is traced.

    Variables that are made while it is traced have it traced a second time.
    """
    state.engines.begin_execution()
    known = bool(state.engines) and model.optimizer.built
    if not known and (specs is not None or state.given is not None):
        data, spec = (specs, lambda spec: spec) if specs is not None else (state.given, _spec)
        parts = [as_batch(block, convert=spec) for block in blocks_of(data)]
        engines_for(model, state, of_any_length(parts), fitting=fitting)
    if state.has_begun or not model.built:  # whose variables are made while it is traced
        return
    with model.distribute_strategy.scope():
        model.optimizer.ensure_built(model.trainable_variables)
        model.optimizer.begin(model)
        if not known:
            clipping.clip_groups(model, model.optimizer.query())  # has bounds for all layers
    state.has_begun = True


def _spec(value):
    return tf.TensorSpec.from_tensor(tf.convert_to_tensor(value))


def engines_for(model, state, batch, *, fitting=False):
    """The engines that serve batches of this form."""
    announce = fitting and state.shows_progress
    engines = state.engines.of(
        model, batch, state.physical_batch_size, fitting=fitting, announce=announce
    )
    if state.non_finite is None:
        strategy = model.distribute_strategy
        state.non_finite = workers.without_strategy(workers.count_variable, strategy)
        # A plain variable: outside of any replica, once for all of them.
        state.released = workers.without_strategy(lambda: tf.Variable(0, dtype=tf.int64))
    return engines


def sums_in_chunks(model, state, parts, queries, engines):
    """The clipped sums over a logical batch, chunk by chunk where memory asks for it.

    Args:
        parts: `Batch`es, of one length each. The first has rows, the others may have none.
    """
    limits = _limits(state, parts, engines)
    seeds = SeedsOfChunks(model)
    (first, limit), *others = zip(parts, limits, strict=True)
    if not others and (limit is None or (first.num_rows is not None and first.num_rows <= limit)):
        seeds.begin(0)
        sums = _sums_of_chunk(model, state, first, queries, engines)
        seeds.end()
        return sums
    # A batch of several lengths is compiled chunk by chunk: the numbers of its rows vary.
    compiled = bool(others and model.jit_compile and not model.run_eagerly)

    def sums_of(*chunk):
        return _sums_of_chunk(model, state, clipping.Batch(*chunk), queries, engines)

    # From zeros: a first chunk in front of the loop would stand in the graph a second time. Added
    # up in float64: what a chunk adds is not to be rounded in units of all others.
    sums = _in(tf.float64, [_zeros(query, model.trainable_variables) for query in queries])
    once = [tf.convert_to_tensor(variable) for variable in engines.moving]
    before = 0  # so many chunks
    for batch, most in ((first, limit), *others):
        is_static = compiled or batch.num_rows is not None or (not others and most == state.block)
        if most == 1 or (is_static and most):
            size = most
        else:  # of one row that is found at run time, TensorFlow's vectorised loops make a mistake
            size = tf.maximum(_even_size(batch, most), 2 if engines.general else 1)
        chunk, count = chunks_of(batch, size)
        traced = sums_of
        if not model.run_eagerly:  # once for each length
            traced = tf.function(sums_of, autograph=False, jit_compile=compiled or None)
            traced = traced.get_concrete_function(*chunk(0))

        def add(
            index, sums, once, traced=traced, chunk=chunk, is_first=batch is first, before=before
        ):
            seeds.begin(before + index)
            more = _in(tf.float64, traced(*chunk(index)))
            sums = tf.nest.map_structure(table_rows.added, sums, more)
            if is_first:
                moved = [tf.convert_to_tensor(variable) for variable in engines.moving]
                once = [tf.where(index == 0, *pair) for pair in zip(moved, once, strict=True)]
            return index + 1, sums, once

        def is_left(index, *_, count=count):
            return index < count

        start = 0, sums, once
        shapes = tf.nest.map_structure(_any_rows, start)
        _, sums, once = tf.while_loop(is_left, add, start, shape_invariants=shapes)
        before += count
    for variable, value in zip(engines.moving, once, strict=True):
        variable.assign(value)  # it is saved, and would tell how many rows the batches had
    seeds.end()
    return _in(tf.float32, sums)


def _in(dtype, sums):
    """Tensors, and rows of tables, in this type."""

    def cast(value):
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(tf.cast(value.values, dtype), value.indices, value.dense_shape)
        return tf.cast(value, dtype)

    return tf.nest.map_structure(cast, sums)


def _limits(state, parts, engines):
    """The most rows of each part to be processed at once, whole users; None for all of them.

    What is said of batches is said of the last part: of the others as many rows take its memory.
    """
    at_once, most = state.physical_batch_size or state.block, per_example.max_rows(engines.general)
    largest, found = _row_size(parts[-1]), []
    for batch in parts:
        rows = at_once and max(1, at_once * largest // _row_size(batch))
        limit = min((each for each in (rows, most) if each is not None), default=None)
        if limit is not None and batch.rows_per_user is not None:  # no user is cut in two
            limit = max(1, limit // batch.rows_per_user) * batch.rows_per_user
        found.append(limit)
    return found


def _zeros(query, variables):
    """The sum of a query over nobody."""
    if query.directions is not None:  # a sum for each of them
        return [tf.zeros_like(directions) for directions in query.directions]
    counts = [tf.zeros(query.clip_norm.shape)] if query.counts else []
    tables = query.tables.trained if query.tables else {}
    if tables and query.tables.contribution_norm is not None:
        counts.append(tf.zeros([sum(variables[index].shape[0] for index in tables)]))
    return [
        *(
            table_rows.none_of(variable) if index in tables else tf.zeros(variable.shape)
            for index, variable in enumerate(variables)
        ),
        *counts,
    ]


def _any_rows(value):
    """The shape of a part of the loop's state, in which the rows of a table may become more."""
    if isinstance(value, tf.IndexedSlices):
        return tf.TensorShape([None, *value.values.shape[1:]])
    return tf.convert_to_tensor(value).shape


def _row_size(batch):
    """How many numbers a row has, as far as they are known."""
    leaves = (leaf for leaf in tree.flatten((batch.x, batch.y)) if leaf is not None)
    sizes = ([size or 1 for size in leaf.shape[1:]] for leaf in leaves)
    return sum(map(math.prod, sizes))


def _even_size(batch, limit):
    """The least number of rows in as few chunks of at most `limit` as hold a batch, a scalar."""
    rows, unit = tf.shape(tree.flatten(batch.x)[0])[0], batch.rows_per_user or 1
    chunks = 1 if limit is None else tf.maximum(1, _ratio_up(rows, limit))
    return tf.maximum(1, _ratio_up(_ratio_up(rows, unit), chunks)) * unit


def _ratio_up(number, divisor):
    return (number + divisor - 1) // divisor


def _sums_of_chunk(model, state, batch, queries, engines):
    scale = FLOAT16_LOSS_SCALE if model.compute_dtype == "float16" else 1.0
    result = clipping.clipped_sums(model, batch, queries, engines, scale)
    state.non_finite.assign_add(result.non_finite)
    losses.update_figures(model, batch, result.losses, result.y_pred)
    return result.sums
