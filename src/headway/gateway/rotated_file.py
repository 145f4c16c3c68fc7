"""A file of JSON lines that never grows beyond its bounds: full, it is put aside under a number and begun anew.

``name`` is the newest, ``name.1`` the one before it; the oldest goes. Appending costs one ``write``. It refuses to
raise in the middle of serving: what cannot be written is counted, and said once until it works again.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from headway.config.lines import cut_torn_line
from headway.errors import ConfigError
from headway.gateway.log import event


class RotatedFile:
    """Lines appended to ``path``: at most ``max_bytes`` per file, ``num_files`` files. Safe to use from many threads.

    Raises:
        ConfigError: the file cannot be opened for appending.
    """

    def __init__(self, path: Path, *, max_bytes: int, num_files: int) -> None:
        self.path = path
        self.num_lost_lines = 0
        self._max_bytes, self._num_files = max_bytes, num_files
        self._lock = threading.Lock()
        self._failing = False
        try:
            self._file: int | None = self._open()
        except OSError as error:
            raise ConfigError(f"cannot be appended to: {error.strerror}", path=str(path)) from error
        self._num_bytes = os.fstat(self._file).st_size

    def append(self, lines: bytes) -> bool:
        """Append whole lines; False when they could not be written. A line longer than a whole file is lost."""
        with self._lock:
            try:
                self._append(lines)
            except OSError as error:
                self.num_lost_lines += lines.count(b"\n")
                if not self._failing:
                    event(logging.ERROR, "file_not_written", path=str(self.path), error=error.strerror or str(error))
                self._failing = True
                return False
            self._failing = False
            return True

    def close(self) -> None:
        """Close the file; what is appended later is lost."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _append(self, lines: bytes) -> None:
        if self._file is None:
            self._file = self._open()
            self._num_bytes = os.fstat(self._file).st_size
        if self._num_bytes and self._num_bytes + len(lines) > self._max_bytes:
            self._rotate()
        if len(lines) > self._max_bytes:
            raise OSError(f"{len(lines)} bytes at once are more than a whole file may hold")
        view = memoryview(lines)
        while view:
            num_written = os.write(self._file, view)
            self._num_bytes += num_written
            view = view[num_written:]

    def _rotate(self) -> None:
        assert self._file is not None
        os.close(self._file)
        self._file = None
        if self._num_files == 1:
            os.truncate(self.path, 0)
        for number in range(self._num_files - 1, 0, -1):
            older = self._numbered(number)
            newer = self.path if number == 1 else self._numbered(number - 1)
            if newer.exists():
                os.replace(newer, older)
        self._file = self._open()
        self._num_bytes = os.fstat(self._file).st_size

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def _open(self) -> int:
        # Prompts may stand in it: readable by its owner alone.
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        cut_torn_line(file)
        return file
