"""`completion`: a script by which a shell completes commands, options and files."""

import argparse

from dp_keras_opt_cli.parser import make_parser
from dp_keras_opt_cli.results import CommandError, Result

_FILES = ("FILE", "MODEL", "DATA")
_FOLDERS = ("DIR",)


def completion(arguments):
    """The `Result` of `completion`."""
    try:
        import shtab
    except ImportError:
        raise CommandError(
            "Completion scripts are made by shtab, which is not installed: "
            "pip install 'dp-keras-opt[cli]'."
        ) from None

    if arguments.shell not in shtab.SUPPORTED_SHELLS:
        raise CommandError(
            f"shtab {shtab.__version__} knows no {arguments.shell}: pip install --upgrade shtab."
        )
    parser = make_parser()
    _complete_paths(parser, {**dict.fromkeys(_FILES, shtab.FILE),
                             **dict.fromkeys(_FOLDERS, shtab.DIRECTORY)})  # fmt: skip
    script = shtab.complete(parser, arguments.shell)
    return Result({"shell": arguments.shell, "script": script}, script.rstrip("\n"))


def _complete_paths(parser, kinds):
    """Has arguments completed by what their metavar says they are."""
    for action in parser._actions:
        if action.metavar in kinds:
            action.complete = kinds[action.metavar]
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_paths(command, kinds)
