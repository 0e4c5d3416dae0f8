"""The file behind a ledger: append-only, one JSON record a line, on disk before a step runs.

    {"run": "9f…", "begins": {…}, "format": 1, "library": "0.1.0", …}   a run, and who wrote it
    {"run": "9f…", "reserved": 101, "time": …}       101 of its steps may run from here on
    {"run": "9f…", "ran": 64, "time": …}             64 of them did
    {"run": "9f…", …, "planned": 500, "time": …}     500 of them were to run

What a run has spent, and planned, is what its last record says. So whatever is lost between two
records, by a crash or a full disk, can only over-count. The times are for the reader; nothing
depends on them.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pathlib
import weakref
from typing import Any

from dp_keras_opt import files
from dp_keras_opt.accounting import versions
from dp_keras_opt.accounting.segment import Segment
from dp_keras_opt.types import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_START = b'{"run": "'
_CHANGING = ("run", "steps", "planned")  # of a segment, what each record says anew


class Journal:
    """An open ledger file, locked against all other writers until this process ends.

    Args:
        path: of the file; made if there is none.

    Attributes:
        path: of the file.
        segments: those that it had when it was opened.
        close: function that gives up the file and its lock.

    Raises:
        ValueError: the file is not a ledger, or was altered.
        RuntimeError: another process, or another `Ledger` of this one, writes to it.
        OSError: the file cannot be opened for writing.
    """

    def __init__(self, path: Path) -> None:
        if fcntl is None:
            raise RuntimeError("A ledger in a file needs the file locks of POSIX systems.")
        self.path = pathlib.Path(path).absolute()  # also where the process changes its directory
        self._writer = os.getpid()
        self._broken = None
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._lock()
            runs, self._size = _runs(self.path)
            self.segments = _segments(runs)
            os.ftruncate(self._file, self._size)  # a last line that was torn: it never counted
            files.sync_directory(self.path.parent)
        except BaseException:
            os.close(self._file)
            raise
        self.close = weakref.finalize(self, os.close, self._file)  # gives up the lock
        self._told = {each.run: (each.steps, each.planned) for each in self.segments}

    def _lock(self):
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RuntimeError(
                f"{self.path} is in use: two writers of one ledger would not see what the other "
                "spends. Wait until the other process ends, or call `unlock` on its Ledger."
            ) from error

    def _is_there(self):
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file))
        except FileNotFoundError:
            return False

    def knows(self, run: str) -> bool:
        """Whether it has records of a run."""
        return run in self._told

    def record(self, segment: Segment, how: str = "ran", continues: str | None = None) -> None:
        """Has the file say how many steps of a segment ran, unless it says so already.

        Args:
            segment: the `Segment`.
            how: "ran", or "reserved" of steps that may run from here on.
            continues: None, or the name of a run that goes on under this one's.

        Raises:
            OSError, RuntimeError: as `append`.
        """
        told = segment.steps, segment.planned
        if self._told.get(segment.run) == told:
            return
        config = segment.to_config()
        content: dict[str, Any] = {}
        if continues is not None:
            content["continues"] = continues
        if not self.knows(segment.run):
            begins = {name: value for name, value in config.items() if name not in _CHANGING}
            content |= {"begins": begins, **versions.STAMP}
        if segment.planned is not None:
            content["planned"] = config["planned"]
        self.append(segment.run, **content, **{how: segment.steps})
        self._told[segment.run] = told

    def reserve(self, segment: Segment, steps: int) -> None:
        """Has the file know of the next steps of a segment, and of some more.

        So that not each step waits for the disk, 1% of the steps so far are reserved ahead, but
        not past the segment's end; none under a privacy filter, whose limit they could exceed.

        Raises:
            OSError, RuntimeError: as `append`.
        """
        needed = segment.steps + steps
        if not self.knows(segment.run) or self._told[segment.run][0] < needed:
            ahead = 0 if segment.filter else min(needed // 100, segment.end[0] - steps)
            self.record(dataclasses.replace(segment, steps=needed + ahead), "reserved")

    def append(self, run, **content):
        """Writes a record, and returns once it is on disk.

        Raises:
            OSError: it could not be written; the file is as it was before.
            RuntimeError: whether something was written is not known, the file is gone or another
                one, or this is a fork of the process that opened it.
        """
        if os.getpid() != self._writer:
            raise RuntimeError(f"{self.path} was opened by the process that this one forked from.")
        if self._broken:
            raise RuntimeError(
                f"Writing to {self.path} failed before ({self._broken}), so that its end is not "
                "known. Start the process anew: it reads what was written."
            )
        if not self._is_there():
            raise RuntimeError(
                f"{self.path} was deleted, moved or replaced since it was opened: who reads it "
                "would not see what is spent from now on. Put it back, and start the process anew."
            )
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        line = (json.dumps({"run": run, **content, "time": now}) + "\n").encode()
        try:
            written = os.write(self._file, line)
            if written < len(line):
                raise OSError(28, "No space left on device", str(self.path))
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        try:
            os.fsync(self._file)
        except OSError as error:
            self._broken = error
            raise
        self._size += len(line)


def read(path: Path) -> list[Segment]:
    """The segments that a ledger file has, without locking it.

    Raises:
        ValueError: a line other than a torn last one is no record; or a later version of the
            library wrote it.
        OSError: the file cannot be read.
    """
    return _segments(_runs(path)[0])


def _segments(runs):
    segments = [
        Segment.from_config({**begins, "run": run, "steps": steps, "planned": planned})
        for run, (begins, steps, planned) in runs.items()
    ]
    return [segment for segment in segments if segment.steps]


def _runs(path):
    """What the records say.

    Returns:
        ({run: (what `begins` says, its steps, what was planned)}, size of the file without a torn
        last line, bytes).
    """
    content = pathlib.Path(path).read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    torn = content[len(whole) :].strip(b"\0")  # zeros are what a crash of the machine may leave
    if torn[: len(_START)] != _START[: len(torn)]:
        raise ValueError(f"{path} is no ledger: it ends in {torn[:40]!r}.")
    runs = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            record = json.loads(line)
            versions.check(record, path)
            run = record["run"]
            begins = record["begins"] if "begins" in record else runs[run][0]
            steps = int(record["ran" if "ran" in record else "reserved"])
            runs[run] = begins, steps, record.get("planned")
            runs.pop(record.get("continues"), None)
        except versions.NewerLedgerError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"Line {number} of {path} is no record of a ledger: the file is another one, or "
                "was altered. What was spent is not known; restore the file from a copy."
            ) from error
    return runs, len(whole)
