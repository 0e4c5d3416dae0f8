"""The benchmark's command still runs: Keras and this library, on a tiny batch."""

import csv
import pathlib
import subprocess
import sys

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
CONTENDERS = ("keras_plain:plain", "keras_plain:noise", "dp_keras:scale_then_privatize")


def test_compares_this_library_with_keras_in_the_environment_at_hand(tmp_path):
    command = [sys.executable, BENCHMARKS / "compare.py", "--here", "--batch-size", "4"]
    command += ["--rounds", "1", "--steps", "2"]
    command += ["--workloads", "mlp", "--contenders", *CONTENDERS, "--output", tmp_path]

    run = subprocess.run(command, capture_output=True, text=True, check=False)

    assert run.returncode == 0, run.stderr
    with open(tmp_path / "table.csv", newline="", encoding="utf-8") as file:
        rows = {row["contender"]: row for row in csv.DictReader(file)}
    assert tuple(rows) == CONTENDERS
    assert not any(row["error"] for row in rows.values()), rows
    plain, noise, private = (float(row["fastest_round"]) for row in rows.values())
    assert min(plain, noise, private) > 0
    assert float(rows["dp_keras:scale_then_privatize"]["ratio_to_floor"]) > 0
    assert all(float(row["peak_megabytes"]) > 100 for row in rows.values())
    assert "scale-then-privatize" in (tmp_path / "table.md").read_text(encoding="utf-8")
    assert (tmp_path / "table.png").stat().st_size > 0
