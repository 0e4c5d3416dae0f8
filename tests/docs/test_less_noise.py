"""The page on less noise says what the results beside it say, and the commands run."""

import csv
import dataclasses
import importlib
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "explanation" / "less_noise"
PAGE = FOLDER.with_suffix(".md").read_text(encoding="utf-8")


def module(path, monkeypatch):
    """The script at a path, as a module."""
    monkeypatch.syspath_prepend(path.parent)
    return importlib.import_module(path.stem)


def rows_of(name):
    with open(FOLDER / name, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("mark", "script", "results"),
    [
        ("noise", "benchmarks/noise.py", "noise.csv"),
        ("pairs", "examples/same_epsilon.py", "pairs.csv"),
    ],
)
def test_the_tables_are_those_of_the_results(mark, script, results, monkeypatch):
    expected = module(ROOT / script, monkeypatch).table(rows_of(results))
    assert f"<!-- {mark} -->\n\n{expected}\n" in PAGE


def test_no_library_asks_for_less_noise_than_is_needed_here():
    """σ is within 0.2% of every other's, or the other's is proved too small."""
    by_setting = {}
    for row in rows_of("noise.csv"):
        by_setting.setdefault(row["name"], {})[row["library"]] = row
    assert len(by_setting) == 10
    for found in by_setting.values():
        ours = found.pop("this library, auto")
        assert float(ours["upper"]) <= float(ours["epsilon"])
        for row in found.values():
            if row["sigma"] and float(row["lower"]) <= float(row["epsilon"]):
                assert float(ours["sigma"]) <= 1.002 * float(row["sigma"])


def test_a_pair_of_runs(tmp_path, monkeypatch):
    script = module(ROOT / "examples" / "same_epsilon.py", monkeypatch)
    options = ["--tasks", "tabular", "--epsilons", "3", "--seeds", "2"]
    options += ["--candidates", "DPSGD, momentum", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["same_epsilon.py", *options])
    monkeypatch.setattr(script.runs, "score", lambda task, model, part: 0.5)
    short = dataclasses.replace(script.choosing.tabular(), steps=20)
    monkeypatch.setitem(script.choosing.TASKS, "tabular", lambda: short)
    script.main()
    first = (tmp_path / "results.csv").read_bytes()
    script.main()  # nothing is left to run
    assert (tmp_path / "results.csv").read_bytes() == first
    rows = list(csv.DictReader(first.decode().splitlines()))
    assert [row["accountant"] for row in rows] == ["rdp", "auto"] * 2
    sigmas = [float(row["noise_multiplier"]) for row in rows]
    assert sigmas[1] == sigmas[3] < sigmas[0] == sigmas[2]
    assert "| tabular | DPSGD, momentum | 3 |" in (tmp_path / "same_epsilon.md").read_text()
