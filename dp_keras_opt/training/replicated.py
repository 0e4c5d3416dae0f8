"""Training on several devices or machines: what Keras's own loop cannot do with a private step.

Each replica computes the clipped sums of its rows. Then, outside of any replica, the sums are added
up, noise is added once and the optimizer moves the variables, which TensorFlow keeps equal on all
replicas. Of several workers (processes) each does the second part for itself, on the same sum and
with the same noise, so that all get the same weights.

Keras's loop calls the optimizer inside of each replica; under `MultiWorkerMirroredStrategy` it
reduces scalar logs along an axis that they do not have; and it builds a model from a batch that it
reduces first, whatever the types in it. `train_function`, `test_function` and `element_spec` stand
in their place.
"""

import contextlib
import functools

import keras
import tensorflow as tf

from dp_keras_opt import _keras, workers
from dp_keras_opt.clipping import table_rows
from dp_keras_opt.data import Blocks
from dp_keras_opt.training import step


def check_compiled(model, optimizer):
    """Refuses what replicas could not be trained with.

    Raises:
        ValueError: the optimizer's variables would not be on all replicas, or XLA is asked to
            compile for several logical CPUs, of which it has one.
    """
    strategy = model.distribute_strategy
    if not workers.is_used(strategy):
        return
    made = _keras.strategy_of_model(model), _keras.strategy_of_optimizer(optimizer)
    if any(each is not strategy for each in made):
        raise ValueError(
            "The model and its optimizer were not both made under the strategy that is in use. "
            "Make both within `with strategy.scope():`."
        )
    several = workers.local(strategy) > 1
    if model.jit_compile and several and "CPU" in strategy.extended.worker_devices[0]:
        raise ValueError(
            "XLA does not compile for several CPU devices of one process. Leave jit_compile out."
        )


def distributed(strategy, dataset):
    """Elements for each replica of this worker in turn, over and over, as what `fit` takes.

    TensorFlow is not left to split the data: by rules of its own it may leave out examples or give
    one to two workers.
    """
    return strategy.distribute_datasets_from_function(
        lambda _: dataset.repeat().prefetch(2 * workers.local(strategy))
    )


def element_spec(iterable):
    """The `TensorSpec`s of what one replica gets, None for what is not there."""
    spec = getattr(iterable, "element_spec", None)

    def first(part):
        part = getattr(part, "_value_specs", (part,))[0]
        return part if hasattr(part, "dtype") else None

    return keras.tree.map_structure(first, spec)


def train_function(model, state, local_sums):
    """In place of Keras's: clipped sums on each replica, then one update for all of them.

    Also of one device, for batches of several lengths: these are compiled chunk by chunk.

    Args:
        model: the `DPModel`.
        state: its `StepState`.
        local_sums: function of a batch that gives its clipped sums and the logs, on a replica.
    """
    strategy = model.distribute_strategy
    form = []

    def on_replica(data):
        sums, logs = local_sums(data)
        form[:] = [[[None if _is_by_row(part) else part.shape for part in one] for one in sums]]
        parts = [part for one in sums for part in one]
        flat = [tf.reshape(part, [-1]) for part in parts if not _is_by_row(part)]
        rows = [_behind_one(part) for part in parts if _is_by_row(part)]
        return tf.concat([tf.zeros([1]), *flat], 0), rows, logs  # also where there is nothing else

    compiled = on_replica
    if model.jit_compile and not model.run_eagerly:
        compiled = tf.function(on_replica, jit_compile=True, reduce_retracing=True)

    def one_step(iterator):
        data = next(iterator)
        run = on_replica if isinstance(data, Blocks) else compiled

        def sums_of_all(_):  # each replica has asked for itself, from its own copies of variables
            if not workers.is_used(strategy):
                return local_sums(data)
            flat, rows, logs = strategy.run(run, args=(data,))
            total = strategy.reduce(tf.distribute.ReduceOp.SUM, flat, axis=None)
            rows = [_of_all(strategy, *of_one) for of_one in rows]
            return _unpacked(total, rows, form[0]), _local_mean(strategy, logs)

        with strategy.scope():
            return step.train_step(model, state, sums_of_all)

    if not model.run_eagerly:
        one_step = tf.function(one_step, reduce_retracing=True, autograph=False)

    def function(iterator):
        for _ in range(model.steps_per_execution):
            logs = one_step(iterator)
        return logs

    return function


def test_function(model):
    """In place of Keras's evaluation step."""
    strategy = model.distribute_strategy

    def one_step(iterator):
        return _local_mean(strategy, strategy.run(model.test_step, args=(next(iterator),)))

    if not model.run_eagerly:
        one_step = tf.function(one_step, reduce_retracing=True, autograph=False)

    def function(iterator):
        logs = one_step(iterator)
        with contextlib.suppress(tf.errors.OutOfRangeError, StopIteration):
            for _ in range(1, model.steps_per_execution):
                logs = one_step(iterator)
        return logs

    return function


def _is_by_row(part):
    """Whether it is the sum of a table of which few rows are moved: of another size on each."""
    return isinstance(part, tf.IndexedSlices)


def _behind_one(rows):
    """Ids and values with one row of zeros in front, and the shape of the table.

    TensorFlow crashes where it gathers from replicas of which none has a row.
    """
    ids, values = tf.pad(rows.indices, [[1, 0]]), tf.pad(rows.values, [[1, 0], [0, 0]])
    return ids, values, rows.dense_shape


def _of_all(strategy, ids, values, shape):
    """The rows of a table that any replica has, added up replica by replica: of a sum of more than
    two numbers in any order, workers would get different last bits.

    Args:
        strategy: the strategy.
        ids, values, shape: those of `_behind_one`, on each replica.
    """
    row, shape = (strategy.experimental_local_results(part)[0] for part in (values, shape))
    sizes = strategy.gather(strategy.run(lambda part: tf.shape(part)[:1], args=(ids,)), axis=0)
    values = tf.ensure_shape(strategy.gather(values, axis=0), [None, *row.shape[1:]])
    ids, values = (
        tf.split(part, sizes, num=strategy.num_replicas_in_sync)
        for part in (strategy.gather(ids, axis=0), values)
    )
    parts = (tf.IndexedSlices(v[1:], i[1:], shape) for i, v in zip(ids, values, strict=True))
    return functools.reduce(table_rows.added, parts)


def _unpacked(flat, rows, form):
    """The sums of each query: all but rows of tables from one vector, which is added up at once."""
    shapes = [shape for query in form for shape in query if shape is not None]
    _, *parts = tf.split(flat, [1, *(shape.num_elements() for shape in shapes)])
    parts, rows = iter(parts), iter(rows)

    def part(shape):
        return next(rows) if shape is None else tf.reshape(next(parts), shape)

    return [[part(shape) for shape in query] for query in form]


def _local_mean(strategy, logs):
    """Logs of the replicas of this process; those of an epoch are over all replicas."""
    return {
        name: tf.reduce_mean(tf.stack(strategy.experimental_local_results(value)))
        for name, value in logs.items()
    }
