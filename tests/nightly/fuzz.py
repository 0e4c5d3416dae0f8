"""Tries random configurations; see tests/helpers/fuzzing.py.

    python -m tests.nightly.fuzz --count 2000

Ends with status 1 where one of them trains otherwise than accounted, or is refused without reason.
"""

import argparse
import collections
import sys
import traceback

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.helpers.fuzzing import check, configurations


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    counts, reasons, failures = collections.Counter(), collections.Counter(), []

    @seed(options.seed)
    @settings(
        max_examples=options.count, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(configurations)
    def attempt(configuration):
        try:
            reason = check(configuration)
            counts["trained as accounted" if reason is None else "refused with a reason"] += 1
            if reason:
                reasons[reason[:70]] += 1
        except Exception as error:
            counts["failed"] += 1
            kind = traceback.extract_tb(error.__traceback__)[-1][:2], str(error)[:100]
            if kind not in failures:
                failures.append(kind)
                print(f"{configuration}\n{traceback.format_exc()[-1500:]}", flush=True)

    attempt()
    for reason, count in reasons.most_common():
        print(f"{count:5} {reason}…")
    print(", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
