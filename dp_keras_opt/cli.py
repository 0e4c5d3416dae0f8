"""Where the command line was: it is the package `dp_keras_opt_cli` now."""

from dp_keras_opt_cli import main

__all__ = ["main"]
