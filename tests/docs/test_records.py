"""The page of records: its tables are those of the runs, and Fashion-MNIST's script goes on."""

import sys

import numpy as np
import pytest

from tests.helpers.examples import RECORDS, clothes, imported, page_of_records, rows_of


@pytest.fixture
def script(request, monkeypatch):
    return imported(request.param, monkeypatch)


@pytest.fixture
def small(script, monkeypatch):
    """The script with little of everything."""
    monkeypatch.setattr(script, "fashion", lambda: (clothes(400, 0), clothes(100, 2)))
    for name, value in {"FILTERS": 8, "DRAWN": 60, "FEATURES": 40, "PUBLIC": 60}.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(script, "ABLATIONS", {"without momentum": {"momentum": 0.0}})
    caches = script.features, script.pictures_as_features
    for cached in caches:
        cached.cache_clear()
    yield script
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize("script", ["fashion"], indirect=True)
def test_features_have_length_1_and_do_not_tell_mirror_images_apart(small):
    x, _ = clothes(5, 7)
    model = small.features("all")
    found = model.predict(x, verbose=0)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    mirrored = model.predict(x[:, :, ::-1], verbose=0)
    np.testing.assert_allclose(mirrored, found, atol=2e-3)
    assert not model.trainable_weights


@pytest.mark.parametrize("script", ["fashion"], indirect=True)
def test_the_whitening_makes_large_components_alike_and_no_other_larger(script, monkeypatch):
    monkeypatch.setattr(script, "FEATURES", 30)
    rng = np.random.default_rng(0)
    of_drawn = rng.normal(size=(4000, 50)) * np.geomspace(30, 0.01, 50) + 3
    matrix, shift = script.whitening(of_drawn)
    variances = (of_drawn @ matrix + shift).var(axis=0)[::-1]
    assert variances[0] == pytest.approx(1, abs=0.05)
    assert np.all(np.diff(variances) < 1e-9) and variances[-1] < 0.1
    np.testing.assert_allclose((of_drawn @ matrix + shift).mean(axis=0), 0, atol=1e-6)


@pytest.mark.parametrize("script", ["fashion"], indirect=True)
def test_a_trial_on_public_rows_has_the_noise_of_the_private_run(script, monkeypatch):
    """Std of the noise in the mean gradient, in units of the clip norm: σ/B."""
    rows = np.eye(8, dtype=np.float32)[np.arange(200) % 8], np.int32(np.arange(200) % 8)
    values = {"learning_rate": 4.0, "clip_norm": 0.05, "steps": 2}
    of_trial = script.train(rows, 2.7, values, 0, stands_for=5000).optimizer
    sigma = script.records.noise(5000, 350, 2, 2.7, script.DELTA)
    assert of_trial.noise_multiplier / 14 == pytest.approx(sigma / 350)
    private = script.train(rows, 2.7, values, 0)
    assert private.ledger.epsilon(script.DELTA) == pytest.approx(2.7, abs=0.02)


@pytest.mark.parametrize("script", ["fashion"], indirect=True)
def test_runs_go_on_and_write_their_files(small, tmp_path, monkeypatch):
    monkeypatch.setattr(small, "SPACE", small.SPACE | {"steps": (5, 10)})
    options = ["--output", str(tmp_path), "--epsilons", "2.7", "8", "--trials", "2"]
    monkeypatch.setattr(sys, "argv", ["fashion.py", *options, "--seeds", "2"])
    small.main()
    kept = {path: path.read_bytes() for path in tmp_path.glob("*.csv")}
    assert {path.name for path in kept} == {"results.csv", "trials.csv", "trials-test.csv"}
    small.main()  # nothing is left to run
    assert {path: path.read_bytes() for path in tmp_path.glob("*.csv")} == kept
    rows = rows_of(tmp_path / "results.csv")
    assert len(rows) == 2 * 2 + 2 * 2 + 2
    for row in rows:
        assert float(row["epsilon"]) - 0.05 < float(row["spent"]) <= float(row["epsilon"])
    text = (tmp_path / "fashion.md").read_text(encoding="utf-8")
    assert "| without momentum |" in text and "chosen on the test set" in text
    assert (tmp_path / "records_fashion.png").stat().st_size > 1000
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
