"""What earlier versions saved loads for all time, with the ε that it had then."""

import json
import pathlib
import shutil

import keras
import numpy as np
import pytest

import dp_keras_opt as dp
from dp_keras_opt.accounting import Ledger

SAVED = pathlib.Path(__file__).parent / "saved_0_1"
LEDGERS = json.loads((SAVED / "ledgers.json").read_text(encoding="utf-8"))
TOLD = json.loads((SAVED / "told.json").read_text(encoding="utf-8"))
DELTA = 1e-5


def near(epsilon):
    """Releases of dp_accounting differ in the last digits."""
    return pytest.approx(epsilon, rel=1e-3)


def examples(n=60):
    x = np.random.default_rng(0).normal(size=(n, 3)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def private_model(optimizer):
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4, activation="tanh", name="hidden")(inputs)
    model = dp.DPModel(inputs, keras.layers.Dense(1, name="top")(hidden))
    model.compile(optimizer, "mse")
    return model


def revived_optimizer():
    config = json.loads((SAVED / "optimizer.json").read_text(encoding="utf-8"))
    return keras.saving.deserialize_keras_object(config)


def check(ledger, told):
    given = told["delta"], told["accountant"]
    assert ledger.epsilon(*given) == near(told["epsilon"])
    assert ledger.epsilon_as_planned(*given) == near(told["epsilon_as_planned"])
    again = Ledger.from_json(ledger.to_json())
    assert again.segments == ledger.segments


@pytest.mark.parametrize("name", LEDGERS)
def test_ledgers(name):
    ledger = Ledger.from_json(json.dumps(LEDGERS[name]))
    check(ledger, TOLD[name])
    kinds = {segment["sampling"]["kind"] for segment in LEDGERS[name]["segments"]}
    assert {segment.sampling.kind for segment in ledger.segments} == kinds
    ledger.merge(Ledger.from_json(json.dumps(LEDGERS[name])))  # the same history, counted once
    assert ledger.epsilon(*list(TOLD[name].values())[:2]) == near(TOLD[name]["epsilon"])


def test_the_ledgers_are_of_every_kind_and_mechanism():
    segments = [segment for ledger in LEDGERS.values() for segment in ledger["segments"]]
    assert {segment["sampling"]["kind"] for segment in segments} == {
        "poisson", "without_replacement", "full", "shuffled", "fixed_order", "cyclic_poisson",
        "shuffled_accounted_as_poisson",
    }  # fmt: skip
    assert {release["mechanism"]["class_name"] for s in segments for release in s["releases"]} == {
        "Gaussian", "Laplace", "BandedMatrix", "SquareRootFactorization", "TreeAggregation",
        "FromMatrix",
    }  # fmt: skip


def test_a_ledger_file_is_read_and_written_on(tmp_path):
    check(Ledger.read(SAVED / "spent.jsonl"), TOLD["spent.jsonl"])
    path = shutil.copy(SAVED / "spent.jsonl", tmp_path)
    ledger = Ledger(path)
    check(ledger, TOLD["spent.jsonl"])
    before, last = ledger.steps, ledger.segments[0]
    ledger.begin(last.releases, last.sampling)
    ledger.reserve(3)
    ledger.close()
    again = Ledger.read(path)
    assert again.steps == before + 3 and again.segments == ledger.segments
    assert pathlib.Path(path).read_bytes().startswith((SAVED / "spent.jsonl").read_bytes())


def test_a_model_is_loaded_and_trained_on():
    model = keras.models.load_model(SAVED / "model.keras")
    assert model.ledger.epsilon(DELTA, "rdp") == near(TOLD["model"]["epsilon"])
    predicted = model.predict(examples(5)[0], verbose=0).ravel()
    np.testing.assert_allclose(predicted, TOLD["model"]["predicted"], rtol=1e-4)
    assert model.optimizer.get_config().keys() == revived_optimizer().get_config().keys()
    model.fit(dp.data.poisson_batches(examples(), 12), epochs=1, verbose=0)
    assert model.ledger.steps == 15
    assert model.ledger.epsilon(DELTA, "rdp") > 1.05 * TOLD["model"]["epsilon"]


def test_weights_bring_their_ledger():
    model = private_model(revived_optimizer())
    model.load_weights(SAVED / "model.weights.h5")
    assert model.ledger.epsilon(DELTA, "rdp") == near(TOLD["model"]["epsilon"])
    predicted = model.predict(examples(5)[0], verbose=0).ravel()
    np.testing.assert_allclose(predicted, TOLD["model"]["predicted"], rtol=1e-4)


def test_a_saved_run_goes_on(tmp_path):
    model = keras.models.load_model(SAVED / "run.keras")
    assert model.ledger.epsilon(DELTA, "rdp") == near(TOLD["run"]["epsilon"])
    order_seed = model.resume_run(shutil.copy(SAVED / "run.secret.npz", tmp_path))
    model.fit(
        dp.data.fixed_order_epochs(examples(), 12, order_seed=order_seed), epochs=1, verbose=0
    )
    (segment,) = model.ledger.segments
    assert segment.steps == TOLD["run"]["steps"] + 5
