"""The papers' claims at length: the tasks can be learned, and the verdict says what was seen."""

import dataclasses
import pathlib
import re
import sys

import keras
import numpy as np
import pytest

import dp_keras_opt as dp
from tests.helpers.page_tables import cells, mean_and_error, scores

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "papers")]

import at_length  # noqa: E402
import example_data  # noqa: E402

LINE = '{:08d} {:02d} n 02 {} 0 other 0 {:03d} {}| what {} is; "an example"\n'


@pytest.fixture
def nouns(tmp_path):
    """Seven nouns: 1 is above all, 2 and 3 below it, 4 and 5 below 2, 6 below 5, 7 below 3, 4."""
    above = {1: [], 2: [1], 3: [1], 4: [2], 5: [2], 6: [5], 7: [3, 4]}
    lines = ["  1 a licence\n"]
    for place, parents in above.items():
        kinds = ["@"] * len(parents)
        if place == 7:
            kinds[1] = "@i"
        pointers = "".join(
            f"{kind} {p:08d} n 0000 " for kind, p in zip(kinds, parents, strict=True)
        )
        pointers += "~ 00000009 n 0000 "  # of another kind
        count = len(parents) + 1
        lines.append(LINE.format(place, 3 + place, f"noun{place}", count, pointers, place))
    path = tmp_path / "data.noun"
    path.write_text("".join(lines), encoding="utf-8")
    return path


def test_branches_hold_all_that_is_below(nouns):
    definitions, members = example_data.branches(3, nouns, largest=0.6)
    assert definitions[3] == "what 4 is"
    below = {frozenset(np.flatnonzero(column) + 1) for column in members.T}
    # 1 is above six of seven, too many; 3, 4 and 5 have one each, of which two are taken.
    assert frozenset({4, 5, 6, 7}) in below
    assert below - {frozenset({4, 5, 6, 7})} <= {frozenset({7}), frozenset({6})}


def made_up_pictures():
    """Bright above, or below."""
    y = np.arange(6_800) % 2
    x = np.zeros((len(y), 28, 28, 1), np.float32)
    x[y == 0, :14], x[y == 1, 14:] = 1.0, 1.0
    return (x[:6_600], np.int32(y[:6_600])), (x[6_600:], np.int32(y[6_600:]))


def made_up_branches(count):
    """Two words, each of a branch of its own."""
    which = np.arange(20_600) % 2
    members = np.zeros((len(which), count), np.float32)
    members[np.arange(len(which)), which] = 1.0
    return np.array(["a hot thing", "a cold thing"])[which], members


def made_up_sentences():
    """Of one kind a word more; words come more than once."""
    which = np.arange(24_855) % 2
    return np.array(["he said he said", "he said he wrote"])[which], np.int32(which)


@pytest.fixture
def made_up(monkeypatch):
    monkeypatch.setattr(at_length, "fashion", made_up_pictures)
    monkeypatch.setattr(at_length, "branches", made_up_branches)
    monkeypatch.setattr(at_length, "testaments", made_up_sentences)
    monkeypatch.setattr(at_length, "prose", lambda: "abcdefgh" * 6_000)
    monkeypatch.setattr(at_length, "TAGS", 5)


def trained(make, name, values, steps, **changes):
    task = dataclasses.replace(make(), steps=steps, batch_size=100, **changes)
    model = dp.tuning.runs.train(task, dp.tuning.get(name), values, 50.0, 1e-5)
    return dp.tuning.runs.score(task, model, task.test)


@pytest.mark.parametrize("name", ["cnn", "vit", "pretrained"])
def test_pictures_can_be_told_apart(made_up, name):
    make = at_length.filtered().tasks[name]
    assert trained(make, "DPSGD", {"learning_rate": 1.0}, 40) > 0.9


def test_branches_can_be_told_apart(made_up):
    before = trained(at_length.tags, "DPSGD", {"learning_rate": 1e-6}, 1)
    after = trained(at_length.tags, "DPSGD", {"learning_rate": 20.0}, 60, clip_norm=1.0)
    assert after < 0.7 * before


def test_sentences_can_be_told_apart_by_a_logistic_regression(made_up):
    task = at_length.sentences()
    assert len(task.train[1]) == 340 * 64
    model = task.build()
    assert model.count_params() == 10_001
    table = np.zeros((10_001, 1), np.float32)
    table[:5, 0], table[10_000] = [9.0, 0.5, 0.25, -1.0, 2.0], 4.0  # 0 is no word
    model.set_weights([table])
    for row, logit in zip(task.test[0][:20], model.predict(task.test[0][:20]), strict=True):
        words = set(row) - {0}  # each once, and the one that is in all
        assert len(words) in (3, 4)
        assert logit == sum(table[word, 0] for word in words)
    short = dataclasses.replace(task, steps=60, batch_size=100, steps_per_execution=1)
    values = {"learning_rate": 3.0, "clip_norm": 1.0}
    trained = dp.tuning.runs.train(short, at_length.logistic().candidates[0], values, 50.0, 1e-5)
    assert dp.tuning.runs.score(short, trained, short.test) > 0.95


def test_the_transformer_has_a_million_weights():
    assert 0.9e6 < at_length.large_transformer().count_params() < 1.1e6


def test_characters_can_be_predicted(made_up, monkeypatch):
    monkeypatch.setattr(at_length, "large_transformer", lambda: small_transformer())
    loss = trained(at_length.characters, "DPAdam", {"learning_rate": 0.02}, 40)
    assert loss < 0.7 * np.log(at_length.language_model.VOCABULARY)


def small_transformer():
    return BUILD(width=20, depth=1, heads=2)


BUILD = at_length.large_transformer


def test_the_start_of_pretrained_models_is_that_of_the_digits(made_up):
    model = at_length.filtered().tasks["pretrained"]().build()
    for found, expected in zip(model.get_weights(), at_length.pretrained(), strict=False):
        np.testing.assert_array_equal(found, expected)
    keras.utils.set_random_seed(1)
    fresh = at_length.classifier(at_length.doppler.small_cnn).get_weights()
    assert any(
        np.abs(a - b).max() > 0.01 for a, b in zip(at_length.pretrained(), fresh, strict=False)
    )


def test_noise_follows_the_rounded_step_sizes():
    """σ_t ∝ η_t^(−1/2), up to half a step of the rounding."""
    plain, adp = at_length.uneven().candidates
    run = dp.tuning.RunInfo(steps=500, batch_size=100, clip_norm=1.0)
    optimizer = adp.make(run, learning_rate=2.0)
    found = np.log(optimizer.noise_schedule.alphas(0, 500))
    rates = np.array([float(optimizer._learning_rate(t)) for t in range(500)])
    exact = -0.5 * np.log(rates)
    spread = (found - exact) - np.mean(found - exact)
    assert np.abs(spread).max() < 0.15
    assert np.ptp(found) > 0.5  # they do differ
    assert np.ptp(plain.make(run, learning_rate=2.0).noise_schedule.alphas(0, 500)) == 0


def test_the_budget_of_delayed_is_what_the_papers_noise_costs(made_up):
    experiment = at_length.delayed()
    task = at_length.tags()
    (epsilon,) = experiment.epsilons(task)
    optimizer = dp.optimizers.DPSGD(clip_norm=1.0, batch_size=64)
    sampling = dp.accounting.Sampling.poisson(len(task.train[1]), 64)
    sigma = dp.accounting.calibrate(optimizer, sampling, 10_000, epsilon, 1e-6)
    np.testing.assert_allclose(sigma, 1.0, rtol=1e-3)


def test_fewer_steps_at_the_same_noise_have_a_smaller_budget(made_up, tmp_path, monkeypatch):
    experiment = at_length.delayed()
    few = at_length.shortened(experiment, 40).tasks["tags"]()
    assert few.steps == 40
    assert few.batch_size == experiment.tasks["tags"]().batch_size == 64
    (epsilon,) = experiment.epsilons(few)
    assert epsilon < 0.8 * experiment.epsilons(experiment.tasks["tags"]())[0]
    seen = {}
    monkeypatch.setattr(at_length, "compared", lambda name, e, _: seen.update({name: e}) or {})
    monkeypatch.setattr(at_length.report, "write", lambda *_: None)
    arguments = ["at_length.py", "delayed", "--steps", "40", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    at_length.main()
    assert seen["delayed"].tasks["tags"]().steps == 40


def test_the_verdict_needs_two_standard_errors(tmp_path):
    rows = [
        {"candidate": name, "epsilon": 3.0, "score": score, "standard_error": 0.01, "values": {},
         "scores": []}
        for name, score in [("a", 0.90), ("b", 0.80), ("c", 0.89)]
    ]  # fmt: skip
    found = {"task": dp.tuning.Comparison(rows, higher_is_better=True)}
    text = at_length.verdict(found, [("a", "b"), ("a", "c"), ("b", "c")])
    assert "a better than b: seen (+0.1000 ± 0.0141)" in text
    assert "a better than c: not told apart" in text
    assert "b better than c: contradicted" in text
    lower = {"task": dp.tuning.Comparison(rows, higher_is_better=False)}
    assert "a better than b: contradicted" in at_length.verdict(lower, [("a", "b")])


def test_a_comparison_goes_on(made_up, tmp_path, monkeypatch, capsys):
    arguments = ["filtered", "--quick", "--tasks", "cnn", "--epsilons", "3"]
    monkeypatch.setattr(sys, "argv", ["at_length.py", *arguments, "--output", str(tmp_path)])
    at_length.main()
    first = (tmp_path / "filtered-cnn-quick.csv").read_text(encoding="utf-8")
    at_length.main()
    assert (tmp_path / "filtered-cnn-quick.csv").read_text(encoding="utf-8") == first
    written = (tmp_path / "filtered-quick.md").read_text(encoding="utf-8")
    assert "DPSGD, filter" in written
    there = re.search(r"cnn, DPSGD: ε = 3 here is ([\d.]+) by RDP", written)
    assert 3.0 < float(there.group(1)) < 12.0


def test_all_experiments_without_a_name_and_an_unknown_one(monkeypatch, tmp_path, capsys):
    ran = []
    monkeypatch.setattr(at_length, "compared", lambda name, *_: ran.append(name) or {})
    monkeypatch.setattr(at_length.report, "write", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["at_length.py", "--output", str(tmp_path)])
    at_length.main()
    assert ran == list(at_length.EXPERIMENTS)
    for arguments, said in ((["filtred"], "'filtred'"), (["filtered", "--seed", "1"], "--seeds")):
        monkeypatch.setattr(sys, "argv", ["at_length.py", *arguments])
        with pytest.raises(SystemExit):
            at_length.main()
        assert said in capsys.readouterr().err


# The tables of the page.

PAGE = EXAMPLES.parent / "docs" / "reference" / "papers.md"
RUNS = sorted(PAGE.with_suffix("").glob("*.csv"))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_the_tables_and_verdicts_are_those_of_the_runs(path):
    page = PAGE.read_text(encoding="utf-8")
    means = {key: mean_and_error(values) for key, values in scores(path).items()}
    shown = cells(page, path.stem)
    assert shown == {key: f"{mean:.4f} ± {error:.4f}" for key, (mean, error) in means.items()}
    rows = [
        {"candidate": name, "epsilon": epsilon, "score": mean, "standard_error": error,
         "values": {}, "scores": []}
        for (name, epsilon), (mean, error) in means.items()
    ]  # fmt: skip
    name, task = path.stem.split("-")
    comparison = dp.tuning.Comparison(rows, higher_is_better=name not in ("delayed", "scaled"))
    said = at_length.verdict({task: comparison}, at_length.EXPERIMENTS[name]().order)
    for line in said.strip().splitlines():
        assert line.removeprefix("- ").removeprefix(f"{task}, ") in page, line


def test_there_are_tables():
    found = {path.stem for path in RUNS}
    assert found == {
        *("filtered-cnn", "filtered-pretrained", "filtered-vit"),
        *("logistic-testaments", "scaled-characters", "uneven-cnn"),
    }
