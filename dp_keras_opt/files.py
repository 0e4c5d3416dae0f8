"""Files that a crash leaves whole."""

import os
import pathlib
import secrets


def sync_directory(path):
    """Puts on disk that a file of this folder was made or removed."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def replaced(save, filepath, overwrite):
    """Saves beside the file and renames, where Keras would truncate the file and write."""
    path = pathlib.Path(filepath)
    one_file = path.name.endswith((".keras", ".weights.h5")) and "://" not in str(filepath)
    if not one_file or path.is_dir() or (path.exists() and not overwrite):  # where Keras asks
        save(filepath, overwrite=overwrite)
        return
    beside = path.with_name(f"{secrets.token_hex(4)}-{path.name}")
    try:
        save(beside, overwrite=True)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
