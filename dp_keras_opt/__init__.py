"""Differentially private training for Keras 3 on TensorFlow."""

import os
import sys

__version__ = "0.1.0"


def _is_command():
    """Whether this process is the command line.

    It reads its arguments before it waits seconds for TensorFlow (`cli.main.load_library`). To
    import the names only when they are used would not do for everyone: to import the library is
    also to register its classes, which `keras.saving.load_model` needs.
    """
    program = (sys.argv or [""])[0]
    if program == "-m":  # the module that is run is not yet found
        return sys.orig_argv[sys.orig_argv.index("-m") :][1:2] == ["dp_keras_opt"]
    return os.path.basename(program) == "dp-keras-opt"


if not _is_command():
    from dp_keras_opt._names import *  # noqa: F403
    from dp_keras_opt._names import __all__  # noqa: F401
