"""The benchmarks' commands still run, and the page says what the results beside it say."""

import csv
import importlib
import pathlib
import shutil
import subprocess
import sys

import pytest

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "reference" / "benchmarks.md"
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


def test_two_devices_are_timed_beside_one(tmp_path):
    command = [sys.executable, BENCHMARKS / "compare.py", "--here", "--batch-size", "4", "--quick"]
    command += ["--workloads", "mlp", "--output", tmp_path, "--contenders"]
    names = ["dp_keras:dpsgd", "keras_plain:plain+two", "dp_keras:dpsgd+two"]
    run = subprocess.run(command + names, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    rows = _rows(tmp_path / "table.csv")
    assert [row["contender"] for row in rows] == names
    assert not any(row["error"] for row in rows), rows


def test_without_a_gpu_nothing_is_installed(tmp_path):
    if shutil.which("nvidia-smi"):
        pytest.skip("There may be a GPU.")
    command = [sys.executable, BENCHMARKS / "compare.py", "--device", "gpu", "--output"]
    run = subprocess.run([*command, tmp_path / "out"], capture_output=True, text=True, check=False)
    assert run.returncode == 2 and "lists no GPU" in run.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_dry_run_says_what_is_installed_and_run(device):
    command = [sys.executable, BENCHMARKS / "compare.py", "--device", device, "--dry-run"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert ("tensorflow[and-cuda]==" in run.stdout) == ("jax[cuda12]==" in run.stdout)
    assert ("tensorflow[and-cuda]==" in run.stdout) == (device == "gpu")
    assert ("mlp, batch 256, gpu: dp_keras:dpsgd+two" in lines) == (device == "gpu")
    assert f"cnn, batch 256, {device}: opacus:ghost" in lines
    assert f"transformer, batch 32, {device}: jax_privacy:vectorized" in lines


def test_trains_from_files(tmp_path):
    command = [sys.executable, BENCHMARKS / "data.py", "--quick", "--output", tmp_path]
    command += ["--workloads", "cnn", "--kinds", "memmap", "jpeg", "--memory", "memmap:0.05"]

    run = subprocess.run(command, capture_output=True, text=True, check=False)

    assert run.returncode == 0, run.stderr
    mapped, pictures = _rows(tmp_path / "data.csv")
    for row in (mapped, pictures):
        assert not row["error"]
        assert all(float(row[name]) > 0 for name in ("milliseconds", "to_memory", "alone", "plain"))
    assert (mapped["kind"], pictures["kind"]) == ("memmap", "jpeg")
    (memory,) = _rows(tmp_path / "data_memory.csv")
    assert not memory["error"] and memory["steps"] == "50" and float(memory["epsilon"]) > 0
    assert float(memory["peak_megabytes"]) > 100


@pytest.mark.parametrize("name, table", [("data", "of_speeds"), ("data_memory", "of_memories")])
def test_the_tables_of_data_on_disk_are_those_of_the_results(name, table, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    data = importlib.import_module("data")
    kind = data.Speed if name == "data" else data.Memory
    rows = data.measurements.read(kind, PAGE.with_suffix("") / f"{name}.csv")
    expected = "\n".join(getattr(data, table)(rows))
    assert f"<!-- {name} -->\n\n{expected}\n" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["buckets", "draw", "flops", "sparse"])
def test_the_plain_tables_are_those_of_the_results(name, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    rows = _rows(PAGE.with_suffix("") / f"{name}.csv")
    expected = importlib.import_module("measurements").write_plain(name, rows, tmp_path)
    assert f"<!-- {name} -->\n\n{expected}" in PAGE.read_text(encoding="utf-8")


def test_times_the_routes_of_the_draw(tmp_path):
    command = [sys.executable, BENCHMARKS / "draw.py", "--rounds", "1", "--sizes", "1000"]

    run = subprocess.run([*command, "--output", tmp_path], capture_output=True, check=False)

    assert run.returncode == 0, run.stderr
    first, *others = _rows(tmp_path / "draw.csv")
    assert first["1,000 draws"] == "1.00" and len(others) > 10
    assert all(float(row["1,000 draws"]) >= 0 for row in others)


@pytest.mark.parametrize("name", ["gpt2", "later", "networks", "small_batches"])
def test_the_tables_of_steps_are_those_of_the_results(name, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    measurements = importlib.import_module("measurements")
    rows = measurements.read(measurements.Row, PAGE.with_suffix("") / f"{name}.csv")
    expected = "\n".join(measurements.overview(rows))
    assert f"<!-- {name} -->\n\n{expected}" in PAGE.read_text(encoding="utf-8")


def _rows(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
