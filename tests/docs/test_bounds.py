"""What bounds of each weight's own could save: by the formula, on made-up data, and on the page."""

import csv
import json
import pathlib
import sys

import keras
import numpy as np
import pytest

import dp_keras_opt as dp
from tests.helpers.examples import rows_of

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples" / "papers")]

import bounds  # noqa: E402


def least_noise(variances):
    """Of all b with Σ s/b² = 1, the least Σ b²: by steps on log b, projected."""
    log_b = np.zeros(len(variances))
    for _ in range(4_000):
        b = np.exp(log_b)
        b *= np.sqrt(np.sum(variances / b**2))
        gradient = 2 * b**2 - np.sum(b**2) * 2 * variances / b**2
        log_b = np.log(b) - 0.05 * gradient / np.sum(b**2)
    return np.sum(b**2)


def test_it_is_one_bound_over_the_best():
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(500, 6)) * np.geomspace(0.1, 1, 6) + 3.0
    variances = gradients.var(axis=0)
    one = 6 * np.sum(variances)  # b² = Σ s for all six
    np.testing.assert_allclose(bounds.saving(gradients), one / least_noise(variances), rtol=1e-6)
    assert bounds.saving(gradients[:, [2, 2, 2]]) == pytest.approx(1.0)


def test_the_script_on_made_up_data(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(400, 3)).astype("float32"), rng.normal(size=(400, 1)).astype("float32")

    def task():
        def build():
            return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

        return dp.tuning.Task(build, (x, y), (x, y), "mse", batch_size=100, steps=2)

    for name in bounds.TASKS:
        monkeypatch.setitem(bounds.choosing.EVERY, name, task)
    monkeypatch.setattr(sys, "argv", ["bounds.py", "--quick", "--output", str(tmp_path)])
    bounds.main()
    with open(tmp_path / "bounds-quick.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(r["task"], r["at"]) for r in rows] == [
        (name, at) for name in bounds.TASKS for at in ("start", "end")
    ]
    assert all(float(r["test"]) >= 1 for r in rows)


@pytest.mark.parametrize("name", bounds.TASKS)
def test_the_rates_are_those_of_the_page(name):
    path = ROOT / "docs" / "explanation" / "geometries" / f"others-{name}.csv"
    found = {
        json.loads(row["values"])["learning_rate"]
        for row in rows_of(path)
        if (row["part"], row["candidate"], float(row["epsilon"])) == ("test", "DPSGD, momentum", 3)
    }
    assert found == {bounds.TASKS[name]}


def test_the_table_is_that_of_the_runs():
    docs = ROOT / "docs" / "explanation"
    with open(docs / "geometries" / "bounds.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = {name: [r["test"] for r in rows if r["task"] == name] for name in bounds.TASKS}
    assert len(rows) == 2 * len(found) and rows[0]["at"] == "start"
    page = (docs / "geometries.md").read_text(encoding="utf-8")
    _, table = page.split("<!-- bounds -->\n\n")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[:4]]
    assert [line[1:] for line in (lines[0], *lines[2:])] == [
        list(found), *(list(part) for part in zip(*found.values(), strict=True))
    ]  # fmt: skip
