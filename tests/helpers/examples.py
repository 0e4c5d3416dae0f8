"""The scripts of examples/, what they write, and made-up data for them."""

import csv
import importlib
import pathlib

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
RECORDS = ROOT / "docs" / "reference" / "records"


def imported(name, monkeypatch):
    """A script of examples/ or examples/records/, as a module."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.syspath_prepend(ROOT / "examples" / "records")
    return importlib.import_module(name)


def rows_of(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def page_of_records():
    return RECORDS.with_suffix(".md").read_text(encoding="utf-8")


def clothes(count, seed):
    """Pictures of two kinds, to tell by their height."""
    y = np.random.default_rng(seed).integers(0, 2, count)
    x = np.random.default_rng(seed + 1).uniform(0, 0.2, (count, 28, 28, 1))
    x[y == 1, :14] += 0.7
    return np.float32(x), np.int32(y)
