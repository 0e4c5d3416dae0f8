"""Files that a crash leaves whole."""

import contextlib
import os
import pathlib
import secrets
import shutil


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
    with replacing(path) as beside:
        save(beside, overwrite=True)


@contextlib.contextmanager
def replacing(path):
    """A file beside `path`, which takes its place once the block ends without an error."""
    path = pathlib.Path(path)
    beside = path.with_name(f"{secrets.token_hex(4)}-{path.name}")
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path, content):
    """A folder beside `path`, which takes its place once the block ends without an error.

    A hidden name, so that nothing that watches the folder above takes it for finished.

    Args:
        path: folder to write. One that is there is replaced if all in it is `content`.
        content: relative paths of the files and folders that such a folder consists of.

    Raises:
        FileExistsError: there are other files at `path`.
        ValueError: `path` is not on this machine's file systems.
    """
    check_replaceable(path, content)
    path = pathlib.Path(path).absolute()
    beside = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        beside.mkdir(parents=True)
        yield beside
        _put(beside, path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _put(folder, path):
    if not path.exists():
        os.replace(folder, path)
        return
    old = path.with_name(f"{folder.name}-old")
    os.replace(path, old)
    try:
        os.replace(folder, path)
    except OSError:
        os.replace(old, path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def check_replaceable(path, content):
    """Refuses a place where there are other files than `content`; see `new_folder`."""
    if "://" in str(path):
        raise ValueError(f"{path} is no local folder. Write a local one and copy it there.")
    path = pathlib.Path(path).absolute()
    if not path.exists():
        return
    known = [path / part for part in content]
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    others = [file for file in files if not {file, *file.parents} & set(known)]
    if others:
        raise FileExistsError(
            f"{path} holds other files than those of an export, such as {others[0]}. Give the "
            "name of a new folder."
        )
