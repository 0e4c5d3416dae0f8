"""The table of clip norms says what the results beside the page say, and the experiment runs."""

import collections
import csv
import math
import pathlib
import re
import subprocess
import sys

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how_to" / "settings.md").read_text(encoding="utf-8")
RESULTS = ROOT / "docs" / "how_to" / "clip_norms"
HIGHER_IS_BETTER = {"tabular": True, "clothes": True, "ratings": False, "text": False}
CONSTANTS = ("C = 0.1", "C = 1", "C = 10")


def scores(path, part):
    """Candidate -> scores of the runs of this part."""
    found = collections.defaultdict(list)
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["part"] == part:
                found[row["candidate"]].append(float(row["score"]))
    return found


def chosen(path):
    """The constant of each optimizer that validation data chose."""
    best, is_higher = {}, HIGHER_IS_BETTER[path.stem.removeprefix("results-")]
    for candidate, found in scores(path, "validation").items():
        optimizer, bound = candidate.split(": ")
        score = max(found) if is_higher else -min(found)
        if bound in CONSTANTS and score > best.get(optimizer, (-math.inf,))[0]:
            best[optimizer] = score, candidate
    return {candidate for _, candidate in best.values()}


def rows():
    """The rows of the table as the results have them; constants that were chosen in italics."""
    tasks = {name: RESULTS / f"results-{name}.csv" for name in HIGHER_IS_BETTER}
    tests = {name: scores(path, "test") for name, path in tasks.items()}
    for candidate in tests["tabular"]:
        cells = []
        for name, path in tasks.items():
            values = tests[name][candidate]
            if len(values) < 3:  # yet to be run
                cells.append("")
                continue
            error = np.std(values, ddof=1) / math.sqrt(len(values))
            mark = "*" if candidate in chosen(path) else ""
            cells.append(f"{mark}{np.mean(values):.4f} ± {error:.4f}{mark}")
        yield "| " + " | ".join([candidate, *cells]) + " |"


def test_the_table_is_that_of_the_results():
    section = re.search(r"^<!-- clip norms -->\n\n(.*?)\n\n", PAGE, re.M | re.S).group(1)
    header, _, *lines = section.splitlines()
    assert header == f"| | {' | '.join(HIGHER_IS_BETTER)} |"
    assert lines == list(rows())


def test_the_experiment_runs(tmp_path):
    options = ["--quick", "--tasks", "tabular", "--output", str(tmp_path)]
    command = [sys.executable, str(ROOT / "examples" / "clip_norms.py"), *options]
    subprocess.run(command, check=True, cwd=tmp_path)
    assert len(scores(tmp_path / "results-tabular-quick.csv", "test")) == 10


if __name__ == "__main__":
    print("\n".join(rows()))
