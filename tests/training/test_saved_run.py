"""Runs of correlated noise that one process hands over to another."""

import os
import stat

import keras
import numpy as np
import pytest

import dp_keras_opt as dp
from dp_keras_opt.accounting import Sampling
from dp_keras_opt.noise import (
    BandedInverseSquareRoot,
    BandedMatrix,
    BufferedToeplitz,
    LambdaCGD,
    SquareRootFactorization,
    TreeAggregation,
)
from dp_keras_opt.optimizers import DPSGD
from tests.helpers.factorizations import inverse

ROWS, BATCH = 24, 8  # three steps an epoch
WIDE = 3000


def compiled(mechanism, width=4, batch_size=BATCH):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((width,))
    model = dp.DPModel(inputs, keras.layers.Dense(1, use_bias=False)(inputs))
    optimizer = DPSGD(
        0.1, clip_norm=0.5, batch_size=batch_size, noise_multiplier=2.0, noise=mechanism
    )
    model.compile(optimizer, "mse")
    return model


def zeros(width=4, **kwargs):
    data = np.zeros((ROWS, width), "float32"), np.zeros((ROWS, 1), "float32")
    return dp.data.fixed_order_epochs(data, BATCH, **kwargs)


def released_noise(model, batches, epochs):
    """The noise that a fit releases, in units of σC/B: (steps, d)."""
    released = []
    model.observe_releases(lambda queries, parts: released.append(parts[0].value[0].numpy()))
    model.run_eagerly = True
    model.fit(batches, epochs=epochs, verbose=0)
    return np.array(released)[..., 0] * BATCH / (2.0 * 0.5)


@pytest.fixture
def trained(tmp_path):
    """A model after two epochs, saved with its run: (model, its file, the secret one, batches)."""
    model, batches = compiled(BandedMatrix(12, 3)), zeros()
    model.fit(batches, epochs=2, verbose=0)
    model.save(tmp_path / "model.keras")
    model.save_run(tmp_path / "run.secret.npz")
    return model, tmp_path / "model.keras", tmp_path / "run.secret.npz", batches


@pytest.mark.parametrize(
    "mechanism",
    [
        BandedMatrix(12, 3),
        SquareRootFactorization(12, 12),
        TreeAggregation(12),
        BufferedToeplitz(12),
        LambdaCGD(12, 0.9),
        BandedInverseSquareRoot(12, 8),
    ],
)
def test_a_resumed_run_is_one_mechanism(mechanism, tmp_path):
    """Its covariance has the entries between steps of both halves. Five standard errors: 0.13."""
    model, batches = compiled(mechanism, WIDE), zeros(WIDE)
    first = released_noise(model, batches, 2)
    model.save(tmp_path / "model.keras")
    model.save_run(tmp_path / "run.secret.npz")

    loaded = keras.models.load_model(tmp_path / "model.keras")
    order_seed = loaded.resume_run(tmp_path / "run.secret.npz")
    second = released_noise(loaded, zeros(WIDE, order_seed=order_seed), 2)

    y = np.concatenate([first, second])
    actual = y @ y.T / WIDE
    mixing = inverse(mechanism)
    expected = mixing @ mixing.T
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    assert np.abs((actual - expected) / scale).max() < 0.13
    assert np.abs(expected[6:, :6] / scale[6:, :6]).max() > 0.26  # two independent runs would fail

    whole = dp.accounting.epsilon(loaded.optimizer, batches.sampling, 12, 1e-5)
    assert loaded.ledger.epsilon(1e-5) == pytest.approx(whole)
    assert loaded.ledger.steps == 12 and len(loaded.ledger.segments) == 1


def test_the_order_is_that_of_the_run(trained):
    _, path, secret, batches = trained
    order_seed = keras.models.load_model(path).resume_run(secret)
    x = np.arange(float(ROWS))[:, None]
    orders = [
        [b[0].numpy().ravel().tolist() for b in again.dataset]
        for again in (
            dp.data.fixed_order_epochs((x, x), BATCH, order_seed=order_seed),
            dp.data.fixed_order_epochs((x, x), BATCH, order_seed=batches.order_seed),
            dp.data.fixed_order_epochs((x, x), BATCH),
        )
    ]
    assert orders[0] == orders[1] != orders[2]


def test_the_file_is_secret_and_serves_once(trained):
    model, path, secret, _ = trained
    assert stat.S_IMODE(os.stat(secret).st_mode) == 0o600
    with np.load(secret) as stored:
        assert "SECRET" in stored["header"][0]
    loaded = keras.models.load_model(path)
    loaded.resume_run(secret)
    assert not secret.exists()
    with pytest.raises(FileNotFoundError):
        keras.models.load_model(path).resume_run(secret)


def test_who_hands_a_run_over_begins_a_new_one(trained):
    model, _, _, batches = trained
    source = model.optimizer.noise_source
    assert int(source.memory.steps((0, 0))) == 0
    assert not any(past.any() for buffers in source.memory.state().values() for past in buffers)
    model.fit(batches, epochs=1, verbose=0)
    assert len(model.ledger.segments) == 2 and int(source.memory.steps((0, 0))) == 3


def test_two_that_go_on_with_copies_of_a_run_are_not_taken_for_one(trained, tmp_path):
    """Nothing can forbid the copy; the ledgers at least add up."""
    _, path, secret, _ = trained
    copy = tmp_path / "copy.secret.npz"
    copy.write_bytes(secret.read_bytes())
    ledgers = []
    for file in (secret, copy):
        model = keras.models.load_model(path)
        model.fit(zeros(order_seed=model.resume_run(file)), epochs=1, verbose=0)
        ledgers.append(model.ledger)
    ledgers[0].merge(ledgers[1])
    assert ledgers[0].steps == 18


def test_refuses_a_run_of_another_time(trained, tmp_path):
    """Between the model's file and the secret one, steps were taken."""
    model, path, secret, batches = trained
    again = keras.models.load_model(path)
    again.fit(zeros(order_seed=again.resume_run(secret)), epochs=1, verbose=0)
    later = tmp_path / "later.secret.npz"
    again.save_run(later)
    with pytest.raises(ValueError, match="another time"):
        keras.models.load_model(path).resume_run(later)
    assert later.exists()


@pytest.mark.parametrize(
    ("schedule", "steps", "differs"),
    [
        (None, 6, None),
        ([1.0] * 6 + [0.1] * 6, 6, "another noise schedule"),
        (None, 5, "another number of steps"),
    ],
)
def test_a_new_optimizer_goes_on_at_its_place_in_the_schedule(trained, schedule, steps, differs):
    _, path, secret, _ = trained
    loaded = keras.models.load_model(path)
    optimizer = DPSGD(
        0.1, clip_norm=0.5, batch_size=BATCH, noise_multiplier=2.0, noise=BandedMatrix(12, 3),
        noise_schedule=schedule,
    )  # fmt: skip
    loaded.compile(optimizer, "mse")
    optimizer.build(loaded.trainable_variables)
    optimizer.iterations.assign(steps)
    batches = zeros(order_seed=loaded.resume_run(secret))
    if differs is None:
        loaded.fit(batches, verbose=0)
        assert loaded.ledger.steps == 9 and len(loaded.ledger.segments) == 1
    else:
        with pytest.raises(ValueError, match=differs):
            loaded.fit(batches, verbose=0)
        assert loaded.ledger.steps == 6


@pytest.mark.parametrize("change", ["data", "noise", "clip_norm", "sampling"])
def test_refuses_to_go_on_otherwise(trained, change):
    _, path, secret, batches = trained
    loaded = keras.models.load_model(path)
    if change == "noise":
        loaded.compile(compiled(BandedMatrix(12, 2)).optimizer, "mse")
    if change == "clip_norm":
        optimizer = DPSGD(
            0.1, clip_norm=1.0, batch_size=BATCH, noise_multiplier=2.0, noise=BandedMatrix(12, 3)
        )
        loaded.compile(optimizer, "mse")
    order_seed = loaded.resume_run(secret)
    kwargs = {"adjacency": "zero_out"} if change == "sampling" else {}
    again = zeros(order_seed=None if change == "data" else order_seed, **kwargs)
    with pytest.raises(ValueError, match="had another"):
        loaded.fit(again, verbose=0)
    assert loaded.ledger.steps == 6
    if change == "data":  # a second try may be right
        loaded.fit(batches, verbose=0)
        assert loaded.ledger.steps == 9 and len(loaded.ledger.segments) == 1
    else:  # or a new run
        loaded.compile(compiled(BandedMatrix(12, 3)).optimizer, "mse")
        loaded.fit(batches, verbose=0)
        assert loaded.ledger.steps == 9


def test_errors(trained, tmp_path):
    model, path, secret, batches = trained
    with pytest.raises(ValueError, match="no run to save"):
        model.save_run(tmp_path / "other.secret.npz")
    independent = compiled("gaussian")
    independent.fit(batches, verbose=0)
    with pytest.raises(ValueError, match="no run to save"):
        independent.save_run(tmp_path / "other.secret.npz")
    model.fit(batches, verbose=0)
    with pytest.raises(ValueError, match=r"\.secret\.npz"):
        model.save_run(tmp_path / "run.npz")
    with pytest.raises(FileExistsError):
        model.save_run(secret)
    assert model.ledger.current is not None  # nothing was handed over
    within = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: model.save_run(tmp_path / "other.secret.npz")
    )
    with pytest.raises(ValueError, match="broke off after 1 steps"):
        model.fit(batches, verbose=0, callbacks=[within])
    np.savez(tmp_path / "no.secret.npz", header=np.array(["?"]))
    with pytest.raises(ValueError, match="no file of DPModel.save_run"):
        model.resume_run(tmp_path / "no.secret.npz")


def test_a_disk_that_is_full_leaves_no_half_a_file(monkeypatch, tmp_path):
    model = compiled(BandedMatrix(12, 3))
    model.fit(zeros(), verbose=0)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        model.save_run(tmp_path / "run.secret.npz")
    assert not list(tmp_path.iterdir()) and model.ledger.current is not None


def test_cyclic_groups_go_on_too(tmp_path):
    x = np.arange(float(ROWS))[:, None].astype("float32")
    model = compiled(BandedMatrix(12, 3), 1, batch_size=4)
    batches = dp.data.cyclic_poisson((x, x), 4, 3)
    model.fit(batches, verbose=0)
    model.save(tmp_path / "model.keras")
    model.save_run(tmp_path / "run.secret.npz")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    order_seed = loaded.resume_run(tmp_path / "run.secret.npz")
    loaded.fit(dp.data.cyclic_poisson((x, x), 4, 3, order_seed=order_seed), verbose=0)
    sampling = Sampling.cyclic_poisson(ROWS, 4, 3)
    whole = dp.accounting.epsilon(loaded.optimizer, sampling, 12, 1e-3)
    assert loaded.ledger.epsilon(1e-3) == pytest.approx(whole)
