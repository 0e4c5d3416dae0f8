"""Times this library beside Keras without privacy, TF Privacy, Opacus and jax-privacy, in one run.

    python3.11 benchmarks/compare.py                      # every contender, on the CPU
    python3.11 benchmarks/compare.py --scaling            # and the mlp in batches of 64 to 4096
    python3.11 benchmarks/compare.py --workloads --scaling mlp cnn       # this only, of two
    python3.11 benchmarks/compare.py --workloads --pieces                # one batch of 65,536
    python3.11 benchmarks/compare.py --workloads gpt2 --contenders keras_plain dp_keras:dpsgd \
        dp_keras:post_processing                          # a language model
    python3.11 benchmarks/compare.py --workloads real --contenders keras_plain dp_keras:dpsgd \
        dp_keras:scale_then_privatize opacus              # networks as they are in use
    python3.11 benchmarks/compare.py --device gpu         # every contender, on an NVIDIA GPU
    python3.11 benchmarks/compare.py --device gpu --dry-run   # what it would install and run
    python benchmarks/compare.py --here --quick           # Keras and this library: a smoke test

Each library has an environment of its own in `.bench/`, made when it is missing (7 GB in all; a CPU
build of PyTorch is taken where pip finds one); those for GPUs lie beside them. `--here` uses the
environment that it runs in, and compares only what is there.

On a GPU this library's steps are compiled by XLA, and float32 matrices are multiplied in TF32 by
all. Memory is what the framework held on the GPU at most. Where there are two, Keras and DP-SGD are
timed on both as well, the batch split between them, without XLA.

Each contender is a process of its own (`workers/`). Those of a workload are timed in turn, round by
round, so that a drift of the machine's speed hits all of them; in the scaling run, where some fill
the memory, each has the machine to itself. A step is forward, backward, clipping, noise and update
on a batch that lies in memory, with Adam (unless the label says otherwise), clip norm 1 and noise
multiplier 1. The models are the same, down to the number of parameters, which is checked; of `real`
networks PyTorch has its own, whose numbers are stated. Their batch normalization is exchanged for
group normalization everywhere, by `clipping.fix` and by Opacus's `ModuleValidator.fix`.

The floor of a private step is the faster step of Keras without privacy plus the bare draw of the
noise; look at the ratio to it, since absolute figures belong to the machine. Peak memory is that of
the whole process, libraries included. Tables and plots go to `output/benchmark/`.
"""

import argparse
import itertools
import pathlib
import statistics
import subprocess
import sys

import measurements
from contenders import (
    BENCHMARKS,
    CONTENDERS,
    REPOSITORY,
    Worker,
    commands_for,
    number_of_gpus,
    pythons,
    say,
)
from measurements import Row
from workloads import REAL, SMALL, WORKLOADS

BATCH_SIZES = (64, 256, 1024, 4096)


def measure(contenders, workload, batch_size, found, options):
    """A `Row` for each contender, all of them in memory and timed in turn; and their versions."""
    workers = []
    try:
        for contender in contenders:
            say(f"{workload}, batch {batch_size}: {contender.label}")
            python = found[contender.environment]
            workers.append(
                Worker(contender, python, workload, batch_size, options.device, options.limit)
            )
        for _ in range(options.rounds):
            for worker in workers:
                worker.time(options.steps, options.seconds)
    finally:
        for worker in workers:
            worker.close()
    versions = {name: v for worker in workers for name, v in worker.versions.items()}
    return rows(workers, workload, batch_size), versions


def rows(workers, workload, batch_size):
    """The medians of the workers' rounds, and the ratios of these workers to each other."""
    measured = {worker.contender.name: worker for worker in workers if not worker.error}
    floors = floor(measured)
    plain = measured.get("keras_plain:plain")
    result = []
    for worker in workers:
        row = Row(workload, batch_size, worker.contender.name, worker.contender.label)
        row.error = worker.error
        result.append(row)
        if worker.error:
            continue
        times = worker.milliseconds
        row.milliseconds = statistics.median(times)
        row.fastest_round, row.slowest_round = min(times), max(times)
        row.peak_megabytes = worker.peak_megabytes
        row.optimizer_megabytes = worker.optimizer_megabytes
        if worker.contender.variant == "noise":
            continue
        row.examples_per_second = 1e3 * batch_size / row.milliseconds
        if floors:
            ratios = (time / least for time, least in zip(times, floors, strict=True))
            row.ratio_to_floor = statistics.median(ratios)
        if plain:
            row.ratio_of_memory = row.peak_megabytes / plain.peak_megabytes
    return result


def floor(measured):
    """Round by round, the faster step of Keras without privacy plus the draw of the noise."""
    steps = [measured[f"keras_plain:{name}"].milliseconds for name in ("plain", "xla")
             if f"keras_plain:{name}" in measured]  # fmt: skip
    if not steps or "keras_plain:noise" not in measured:
        return None
    noise = measured["keras_plain:noise"].milliseconds
    return [min(plain) + draw for *plain, draw in zip(*steps, noise, strict=True)]


def compare(contenders, found, options):
    """All contenders on each workload, in turn; written after each, in case a run is cut short."""
    table, versions = [], {}
    for workload in options.workloads:
        size = options.batch_size or WORKLOADS[workload].batch_size
        part, seen = measure(contenders, workload, size, found, options)
        table, versions = table + part, versions | seen
        text = measurements.write("table", table, measurements.comparison(table), versions, options)
    return text


def scale(contenders, found, options):
    """Each contender alone on each batch size."""
    table, versions = [], {}
    for workload, size in itertools.product(options.scaling, BATCH_SIZES):
        for contender in contenders:
            if contender.variant != "noise":
                part, seen = measure([contender], workload, size, found, options)
                table, versions = table + part, versions | seen
                text = measurements.write(
                    "scaling", table, measurements.scaling(table), versions, options
                )
    return text


def pieces(found, options):
    """A small logical batch; a huge one, whole and in physical batches of the small one's size."""
    whole = next(c for c in CONTENDERS if c.name == "dp_keras:post_processing")
    cut = whole._replace(variant=f"{whole.variant}+pieces", label=f"{whole.label}, 256 at a time")
    table, versions = [], {}
    for contender, size in ((whole, 256), (whole, 65_536), (cut, 65_536)):
        part, seen = measure([contender], "mlp", size, found, options)
        table, versions = table + part, versions | seen
    return measurements.write("pieces", table, measurements.scaling(table), versions, options)


def plan(contenders, options):
    """What a run installs and measures, line by line."""
    for name in dict.fromkeys(contender.environment for contender in contenders):
        if not options.here:
            yield from (
                " ".join(map(str, command)) for command in commands_for(name, options.device)
            )
    for workload in options.workloads:
        size = options.batch_size or WORKLOADS[workload].batch_size
        for contender in contenders:
            yield f"{workload}, batch {size}, {options.device}: {contender.name}"


def main(arguments=None):
    options = parse(arguments)
    chosen = [
        contender
        for contender in CONTENDERS
        if contender.name in options.contenders
        or (contender.worker in options.contenders and _is_usual(contender, options))
    ]
    chosen = [each for each in chosen if each.environment == "keras" or not options.here]
    if options.dry_run:
        print("\n".join(plan(chosen, options)))
        return
    found = pythons(chosen, options.here, options.device)
    options.output.mkdir(parents=True, exist_ok=True)
    if options.workloads:
        print(compare(chosen, found, options))
    if options.scaling:
        print(scale(chosen, found, options))
    if options.pieces:
        print(pieces(found, options))
    python = found.get("keras", sys.executable)
    if not isinstance(python, str):
        subprocess.run([python, BENCHMARKS / "plot.py", options.output], check=False)


def _is_usual(contender, options):
    """Whether a contender is compared without being asked for by its own name."""
    if contender.variant.endswith("+two"):
        return options.gpus >= 2
    return options.device == "cpu" or not contender.variant.endswith("+xla")  # all are, there


def parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    workers = list(dict.fromkeys(contender.worker for contender in CONTENDERS))
    names = workers + [contender.name for contender in CONTENDERS]
    add = parser.add_argument
    add("--workloads", nargs="*", choices=[*WORKLOADS, "real"], default=list(SMALL),
        help=f"real: {' '.join(REAL)}; without it: {' '.join(SMALL)}")  # fmt: skip
    add("--contenders", nargs="+", choices=names, default=workers, metavar="WORKER[:VARIANT]",
        help=", ".join(names))  # fmt: skip
    add("--scaling", nargs="*", choices=WORKLOADS, help="workloads in several batch sizes; mlp")
    add("--pieces", action="store_true", help="memory of a logical batch of 65,536")
    add("--device", choices=("cpu", "gpu"), default="cpu")
    add("--dry-run", action="store_true", help="say what would be installed and run")
    add("--here", action="store_true", help="Keras and this library, in this environment")
    add("--rounds", type=int, default=5)
    add("--steps", type=int, default=20, help="of a round, at most")
    add("--seconds", type=float, default=5.0, help="of a round, about, at most")
    add("--limit", type=float, default=300.0, help="seconds after which a contender is given up")
    add("--batch-size", type=int, help="instead of that of the workload")
    add("--quick", action="store_true", help="2 rounds of 3 steps: whether it runs")
    add("--output", type=pathlib.Path, help="folder; output/benchmark, or benchmark-gpu")
    options = parser.parse_args(arguments)
    if "real" in options.workloads:
        others = [name for name in options.workloads if name != "real"]
        options.workloads = list(dict.fromkeys([*others, *REAL]))
    if options.quick:
        options.rounds, options.steps = 2, 3
    options.scaling = [] if options.scaling is None else options.scaling or ["mlp"]
    options.gpus = number_of_gpus() if options.device == "gpu" else 0
    if options.device == "gpu" and options.dry_run:
        options.gpus = options.gpus or 2  # what it would do at most
    if options.device == "gpu" and not options.gpus:
        parser.error(
            "--device gpu: the driver (nvidia-smi -L) lists no GPU on this machine. Run it where "
            "there is one, or see with --dry-run what it would do."
        )
    folder = "benchmark-gpu" if options.device == "gpu" else "benchmark"
    options.output = options.output or REPOSITORY / "output" / folder
    return options


if __name__ == "__main__":
    main()
