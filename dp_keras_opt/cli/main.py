"""From arguments to an exit code: parses, loads the library, runs a command, prints."""

import argparse
import contextlib
import importlib
import os
import sys
import traceback
import warnings

import dp_keras_opt as dp
from dp_keras_opt.cli.results import INTERRUPTED, CommandError, FileError, UsageError

#: The modules whose `add_parser` makes the commands, in the order of `--help`.
COMMANDS = (
    "plan",
    "spent",
    "optimizers",
    "train",
    "compare",
    "explain",
    "reproduce",
    "completion",
)

_EPILOG = """exit codes: 0 done; 1 what was asked cannot be done; 2 wrong arguments; 3 a file is not
there or cannot be read; 4 the budget is spent already; 130 interrupted"""


class Parser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` whose errors are like all others: one line."""

    def error(self, message):
        raise UsageError(f"{message} ({self.prog} --help lists the arguments)")


def make_parser():
    """The parser of all commands; quick, since it does not load TensorFlow."""
    parser = Parser(
        prog="dp-keras-opt",
        description="Train Keras models under differential privacy, and account for it.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"dp-keras-opt {dp.__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True
    )
    for name in COMMANDS:
        importlib.import_module(f"dp_keras_opt.cli.{name}").add_parser(commands)
    return parser


def load_library():
    """Imports what `import dp_keras_opt` would have, had this not been the command line."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # for its later messages
    if "dp_keras_opt._names" not in sys.modules:
        with _silenced():
            importlib.import_module("dp_keras_opt._names")
    names = sys.modules["dp_keras_opt._names"]
    vars(dp).update({name: getattr(names, name) for name in names.__all__})


@contextlib.contextmanager
def _silenced():
    """Drops what TensorFlow greets with when it is loaded: no setting of its own does."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


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
    load_library()
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = _show_warning
        result = arguments.run(arguments)
    print(result.to_json() if arguments.json else result.text, flush=True)
    if result.refused:
        return _fail(result.refused, CommandError.code)
    return 0


def _show_warning(message, *_args, **_kwargs):
    print(f"dp-keras-opt: warning: {_one_line(message)}", file=sys.stderr)


def _fail(error, code):
    print(f"dp-keras-opt: error: {_one_line(error)}", file=sys.stderr)
    return code


def _one_line(text):
    return " ".join(str(text).split())
