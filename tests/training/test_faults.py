"""What goes wrong in training: kills, interrupts, full disks, broken files, data that end, NaN."""

import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.accounting import Ledger
from dp_keras_opt.accounting.journal import Journal
from dp_keras_opt.training import saved_run
from tests.nightly import kills

ROOT = pathlib.Path(__file__).parents[2]
DELTA = 1e-5


@pytest.fixture
def model(tmp_path):
    inputs = keras.Input((4,))
    model = dp.DPModel(inputs, keras.layers.Dense(2)(inputs))
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, batch_size=4, noise_multiplier=1.0)
    model.compile(optimizer, "mse")
    model.ledger = Ledger(tmp_path / "spent.jsonl")
    return model


def batches(x=None, steps=6):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 4)).astype("float32") if x is None else x
    return dp.data.poisson_batches((x, rng.normal(size=(40, 2))), 4, steps_per_epoch=steps)


def on_file(model):
    return Ledger.read(model.ledger.path).steps


@pytest.mark.representatives(1)
@pytest.mark.parametrize(("signal", "kills"), [("SIGKILL", 7), ("SIGINT", 3)])
def test_random_kills(signal, kills):
    """See tests/nightly/kills.py, which tox runs for 200."""
    options = ["--kills", str(kills), "--signal", signal, "--longest", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.nightly.kills", *options], cwd=ROOT, capture_output=True,
        text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{kills} kills by {signal} survived" in done.stdout


def test_a_kill_while_keras_writes_the_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr(kills, "EPOCHS", 2)
    kills.train(tmp_path, backup=True)
    (tmp_path / "backup" / "training_metadata.json").write_text("")
    with monkeypatch.context() as as_it_is:
        as_it_is.setattr(kills, "remove_if_empty", lambda path: None)
        with pytest.raises(ValueError, match="Expecting value"):
            kills.train(tmp_path, backup=True)
    kills.train(tmp_path, backup=True)  # from the first epoch, with the weights and their ledger
    assert kills.check(tmp_path) == (40, 40)


class Interrupt(keras.callbacks.Callback):
    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_batch_begin(self, batch, logs=None):
        if batch == self.step:
            raise KeyboardInterrupt


def test_an_interrupt_leaves_the_ledger_exact(model):
    with pytest.raises(KeyboardInterrupt):
        model.fit(batches(), verbose=0, callbacks=[Interrupt(4)])
    assert model.ledger.steps == on_file(model) == 4
    model.fit(batches(), verbose=0)
    assert model.ledger.steps == on_file(model) == 10


def test_an_interrupt_within_a_step_counts_it(model):
    def interrupted():
        raise KeyboardInterrupt

    model.observe_releases(lambda queries, parts: interrupted())
    with pytest.raises(KeyboardInterrupt):
        model.fit(batches(), verbose=0)
    assert on_file(model) == 1


@pytest.mark.parametrize("how", ["train_on_batch", "fit"])
def test_training_goes_on_after_a_step_that_failed_under_a_noise_schedule(how):
    inputs = keras.Input((4,))
    model = dp.DPModel(inputs, keras.layers.Dense(3)(inputs))
    optimizer = dp.optimizers.DPSGD(
        0.1, clip_norm=1.0, batch_size=8, noise_multiplier=1.0, noise_schedule=[1.0, 2.0, 3.0, 4.0]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    sampling = dp.accounting.Sampling.poisson(100, 8)
    x, labels, beyond = np.ones((8, 4), "float32"), np.zeros(8, "int32"), np.full(8, 9, "int32")

    def step(y):
        if how == "fit":
            data = tf.data.Dataset.from_tensors((x, y))
            model.fit(dp.data.assume_sampling(data, sampling), verbose=0)
        else:
            model.sampling = sampling
            model.train_on_batch(x, y)

    step(labels)
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(beyond)
    step(labels)
    counted = [(each.first_step, each.steps) for each in model.ledger.segments]
    assert sum(steps for _, steps in counted) == 3  # with the one that failed
    assert model.optimizer.iterations == 2
    assert counted[-1] == (1, 1)  # at α = 2, the factor of the second step


def test_data_that_end_early(model):
    data = batches()
    data = dp.data.assume_sampling(
        data.dataset.filter(lambda x, y, rows: True).take(3), data.sampling
    )
    with pytest.warns(UserWarning, match="ran out of data"):
        model.fit(data, steps_per_epoch=10, epochs=2, verbose=0)
    assert on_file(model) == model.ledger.steps == int(model.optimizer.iterations) > 0


def test_batches_of_nan(model):
    x = np.full((40, 4), np.nan, "float32")
    with pytest.warns(UserWarning, match="NaN"):
        model.fit(batches(x), verbose=0)
    assert on_file(model) == 6  # the noise was released all the same
    assert np.isfinite(model.get_weights()[0]).all()


def test_a_disk_that_is_full_stops_the_training_before_the_step(model, monkeypatch):
    model.fit(batches(), verbose=0)
    weights, write = model.get_weights(), os.write
    path = str(model.ledger.path)

    def full(file, line):
        if os.readlink(f"/proc/self/fd/{file}") == path:
            raise OSError(28, "No space left on device")
        return write(file, line)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        model.fit(batches(), verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], weights[0])
    monkeypatch.undo()
    model.fit(batches(), verbose=0)
    assert on_file(model) == model.ledger.steps == 12


def test_a_disk_that_is_full_at_the_end_warns(model, monkeypatch):
    model.compile(model.optimizer, "mse", steps_per_execution=4)  # of 8 steps reserved, 6 run
    append = Journal.append

    def full(self, run, **content):
        if "ran" in content:
            raise OSError(28, "No space left on device")
        append(self, run, **content)

    monkeypatch.setattr(Journal, "append", full)
    with pytest.warns(UserWarning, match="counts more steps than ran, which is safe"):
        model.fit(batches(), verbose=0)
    assert model.ledger.steps == 6 and on_file(model) == 8
    monkeypatch.undo()
    model.fit(batches(), verbose=0)
    assert model.ledger.steps == on_file(model) == 12


def test_a_checkpoint_that_is_cut_off_is_refused_and_counts_go_on(model, tmp_path):
    saved = tmp_path / "model.keras"
    model.fit(batches(), verbose=0)
    model.save(saved)
    saved.write_bytes(saved.read_bytes()[:-200])
    with pytest.raises((ValueError, OSError)):
        keras.models.load_model(saved)
    assert on_file(model) == 6


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
@pytest.mark.parametrize("exists", [False, True])
def test_a_save_that_fails_leaves_the_old_file(model, tmp_path, monkeypatch, name, exists):
    path = tmp_path / name
    save = model.save if name.endswith(".keras") else model.save_weights
    if exists:
        save(path)
    before = path.read_bytes() if exists else None

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(model), "save_own_variables", full)
    with pytest.raises(OSError, match="No space left"):
        save(path)
    assert path.exists() == exists and (not exists or path.read_bytes() == before)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["spent.jsonl", *([name] if exists else [])]
    )


def test_folders_and_shards_are_saved_as_by_keras(model, tmp_path):
    model.save(tmp_path / "folder", zipped=False)
    assert keras.models.load_model(tmp_path / "folder").ledger.steps == 0
    model.save_weights(tmp_path / "shards.weights.json", max_shard_size=1.0)
    model.load_weights(tmp_path / "shards.weights.json")
    model.save(tmp_path / "model.keras")
    model.save(str(tmp_path / "model.keras"))  # over what is there


def test_a_checkpoint_and_the_file_count_a_run_once(model, tmp_path):
    model.fit(batches(), verbose=0)
    model.save(tmp_path / "model.keras")
    model.fit(batches(), verbose=0)
    path = model.ledger.path
    model.ledger.unlock()
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.ledger.steps == 6
    loaded.ledger = Ledger(path)  # and what ran after the checkpoint
    assert loaded.ledger.steps == 12
    loaded.fit(batches(), verbose=0)
    assert on_file(loaded) == 18
    assert loaded.ledger.epsilon(DELTA) == Ledger.read(path).epsilon(DELTA)


def test_several_models_on_one_ledger(model):
    """As in a search for hyper-parameters: what all of them spend on the same data adds up."""
    inputs = keras.Input((4,))
    other = dp.DPModel(inputs, keras.layers.Dense(2)(inputs))
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, batch_size=4, noise_multiplier=1.0)
    other.compile(optimizer, "mse")
    other.ledger = model.ledger
    model.sampling = other.sampling = dp.accounting.Sampling.poisson(40, 4)
    x, y = np.zeros((4, 4)), np.zeros((4, 2))
    for _ in range(3):  # in turn, each with a run of its own
        model.train_on_batch(x, y)
        other.train_on_batch(x, y)
    assert model.ledger.steps == other.ledger.steps == 6
    budget = dp.callbacks.PrivacyBudget(epsilon=model.ledger.epsilon(DELTA), delta=DELTA)
    with pytest.warns(UserWarning, match="allows no further step"):
        other.fit(batches(), verbose=0, callbacks=[budget])
    assert model.ledger.steps == 6


def test_a_budget_counts_what_earlier_processes_spent(model):
    model.fit(batches(steps=20), verbose=0)
    path, spent = model.ledger.path, model.ledger.epsilon(DELTA)
    model.ledger.unlock()
    inputs = keras.Input((4,))
    fresh = dp.DPModel(inputs, keras.layers.Dense(2)(inputs))
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, batch_size=4, noise_multiplier=1.0)
    fresh.compile(optimizer, "mse")
    fresh.ledger = Ledger(path)
    report = dp.callbacks.PrivacyReport(delta=DELTA)
    budget = dp.callbacks.PrivacyBudget(epsilon=1.02 * spent, delta=DELTA)
    fresh.fit(batches(steps=20), verbose=0, callbacks=[report, budget])
    assert 20 <= fresh.ledger.steps < 40 and report.epsilon <= 1.02 * spent


def test_only_ledgers_are_ledgers(model, tmp_path):
    with pytest.raises(ValueError, match="must be a dp_keras_opt.accounting.Ledger"):
        model.ledger = str(tmp_path / "spent.jsonl")


def test_checkpoints_of_tensorflow_carry_the_ledger(model, tmp_path):
    model.fit(batches(), verbose=0)
    saved = tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
    inputs = keras.Input((4,))
    other = dp.DPModel(inputs, keras.layers.Dense(2)(inputs))
    other.ledger = Ledger(tmp_path / "other.jsonl")
    tf.train.Checkpoint(model=other).restore(saved)
    assert other.ledger.steps == on_file(other) == 6


def test_loading_runs_no_code_from_the_file(tmp_path):
    inputs = keras.Input((4,))
    outputs = keras.layers.Dense(2)(keras.layers.Lambda(lambda x: 2 * x)(inputs))
    model = dp.DPModel(inputs, outputs)
    model.save(tmp_path / "model.keras")
    with pytest.raises(Exception, match="safe_mode|unsafe"):
        keras.models.load_model(tmp_path / "model.keras")


def test_no_file_of_the_library_is_a_pickle(tmp_path):
    """An array of objects in the place of a saved run would run code when it is read."""
    path = tmp_path / "run.secret.npz"
    np.savez(path, header=np.array(["a", {"b": 1}], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        saved_run.read(path)
