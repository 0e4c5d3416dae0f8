"""Kills a training process at random moments, again and again, and compares with its ledger.

    python -m tests.nightly.kills --kills 200

A child trains with a ledger file and checkpoints, and writes each release to a file as it happens.
The data are zero, so that a release is nothing but noise. After each kill, and again after each
resume:

- the ledger counts at least the steps that ran, and its ε is at least theirs;
- the checkpoint loads, and the training goes on;
- no noise was released twice.
"""

import argparse
import hashlib
import logging
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback

import dp_accounting
import keras
import numpy as np
import tensorflow as tf

import dp_keras_opt as dp

ROWS, BATCH, STEPS, EPOCHS, SIGMA, DELTA = 40, 4, 10, 30, 1.0, 1e-5


def new_model():
    inputs = keras.Input((8,))
    model = dp.DPModel(inputs, keras.layers.Dense(2, use_bias=False)(inputs))
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, batch_size=BATCH, noise_multiplier=SIGMA)
    model.compile(optimizer, "mse")
    return model


def train(folder, backup):
    """What the child does: loads what is there, and trains on."""
    saved = folder / "model.keras"
    model = keras.models.load_model(saved) if saved.exists() else new_model()
    model.ledger = dp.accounting.Ledger(folder / "spent.jsonl")
    released = os.open(folder / "released", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(value):
        os.write(released, hashlib.sha256(value.tobytes()).hexdigest()[:31].encode() + b"\n")
        return np.int32(0)

    def observe(queries, parts):
        tf.numpy_function(write, [parts[0].value[0]], tf.int32)

    model.observe_releases(observe)
    data = np.zeros((ROWS, 8), "float32"), np.zeros((ROWS, 2), "float32")
    remove_if_empty(folder / "backup" / "training_metadata.json")
    checkpoint = (
        keras.callbacks.BackupAndRestore(
            folder / "backup", double_checkpoint=True, delete_checkpoint=False
        )
        if backup
        else keras.callbacks.ModelCheckpoint(saved)
    )
    batches = dp.data.poisson_batches(data, BATCH, steps_per_epoch=STEPS)
    try:
        model.fit(batches, epochs=EPOCHS, verbose=0, callbacks=[checkpoint])
    finally:
        model.ledger.unlock()


def remove_if_empty(path):
    """`BackupAndRestore` writes its epoch in place: a kill in between leaves nothing of it."""
    if path.exists() and not path.stat().st_size:
        path.unlink()


def check(folder):
    """How many steps ran, and how many the ledger counts; refuses what must not be."""
    released = folder / "released"
    noises = released.read_bytes().splitlines() if released.exists() else []
    path = folder / "spent.jsonl"
    ledger = dp.accounting.Ledger.read(path) if path.exists() else dp.accounting.Ledger()
    assert ledger.steps >= len(noises), f"{len(noises)} steps ran, the ledger has {ledger.steps}"
    assert len(set(noises)) == len(noises), "noise was released twice"
    if not noises:
        return 0, ledger.steps
    event = dp_accounting.PoissonSampledDpEvent(BATCH / ROWS, dp_accounting.GaussianDpEvent(SIGMA))
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, len(noises)))
    assert ledger.epsilon(DELTA, "rdp") >= accountant.get_epsilon(DELTA) - 1e-9
    return len(noises), ledger.steps


def child(folder, backup):
    """Forks a process that trains; TensorFlow is imported here, but has not started yet."""
    process = os.fork()
    if process:
        return process
    try:
        train(folder, backup)
    except BaseException:
        (folder / "error").write_text(traceback.format_exc(), encoding="utf-8")
        os._exit(1)
    os._exit(0)


def kill_at_random(kills, seed, longest, number=signal.SIGKILL):
    """Runs and kills until `kills` of them hit.

    Returns:
        (kills, runs that ended by themselves, steps that ran, steps that the ledgers count).
    """
    rng = random.Random(seed)
    hits = ended = ran = counted = 0
    while hits < kills:
        backup = rng.random() < 0.5
        folder = pathlib.Path(tempfile.mkdtemp(prefix="kills-"))
        while hits < kills:
            process = child(folder, backup)
            time.sleep(rng.uniform(0, longest))
            os.kill(process, number)
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            if (folder / "error").exists():
                error = (folder / "error").read_text(encoding="utf-8")
                if number == signal.SIGKILL or "KeyboardInterrupt" not in error:
                    raise AssertionError(f"The child failed:\n{error}")
                (folder / "error").unlink()
            steps = check(folder)
            if status == 0:
                ended += 1
                break
            hits += 1
        ran, counted = ran + steps[0], counted + steps[1]
        shutil.rmtree(folder)
    return hits, ended, ran, counted


def main(arguments=None):
    logging.getLogger("absl").setLevel(
        logging.ERROR
    )  # the accountant's orders that do not converge
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--longest", type=float, default=6.0, help="seconds before a kill, at most")
    parser.add_argument("--signal", default="SIGKILL", choices=["SIGKILL", "SIGINT", "SIGTERM"])
    options = parser.parse_args(arguments)
    hits, ended, ran, counted = kill_at_random(
        options.kills, options.seed, options.longest, getattr(signal, options.signal)
    )
    print(
        f"{hits} kills by {options.signal} survived (seed {options.seed}); {ended} runs ended by "
        f"themselves; {ran} steps ran, {counted} were counted; no noise was released twice."
    )


if __name__ == "__main__":
    sys.exit(main())
