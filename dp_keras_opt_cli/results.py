"""What a command returns, and the ways in which it fails, each with its exit code."""

import contextlib
import dataclasses
import json
import math


@dataclasses.dataclass(frozen=True)
class Result:
    """What a command found.

    Attributes:
        data: JSON-able values, what `--json` prints. Infinity becomes "inf", which JSON lacks.
        text: the same for a person.
        refused: None, or why what was asked is not to be had, although there is a result.
    """

    data: dict
    text: str
    refused: str | None = None

    def to_json(self):
        """`data` as JSON that every parser reads."""
        return json.dumps(_finite(self.data), indent=2, allow_nan=False, ensure_ascii=False)


class CommandError(Exception):
    """What was asked cannot be done; the text says why, and what to do."""

    code = 1


class UsageError(CommandError):
    """The arguments are wrong."""

    code = 2


class FileError(CommandError):
    """A file is not there, or cannot be read as what it should be."""

    code = 3


class SpentError(CommandError):
    """The budget is spent already."""

    code = 4


INTERRUPTED = 130


@contextlib.contextmanager
def errors_as(kind, *, of=(ValueError, TypeError), before=""):
    """Turns errors of the library into errors of this kind.

    Args:
        kind: a `CommandError` class.
        of: the exception classes.
        before: text to put before what they say.
    """
    try:
        yield
    except of as error:
        raise kind(f"{before}{error}") from error


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
