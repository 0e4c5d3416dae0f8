"""The page on choosing says what the results beside it say, and the experiment runs."""

import collections
import csv
import math
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how_to" / "choosing.md").read_text(encoding="utf-8")
RESULTS = sorted((ROOT / "docs" / "how_to" / "choosing").glob("results-*.csv"))


def scores(path):
    """(candidate, ε) -> scores of the runs that judge it."""
    found = collections.defaultdict(list)
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["part"] == "test":
                found[row["candidate"], float(row["epsilon"])].append(float(row["score"]))
    return found


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
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
    assert len(RESULTS) >= 4


def test_the_experiment_runs(tmp_path):
    options = ["--quick", "--tasks", "tabular", "--epsilons", "3", "--output", str(tmp_path)]
    options += ["--candidates", "DPSGD", "DPAdam, banded noise"]
    command = [sys.executable, str(ROOT / "examples" / "choosing.py"), *options]
    subprocess.run(command, check=True, cwd=tmp_path)
    assert len(scores(tmp_path / "results-tabular-quick.csv")) == 2
    assert (tmp_path / "tabular.png").stat().st_size > 1000
