"""Text files line by line: one reader for traces, prompts and evaluation data, gzipped or not, and one way to go on
appending to a file whose last line a crash tore.

It refuses to guess an encoding or to pass over damage: what cannot be read is a
:class:`~headway.errors.DatasetError` that names the file and, where known, the line.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from headway.errors import DatasetError

Row = TypeVar("Row")


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file, numbered from 1; its name tells whether it is gzipped.

    Raises:
        DatasetError: it cannot be read, or is not UTF-8.
    """
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                yield number, line
    except UnicodeDecodeError as error:
        raise DatasetError("is not UTF-8 text", path=str(path), line=number + 1) from error
    except (OSError, EOFError, zlib.error) as error:  # gzip reports damage as any of the three
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DatasetError(f"cannot be read: {reason}", path=str(path)) from error


def decode_lines(path: Path, decoder: msgspec.json.Decoder[Row], *, what: str = "") -> Iterator[tuple[int, Row]]:
    """The rows of a file of JSON lines with their numbers; blank lines are passed over. ``what`` begins a complaint.

    Raises:
        DatasetError: as :func:`read_lines`, or a line that is no such row.
    """
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise DatasetError(f"{what}{error}", path=str(path), line=number) from error
        yield number, row


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def cut_torn_line(file: int) -> int:
    """Cut off what stands behind the last line feed of an open file; how many bytes that were. ``file`` is its number.

    Raises:
        OSError: it cannot be read or cut.
    """
    size = os.fstat(file).st_size
    end, step = size, 1 << 16
    while end > 0:
        start = max(0, end - step)
        found = os.pread(file, end - start, start).rfind(b"\n")
        if found >= 0:
            end = start + found + 1
            break
        end = start
    if end < size:
        os.ftruncate(file, end)
    return size - end
