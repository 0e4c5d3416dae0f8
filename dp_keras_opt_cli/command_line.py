"""From arguments to an exit code: parses, imports what the command needs, runs it, prints."""

import contextlib
import os
import pkgutil
import sys
import traceback
import warnings

from dp_keras_opt_cli.parser import make_parser
from dp_keras_opt_cli.results import INTERRUPTED, CommandError, FileError


def main(argv=None):
    """Runs the command line.

    Args:
        argv: the arguments after the name of the program; None for those of this process.

    Returns:
        The exit code. Errors are one line on stderr, with what to do about them.
    """
    debug = "--debug" in (sys.argv[1:] if argv is None else argv)
    try:
        return _run(make_parser().parse_args(argv))
    except SystemExit as end:  # --help and --version
        return end.code or 0
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except CommandError as error:
        if debug:
            traceback.print_exc()
        return _fail(error, error.code)
    except Exception as error:
        if debug:
            traceback.print_exc()
        code = FileError.code if isinstance(error, OSError) else CommandError.code
        expected = isinstance(error, ValueError | OSError)
        return _fail(error if expected else f"{error!r} (--debug shows where)", code)


def _run(arguments):
    command = _imported(arguments.run)
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = _show_warning
        result = command(arguments)
    print(result.to_json() if arguments.json else result.text, flush=True)
    if result.refused:
        return _fail(result.refused, CommandError.code)
    return 0


def _imported(name):
    """The function "module:function" of this package; with it, mostly, comes TensorFlow."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # for its later messages
    with _silenced():
        return pkgutil.resolve_name(f"dp_keras_opt_cli.{name}")


@contextlib.contextmanager
def _silenced():
    """Drops what TensorFlow greets with when it is imported: no setting of its own does."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _show_warning(message, *_args, **_kwargs):
    print(f"dp-keras-opt: warning: {_one_line(message)}", file=sys.stderr)


def _fail(error, code):
    print(f"dp-keras-opt: error: {_one_line(error)}", file=sys.stderr)
    return code


def _one_line(text):
    return " ".join(str(text).split())
