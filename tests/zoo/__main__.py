"""Runs models of the zoo, each in a process of its own, and writes the page on them.

    python -m tests.zoo                    # all; writes output/models.md
    python -m tests.zoo gru u_net --output docs/reference/models.md
    python -m tests.zoo --only-missing --output docs/reference/models.md

Results that are stored beside the page are kept for models that are not run.
"""

import argparse
import importlib.util
import json
import pathlib
import resource
import signal
import subprocess
import sys

from tests.zoo import page
from tests.zoo.catalog import ROWS
from tests.zoo.trial import Result

ROOT = pathlib.Path(__file__).parents[2]


def main(words=None):
    options = _parser().parse_args(words)
    stored = options.output.with_suffix("") / "results.csv"
    results, unexpected = page.read(stored), []
    for name in _chosen(options, results):
        result = run(name, options.timeout)
        results[name] = result
        page.write(options.output, results)  # what takes hours may be ended early
        print(f"{name}: {result.outcome} {result.unexpected}".rstrip(), flush=True)
        if result.unexpected:
            unexpected.append(name)
    page.write(options.output, results)
    return f"Not as expected: {', '.join(unexpected)}" if unexpected else 0


def _parser():
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="models; by default all")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "output" / "models.md")
    parser.add_argument("--only-missing", action="store_true", help="only those without a result")
    parser.add_argument("--rewrite", action="store_true", help="write the page, and run none")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each model")
    return parser


def _chosen(options, results):
    """The names of the models that are to be run."""
    unknown = set(options.names) - set(ROWS)
    if unknown:
        sys.exit(f"No such models: {', '.join(sorted(unknown))}. There are: {', '.join(ROWS)}.")
    if options.rewrite:
        return []
    names = [
        name
        for name in options.names or ROWS
        if not (options.only_missing and _has_result(results.get(name)))
    ]
    without = [name for name in names if importlib.util.find_spec(ROWS[name].needs) is None]
    if without:
        print(f"Left out, since their package is not installed: {', '.join(without)}")
    return [name for name in names if name not in without]


def _has_result(result):
    return result is not None and result.outcome not in (page.NOT_RUN, page.FAILED)


def run(name, timeout):
    """The `Result` of a model, from a process of its own."""
    command = [sys.executable, "-m", "tests.zoo.trial", name]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            preexec_fn=_limit_memory,
        )
    except subprocess.TimeoutExpired:
        return _failed(name, f"no result in {timeout:g} s")
    if done.returncode < 0:
        return _failed(name, f"ended by {signal.Signals(-done.returncode).name}")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        return _failed(name, lines[-1])
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def _failed(name, why):
    return Result(name, page.FAILED, unexpected=why, message=why)


def _limit_memory():
    """For a new process: what is available less 1 GB, and the first to be ended."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        (available,) = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    limit = 1024 * max(available - 2**20, 2**20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    pathlib.Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


if __name__ == "__main__":
    sys.exit(main())
