"""The command line `dp-keras-opt`: one module a group of commands.

A module of commands has `add_parser(subparsers)` and is listed in `main.COMMANDS`. TensorFlow is
loaded after the arguments are parsed, so nothing here imports the library at its top but for
`import dp_keras_opt as dp`, whose names are used inside of functions.
"""

from dp_keras_opt.cli.main import main

__all__ = ["main"]
