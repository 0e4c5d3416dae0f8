"""Pages that show experiments say what the results beside them say, and the commands run."""

import dataclasses
import sys

import pytest

from tests.helpers.examples import ROOT, imported, rows_of

DOCS = ROOT / "docs"


@pytest.fixture
def script(monkeypatch, request):
    return imported(request.param, monkeypatch)


@pytest.mark.parametrize(
    ("script", "page", "mark", "results"),
    [
        ("planned_noise", "explanation/correlated", "planned", "planned.csv"),
        ("weight_averages", "how_to/averages", "averages", "results.csv"),
    ],
    indirect=["script"],
)
def test_the_tables_are_those_of_the_results(script, page, mark, results):
    expected = script.table(rows_of(DOCS / page / results))
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert f"<!-- {mark} -->\n\n{expected}\n" in text


@pytest.mark.parametrize("script", ["planned_noise"], indirect=True)
def test_a_pair_of_runs_with_planned_noise(script, tmp_path, monkeypatch):
    options = ["--tasks", "tabular", "--epsilons", "8", "--seeds", "2", "--output", str(tmp_path)]
    options += ["--noises", "8 bands", "planned, horizon 20", "planned, rate by σ"]
    monkeypatch.setattr(sys, "argv", ["planned_noise.py", *options])
    monkeypatch.setattr(script.runs, "score", lambda task, model, part: 0.5)
    script.main()
    first = (tmp_path / "results.csv").read_bytes()
    script.main()  # nothing is left to run
    assert (tmp_path / "results.csv").read_bytes() == first
    rows = rows_of(tmp_path / "results.csv")
    kept = {row["noise"]: row for row in rows_of(DOCS / "explanation/correlated/planned.csv")
            if (row["task"], row["epsilon"]) == ("tabular", "8")}  # fmt: skip
    assert [row["noise"] for row in rows] == [*options[-3:]] * 2
    for row in rows:  # the plan of the page
        expected = kept.get(row["noise"], kept["planned"])
        for name in ("groups", "steps", "mechanism"):
            assert row[name] == expected[name], name
        assert float(row["noise_multiplier"]) == pytest.approx(float(expected["noise_multiplier"]))
    assert "| planned, horizon 20 | 20 | 0.5000 |" in (tmp_path / "planned_noise.md").read_text()


@pytest.mark.parametrize("script", ["weight_averages"], indirect=True)
def test_a_run_and_its_average(script, tmp_path, monkeypatch):
    options = ["--tasks", "tabular", "--epsilons", "3", "--seeds", "2", "--output", str(tmp_path)]
    options += ["--rules", "DPSGD, momentum, banded noise"]
    monkeypatch.setattr(sys, "argv", ["weight_averages.py", *options])
    short = dataclasses.replace(script.choosing.tabular(), steps=24)
    monkeypatch.setitem(script.choosing.TASKS, "tabular", lambda: short)
    script.main()
    first = (tmp_path / "results.csv").read_bytes()
    script.main()  # nothing is left to run
    assert (tmp_path / "results.csv").read_bytes() == first
    rows = rows_of(tmp_path / "results.csv")
    assert [row["seed"] for row in rows] == ["0", "1"]
    assert all(row["score"] != row["score_of_average"] for row in rows)
    assert "| tabular | DPSGD, momentum, banded noise | 3 |" in (
        tmp_path / "weight_averages.md"
    ).read_text(encoding="utf-8")
