"""No batch is made while Python ends.

A thread of TensorFlow that asks Python for a batch then waits for ever, and so does whoever deletes
the iterator that the batch is for: a script that is interrupted within `fit`, or has an iterator of
its own, would hang at its end.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

_QUIET = 0.05  # seconds without a call, after which none is on its way

_changed = threading.Condition()
_running, _last, _ends = 0, 0.0, False


@contextlib.contextmanager
def called() -> Iterator[None]:
    """Around what a thread of TensorFlow calls.

    Raises:
        RuntimeError: Python ends.
    """
    global _running, _last
    with _changed:
        _last = time.monotonic()
        if _ends:
            raise RuntimeError("No batch is made any more: this Python process is ending.")
        _running += 1
    try:
        yield
    finally:
        with _changed:
            _running, _last = _running - 1, time.monotonic()
            _changed.notify_all()


def until_end(values: Iterable[Any]) -> Iterator[Any]:
    """The values, each of them asked for by a thread of TensorFlow."""
    iterator, nothing = iter(values), object()
    while True:
        with called():
            value = next(iterator, nothing)
        if value is nothing:
            return
        yield value


@atexit.register
def _wait() -> None:
    """Has pipelines end, and waits for what they have asked for."""
    global _ends
    with _changed:
        _ends = True
        while _running or (_last and time.monotonic() < _last + _QUIET):
            _changed.wait(_QUIET)
