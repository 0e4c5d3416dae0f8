"""The secret file that hands a run of correlated noise over to another process.

It holds past noise: whoever has it and a released gradient has the raw sum. It exists once: who
saves it stops using the run, and who resumes from it deletes it, so that no noise serves twice.
"""

import os
import pathlib
from typing import NamedTuple

import numpy as np

from dp_keras_opt import files

SUFFIX = ".secret.npz"
_WARNING = "SECRET: past noise. With a released gradient it gives the raw sum. Never publish it."


class SavedRun(NamedTuple):
    """A run of correlated noise between two steps."""

    run: str  # name of its segment in the ledger
    steps: int  # how many of it were taken
    arrangement: int | None  # of the examples; see `data.Batches`
    memories: dict  # stream -> its buffers, float32 (size,)


def write(path, saved):
    """Writes a new file that only its owner can read.

    Raises:
        ValueError: the name does not end in ".secret.npz".
        OSError: the file exists, or cannot be written; none is left behind then.
    """
    path = _checked(path)
    arrays = {
        f"{index}.{part}.{position}": buffer
        for (index, part), buffers in saved.memories.items()
        for position, buffer in enumerate(buffers)
    }
    arrangement = "" if saved.arrangement is None else str(saved.arrangement)
    header = np.array([_WARNING, saved.run, str(saved.steps), arrangement])
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            np.savez(file, header=header, **arrays)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink()
        raise


def read(path):
    """The `SavedRun` in a file that `write` made.

    Raises:
        ValueError: it is no such file.
    """
    path = _checked(path)
    with np.load(path, allow_pickle=False) as stored:
        content = {name: stored[name] for name in stored.files}
    header = content.pop("header", None)
    if header is None or header[0] != _WARNING:
        raise ValueError(f"{path} is no file of DPModel.save_run.")
    memories = {}
    for name in content:
        index, part, _ = map(int, name.split("."))
        memories.setdefault((index, part), []).append(content[name])
    _, run, steps, arrangement = header.tolist()
    return SavedRun(run, int(steps), int(arrangement) if arrangement else None, memories)


def delete(path):
    """Removes the file, for good: another process cannot resume from it as well."""
    path = _checked(path)
    path.unlink()
    files.sync_directory(path.parent)  # or a crash of the machine could bring the file back


def _checked(path):
    if not str(path).endswith(SUFFIX):
        raise ValueError(
            f"The file holds past noise and must be kept secret: give it a name that ends in "
            f"{SUFFIX!r}; received {str(path)!r}."
        )
    return pathlib.Path(path)
