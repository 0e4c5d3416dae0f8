"""Whether files are what they were."""

import os


class Unchanged:
    """Remembers the sizes and times of files, and notices when they are others.

    A mapped file that was cut short would end the process where the missing part is read.
    """

    def __init__(self, paths):
        self._seen = {os.fspath(path): _state(path) for path in paths}

    def check(self):
        """Raises where a file is no longer as it was when it was opened.

        Raises:
            RuntimeError: it was changed, cut short or removed.
        """
        for path, before in self._seen.items():
            try:
                now = _state(path)
            except OSError as error:
                raise RuntimeError(f"{path} cannot be read any more: {error}") from error
            if now != before:
                raise RuntimeError(
                    f"{path} was changed while it was trained on: it had {before[0]:,} bytes and "
                    f"has {now[0]:,}. The guarantee is for data that stay what they are: open "
                    "the file anew, and train on from the model that was saved last."
                )


def _state(path):
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns
