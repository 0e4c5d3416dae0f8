"""The plugin that leaves out tests when time is up."""

import types

import pytest

from tests.helpers.slow import Limit


def order(run, monkeypatch):
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", run)
    items = [types.SimpleNamespace(path=f"file {n % 9}", number=n) for n in range(36)]
    Limit(60).pytest_collection_modifyitems(items)
    return [(item.path, item.number) for item in items]


def test_files_come_in_an_order_of_the_run_and_stay_whole(monkeypatch):
    found = order("a", monkeypatch)
    assert found == order("a", monkeypatch)  # in each worker
    assert found != order("b", monkeypatch)
    files = [path for path, _ in found]
    assert all(len(set(files[n : n + 4])) == 1 for n in range(0, 36, 4))
    assert all(a < b for (p, a), (q, b) in zip(found, found[1:], strict=False) if p == q)


def test_no_test_begins_when_time_is_up():
    Limit(60).pytest_runtest_setup()
    with pytest.raises(pytest.skip.Exception, match="time was up"):
        Limit(-1).pytest_runtest_setup()
