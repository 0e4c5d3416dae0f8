"""How much memory data take: one copy, and none before it is known that it fits."""

import gc
import os
import tracemalloc

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.data import held

N, WIDTH = 20_000, 500
SIZE = N * WIDTH * 4  # 40 MB as float32
SLACK = SIZE // 8


def peak_of(function):
    """(What it returns, the most bytes that Python and NumPy held for it at once.)"""
    gc.collect()
    tracemalloc.start()
    try:
        result = function()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _poisson(data):
    return dp.data.poisson_batches(data, 10)


SAMPLERS = {
    "poisson_batches": _poisson,
    "cyclic_poisson": lambda data: dp.data.cyclic_poisson(data, 10, 5),
    "fixed_order_epochs": lambda data: dp.data.fixed_order_epochs(data, 10),
    "poisson_users": lambda data: dp.data.poisson_users(
        data, np.arange(N) % 1000, 10, examples_per_user=2
    ),
}


@pytest.mark.representatives(6)
@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8"])
def test_samplers_make_one_copy_of_arrays(name, dtype):
    x, y = np.ones((N, WIDTH), dtype), np.zeros(N, np.float32)
    held_bytes = N * WIDTH * (1 if dtype == "uint8" else 4)
    batches, peak = peak_of(lambda: SAMPLERS[name]((x, y)))
    assert held_bytes <= peak <= held_bytes + SLACK
    x[:] = 0  # the copy is the sampler's own
    assert np.min(next(iter(batches))[0]) == 1


@pytest.mark.parametrize("known", [True, False])
def test_a_dataset_is_read_into_one_copy(known):
    rows = tf.data.Dataset.range(N).map(lambda i: (tf.ones([WIDTH]), i))
    rows = rows if known else rows.filter(lambda x, i: True)
    _, peak = peak_of(lambda: _poisson(rows))
    assert SIZE <= peak <= SIZE + SLACK + (0 if known else 2 * 2**26)


def test_many_examples_of_unknown_number_keep_their_order(monkeypatch):
    monkeypatch.setattr(dp.data.reading, "_SLAB", 1000)
    rows = tf.data.Dataset.range(1000).map(lambda i: ([i, i], tf.strings.as_string(i)))
    examples = dp.data.examples.of(rows.filter(lambda x, y: True))
    (x, y, _), _ = examples.gather(tf.range(1000, dtype=tf.int64))
    assert examples.num_examples == 1000
    np.testing.assert_array_equal(x, np.arange(1000)[:, None] * [1, 1])
    assert y.numpy().tolist() == [str(i).encode() for i in range(1000)]


def test_what_is_held_is_what_tensorflow_reads():
    room = held.Held(3, np.zeros((1, 2), np.float64))
    room.add(np.array([[1.0, 2.0]]))
    room.add(np.array([[3.0, 4.0]]))
    tensor = room.tensor()
    assert tensor.dtype == tf.float32 and tensor.numpy().tolist() == [[1, 2], [3, 4]]
    assert np.asarray(tensor).ctypes.data == room.array.ctypes.data
    assert room.array.ctypes.data % 64 == 0  # as TensorFlow's own


@pytest.mark.parametrize(
    "values",
    [
        np.array([True, False, True]),
        np.arange(6, dtype=np.uint16).reshape(3, 2),
        np.zeros((3, 0), np.float32),
        np.arange(12.0).reshape(3, 4)[:, ::2],
        np.array(["a", "bé", ""]),
        np.array([b"a", "b", "c"], object),
        np.ones(3, np.complex64),
        tf.constant([1.0, 2.0, 3.0], tf.float64),
        tf.constant(["a", "b", "c"]),
        tf.cast([1, 2, 3], tf.bfloat16),
    ],
    ids=lambda v: str(getattr(v.dtype, "name", v.dtype)),
)
def test_what_is_held_has_the_values_given(values):
    expected = tf.convert_to_tensor(values)
    tensor = held.tensor(values)
    if expected.dtype == tf.float64:
        expected = tf.cast(expected, tf.float32)
    assert tensor.dtype == expected.dtype
    np.testing.assert_array_equal(tensor, expected)


def test_tensors_are_not_copied():
    given = tf.ones([N, WIDTH])
    _, peak = peak_of(lambda: _poisson((given, tf.zeros([N]))))
    assert peak < SLACK
    assert held.tensor(given) is given


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8"])
def test_arrays_that_are_too_large_are_refused_before_they_are_read(dtype):
    shape = (10_000_000, 4000 // np.dtype(dtype).itemsize)
    x = np.broadcast_to(np.zeros((), dtype), shape)  # 40 GB, if somebody copies them
    y = np.zeros(len(x), bool)
    before = _resident()

    def refused():
        with pytest.raises(ValueError, match="takes at least .* max_bytes=4,294,967,296"):
            dp.data.poisson_batches((x, y), 10)

    _, peak = peak_of(refused)
    assert peak < 2**20
    assert _resident() - before < 2**28


@pytest.mark.parametrize("sampler", [dp.data.poisson_batches, dp.data.balls_in_bins])
def test_arrays_on_disk_stay_there_whatever_their_size(tmp_path, sampler):
    # A file with a hole: 40 GB that take no place, neither on the disk nor, unread, in memory.
    x = np.memmap(tmp_path / "x", np.float32, mode="w+", shape=(10_000_000, 1000))
    y = np.zeros(len(x), np.int8)
    before = _resident()
    batches = sampler((x, y), 100)
    for _, (rows, _, _) in zip(range(20), batches, strict=False):
        assert rows.shape[1] == 1000
    assert _resident() - before < 2**29


def test_training_holds_no_further_copy():
    x, y = np.ones((N * 4, WIDTH), np.float32), np.zeros(N * 4, np.float32)
    batches = dp.data.poisson_batches((x, y), 10, steps_per_epoch=2)
    inputs = keras.Input((WIDTH,))
    model = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=10)
    model.compile(optimizer, "mse")
    small = dp.data.poisson_batches((x[:1000], y[:1000]), 10, steps_per_epoch=2)
    model.fit(small, verbose=0)  # what training itself takes
    before = _resident()
    list(batches)
    model.fit(batches, epochs=2, verbose=0)
    assert _resident() - before < 2 * SIZE  # half of the data


def _resident():
    """Bytes of memory that this process has for itself, without files that it maps."""
    if not os.path.exists("/proc/self/status"):
        pytest.skip("The system does not tell.")
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["RssAnon"].split()[0]) * 1024
