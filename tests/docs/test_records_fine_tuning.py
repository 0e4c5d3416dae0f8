"""The record of fine-tuning: what is pre-trained on, what each way trains, and that runs go on."""

import re
import sys

import numpy as np
import pytest

from tests.helpers.examples import RECORDS, clothes, imported, page_of_records, rows_of

LAYERS = {"attention_0", "expand_0", "back_0", "patches", "head"}  # with a kernel


@pytest.fixture
def script(monkeypatch):
    """The script with little of everything."""
    pytest.importorskip("PIL")
    module = imported("fine_tuning", monkeypatch)
    small = {"WIDTH": 8, "BLOCKS": 1, "RANK": 1, "GLYPHS": 20, "EPOCHS": 2, "STEPS": 2}
    for name, value in small.items():
        monkeypatch.setattr(module, name, value)
    return module


@pytest.fixture
def weights(script, tmp_path):
    path = tmp_path / "glyphs.weights.h5"
    script.transformer().save_weights(path)
    return path


def trainable(model):
    """Paths of what is trained, with sizes."""
    return {weight.path: int(np.prod(weight.shape)) for weight in model.trainable_weights}


def values_of(model):
    return {weight.path: weight.numpy() for weight in model.weights}


def test_a_patch_is_a_square_of_the_picture(script):
    import keras

    x = np.arange(2 * 784, dtype=np.float32).reshape(2, 28, 28, 1)
    body = script.transformer()
    patches = keras.Model(body.input, body.get_layer("patches").input).predict(x, verbose=0)
    np.testing.assert_array_equal(patches[1, 6].reshape(7, 7), x[1, 7:14, 14:21, 0])


def test_what_each_way_trains(script, weights):
    full, lora, head, scratch = (script.classifier(way, weights) for way in script.METHODS)
    assert set(trainable(full)) == {weight.path for weight in full.weights}
    assert trainable(head) == {"head/kernel": 16 * 8 * 10, "head/bias": 10}
    assert trainable(scratch) == trainable(full)
    kept = values_of(full)
    for path, value in values_of(head).items():
        np.testing.assert_array_equal(value, kept[path])
    assert not np.array_equal(values_of(scratch)["patches/kernel"], kept["patches/kernel"])

    names = trainable(lora)
    assert {path.split("/")[0] for path in names} == LAYERS
    kernels = {path for path in names if path.endswith("kernel")}
    assert kernels == {"head/kernel"}
    of_lora = [path for path in names if "lora" in path]
    assert len(of_lora) == 2 * 7  # patches, four of the attention, two dense
    x, _ = clothes(3, 0)  # a change that is zero
    np.testing.assert_allclose(lora.predict(x, verbose=0), full.predict(x, verbose=0), atol=1e-6)


@pytest.mark.parametrize("way", [1, 2])
def test_what_is_frozen_stays_and_all_else_moves(script, weights, way):
    method = script.METHODS[way]
    begun = values_of(script.classifier(method, weights))
    rows = clothes(60, 3)
    model = script.train(method, weights, rows, 8.0, {"learning_rate": 0.01}, 0)
    trained = set(trainable(model))
    for path, value in values_of(model).items():
        moved = path not in begun or not np.array_equal(value, begun[path])
        assert moved == (path in trained), path
    assert model.ledger.epsilon(script.DELTA) == pytest.approx(8, abs=0.05)


def test_a_trial_on_public_rows_has_the_noise_of_the_private_run(script, weights):
    """Std of the noise in the mean gradient, in units of the clip norm: σ/B."""
    values = {"learning_rate": 0.01}
    model = script.train(script.HEAD, weights, clothes(200, 0), 3.0, values, 0, stands_for=4000)
    sigma = script.records.noise(4000, 300, 2, 3.0, script.DELTA)
    assert model.optimizer.noise_multiplier / 15 == pytest.approx(sigma / 300)


def test_a_quick_run_goes_on_and_writes_its_files(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "fashion", lambda: (clothes(200, 0), clothes(50, 2)))
    monkeypatch.setattr(script, "PUBLIC", 60)
    options = ["--quick", "--output", str(tmp_path), "--methods", script.HEAD]
    monkeypatch.setattr(sys, "argv", ["fine_tuning.py", *options])
    script.main()
    files = [*tmp_path.glob("*.h5"), *(tmp_path / "quick").glob("*.csv")]
    names = {"glyphs.weights.h5", "results.csv", "trials-head-alone.csv"}
    assert {path.name for path in files} == names
    kept = {path: (path.read_bytes(), path.stat().st_mtime) for path in files}
    script.main()  # nothing is left to run
    assert {path: (path.read_bytes(), path.stat().st_mtime) for path in files} == kept
    rows = rows_of(tmp_path / "quick" / "results.csv")
    assert len(rows) == 2
    for row in rows:
        assert row["trained"] == str(16 * 8 * 10 + 10)
        assert 2.95 < float(row["spent"]) <= 3.0
    text = (tmp_path / "quick" / "fine_tuning.md").read_text(encoding="utf-8")
    assert "| head alone |" in text
    assert (tmp_path / "quick" / "records_fine_tuning.png").stat().st_size > 1000


def test_the_tables_of_the_page_are_those_of_the_runs(script):
    text, rows = page_of_records(), rows_of(RECORDS / "fine_tuning-results.csv")
    published = script.records.published_table("fine-tuning")
    assert f"<!-- fine-tuning -->\n\n{script.records.table(rows, 2)}\n" in text
    assert f"<!-- fine-tuning published -->\n\n{published}\n" in text
    for way in script.METHODS:  # as the page's table of what is trained has them
        (trained,) = {int(row["trained"]) for row in rows if row["method"] == way}
        assert re.search(rf"^\| {way} \| .* \| {trained:,} \|$", text, re.M), way
