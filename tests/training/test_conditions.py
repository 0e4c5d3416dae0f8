"""What a guarantee rests on besides: known seeds, and somebody's word for the sampling."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.accounting.segment import CONDITIONS

N, B, DELTA = 40, 8, 1e-3
X = np.random.default_rng(0).normal(size=(N, 3)).astype("float32")
SEEDED = pytest.mark.filterwarnings("ignore:.*seed")


def model_of(**kwargs):
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
    optimizer = dp.optimizers.DPSGD(
        0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=B, **kwargs
    )
    model.compile(optimizer, "mse")
    return model


def drawn(**kwargs):
    return dp.data.poisson_batches((X, X[:, :1]), B, **kwargs)


def own():
    dataset = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).shuffle(N).batch(B)
    return dp.data.assume_sampling(dataset, dp.accounting.Sampling.poisson(N, B))


def said(text):
    """The names of the conditions of which a statement speaks."""
    text = " ".join(text.split())
    return [name for name, words in CONDITIONS.items() if words in text]


CASES = {
    "none": (lambda: model_of(), drawn, []),
    "noise": (lambda: model_of(seed=1), drawn, ["noise seed"]),
    "batches": (lambda: model_of(), lambda: drawn(seed=2), ["batch seed"]),
    "both": (lambda: model_of(seed=1), lambda: drawn(seed=2), ["noise seed", "batch seed"]),
    "own batches": (lambda: model_of(), own, ["stated sampling"]),
}


@SEEDED
@pytest.mark.parametrize("case", CASES)
def test_the_statement_says_on_what_it_rests(case, tmp_path):
    make, data, expected = CASES[case]
    model, report = make(), dp.callbacks.PrivacyReport(delta=DELTA)
    model.fit(data(), verbose=0, callbacks=[report])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for text in (report.statement(), model.statement(DELTA), loaded.statement(DELTA)):
        assert said(text) == expected
        is_known = any(name.endswith("seed") for name in expected)
        assert ("against those who do not know the" in " ".join(text.split())) == is_known
    dp.serving.export(model, tmp_path / "1", report)
    card = json.loads((tmp_path / "1" / "assets.extra" / "model_card.json").read_text())
    assert [each["conditions"] for each in card["privacy"]["guarantees"]] == [expected]


@SEEDED
def test_what_one_fit_rests_on_stays_in_the_statement():
    model = model_of()
    model.fit(drawn(seed=2), verbose=0)
    model.fit(drawn(), verbose=0)
    assert said(model.statement(DELTA)) == ["batch seed"]
    assert [segment.conditions for segment in model.ledger.segments] == [("batch seed",), ()]


def test_an_own_loop_on_a_stated_sampling():
    model = model_of()
    model.sampling = dp.accounting.Sampling.poisson(N, B)
    model.train_on_batch(X[:B], X[:B, :1])
    assert said(model.statement(DELTA)) == ["stated sampling"]


@SEEDED
def test_ledgers_keep_it():
    model = model_of(seed=1)
    model.fit(drawn(), verbose=0)
    again = dp.accounting.Ledger.from_json(model.ledger.to_json())
    assert said(again.statement(DELTA)) == ["noise seed"]


def test_a_loaded_model_is_exported_with_a_new_report(tmp_path):
    model = model_of()
    model.fit(drawn(), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    dp.serving.export(loaded, tmp_path / "1", dp.callbacks.PrivacyReport(delta=DELTA))
    text = (tmp_path / "1" / "assets.extra" / "privacy_statement.txt").read_text()
    assert text.strip() == model.statement(DELTA).strip()
    with pytest.raises(ValueError, match="nothing to state yet"):
        dp.serving.export(model_of(), tmp_path / "2", dp.callbacks.PrivacyReport(delta=DELTA))


def test_a_clone_does_not_say_that_nothing_was_released():
    model = model_of()
    model.fit(drawn(), verbose=0)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    assert "What the weights were trained on before" in " ".join(clone.statement(DELTA).split())
