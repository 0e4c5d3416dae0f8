"""Training from files beside training from memory: how fast it is, and what memory it takes.

    python benchmarks/data.py                             # throughput of every kind of file
    python benchmarks/data.py --cold                      # with the page cache emptied each time
    python benchmarks/data.py --kinds --memory memmap:20 array_record:4 tfrecord:4     # GB
    python benchmarks/data.py --quick                     # a smoke test, of few small files

It runs in the environment at hand; kinds whose packages are missing are left out, with a note.
Files are written to a temporary folder (`--folder` says where) and removed at the end.

**Throughput.** For each kind of file a process trains a workload of `workloads.py` in turn, round
by round: privately from the files; privately from arrays in memory; and by plain Keras `fit` with
what is usual for such files. It also draws the same batches without training on them, which is what
the source alone delivers. The ratios are medians of the ratios within each round; on a machine that
others use, that of the processor's time (of all threads of the process, for a step) says more than
that of the clock. A source is fast enough at 0.9 of the throughput from memory or, where it cannot
deliver as much, at 0.8 of the least of that and what it delivers alone.

`--cold` empties the page cache (/proc/sys/vm/drop_caches, which takes root) before each round of
what reads files. Without it all files are in the page cache, as they are smaller than the memory.

**Memory.** A process trains a small model for 5,000 steps on a file that is written row by row, and
looks at its anonymous memory (RssAnon: what it has for itself, without mapped files) after a
warm-up and until the end. `max_bytes` is 1 byte, which would refuse any data in memory.

Tables and CSV go to `output/benchmark/`.
"""

import argparse
import csv
import dataclasses
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import measurements
import stored
from contenders import BENCHMARKS, REPOSITORY, SETTINGS, say
from workloads import WORKLOADS

_LIMIT = 7200  # seconds for one process


@dataclasses.dataclass
class Speed:
    """What was measured of a workload and a kind of file; ratios above 1: faster than that."""

    kind: str
    workload: str
    batch_size: int
    cold: bool
    megabytes: float | None = None
    milliseconds: float | None = None
    from_memory: float | None = None
    plain: float | None = None
    alone: float | None = None
    to_memory: float | None = None
    processor: float | None = None
    processor_to_memory: float | None = None
    to_plain: float | None = None
    to_possible: float | None = None
    error: str = ""


@dataclasses.dataclass
class Memory:
    """What training from a large file took; megabytes are of anonymous memory."""

    kind: str
    gigabytes: float
    examples: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    steps_per_second: float | None = None
    epsilon: float | None = None
    opened_megabytes: float | None = None
    warm_megabytes: float | None = None
    peak_megabytes: float | None = None
    end_megabytes: float | None = None
    growth_megabytes: float | None = None
    error: str = ""


def speeds(options):
    """A `Speed` for each kind of file and workload."""
    for workload in options.workloads:
        for kind in options.kinds:
            if kind == "jpeg" and WORKLOADS[workload].kind == "tokens":
                continue
            size = options.batch_sizes[workload] // (8 if kind == "jpeg" else 1)
            row = Speed(kind, workload, size, options.cold)
            say(f"{workload} from {kind}")
            row.error = missing(kind)
            if not row.error:
                with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                    _speed(row, pathlib.Path(folder), options)
            yield row


def _speed(row, folder, options):
    """Has a process write the files and train from them, and fills in the row."""
    count = options.pictures if row.kind == "jpeg" else options.examples
    reply = ask(
        do="speeds", kind=row.kind, workload=row.workload, folder=os.fspath(folder), count=count,
        batch_size=row.batch_size, rounds=options.rounds, steps=options.steps, cold=options.cold,
    )  # fmt: skip
    row.megabytes = stored.size_of(folder) / 1e6
    row.error = reply.get("error", "")
    if row.error:
        return
    times = {name: [t for t, _ in both] for name, both in reply["milliseconds"].items()}
    busy = {name: [t for _, t in both] for name, both in reply["milliseconds"].items()}
    row.milliseconds, row.from_memory, row.alone = (
        statistics.median(times[name]) for name in ("private", "memory", "alone")
    )
    row.to_memory = median_ratio(times["memory"], times["private"])
    row.processor = statistics.median(busy["private"])
    row.processor_to_memory = median_ratio(busy["memory"], busy["private"])
    possible = [max(pair) for pair in zip(times["memory"], times["alone"], strict=True)]
    row.to_possible = median_ratio(possible, times["private"])
    if "plain" in times:
        row.plain = statistics.median(times["plain"])
        row.to_plain = median_ratio(times["plain"], times["private"])


def median_ratio(upper, lower):
    return statistics.median(a / b for a, b in zip(upper, lower, strict=True))


def memories(options):
    """A `Memory` for each of the large files."""
    for kind, gigabytes in options.memory:
        row = Memory(kind, gigabytes, batch_size=options.batch_sizes["memory"])
        row.error = missing(kind)
        if not row.error:
            say(f"{gigabytes:g} GB of {kind}")
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                written = ask(do="write_large", kind=kind, folder=folder, gigabytes=gigabytes)
                reply = written if "error" in written else ask(
                    do="memory", kind=kind, folder=folder, count=written["examples"],
                    batch_size=row.batch_size, steps=options.memory_steps,
                    warm_up=max(1, options.memory_steps // 25), cold=options.cold,
                )  # fmt: skip
                row.gigabytes = stored.size_of(folder) / 1e9
            for name in {field.name for field in dataclasses.fields(row)} & set(reply):
                setattr(row, name, reply[name])
        yield row


def missing(kind):
    """What is not installed, or ""."""
    packages = [p for p in stored.KINDS[kind].packages if importlib.util.find_spec(p) is None]
    return f"without {', '.join(packages)}" if packages else ""


def ask(**request):
    """The reply of a process to one request."""
    command = [sys.executable, "-m", "workers.on_disk", json.dumps(request)]
    run = subprocess.run(
        command, cwd=BENCHMARKS, env=os.environ | SETTINGS["cpu"], capture_output=True, text=True,
        timeout=_LIMIT,
    )  # fmt: skip
    if run.stdout.strip():
        return json.loads(run.stdout)
    lines = run.stderr.strip().splitlines() or ["no message"]
    return {"error": f"ended with status {run.returncode}: {lines[-1][:200]}"}


def of_speeds(rows):
    """Markdown: examples a second, and the ratios."""
    yield (
        "| model, batch | files | MB | from files | from memory | × | × (processor) | "
        "plain Keras | × | source alone | × the possible |"
    )
    yield "|---" * 11 + "|"
    for row in rows:
        kind = stored.KINDS[row.kind].label
        name = f"| {row.workload}, {row.batch_size} | {kind} |"
        if row.error:
            yield f"{name} {row.error.replace('|', '/')} | | | | | | | | |"
            continue
        times = row.milliseconds, row.from_memory, row.plain, row.alone
        private, memory, plain, alone = (
            f"{1e3 * row.batch_size / time:,.0f}" if time else "" for time in times
        )
        to_plain = f"{row.to_plain:.2f}" if row.to_plain else ""
        yield (
            f"{name} {row.megabytes:,.0f} | {private} | {memory} | {row.to_memory:.2f} | "
            f"{row.processor_to_memory:.2f} | {plain} | {to_plain} | {alone} | "
            f"{row.to_possible:.2f} |"
        )


def of_memories(rows):
    """Markdown: memory, time and ε."""
    yield (
        "| file | GB | examples | steps | steps a second | opening | after warm-up | at most | "
        "growth to the end | ε at δ = 1e-7 |"
    )
    yield "|---" * 10 + "|"
    for row in rows:
        name = f"| {stored.KINDS[row.kind].label} | {row.gigabytes:.1f} |"
        if row.error:
            yield f"{name} {row.error.replace('|', '/')} | | | | | | | |"
            continue
        yield (
            f"{name} {row.examples:,} | {row.steps:,} | {row.steps_per_second:.0f} | "
            f"{row.opened_megabytes:+.0f} MB | {row.warm_megabytes:.0f} MB | "
            f"{row.peak_megabytes:.0f} MB | {row.growth_megabytes:+.0f} MB | {row.epsilon:.3f} |"
        )


def write(name, title, rows, table, options):
    """The rows as NAME.csv and NAME.md, after each of them in case a run is cut short."""
    done = []
    for row in rows:
        done.append(row)
        with open(options.output / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(row)])
            writer.writeheader()
            writer.writerows(map(dataclasses.asdict, done))
        load = f"load {measurements.LOAD:.1f} before the run"
        lines = [title, "", f"{measurements.machine('cpu')}, {load}.", ""]
        text = "\n".join([*lines, *table(done)]) + "\n"
        (options.output / f"{name}.md").write_text(text, encoding="utf-8")
    return text


def main(arguments=None):
    options = parse(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    if options.cold and not os.access("/proc/sys/vm/drop_caches", os.W_OK):
        say("The page cache cannot be emptied here: --cold is left out.")
        options.cold = False
    if options.kinds:
        cache = "emptied before each round" if options.cold else "warm"
        title = f"# Training from files\n\nExamples a second; page cache {cache}."
        name = "data_cold" if options.cold else "data"
        print(write(name, title, speeds(options), of_speeds, options))
    if options.memory:
        title = "# Anonymous memory of training from a large file"
        print(write("data_memory", title, memories(options), of_memories, options))


def parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--kinds", nargs="*", choices=stored.KINDS, default=list(stored.KINDS), help="all")
    add("--workloads", nargs="*", choices=("cnn", "transformer"), default=["cnn", "transformer"])
    add("--memory", nargs="*", type=large, default=[], metavar="KIND:GB",
        help="large files of memmap, array_record or tfrecord")  # fmt: skip
    add("--cold", action="store_true", help="empty the page cache before each round")
    add("--rounds", type=int, default=5)
    add("--steps", type=int, default=20, help="of a round")
    add("--examples", type=int, default=60_000, help="in a file")
    add("--pictures", type=int, default=20_000, help="JPEG files")
    add("--memory-steps", type=int, default=5000)
    add("--quick", action="store_true", help="one round of 3 steps on small files")
    add("--folder", type=pathlib.Path, help="where files are written; the system's temporary one")
    add("--output", type=pathlib.Path, default=REPOSITORY / "output" / "benchmark")
    options = parser.parse_args(arguments)
    #: Steps of 30 ms and more on two cores; of pictures of 96 px, an eighth.
    options.batch_sizes = {"cnn": 1024, "transformer": 32, "memory": 256}
    if options.quick:
        options.rounds, options.steps, options.memory_steps = 1, 3, 50
        options.examples = options.pictures = 200
        options.batch_sizes = dict.fromkeys(options.batch_sizes, 16)
        options.memory = [(kind, min(gigabytes, 0.1)) for kind, gigabytes in options.memory]
    return options


def large(text):
    kind, _, gigabytes = text.partition(":")
    if kind not in ("memmap", "array_record", "tfrecord"):
        raise argparse.ArgumentTypeError(f"{kind!r} is none of memmap, array_record, tfrecord")
    return kind, float(gigabytes)


if __name__ == "__main__":
    main()
