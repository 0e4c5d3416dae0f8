"""Which version wrote a ledger, and whether this one can read it."""

from dp_keras_opt.version import __version__

#: Of ledgers as text and as files. A new number is for what older libraries would misread.
FORMAT = 1

#: What every ledger says of its writer. Ledgers of before say the format, or nothing.
STAMP = {"format": FORMAT, "library": __version__}


class NewerLedgerError(ValueError):
    """The ledger was written by a later version, which may mean something else by it."""


def check(stamp, what):
    """Refuses what a later version wrote: a later format, or a later minor version.

    Args:
        stamp: a dict that may have the keys of `STAMP`.
        what: the ledger in words.

    Raises:
        NewerLedgerError: it names both versions.
        ValueError: the stamp is none.
    """
    written, library = stamp.get("format", FORMAT), stamp.get("library", __version__)
    if type(written) is not int or written < 1:
        raise ValueError(f"its format is {written!r}, not {FORMAT}")
    if written > FORMAT or _minor(library) > _minor(__version__):
        raise NewerLedgerError(
            f"{what} was written by dp_keras_opt {library} (ledger format {written}), which is "
            f"newer than this library: dp_keras_opt {__version__} (ledger format {FORMAT}). What "
            "it says may mean something else, so no ε can be stated. Update dp_keras_opt."
        )


def _minor(version):
    """(major, minor) of a version, as "0.1.0"."""
    major, minor = str(version).split(".")[:2]
    return int(major), int(minor)
