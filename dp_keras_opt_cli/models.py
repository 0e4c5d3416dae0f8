"""Model files and ledger files, with errors that say what is wrong with them."""

import importlib
import pathlib
import sys
import zipfile

import keras

import dp_keras_opt as dp
from dp_keras_opt_cli.results import FileError, UsageError, errors_as


def load(path, modules=()):
    """The model in a `.keras` file, not compiled.

    Args:
        path: of the file.
        modules: names of modules to import first; the working folder is searched, too.

    Raises:
        FileError: there is no such file, or Keras cannot make a model of it.
        UsageError: a module cannot be imported.
    """
    sys.path.insert(0, "")
    try:
        for module in modules:
            with errors_as(UsageError, of=ImportError, before=f"--import {module}: "):
                importlib.import_module(module)
    finally:
        sys.path.remove("")
    if not zipfile.is_zipfile(existing(path)):
        raise FileError(f"{path} is no .keras file. Save the model with model.save('name.keras').")
    try:
        return keras.saving.load_model(path, compile=False)
    except (ValueError, TypeError, KeyError, OSError) as error:
        text = str(error).split("Full object config")[0]
        raise FileError(
            f"Keras cannot load {path}: {text} If the model has layers of your own, give --import "
            "MODULE, which registers them."
        ) from error


def spent(path, modules=()):
    """The private model in a `.keras` file, or the ledger in a ledger file, which is only read.

    Raises:
        FileError: there is no such file, or no ledger in it.
    """
    if existing(path).suffix != ".keras":
        with errors_as(FileError):
            return dp.accounting.Ledger.read(path)
    model = load(path, modules)
    if not isinstance(model, dp.DPModel):
        raise FileError(
            f"{path} holds a Keras model that is not private, and so no ledger. Nothing is "
            "guaranteed for it."
        )
    return model


def existing(path):
    """`path` as a `pathlib.Path`, or a FileError."""
    path = pathlib.Path(path)
    if not path.exists():
        raise FileError(f"There is no file {path}.")
    return path
