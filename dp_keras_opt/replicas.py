"""Training on several devices or machines: all that TensorFlow's strategies ask for is here.

A step has two parts. Each replica computes the clipped sums of its rows. Then, outside of any
replica, the sums are added up, noise is added once and the optimizer moves the variables, which
TensorFlow keeps equal on all replicas. Of several workers (processes) each does the second part for
itself, on the same sum and with the same noise, so that all get the same weights.

Keras's own loop cannot do this: it calls the optimizer inside of each replica; under
`MultiWorkerMirroredStrategy` it reduces scalar logs along an axis that they do not have; and it
builds a model from a batch that it reduces first, whatever the types in it. `train_function`,
`test_function` and `element_spec` stand in their place.
"""

import concurrent.futures
import contextlib
import functools

import keras
import numpy as np
import tensorflow as tf

__all__ = ["WorkerLostError"]

#: What is raised where a worker is gone, or its connection is.
_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.DeadlineExceededError)


class WorkerLostError(RuntimeError):
    """Another worker stopped answering, so that no further step can be taken together."""


def is_used(strategy):
    """Whether training runs on replicas that must be brought together.

    Raises:
        ValueError: by a strategy that was not made for this.
    """
    several_workers = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    if not several_workers and strategy.num_replicas_in_sync == 1:
        return False
    if not several_workers and not isinstance(strategy, tf.distribute.MirroredStrategy):
        raise ValueError(
            f"Private training under {type(strategy).__name__} is not supported. Use "
            "tf.distribute.MirroredStrategy or MultiWorkerMirroredStrategy."
        )
    return True


def place(strategy=None):
    """(index of this worker, number of workers), of a strategy or of the one in scope."""
    strategy = strategy or tf.distribute.get_strategy()
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return 0, 1
    resolver = strategy.cluster_resolver
    workers = strategy.num_replicas_in_sync // local(strategy)
    if workers == 1:
        return 0, 1
    cluster = resolver.cluster_spec()
    if resolver.task_type == "worker":  # a "chief", where there is one, comes before them
        return resolver.task_id + len(cluster.as_dict().get("chief", ())), workers
    return resolver.task_id, workers


def local(strategy):
    """Number of replicas in this process."""
    return len(strategy.extended.worker_devices)


def without_strategy(function, *args):
    """Calls a function eagerly where no strategy is in scope: its variables are plain ones."""
    if not tf.distribute.has_strategy():
        with tf.init_scope():
            return function(*args)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # scopes are a thread's own
        return pool.submit(function, *args).result()


def check_compiled(model, optimizer):
    """Refuses what replicas could not be trained with.

    Raises:
        ValueError: the optimizer's variables would not be on all replicas, or XLA is asked to
            compile for several logical CPUs, of which it has one.
    """
    strategy = model.distribute_strategy
    if not is_used(strategy):
        return
    if not strategy is model._distribute_strategy is optimizer._distribution_strategy:
        raise ValueError(
            "The model and its optimizer were not both made under the strategy that is in use. "
            "Make both within `with strategy.scope():`."
        )
    if model.jit_compile and local(strategy) > 1 and "CPU" in strategy.extended.worker_devices[0]:
        raise ValueError(
            "XLA does not compile for several CPU devices of one process. Leave jit_compile out."
        )


# What workers tell each other.


def gathered(content, strategy=None):
    """What each worker gave, as bytes, in the order of the workers; all of them must call it."""
    strategy = strategy or tf.distribute.get_strategy()
    index, workers = place(strategy)
    if workers == 1:
        return [content]

    everyones = _exchange(strategy)
    with worker_lost(strategy):
        longest = max(size for _, size in everyones([index, len(content)]).numpy())
        padded = [*content, *[0] * (longest - len(content))]
        rows = everyones([index, len(content), *padded]).numpy().tolist()
    contents = {index: bytes(rest[:size]) for index, size, *rest in rows}
    return [contents[index] for index in sorted(contents)]


@functools.cache
def _exchange(strategy):
    """Function of a worker's row of numbers that gives the rows of all replicas."""

    def gather(row):
        return strategy.gather(strategy.run(lambda: row[tf.newaxis]), axis=0)

    return tf.function(gather, input_signature=[tf.TensorSpec([None], tf.int32)], autograph=False)


def of_chief(content, strategy=None):
    """The bytes that the first worker gave, at all of them."""
    return gathered(content, strategy)[0]


@contextlib.contextmanager
def worker_lost(strategy):
    """Says in plain words that another worker is gone.

    Raises:
        WorkerLostError: it is.
    """
    try:
        yield
    except _LOST as error:
        if place(strategy)[1] == 1:  # remote storage, perhaps
            raise
        raise WorkerLostError(
            "Another worker stopped or cannot be reached, so this one stops too. The ledger counts "
            "every step that may have released something. Start all workers again, from the model "
            "that was saved last."
        ) from error


# Data.


def distributed(strategy, dataset):
    """Elements for each replica of this worker in turn, over and over, as what `fit` takes.

    TensorFlow is not left to split the data: by rules of its own it may leave out examples or give
    one to two workers.
    """
    return strategy.distribute_datasets_from_function(
        lambda _: dataset.repeat().prefetch(2 * local(strategy))
    )


def element_spec(iterable):
    """The `TensorSpec`s of what one replica gets, None for what is not there."""
    spec = getattr(iterable, "element_spec", None)

    def first(part):
        part = getattr(part, "_value_specs", (part,))[0]
        return part if hasattr(part, "dtype") else None

    return keras.tree.map_structure(first, spec)


# The loop.


def train_function(model):
    """In place of Keras's: clipped sums on each replica, then one update for all of them."""
    strategy, optimizer = model.distribute_strategy, model.optimizer
    form = []

    def on_replica(data):
        sums, logs = model._clipped_sums_of(data)
        form[:] = [tf.nest.map_structure(lambda part: part.shape, sums)]
        return tf.concat([tf.reshape(part, [-1]) for part in tf.nest.flatten(sums)], 0), logs

    if model.jit_compile and not model.run_eagerly:
        on_replica = tf.function(on_replica, jit_compile=True, reduce_retracing=True)

    def step(iterator):
        data = next(iterator)
        with strategy.scope():
            optimizer.prepare(model.trainable_variables)
        flat, logs = strategy.run(on_replica, args=(data,))
        with strategy.scope():
            total = strategy.reduce(tf.distribute.ReduceOp.SUM, flat, axis=None)
            model._update_from(optimizer.queries(), _unpacked(total, form[0]))
        return _local_mean(strategy, logs)

    if not model.run_eagerly:
        step = tf.function(step, reduce_retracing=True, autograph=False)

    def function(iterator):
        for _ in range(model.steps_per_execution):
            logs = step(iterator)
        return logs

    return function


def test_function(model):
    """In place of Keras's evaluation step."""
    strategy = model.distribute_strategy

    def step(iterator):
        return _local_mean(strategy, strategy.run(model.test_step, args=(next(iterator),)))

    if not model.run_eagerly:
        step = tf.function(step, reduce_retracing=True, autograph=False)

    def function(iterator):
        logs = step(iterator)
        with contextlib.suppress(tf.errors.OutOfRangeError, StopIteration):
            for _ in range(1, model.steps_per_execution):
                logs = step(iterator)
        return logs

    return function


def _unpacked(flat, form):
    """The sums of each query, from all of them in one vector, which is added up at once."""
    shapes = [shape for query in form for shape in query]
    parts = iter(tf.split(flat, [shape.num_elements() for shape in shapes]))
    return [[tf.reshape(next(parts), shape) for shape in query] for query in form]


def _local_mean(strategy, logs):
    """Logs of the replicas of this process; those of an epoch are over all replicas."""
    return {
        name: tf.reduce_mean(tf.stack(strategy.experimental_local_results(value)))
        for name, value in logs.items()
    }


# Variables.


def count_variable(strategy):
    """An integer that each replica adds to."""
    with strategy.scope() if is_used(strategy) else contextlib.nullcontext():
        return tf.Variable(
            0,
            dtype=tf.int64,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )


def local_sum(strategy, variable):
    """What the replicas of this process have added to a `count_variable`."""
    return int(np.sum([part.numpy() for part in strategy.experimental_local_results(variable)]))


class UpdatesOnce(keras.optimizers.Optimizer):
    """An optimizer that is called once for all replicas, not in each of them.

    Keras's asks TensorFlow to leave the replica that it is called in; here there is none to leave.
    """

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            variable = variable.value if isinstance(variable, keras.Variable) else variable
            self.update_step(gradient, variable, learning_rate)

    def _apply_weight_decay(self, variables):
        if self.weight_decay is None:
            return
        for variable in variables:
            if self._use_weight_decay(variable):
                rate = keras.ops.cast(self.learning_rate, variable.dtype)
                value = keras.ops.convert_to_tensor(variable)
                self.assign_sub(variable, value * self.weight_decay * rate)


@contextlib.contextmanager
def updating_once(optimizer):
    """Has a plain Keras optimizer do as `UpdatesOnce` does, while it is traced."""
    kind = type(optimizer)
    object.__setattr__(optimizer, "__class__", type(kind.__name__, (kind, UpdatesOnce), {}))
    try:
        yield
    finally:
        object.__setattr__(optimizer, "__class__", kind)
