"""What went wrong while data were read, of which TensorFlow passes on the text alone."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator

import tensorflow as tf

#: The last errors of all pipelines of this process, as they were raised.
_kept: collections.deque[Exception] = collections.deque(maxlen=8)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Around what TensorFlow calls: keeps an error, for `as_raised`.

    Raises:
        RuntimeError: in the place of a `StopIteration`, which TensorFlow takes for the end of data.
    """
    try:
        yield
    except StopIteration:
        ended = RuntimeError("`data` raised StopIteration where examples were asked for.")
        _kept.append(ended)
        raise ended from None
    except Exception as error:
        _kept.append(error)
        raise


@contextlib.contextmanager
def as_raised() -> Iterator[None]:
    """Around what reads the data: raises the error itself, in the place of TensorFlow's.

    It is recognised by its type and text in TensorFlow's message, so that an error of a pipeline
    that was abandoned is never taken for that of another one; all other errors pass.
    """
    try:
        yield
    except tf.errors.OpError as error:
        original = _original(error.message)
        if original is None:
            raise
        raise original from original.__cause__  # and TensorFlow's is not shown


def _original(message):
    for error in reversed(_kept):
        if f"{type(error).__name__}: {error}" in message:
            _kept.remove(error)
            return error
    return None
