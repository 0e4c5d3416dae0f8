"""Which tests are slow, as a run of all of them has seen: `pytest -n 2 --store-slow`."""

import collections
import functools
import os
import pathlib
import random
import time

import pytest

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


class Limit:
    """A plugin of pytest after whose time no test begins; which ones that are differs each time."""

    def __init__(self, seconds):
        self._end = time.monotonic() + seconds

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        order = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))  # the same in all workers
        place = {path: order.random() for path in dict.fromkeys(item.path for item in items)}
        items.sort(key=lambda item: place[item.path])

    def pytest_runtest_setup(self):
        if time.monotonic() > self._end:
            pytest.skip("the time was up before it began")
