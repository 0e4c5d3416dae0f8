"""What a run of `compare.py` leaves: rows, as CSV and as Markdown."""

import csv
import dataclasses
import os
import platform

from workloads import WORKLOADS


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
    error: str = ""


def write_csv(path, table):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Row)])
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in table)


def markdown(table, scaling, versions, options, load):
    """The report: machine and versions, a table for each workload, one for the scaling run."""
    cores = len(os.sched_getaffinity(0))
    yield "# Time and memory of a training step\n"
    yield (
        f"{cores} CPU cores ({platform.machine()}), Python {platform.python_version()}, device "
        f"{options.device}; medians of {options.rounds} rounds of at most {options.steps} steps."
    )
    yield "Versions: " + ", ".join(f"{name} {v}" for name, v in sorted(versions.items())) + "."
    yield f"Load of the machine before the run: {load:.1f}.\n"
    for workload in dict.fromkeys(row.workload for row in table):
        spec = WORKLOADS[workload]
        part = [row for row in table if row.workload == workload]
        yield f"## {workload}\n"
        yield f"{spec.model}; {spec.parameters:,} parameters, batch {part[0].batch_size}.\n"
        yield "| | ms a step | examples a second | ratio to the floor | peak MB | ratio to Keras |"
        yield "|---|---|---|---|---|---|"
        for row in part:
            yield "| " + " | ".join([row.label, *figures(row)]) + " |"
        yield ""
    for workload in dict.fromkeys(row.workload for row in scaling):
        part = [row for row in scaling if row.workload == workload]
        yield f"## {workload}, by batch size: examples a second (peak MB)\n"
        sizes = sorted({row.batch_size for row in part})
        yield "| | " + " | ".join(map(str, sizes)) + " |"
        yield "|---" * (len(sizes) + 1) + "|"
        for label in dict.fromkeys(row.label for row in part):
            of_label = sorted((r for r in part if r.label == label), key=lambda r: r.batch_size)
            cells = [
                row.error or f"{row.examples_per_second:,.0f} ({row.peak_megabytes:.0f})"
                for row in of_label
            ]
            yield "| " + " | ".join([label, *cells]) + " |"
        yield ""


def figures(row):
    if row.error:
        return [row.error.replace("|", "/"), "", "", "", ""]
    values = [
        (row.milliseconds, ".1f"),
        (row.examples_per_second, ",.0f"),
        (row.ratio_to_floor, ".2f"),
        (row.peak_megabytes, ".0f"),
        (row.ratio_of_memory, ".2f"),
    ]
    return ["" if value is None else format(value, form) for value, form in values]
