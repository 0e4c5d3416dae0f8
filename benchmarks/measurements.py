"""What a run of `compare.py` leaves: rows, as CSV and as Markdown."""

import ast
import csv
import dataclasses
import os
import pathlib
import platform
import subprocess

from workloads import WORKLOADS

LOAD = os.getloadavg()[0]  # before the run adds to it


@dataclasses.dataclass
class Row:
    """What was measured of one contender on one workload; None for what could not be."""

    workload: str
    batch_size: int
    contender: str
    label: str
    milliseconds: float | None = None
    fastest_round: float | None = None
    slowest_round: float | None = None
    examples_per_second: float | None = None
    ratio_to_floor: float | None = None
    peak_megabytes: float | None = None
    ratio_of_memory: float | None = None
    optimizer_megabytes: float | None = None
    error: str = ""


def write(name, rows, tables, versions, options):
    """`rows` as NAME.csv; machine, versions and `tables` as NAME.md, whose text is returned."""
    with open(options.output / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Row)])
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)
    text = "\n".join([*heading(versions, options), *tables]) + "\n"
    (options.output / f"{name}.md").write_text(text, encoding="utf-8")
    return text


def write_plain(name, rows, folder):
    """`rows`, dicts of the same keys, as NAME.csv and as the table NAME.md, which is returned."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    lines = [rows[0].keys(), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    text = "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    return text


def heading(versions, options):
    yield "# Time and memory of a training step\n"
    yield (
        f"{machine(options.device)}, load {LOAD:.1f} before the run; medians of {options.rounds} "
        f"rounds of at most {options.steps} steps or {options.seconds:g} s."
    )
    yield "Versions: " + ", ".join(f"{name} {v}" for name, v in sorted(versions.items())) + ".\n"


def machine(device):
    cores = f"{len(os.sched_getaffinity(0))} CPU cores ({platform.machine()})"
    if device == "cpu":
        return cores
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        name = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        name = "a GPU"
    return f"{name}, {cores}"


def comparison(rows):
    """A table for each workload: time, throughput and memory, and their ratios."""
    for workload in dict.fromkeys(row.workload for row in rows):
        spec = WORKLOADS[workload]
        part = [row for row in rows if row.workload == workload]
        yield f"## {workload}\n"
        other = f" ({spec.of_torch:,} in PyTorch)" if spec.of_torch else ""
        yield f"{spec.model}; {spec.parameters:,} parameters{other}, batch {part[0].batch_size}.\n"
        yield (
            "| | ms a step | examples a second | ratio to the floor | peak MB | ratio to Keras "
            "| optimizer MB |\n|---|---|---|---|---|---|---|"
        )
        for row in part:
            yield f"| {row.label} | " + " | ".join(figures(row)) + " |"
        yield ""


def overview(rows):
    """Two tables, of contenders by workloads: time with its ratio to the floor, and memory."""
    workloads = list(dict.fromkeys(row.workload for row in rows))
    of = {(row.workload, row.label): row for row in rows}
    for title, value, form, ratio in (
        ("ms a step (× the floor)", "milliseconds", ".1f", "ratio_to_floor"),
        ("peak MB (× Keras)", "peak_megabytes", ".0f", "ratio_of_memory"),
    ):
        yield f"| {title} | " + " | ".join(workloads) + " |\n" + "|---" * (len(workloads) + 1) + "|"
        for label in dict.fromkeys(row.label for row in rows):
            cells = (of.get((workload, label)) for workload in workloads)
            yield f"| {label} | " + " | ".join(_cell(c, value, form, ratio) for c in cells) + " |"
        yield ""


def _cell(row, value, form, ratio):
    number, share = (getattr(row, name, None) for name in (value, ratio))
    if number is None:
        return "–"
    return format(number, form) + ("" if share is None else f" ({share:.2f})")


def read(kind, path):
    """The rows of a CSV file, of the dataclass `kind`; None for what is empty."""
    with open(path, newline="", encoding="utf-8") as file:
        return [
            kind(**{name: _value(v) for name, v in row.items()}) for row in csv.DictReader(file)
        ]


def _value(text):
    try:
        return ast.literal_eval(text) if text else None
    except (SyntaxError, ValueError):
        return text


def figures(row):
    if row.error:
        return [row.error.replace("|", "/"), "", "", "", "", ""]
    values = [
        (row.milliseconds, ".1f"),
        (row.examples_per_second, ",.0f"),
        (row.ratio_to_floor, ".2f"),
        (row.peak_megabytes, ".0f"),
        (row.ratio_of_memory, ".2f"),
        (row.optimizer_megabytes, ".1f"),
    ]
    return ["" if value is None else format(value, form) for value, form in values]


def scaling(rows):
    """A table for each workload: throughput and memory by batch size."""
    for workload in dict.fromkeys(row.workload for row in rows):
        part = [row for row in rows if row.workload == workload]
        sizes = list(dict.fromkeys(row.batch_size for row in part))
        yield f"## {workload}: examples a second (peak MB) by batch size\n"
        yield "| | " + " | ".join(map(str, sizes)) + " |"
        yield "|---" * (len(sizes) + 1) + "|"
        for label in dict.fromkeys(row.label for row in part):
            of_size = {row.batch_size: row for row in part if row.label == label}
            yield f"| {label} | " + " | ".join(scaled(of_size.get(size)) for size in sizes) + " |"
        yield ""


def scaled(row):
    if row is None or row.error:
        return row.error.replace("|", "/") if row else ""
    return f"{row.examples_per_second:,.0f} ({row.peak_megabytes:.0f})"
