"""The page of records: its tables are those of the runs, and Fashion-MNIST's script goes on."""

import functools
import sys

import keras
import numpy as np
import pytest

import dp_keras_opt as dp
from tests.helpers.examples import RECORDS, clothes, imported, page_of_records, rows_of


@pytest.fixture
def script(request, monkeypatch):
    return imported(request.param, monkeypatch)


@pytest.fixture
def small(script, monkeypatch):
    """The script with little of everything."""
    monkeypatch.setattr(script, "fashion", lambda: (clothes(400, 0), clothes(100, 2)))
    sizes = {"FILTERS": 8, "DRAWN": 60, "FEATURES": 40, "THINGS": 3, "PICTURES": 20, "EPOCHS": 1}
    training = {"PUBLIC": 60, "FOLDS": 2, "PUBLIC_BATCH": 15, "STEPS": 30, "GROUPS": 2}
    for name, value in (sizes | training).items():
        monkeypatch.setattr(script, name, value)
    kept = "without momentum", "planned noise"
    monkeypatch.setattr(script, "ABLATIONS", {name: script.ABLATIONS[name] for name in kept})
    caches = script.features, script.pictures_as_features
    for cached in caches:
        cached.cache_clear()
    yield script
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize("script", ["fashion"], indirect=True)
@pytest.mark.parametrize("kind", ["all", "no things, no clothes", "not whitened"])
def test_features_have_length_1_and_do_not_tell_mirror_images_apart(small, kind, tmp_path):
    x, _ = clothes(5, 7)
    model = small.features(kind, tmp_path)
    found = model.predict(x, verbose=0)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    mirrored = model.predict(x[:, :, ::-1], verbose=0)
    np.testing.assert_allclose(mirrored, found, atol=2e-3)
    assert not model.trainable_weights


@pytest.mark.parametrize("script", ["fashion"], indirect=True)
def test_what_is_left_out_of_the_features(small, tmp_path):
    of_network = 64 * 16 + 128 * 9
    sizes = {"filters": 8 * 25, "scattering": 81 * 49, "things": of_network, "clothes": of_network}
    for left_out in ([], ["filters"], ["clothes"], ["scattering", "things"]):
        kind = ", ".join(f"no {name}" for name in left_out) or "all"
        size = sum(of_block for name, of_block in sizes.items() if name not in left_out)
        assert small.raw_features(kind, tmp_path).output_shape == (None, size)


@pytest.mark.parametrize("script", ["fashion"], indirect=True)
def test_each_network_sees_its_own_drawings(small):
    things = len(small.kinds_of_things())
    x, kinds = small.things(30, 0)
    assert len(x) == 30 and max(kinds) < things
    x, kinds = small.things_and_clothes(30, 0)
    assert len(x) == 30 and np.mean(kinds >= things) == 0.5
    assert max(kinds) < things + len(small.drawn_clothes.KINDS)


@pytest.mark.parametrize("script", ["fashion"], indirect=True)
def test_the_whitening_makes_large_components_alike_and_no_other_larger(script, monkeypatch):
    monkeypatch.setattr(script, "FEATURES", 30)
    monkeypatch.setattr(script, "DAMPING", 0.3)
    rng = np.random.default_rng(0)
    of_drawn = rng.normal(size=(4000, 50)) * np.geomspace(30, 0.01, 50) + 3
    matrix, shift = script.whitening(of_drawn)
    variances = (of_drawn @ matrix + shift).var(axis=0)[::-1]
    assert variances[0] == pytest.approx(1, abs=0.05)
    assert np.all(np.diff(variances) < 1e-9) and variances[-1] < 0.1
    np.testing.assert_allclose((of_drawn @ matrix + shift).mean(axis=0), 0, atol=1e-6)


@pytest.mark.parametrize("script", ["fashion"], indirect=True)
@pytest.mark.parametrize(("changes", "steps", "size"), [
    ({}, 14, 511),  # an epoch of 14 batches; all 16 steps of trials are whole epochs
    ({"rate": 0.143}, 14, 1022),
    ({"draw": "poisson", "rate": 0.07}, 16, 500),
    ({"draw": "cyclic_poisson", "rate": 0.07, "noise": dp.noise.Planned()}, 16, 500),
    ({"hidden": 3}, 14, 511),
])  # fmt: skip
def test_trials_have_the_noise_and_the_steps_of_the_private_run(
    script, monkeypatch, changes, steps, size
):
    monkeypatch.setattr(script, "STEPS", 16)
    rows = np.eye(8, dtype=np.float32)[np.arange(4000) % 8], np.int32(np.arange(4000) % 8)
    private = script.train(rows, 2.7, {"learning_rate": 4.0}, 0, **changes)
    assert private.ledger.epsilon(script.DELTA) == pytest.approx(2.7, abs=0.02)
    assert int(private.optimizer.iterations) == steps
    trial = script.train(rows, 2.7, {"learning_rate": 4.0}, 0, stands_for=4000, **changes)
    assert int(trial.optimizer.iterations) == 16
    ours, theirs = private.optimizer, trial.optimizer
    assert theirs.batch_size == size
    assert theirs.noise_multiplier / size == pytest.approx(ours.noise_multiplier / ours.batch_size)
    assert theirs.noise.get_config() == ours.noise.get_config()


@pytest.mark.parametrize("script", ["fashion"], indirect=True)
def test_the_hidden_layer_has_length_1_as_its_inputs_have_and_begins_at_zero_logits(script):
    model = script.classifier(50, hidden=64)
    x = np.random.default_rng(0).normal(size=(2000, 50)).astype(np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    units, of_length_1 = (model.layers[place].output for place in (1, 2))
    found = keras.Model(model.input, [units, of_length_1]).predict(x, verbose=0)
    assert np.std(np.arctanh(found[0])) == pytest.approx(1, abs=0.1)
    np.testing.assert_allclose(np.linalg.norm(found[1], axis=1), 1, atol=1e-5)
    assert not np.any(model.predict(x, verbose=0))


@pytest.mark.parametrize("script", ["fashion"], indirect=True)
def test_a_trial_on_public_rows_has_the_noise_of_the_private_run(script, monkeypatch):
    """Std of the noise in the mean gradient, in units of the clip norm: σ/B."""
    monkeypatch.setattr(script, "STEPS", 2)
    rows = np.eye(8, dtype=np.float32)[np.arange(700) % 8], np.int32(np.arange(700) % 8)
    train = functools.partial(script.train, rows, 2.7, {"learning_rate": 4.0}, 0, **script.POISSON)
    of_trial = train(stands_for=50_000).optimizer
    sigma = script.records.noise(50_000, 3500, 2, 2.7, script.DELTA)
    assert of_trial.batch_size == 500
    assert of_trial.noise_multiplier / 500 == pytest.approx(sigma / 3500)
    private = train()
    assert private.ledger.epsilon(script.DELTA) == pytest.approx(2.7, abs=0.02)


@pytest.mark.parametrize("script", ["fashion"], indirect=True)
def test_runs_go_on_and_write_their_files(small, tmp_path, monkeypatch):
    options = ["--output", str(tmp_path), "--epsilons", "2.7", "8", "--trials", "2"]
    monkeypatch.setattr(sys, "argv", ["fashion.py", *options, "--seeds", "2", "--ablations"])
    small.main()
    kept = {path: path.read_bytes() for path in tmp_path.glob("*.csv")}
    drawn = {"trials-Poisson-batches", "trials-test-Poisson-batches", "trials-planned-noise"}
    assert {path.stem for path in kept} == {"results", "trials", "trials-test"} | drawn
    small.main()  # nothing is left to run
    assert {path: path.read_bytes() for path in tmp_path.glob("*.csv")} == kept
    rows = rows_of(tmp_path / "results.csv")
    assert len(rows) == 4 * 2 * 2 + 2 * 2
    for row in rows:
        assert float(row["epsilon"]) - 0.05 < float(row["spent"]) <= float(row["epsilon"])
    text = (tmp_path / "fashion.md").read_text(encoding="utf-8")
    assert "| without momentum |" in text and "chosen on the test set" in text
    assert text.count("| Poisson batches |") == 2
    for name in ("records_fashion.png", "drawn_clothes.png"):
        assert (tmp_path / name).stat().st_size > 1000
    import tensorflow as tf

    served = tf.saved_model.load(tmp_path / "served")
    assert served.serve(clothes(3, 5)[0]).shape == (3, 10)


@pytest.mark.parametrize("script", ["results"], indirect=True)
def test_a_run_is_written_under_the_names_of_the_first(script, tmp_path):
    path = tmp_path / "runs.csv"
    script.completed(path, ("a",), [(1,)], lambda a: {"x": 1, "y": 2})
    script.completed(path, ("a",), [(1,), (2,)], lambda a: {"y": 4, "x": 3})
    assert rows_of(path) == [{"a": "1", "x": "1", "y": "2"}, {"a": "2", "x": "3", "y": "4"}]
    with pytest.raises(ValueError, match="fields not in fieldnames"):
        script.completed(path, ("a",), [(5,)], lambda a: {"z": 1})


@pytest.mark.parametrize("script", ["records"], indirect=True)
def test_the_setting_with_the_best_mean_is_chosen_at_each_epsilon(script, tmp_path):
    scores = {(1.0, 3): (5, 1), (1.0, 4): (2, 2), (8.0, 3): (1, 1), (8.0, 4): (1, 3)}

    def run(epsilon, values, fold):
        return float(scores[epsilon, values["rate"]][fold])

    settings = [{"rate": 3}, {"rate": 4}]
    found = script.chosen(tmp_path / "trials.csv", run, [1.0, 8.0], settings, 2)
    assert found == {1.0: {"rate": 3}, 8.0: {"rate": 4}}
    found = script.chosen(tmp_path / "trials.csv", run, [1.0, 8.0], settings, 2, better=min)
    assert found == {1.0: {"rate": 4}, 8.0: {"rate": 3}}


@pytest.mark.parametrize("script", ["records"], indirect=True)
def test_of_settings_that_are_not_told_apart_the_highest_can_be_chosen(script, tmp_path):
    scores = {1: (80, 90, 85), 3: (80.5, 90, 84), 2: (79, 91, 84.8), 5: (79, 89, 84), 0: (9, 9, 9)}

    def run(epsilon, values, fold):
        return float(scores[values["rate"]][fold])

    settings = [{"rate": rate} for rate in scores]
    arguments = (tmp_path / "trials.csv", run, [1.0], settings, 3)
    assert script.chosen(*arguments) == {1.0: {"rate": 1}}
    # 3 is behind by (-0.5, 0, 1), 0.17 ± 0.44; 5 by 1 at each.
    assert script.chosen(*arguments, highest="rate") == {1.0: {"rate": 3}}


@pytest.mark.parametrize("script", ["records"], indirect=True)
def test_published_figures_say_where_they_are_from(script):
    rows = rows_of(script.HERE / "published.csv")
    assert len({(row["benchmark"], row["method"], row["epsilon"]) for row in rows}) == len(rows)
    for row in rows:
        assert float(row["epsilon"]) > 0 and float(row["score"]) > 0
        assert any(word in row["source"] for word in ("arXiv", "doi", "notebooks", "repository"))


@pytest.mark.parametrize("script", ["fashion"], indirect=True)
def test_the_tables_of_the_page_are_those_of_the_runs(script):
    text = page_of_records()
    rows = rows_of(RECORDS / "fashion.csv")
    ours = [row for row in rows if row["method"] not in script.ABLATIONS]
    assert f"<!-- fashion -->\n\n{script.records.table(ours, 2)}\n" in text
    assert f"<!-- fashion ablation -->\n\n{script.ablation(rows)}\n" in text
    assert f"<!-- fashion published -->\n\n{script.records.published_table('fashion')}\n" in text
    assert f"<!-- adult published -->\n\n{script.records.published_table('adult')}\n" in text
