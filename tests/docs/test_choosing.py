"""The page on choosing says what the results beside it say, and the experiment runs."""

import collections
import dataclasses
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests.helpers.examples import imported, rows_of
from tests.helpers.page_tables import (
    BY_PLANNED_NOISE,
    best_of,
    cells,
    columns,
    compared,
    level_with_the_best,
    mean_and_error,
    scores,
)

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how_to" / "choosing.md").read_text(encoding="utf-8")
FOLDER = ROOT / "docs" / "how_to" / "choosing"
SCREENED, TUNED = (sorted(FOLDER.glob(f"{part}-*.csv")) for part in ("results", "tuned"))


@pytest.mark.parametrize("path", [*SCREENED, *TUNED], ids=lambda path: path.stem)
def test_the_tables_are_those_of_the_results(path):
    task = path.stem.removeprefix("results-")
    shown = {key: cell.strip("*") for key, cell in cells(PAGE, task).items()}
    expected = scores(path)
    assert set(shown) == set(expected)
    for key, values in expected.items():
        mean, error = mean_and_error(values)
        assert shown[key] == f"{mean:.4f} ± {error:.4f}", key


def test_there_are_four_kinds_of_task():
    assert len(SCREENED) >= 4 and len(TUNED) >= 4


@pytest.mark.parametrize("path", TUNED, ids=lambda path: path.stem)
def test_each_is_tuned_at_each_epsilon_and_the_best_are_bold(path):
    rows = rows_of(path)
    for key, values in scores(path).items():
        tried = [r for r in rows if (r["candidate"], float(r["epsilon"])) == key]
        tried = [r for r in tried if r["part"] == "validation"]
        hyperparameters = len(json.loads(tried[0]["values"]))
        assert len(tried) >= 8 * hyperparameters and len(values) == 3, key
        best = best_of(path)(tried, key=lambda r: float(r["score"]))
        judged = {r["values"] for r in rows if r["part"] == "test"
                  and (r["candidate"], float(r["epsilon"])) == key}  # fmt: skip
        assert judged == {best["values"]}, key
    shown = cells(PAGE, path.stem)
    for epsilon, column in columns(path).items():
        bold = {k for k, cell in shown.items() if k[1] == epsilon and cell.startswith("**")}
        assert bold == level_with_the_best(column, best_of(path)), epsilon


def test_how_often_each_leads():
    leads, count = collections.Counter(), 0
    for path in TUNED:
        for column in columns(path).values():
            leads.update(name for name, _ in level_with_the_best(column, best_of(path)))
            count += 1
    nesterov, average, plain = (
        leads[f"{name}, planned noise{more}"]
        for name, more in (("DPNesterov", ""), ("DPSGD, momentum", ", average"),
                           ("DPSGD, momentum", ""))
    )  # fmt: skip
    assert leads.most_common(2)[1][1] == min(nesterov, average)
    assert (
        f"in {nesterov} of the {count} columns below, momentum with planned noise and the "
        f"average in {average}, the same momentum without the average in {plain}."
    ) in " ".join(PAGE.split())


def test_how_often_planned_noise_helps():
    signs = [sign for path in TUNED for sign in compared(path, BY_PLANNED_NOISE)]
    assert min(signs) == 0
    assert (
        f"helped these three in {signs.count(1)} of {len(signs)} cells, was level in "
        f"{signs.count(0)}, and worse in none."
    ) in " ".join(PAGE.split())


def test_the_experiment_runs(tmp_path):
    options = ["--quick", "--tasks", "tabular", "--epsilons", "3", "--output", str(tmp_path)]
    options += ["--candidates", "DPSGD", "DPAdam, banded noise"]
    command = [sys.executable, str(ROOT / "examples" / "choosing.py"), *options]
    subprocess.run(command, check=True, cwd=tmp_path)
    assert len(scores(tmp_path / "results-tabular-quick.csv")) == 2
    assert (tmp_path / "tabular.png").stat().st_size > 1000


@pytest.fixture
def script(monkeypatch):
    return imported("choosing", monkeypatch)


def test_a_long_task_differs_in_its_steps_only(script):
    short, long = script.EVERY["tabular"](), script.EVERY["tabular-long"]()
    assert (short.steps, long.steps) == (200, 2_000)
    assert long.batch_size == short.batch_size
    np.testing.assert_array_equal(long.train[0], short.train[0])


def made_up_nouns():
    """Definitions of two topics, told apart by a word."""
    topics = np.arange(24_400) % 2
    return np.array(["a hot thing", "a cold thing"])[topics], np.int32(topics)


def made_up_incomes(table, count):
    """Whose income is high is told by the age."""
    generator = np.random.default_rng(count)
    columns = {
        name: np.float32(generator.uniform(min(knots), max(knots), count))
        for name, knots in table.numbers.items()
    }
    for name, values in table.categories.items():
        columns[name] = generator.choice(values.split(", "), count)
    return columns, np.int32(columns["age"] > 45)


@pytest.mark.parametrize("name", ["definitions", "incomes"])
def test_tasks_of_other_scripts_can_be_learned(script, name, monkeypatch):
    import tables

    adult = tables.TABLES["adult"]
    rows = made_up_incomes(adult, 4_600), made_up_incomes(adult, 500)
    monkeypatch.setitem(tables.TABLES, "adult", dataclasses.replace(adult, load=lambda: rows))
    monkeypatch.setattr(script, "nouns", made_up_nouns)
    task = script.EVERY[name]()
    task = dataclasses.replace(task, steps=60, batch_size=200)
    model = script.dp.tuning.runs.train(
        task, script.dp.tuning.CANDIDATES["DPSGD, momentum"], {"learning_rate": 1.0}, 8.0, 1e-5
    )
    assert script.dp.tuning.runs.score(task, model, task.test) > 0.9
    sizes = [len(part[1]) for part in (task.train, task.validation, task.test)]
    assert sizes == {"definitions": [400, 8_000, 16_000], "incomes": [600, 4_000, 500]}[name]
