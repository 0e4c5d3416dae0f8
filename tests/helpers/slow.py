"""Which tests are slow, as a run of all of them has seen: `pytest -n 2 --store-slow`."""

import collections
import functools
import pathlib

LIST = pathlib.Path(__file__).parents[1] / "slow.txt"
SECONDS = 0.7  # from here on a test is slow


@functools.cache
def known():
    """The names of the slow tests."""
    return frozenset(LIST.read_text(encoding="utf-8").splitlines())


class Recorder:
    """A plugin of pytest that writes the list anew."""

    def __init__(self):
        self._seconds = collections.Counter()

    def pytest_runtest_logreport(self, report):
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self):
        slow = (name for name, seconds in self._seconds.items() if seconds >= SECONDS)
        LIST.write_text("".join(f"{name}\n" for name in sorted(slow)), encoding="utf-8")
