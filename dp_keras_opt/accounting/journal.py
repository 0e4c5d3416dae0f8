"""The file behind a ledger: append-only, one JSON record a line, on disk before a step runs.

    {"run": "9f…", "begins": {…}, "time": …}     a run: its releases, noise, sampling
    {"run": "9f…", "reserved": 101, "time": …}   so many of its steps may run from here on
    {"run": "9f…", "ran": 64, "time": …}         so many of them did
    {…, "planned": 500, "time": …}               so many of them were to run

What a run has spent, and planned, is what its last record says. So whatever is lost between two
records, by a crash or a full disk, can only over-count. The times are for the reader; nothing
depends on them.
"""

import datetime
import json
import os
import pathlib
import weakref

from dp_keras_opt import files

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_START = b'{"run": "'


class Journal:
    """An open ledger file, locked against all other writers until this process ends.

    Args:
        path: of the file; made if there is none.

    Raises:
        ValueError: the file is not a ledger, or was altered.
        RuntimeError: another process, or another `Ledger` of this one, writes to it.
        OSError: the file cannot be opened for writing.
    """

    def __init__(self, path):
        if fcntl is None:
            raise RuntimeError("A ledger in a file needs the file locks of POSIX systems.")
        self.path = pathlib.Path(path)
        self._process = os.getpid()
        self._broken = None
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._lock()
            self.runs, self._size = read(self.path)
            os.ftruncate(self._file, self._size)  # a last line that was torn: it never counted
            files.sync_directory(self.path.parent)
        except BaseException:
            os.close(self._file)
            raise
        self.close = weakref.finalize(self, os.close, self._file)  # gives up the lock

    def _lock(self):
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RuntimeError(
                f"{self.path} is in use: two writers of one ledger would not see what the other "
                "spends. Wait until the other process ends, or call `release` on its Ledger."
            ) from error

    def _is_there(self):
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file))
        except FileNotFoundError:
            return False

    def append(self, run, **content):
        """Writes a record, and returns once it is on disk.

        Raises:
            OSError: it could not be written; the file is as it was before.
            RuntimeError: whether something was written is not known, the file is gone or another
                one, or this is a fork of the process that opened it.
        """
        if os.getpid() != self._process:
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


def read(path):
    """What a ledger file says, without locking it.

    Returns:
        ({run: (what `begins` says, its steps, what was planned)}, size of the file without a torn
        last line, bytes).

    Raises:
        ValueError: a line other than a torn last one is no record.
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
            run = record["run"]
            begins = record["begins"] if "begins" in record else runs[run][0]
            steps = int(record["ran" if "ran" in record else "reserved"])
            runs[run] = begins, steps, record.get("planned")
            runs.pop(record.get("continues"), None)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"Line {number} of {path} is no record of a ledger: the file is another one, or "
                "was altered. What was spent is not known; restore the file from a copy."
            ) from error
    return runs, len(whole)
