"""TFRecord files, of which any record is read at once, through an index that is built once.

A record is its length as 8 bytes (little endian), 4 bytes of checksum of these, the data, and 4
bytes of checksum of the data. The checksums are CRC-32C, rotated right by 15 bits, plus a constant.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from dp_keras_opt.data.sources.files import Unchanged
from dp_keras_opt.data.sources.packages import of_extra_data
from dp_keras_opt.files import replacing
from dp_keras_opt.types import Path

_HEADER, _FOOTER = struct.Struct("<QI"), struct.Struct("<I")
_ENTRY = np.dtype([("offset", "<u8"), ("length", "<u8"), ("checksum", "<u4")])
_READ = 2**24  # bytes that are read at a time while the index is built


class TFRecords:
    """The records of TFRecord files, bytes, in the order of the files.

    Each record that is read is held against its checksum.

    Args:
        paths: of one file, or of several. Beside each lies its index, which
            `dp-keras-opt index FILES`, or `index_tfrecord`, has built.

    Raises:
        FileNotFoundError: a file has no index.
        ImportError: the package google-crc32c is not installed.
        ValueError: an index is that of another file, or of the file before it was changed.
    """

    is_thread_safe = True

    def __init__(self, paths: Path | Sequence[Path]) -> None:
        _crc32c()  # without it no record can be read
        self._paths = _paths(paths)
        indices = [_read_index(path) for path in self._paths]
        self._files = Unchanged(self._paths)
        self._first = np.cumsum([0, *map(len, indices)])
        self._entries = np.concatenate(indices)
        # Not as arrays, of which a slice costs more than the checksum of a small record.
        self._contents = [np.memmap(path, np.uint8, "r").data for path in self._paths]

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        files = np.searchsorted(self._first, indices, side="right") - 1
        records = np.empty(len(indices), object)
        entries = zip(files.tolist(), self._entries[indices].tolist(), strict=True)
        for row, (file, entry) in enumerate(entries):
            records[row] = self._read(file, *entry)
        return records

    def check(self) -> None:
        """Raises where a file is no longer as it was; called before each batch."""
        self._files.check()

    def _read(self, file, offset, length, checksum):
        start = offset + _HEADER.size
        record = bytes(self._contents[file][start : start + length])
        if _masked(record) != checksum:
            raise ValueError(
                f"the record at byte {offset} of {self._paths[file]} does not match its checksum"
            )
        return record


def index_tfrecord(paths: Path | Sequence[Path]) -> int:
    """Builds the index of TFRecord files, once, and checks every record on the way.

    The index of a file lies beside it, under its name with .index behind it.

    Args:
        paths: of one file, or of several; not compressed.

    Returns:
        The number of records of all files.

    Raises:
        ImportError: the package google-crc32c is not installed.
        ValueError: a file is no TFRecord file, is compressed or cut short, or a record does not
            match its checksum; the message says where.
    """
    count = 0
    for path in _paths(paths):
        entries = np.array(list(_scan(path)), _ENTRY)
        size = np.array([os.stat(path).st_size], "<u8")
        with replacing(index_path(path)) as beside:
            beside.write_bytes(size.tobytes() + entries.tobytes())
        count += len(entries)
    return count


def check_index(path: Path) -> int:
    """Holds a file, every record of it, against the index that it has. Writes nothing.

    Returns:
        The number of records.

    Raises:
        FileNotFoundError: the file has no index.
        ImportError, ValueError: as `index_tfrecord`; or the index is not that of this file.
    """
    known = _read_index(path)
    if not np.array_equal(np.array(list(_scan(path)), _ENTRY), known):
        raise _not_the_index(path)
    return len(known)


def index_path(path: Path) -> str:
    """Where the index of a TFRecord file lies."""
    return f"{os.fspath(path)}.index"


def _scan(path) -> Iterator[tuple[int, int, int]]:
    """(offset, length, checksum) of every record of a file."""
    with open(path, "rb", buffering=_READ) as file:
        offset = 0
        while header := file.read(_HEADER.size):
            wrong = f"{path} is no TFRecord file from byte {offset} on"
            if len(header) < _HEADER.size:
                raise ValueError(f"{wrong}: it ends within the length of a record")
            length, checksum = _HEADER.unpack(header)
            if _masked(header[:8]) != checksum:
                known = " It is compressed: write it without compression, as gunzip does."
                packed = offset == 0 and header[:2] in (b"\x1f\x8b", b"\x78\x9c", b"\x78\x01")
                raise ValueError(
                    f"{wrong}: the length of a record does not match its checksum."
                    f"{known if packed else ''}"
                )
            record, footer = file.read(length), file.read(_FOOTER.size)
            if len(record) < length or len(footer) < _FOOTER.size:
                raise ValueError(f"{wrong}: it ends within a record")
            (checksum,) = _FOOTER.unpack(footer)
            if _masked(record) != checksum:
                raise ValueError(f"the record at byte {offset} of {path} is damaged")
            yield offset, length, checksum
            offset += _HEADER.size + length + _FOOTER.size


def _read_index(path):
    try:
        with open(index_path(path), "rb") as file:
            size, entries = np.frombuffer(file.read(8), "<u8"), file.read()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path} has no index, which random access to its records needs. Build it once: "
            f"dp-keras-opt index {path}, or dp_keras_opt.data.index_tfrecord."
        ) from error
    if not len(size) or size[0] != os.stat(path).st_size or len(entries) % _ENTRY.itemsize:
        raise _not_the_index(path)
    return np.frombuffer(entries, _ENTRY)


def _not_the_index(path):
    return ValueError(
        f"{index_path(path)} is not the index of {path} as it is now. Build it again: "
        f"dp-keras-opt index {path}."
    )


def _crc32c() -> Callable[[bytes], int]:
    with of_extra_data("google-crc32c", "The checksums of TFRecord files need"):
        import google_crc32c
    return google_crc32c.value


def _masked(data: bytes) -> int:
    crc = _crc32c()(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _paths(paths) -> list[str]:
    several: Iterable[Path] = [paths] if isinstance(paths, str | os.PathLike) else paths
    return [os.fspath(path) for path in several]
