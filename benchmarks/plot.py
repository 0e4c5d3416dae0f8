"""Draws what `compare.py` measured.

python benchmarks/plot.py output/benchmark
"""

import dataclasses
import pathlib
import sys

import matplotlib
import measurements

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {
    "keras_plain": "#8a8f98",
    "dp_keras": "#1f6feb",
    "tf_privacy": "#d97706",
    "opacus": "#b4336f",
    "jax_privacy": "#2f8f5b",
}
MARKERS = "os^Dvp"
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}


def main(folder):
    plt.rcParams.update(STYLE)
    for name, draw in (("table", dots), ("scaling", lines)):
        if (folder / f"{name}.csv").exists():
            rows = measurements.read(measurements.Row, folder / f"{name}.csv")
            figure = draw(list(map(dataclasses.asdict, rows)))
            figure.savefig(folder / f"{name}.png", dpi=150)
            plt.close(figure)


def color(row):
    return COLORS[row["contender"].split(":")[0]]


def dots(rows):
    """For each workload, time and peak memory of each contender; a dotted line at the floor."""
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    counts = [sum(row["workload"] == workload for row in rows) for workload in workloads]
    figure, grid = plt.subplots(
        len(workloads), 2, figsize=(11, 0.2 * sum(counts) + 0.9 * len(workloads)),
        squeeze=False, layout="constrained", width_ratios=(3, 2), height_ratios=counts,
    )  # fmt: skip
    for (left, right), workload in zip(grid, workloads, strict=True):
        part = [row for row in rows if row["workload"] == workload]
        title = f"{workload}, batch {part[0]['batch_size']:.0f}"
        dot_panel(left, part, "milliseconds", f"{title}: ms a step (× the floor)")
        dot_panel(right, part, "peak_megabytes", "peak memory, MB")
        right.set_yticklabels([])
        for row in part[:1]:
            if row["ratio_to_floor"]:
                least = row["milliseconds"] / row["ratio_to_floor"]
                left.axvline(least, color="black", lw=0.9, ls=":", zorder=0)
    return figure


def dot_panel(axes, rows, value, title):
    axes.set_title(title)
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", alpha=0.2)
    known = [row[value] for row in rows if row[value]] or [1.0]
    left, right = 0.8 * min(known), max(1.25 * max(known), 8 * min(known))
    axes.set_xlim(left, right * (right / left) ** 0.28)  # room for the figures
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.xaxis.set_minor_formatter("")
    for place, row in enumerate(rows):
        if row[value] is None:
            text = f" {row['error'][:70]}" if value == "milliseconds" else ""
            axes.text(left, place, text, va="center", color="#8a8f98", size=7, style="italic")
            continue
        axes.plot(row[value], place, "o", color=color(row), ms=6)
        text = f"{row[value]:,.0f}" if row[value] >= 100 else f"{row[value]:.1f}"
        if value == "milliseconds" and row["ratio_to_floor"]:
            text += f"  ({row['ratio_to_floor']:.2f}×)"
        axes.annotate(
            text, (row[value], place), (7, 0), textcoords="offset points", va="center", size=7.5
        )


def lines(rows):
    """Examples a second and peak memory over the batch size; a line ends where memory does."""
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    figure, grid = plt.subplots(
        len(workloads), 2, figsize=(11, 4.6 * len(workloads)), squeeze=False, layout="constrained"
    )
    for panels, workload in zip(grid, workloads, strict=True):
        part = [row for row in rows if row["workload"] == workload]
        values = (
            ("examples_per_second", "examples a second"),
            ("peak_megabytes", "peak memory, MB"),
        )
        for axes, (value, title) in zip(panels, values, strict=True):
            line_panel(axes, part, value)
            axes.set_title(f"{workload}: {title}")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def line_panel(axes, rows, value):
    seen = {}
    for name in dict.fromkeys(row["contender"] for row in rows):
        worker = name.split(":")[0]
        seen[worker] = seen.get(worker, -1) + 1
        own = [row for row in rows if row["contender"] == name]
        known = [(row["batch_size"], row[value]) for row in own if row[value]]
        axes.plot(
            [size for size, _ in known], [v for _, v in known], label=own[0]["label"],
            color=color(own[0]), marker=MARKERS[seen[worker]], ms=4.5, lw=1.4,
            ls="-" if worker == "dp_keras" else "--",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({row["batch_size"] for row in rows})
    axes.set_xticks(sizes, [f"{size:.0f}" for size in sizes])
    axes.set_xlabel("batch size")
    axes.grid(alpha=0.25)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
