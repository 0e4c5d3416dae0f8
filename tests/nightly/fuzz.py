"""Tries random configurations; see tests/helpers/fuzzing.py.

    python -m tests.nightly.fuzz --count 2000

Ends with status 1 where one of them trains otherwise than accounted, or is refused without reason.
"""

import argparse
import collections
import multiprocessing
import sys
import traceback

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.helpers.fuzzing import check, configurations

#: A process tries so many, and then makes room: what XLA has compiled stays until its end.
_BY_ONE_PROCESS = 100


def attempt(configuration):
    """(why it was refused or None; where it failed and how, or None) of a configuration."""
    try:
        return check(configuration), None
    except Exception as error:
        kind = str(traceback.extract_tb(error.__traceback__)[-1][:2]), str(error)[:100]
        return None, (kind, traceback.format_exc()[-1500:])


def drawn(count, start):
    """So many configurations, drawn by hypothesis."""
    found = []

    @seed(start)
    @settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(configurations)
    def draw(configuration):
        found.append(configuration)

    draw()
    return found


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args(arguments)
    counts, reasons, failures = collections.Counter(), collections.Counter(), set()
    tried = drawn(options.count, options.seed)
    processes = multiprocessing.get_context("spawn")
    with processes.Pool(options.processes, maxtasksperchild=_BY_ONE_PROCESS) as pool:
        for configuration, (reason, failure) in zip(tried, pool.imap(attempt, tried), strict=True):
            if failure:
                counts["failed"] += 1
                kind, text = failure
                if kind not in failures:
                    failures.add(kind)
                    print(f"{configuration}\n{text}", flush=True)
            else:
                counts["refused with a reason" if reason else "trained as accounted"] += 1
                reasons.update([reason[:70]] if reason else [])
    for reason, count in reasons.most_common():
        print(f"{count:5} {reason}…")
    print(", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
