"""Packages that only some sources need."""

import contextlib


@contextlib.contextmanager
def of_extra_data(package, what):
    """Says how to install a package of the extra `data` where importing it fails.

    Args:
        package: as it is installed.
        what: what needs it, in words with a verb.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"{what} {package}, which cannot be imported ({error}): "
            "pip install 'dp-keras-opt[data]'."
        ) from error
