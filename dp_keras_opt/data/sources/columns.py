"""Arrays side by side, in memory or on disk, of which rows are read."""

import os

import numpy as np
import tensorflow as tf

from dp_keras_opt.data.sources.files import Unchanged


class OnDisk:
    """An array of a file, of which rows are read: of NumPy, h5py or zarr.

    Attributes:
        shape, dtype: those of the array.
    """

    is_thread_safe = True

    def __init__(self, array):
        self._array = array
        self.shape, self.dtype = tuple(array.shape), np.dtype(array.dtype)
        self._files = Unchanged(_files_of(array))
        self._chunks = _chunks_written(array)
        self._mapped = _mapped(array)

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, indices):
        if self._mapped is not None:
            return self._mapped[indices]
        if hasattr(self._array, "get_orthogonal_selection"):  # zarr
            return np.asarray(self._array.get_orthogonal_selection((indices,)))
        return np.asarray(self._array[indices])

    def whole(self):
        """All rows, read into memory."""
        return np.asarray(self._array[:])

    def check(self):
        self._files.check()
        if tuple(self._array.shape) != self.shape:
            raise RuntimeError(
                f"The data had the shape {self.shape} and have {tuple(self._array.shape)} now: "
                "they must stay what they are while they are trained on."
            )

    def check_chunks(self):
        """As `check`, for chunks in files of their own: zarr reads what is missing as zeros."""
        missing = self._chunks - _chunks_written(self._array)
        if missing > 0:
            raise RuntimeError(
                f"{missing} chunks of {self._array!r} are gone, and would be read as zeros."
            )


def open_column(value):
    """An `OnDisk` for an array of a file, or the path of a `.npy` file; all else as it is."""
    if isinstance(value, str | os.PathLike) and str(value).endswith(".npy"):
        value = np.load(value, mmap_mode="r")
    return OnDisk(value) if _is_of_file(value) else value


def _is_of_file(value):
    if isinstance(value, np.memmap):
        return value.ndim > 0 and value.filename is not None
    kind = type(value)
    return (kind.__module__.partition(".")[0], kind.__name__) in {
        ("h5py", "Dataset"),
        ("zarr", "Array"),
    }


def _files_of(array):
    if isinstance(array, np.memmap):
        return [array.filename]
    return [array.file.filename] if hasattr(array, "file") else []


def _chunks_written(array):
    return getattr(array, "nchunks_initialized", 0)


def _mapped(array):
    """A map of the numbers of a file, where they lie there as NumPy has them; or None.

    NumPy's, or that of a data set of h5py which is in one piece: h5py would pick row by row.
    """
    if isinstance(array, np.memmap):
        return array.view(np.ndarray)  # of which a selection costs less
    if not hasattr(array, "file") or array.file.mode != "r" or array.file.driver != "sec2":
        return None  # what others write may not be in the file yet
    import h5py

    place, kind = array.id.get_offset(), array.id.get_type()
    as_it_is = array.dtype.kind in "iuf" and kind.equal(h5py.h5t.py_create(array.dtype))
    if place is None or array.file.userblock_size or not as_it_is:  # None: in chunks, or elsewhere
        return None
    whole = np.memmap(array.file.filename, array.dtype, "r", place, tuple(array.shape))
    return whole.view(np.ndarray)


class Columns:
    """A structure of columns as a source.

    Args:
        structure: of arrays or `OnDisk`, of one length.
    """

    def __init__(self, structure):
        self._structure = structure
        self._columns = tf.nest.flatten(structure)
        self._on_disk = [each for each in self._columns if isinstance(each, OnDisk)]
        self.is_thread_safe = True

    def __len__(self):
        return len(self._columns[0])

    def __getitem__(self, indices):
        return tf.nest.map_structure(lambda column: column[indices], self._structure)

    def check(self):
        for each in self._on_disk:
            each.check()

    def check_chunks(self):
        for each in self._on_disk:
            each.check_chunks()
