"""Trains from files beside training from memory, for `data.py`: one request as JSON, one reply."""

import importlib.metadata
import json
import os
import pathlib
import sys
import time

import keras
import numpy as np
import stored
import tensorflow as tf
from workloads import WORKLOADS

import dp_keras_opt as dp
from workers.keras_common import inputs_and_outputs
from workers.protocol import telling_line

_MOST_STEPS = 10**6
_OF_MEMORY = 5000  # decoded pictures that are held, to compare with


def write_large(kind, folder, gigabytes):
    """Writes a file of this size, and tells the number of its examples."""
    return {"examples": stored.write_large(kind, pathlib.Path(folder), gigabytes)}


def speeds(kind, workload, folder, count, batch_size, rounds, steps, cold):
    """Writes files; (wall clock, processor) milliseconds a batch, one a round, by what was done."""
    spec = WORKLOADS[workload]
    if kind == "jpeg":
        spec = spec._replace(input=stored.PICTURE)
    shapes = spec.input, spec.input if spec.kind == "tokens" else ()
    folder, arrays = pathlib.Path(folder), WORKLOADS[workload].batch(count)
    stored.KINDS[kind].write(folder, *arrays)
    opened = stored.KINDS[kind].open(folder, *shapes)
    if kind == "jpeg":
        arrays = _decoded(opened.data)
    batches = dp.data.poisson_batches(opened.data, batch_size, _MOST_STEPS, map=opened.map)
    types = (leaf.dtype.as_numpy_dtype for leaf in batches.dataset.element_spec[:2])
    arrays = tuple(map(np.asarray, arrays, types))
    in_memory = dp.data.poisson_batches(arrays, batch_size, _MOST_STEPS)
    # One model for both: of two traces of one step, one may take half as long again as the other.
    model = _private(workload, spec, batch_size)
    runs = {
        "private": _fit(model, batches),
        "memory": _fit(model, in_memory),
        "alone": lambda steps: _draw(batches, steps),
    }
    if opened.plain is not None:
        runs["plain"] = _fit(_plain(workload, spec), opened.plain(batch_size))
    times = {name: [] for name in runs}
    for number in range(rounds + 1):  # the first of which traces, and fills the page cache
        for name, run in runs.items():
            if cold and name != "memory":
                drop_caches()
            took = run(steps if number else min(steps, 3))
            if number:
                times[name].append(took)
    return {"milliseconds": times, "how": opened.how}


def memory(kind, folder, count, batch_size, steps, warm_up, cold):
    """What training from a large file takes: memory, time and ε.

    Args:
        count: of examples.
        steps, warm_up: of the training; those of the latter are made before memory is looked at.
        cold: whether the page cache is emptied first.
    """
    if cold:
        drop_caches()
    before = anonymous_megabytes()
    shapes = ((stored.WIDTH,), ())
    opened = _open_large(kind, pathlib.Path(folder), shapes)
    batches = dp.data.poisson_batches(opened.data, batch_size, steps, map=opened.map, max_bytes=1)
    assert batches.sampling.num_examples == count, (batches.sampling, count)
    with_batches = anonymous_megabytes()
    inputs = keras.Input((stored.WIDTH,))
    hidden = keras.layers.Dense(64, activation="relu")(inputs)
    model = dp.DPModel(inputs, keras.layers.Dense(10)(hidden))
    optimizer = dp.optimizers.DPSGD(
        0.01, clip_norm=1.0, noise_multiplier=1.0, batch_size=batch_size
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    watch = _Watch(warm_up)
    model.fit(batches, epochs=1, verbose=0, callbacks=[watch])
    end = anonymous_megabytes()
    return {
        "examples": count,
        "steps": model.ledger.steps,
        "steps_per_second": watch.steps_per_second(),
        "epsilon": model.ledger.epsilon(1e-7),
        "opened_megabytes": with_batches - before,
        "warm_megabytes": watch.seen[0],
        "peak_megabytes": max(*watch.seen, end),
        "end_megabytes": end,
        "growth_megabytes": end - watch.seen[0],
        "every_tenth": watch.seen[:: max(1, len(watch.seen) // 10)],
    }


class _Watch(keras.callbacks.Callback):
    """Looks at the anonymous memory from the end of the warm-up on, now and then."""

    def __init__(self, warm_up):
        super().__init__()
        self.seen, self._warm_up, self._done, self._start = [], warm_up, 0, None

    def on_train_batch_end(self, batch, logs=None):
        self._done += 1
        if self._done == self._warm_up:
            self._start = time.perf_counter()
        if self._done >= self._warm_up and self._done % max(1, self._warm_up // 4) == 0:
            self.seen.append(anonymous_megabytes())

    def steps_per_second(self):
        return (self._done - self._warm_up) / (time.perf_counter() - self._start)


def _open_large(kind, folder, shapes):
    if kind != "tfrecord":
        return stored.KINDS[kind].open(folder, *shapes)
    parse = tf.io.FixedLenFeature((), tf.string), tf.io.FixedLenFeature((), tf.int64)

    def example(record):
        row = tf.io.parse_single_example(record, dict(zip("xy", parse, strict=True)))
        return tf.reshape(tf.io.decode_raw(row["x"], tf.float32), shapes[0]), row["y"]

    return stored.Opened(dp.data.TFRecords(folder / "data.tfrecord"), example, None, "")


def anonymous_megabytes():
    """Memory that this process has for itself, without pages of files that it maps."""
    with open("/proc/self/status", encoding="ascii") as status:
        (line,) = (line for line in status if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def drop_caches():
    """Has the system forget what it keeps of files."""
    os.sync()
    with open("/proc/sys/vm/drop_caches", "w", encoding="ascii") as file:
        file.write("3")


def _decoded(folder):
    """Some of the pictures of a folder, and their classes, as arrays."""
    paths, labels = folder[np.arange(min(_OF_MEMORY, len(folder)))]
    return np.stack([folder.decode(path)[0].numpy() for path in paths]), labels


def _private(workload, spec, batch_size):
    model = dp.DPModel(*inputs_and_outputs(keras, workload, spec))
    optimizer = dp.optimizers.DPAdam(
        0.001, epsilon=1e-3, clip_norm=1.0, noise_multiplier=1.0, batch_size=batch_size
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _plain(workload, spec):
    model = keras.Model(*inputs_and_outputs(keras, workload, spec))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _fit(model, data):
    """The function that fits a model for some steps; (wall clock, processor) milliseconds of one.

    As `keras_common.fit_steps`: from the end of the first batch to that of the last.
    """

    class Clock(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.ends = []

        def on_train_batch_end(self, batch, logs=None):
            float(logs["loss"])
            self.ends.append(_now())

    def run(steps):
        clock = Clock()
        model.fit(data, steps_per_epoch=steps + 1, shuffle=False, verbose=0, callbacks=[clock])
        return _apart(clock.ends[0], clock.ends[-1], steps)

    return run


def _draw(batches, steps):
    """As what `_fit` gives, to have a batch ready if nobody uses it."""
    iterator = iter(batches.dataset)
    for _ in range(3):  # what is prefetched meanwhile counts neither here nor at the end
        next(iterator)
    start = _now()
    for _ in range(steps):
        next(iterator)
    return _apart(start, _now(), steps)


def _now():
    return time.perf_counter(), time.process_time()


def _apart(start, end, steps):
    return [1e3 * (b - a) / steps for a, b in zip(start, end, strict=True)]


def main():
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not end up in the reply
    request = json.loads(sys.argv[1])
    try:
        do = {"write_large": write_large, "memory": memory, "speeds": speeds}
        reply = do[request.pop("do")](**request)
        reply["versions"] = {
            name: importlib.metadata.version(name) for name in ("tensorflow", "keras")
        }
    except Exception as error:
        reply = {"error": f"{type(error).__name__}: {telling_line(str(error))}"[:300]}
    print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
