"""Several devices, and several machines: programs in processes of their own, on this one.

What they check stands in replica_programs.py.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from tests.training import shard_programs


def start(*arguments, module="replica_programs", **environment):
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.training.{module}", *map(str, arguments)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_workers(*arguments, **program):
    """Two workers on two free ports of this machine."""
    sockets = [socket.socket() for _ in range(2)]
    for each in sockets:
        each.bind(("localhost", 0))
    cluster = {"worker": [f"localhost:{each.getsockname()[1]}" for each in sockets]}
    for each in sockets:
        each.close()
    return [
        start(*arguments, **program, TF_CONFIG=json.dumps(
            {"cluster": cluster, "task": {"type": "worker", "index": index}}
        ))
        for index in range(2)
    ]  # fmt: skip


def finish(processes, timeout=300):
    """(exit status, output) of each; none is left behind."""
    try:
        return [(p.communicate(timeout=timeout)[0], p.returncode) for p in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.representatives(1)
@pytest.mark.parametrize("replicas", [3, 2, 4])
def test_mirrored(replicas):
    [(output, status)] = finish([start("mirrored", replicas)])
    assert status == 0, output[-4000:]


def test_workers(tmp_path):
    for output, status in finish(start_workers("worker", tmp_path, "whole")):
        assert status == 0, output[-4000:]
    first, second = (np.load(tmp_path / f"whole{task}.npy") for task in range(2))
    np.testing.assert_array_equal(first, second)
    assert dp.accounting.Ledger(tmp_path / "whole.jsonl").steps == 4
    assert keras.saving.load_model(tmp_path / "model.keras").ledger.steps == 4

    # A worker that is killed stops the other; and the noise is not that of the first run.
    (output, status), (_, killed) = finish(start_workers("worker", tmp_path, "killed"), timeout=120)
    assert (status, killed) == (3, 9), output[-4000:]
    assert "Another worker stopped" in output
    assert 3 <= dp.accounting.Ledger(tmp_path / "killed.jsonl").steps <= 6
    again = np.load(tmp_path / "killed0.npy")
    assert np.abs(np.corrcoef(first[: len(again)], again)[0, 1]) < 0.3


def test_workers_with_data_on_disk(tmp_path):
    """Each with files of its own, or all with one source."""
    shard_programs.write(tmp_path)
    for output, status in finish(start_workers(tmp_path, module="shard_programs")):
        assert status == 0, output[-4000:]
        assert output.rstrip().endswith("ok")


@pytest.mark.parametrize("kind", ["own", "poisson_batches", "balls_in_bins", "arrays"])
def test_a_strategy_of_one_device_trains_as_none_does(kind):
    """As a program for many devices does on a machine with one: sizes that vary failed."""
    x = np.random.default_rng(0).normal(size=(21, 3)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    rows = rows.map(lambda x, y: (x, y, dp.data.RowInfo(tf.ones(tf.shape(x)[:1]))))

    def trained(scope):
        keras.utils.set_random_seed(0)
        with scope:
            inputs = keras.Input((3,))
            model = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
            optimizer = dp.optimizers.DPSGD(0.1, clip_norm=0.5, noise_multiplier=0.0, batch_size=8)
            model.compile(optimizer, "mse", metrics=["mae"])
        if kind == "arrays":
            model.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x, y))
        elif kind == "own":
            order = dp.accounting.Sampling.fixed_order(21, 8)
            model.fit(dp.data.assume_sampling(rows, order), epochs=2, verbose=0)
        else:
            model.fit(getattr(dp.data, kind)((x, y), 8), epochs=2, verbose=0)
        return model

    alone = trained(contextlib.nullcontext())
    model = trained(tf.distribute.MirroredStrategy(["CPU:0"]).scope())
    assert model.ledger.steps == alone.ledger.steps == 6
    if kind == "own":  # others draw their batches anew
        for one, other in zip(alone.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)
