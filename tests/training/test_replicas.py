"""Several devices, and several machines: programs in processes of their own, on this one.

What they check stands in replica_programs.py.
"""

import json
import os
import socket
import subprocess
import sys

import keras
import numpy as np
import pytest

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
