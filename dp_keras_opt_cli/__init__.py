"""The command line `dp-keras-opt`, which parses its arguments before it imports the library.

`parser.py` has the commands with their arguments, and imports neither the library nor TensorFlow.
A command names the function that does it as "module:function" of this package; the function takes
the parsed arguments, and returns a `Result` or raises a `CommandError`.
"""

from dp_keras_opt_cli.command_line import main

__all__ = ["main"]
