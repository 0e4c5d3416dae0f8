"""The processes and devices that train together, and what they tell each other.

A replica is one device's copy of the model; a worker is a process, with one replica or several.
"""

import concurrent.futures
import contextlib
import functools

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
