"""The page on choosing says what the results beside it say, and the experiment runs."""

import collections
import csv
import dataclasses
import json
import math
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.helpers.examples import imported

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how_to" / "choosing.md").read_text(encoding="utf-8")
FOLDER = ROOT / "docs" / "how_to" / "choosing"
SCREENED, TUNED = (sorted(FOLDER.glob(f"{part}-*.csv")) for part in ("results", "tuned"))


def scores(path):
    """(candidate, ε) -> scores of the runs that judge it."""
    found = collections.defaultdict(list)
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["part"] == "test":
                found[row["candidate"], float(row["epsilon"])].append(float(row["score"]))
    return found


@pytest.mark.parametrize("path", [*SCREENED, *TUNED], ids=lambda path: path.stem)
def test_the_tables_are_those_of_the_results(path):
    task = path.stem.removeprefix("results-")
    section = re.search(rf"^<!-- {task} -->\n\n(.*?)\n\n", PAGE, re.M | re.S).group(1)
    header, _, *lines = section.splitlines()
    epsilons = [float(e) for e in re.findall(r"ε = (\d+)", header)]
    expected = scores(path)
    cells = {}
    for line in lines:
        name, *values = (cell.strip() for cell in line.strip("|").split("|"))
        values = [value.strip("*") for value in values]  # bold
        cells |= {(name, e): v for e, v in zip(epsilons, values, strict=True) if v}
    assert set(cells) == set(expected)
    for key, values in expected.items():
        error = np.std(values, ddof=1) / math.sqrt(len(values))
        assert cells[key] == f"{np.mean(values):.4f} ± {error:.4f}", key


def test_there_are_four_kinds_of_task():
    assert len(SCREENED) >= 4 and len(TUNED) >= 4


@pytest.mark.parametrize("path", TUNED, ids=lambda path: path.stem)
def test_each_is_tuned_at_each_epsilon_and_the_best_are_bold(path):
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    means, lower = {}, path.stem not in ("tuned-clothes", "tuned-incomes")
    for key, values in scores(path).items():
        tried = [r for r in rows if (r["candidate"], float(r["epsilon"])) == key]
        tried = [r for r in tried if r["part"] == "validation"]
        hyperparameters = len(json.loads(tried[0]["values"]))
        assert len(tried) >= 8 * hyperparameters and len(values) == 3, key
        best = (min if lower else max)(tried, key=lambda r: float(r["score"]))
        judged = {r["values"] for r in rows if r["part"] == "test"
                  and (r["candidate"], float(r["epsilon"])) == key}  # fmt: skip
        assert judged == {best["values"]}, key
        means[key] = np.mean(values), np.std(values, ddof=1) / math.sqrt(3)
    table = re.search(rf"^<!-- {path.stem} -->\n\n(.*?)\n\n", PAGE, re.M | re.S).group(1)
    for place, epsilon in enumerate((1.0, 3.0, 8.0), start=1):
        column = {name: value for (name, e), value in means.items() if e == epsilon}
        first, error = (min if lower else max)(column.values())
        near = {n for n, (m, s) in column.items() if abs(m - first) <= 2 * math.hypot(s, error)}
        cells = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
        assert {line[0] for line in cells if line[place].startswith("**")} == near, epsilon


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
