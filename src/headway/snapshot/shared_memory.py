"""Snapshots between processes of one machine: a file in /dev/shm that holds one native seqlock slot.

The writer creates the file whole or not at all, owns it through a file lock (which ends with the process, however it
ends) and unlinks it on close; what a killed engine left behind is taken away by the next one. The reader opens the
file when it appears, follows it when it is created anew, and returns a snapshot once. Plain ``open`` and ``mmap``:
the resource tracker of ``multiprocessing`` would unlink segments that another process still serves. Only the engine's
own user can read a segment; a second writer on a segment in use is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
from pathlib import Path
from typing import Final

import msgspec

from headway._core import SeqlockReader, SeqlockWriter
from headway.errors import ConfigError, SnapshotError, SnapshotTornError
from headway.snapshot import wire
from headway.types import Snapshot

SHARED_MEMORY_DIRECTORY: Final = Path("/dev/shm")
#: Room for about 40,000 requests. The memory is taken when the segment is made, so that no later write can lack it.
DEFAULT_CAPACITY_BYTES: Final = 4 << 20

_SLOT_HEADER_BYTES: Final = 64
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


def segment_path(segment: str) -> Path:
    """The file of a segment.

    Raises:
        ConfigError: the name is no plain file name of letters, digits, ``.``, ``_`` and ``-`` (at most 200).
    """
    if not _SEGMENT.fullmatch(segment):
        raise ConfigError(
            f"must be 1 to 200 letters, digits, '.', '_' or '-', not starting with '.' or '-', not {segment!r}",
            key="shared_memory",
        )
    return SHARED_MEMORY_DIRECTORY / segment


class SharedMemoryWriter:
    """Publishes one engine's snapshots. At most one writer per segment."""

    def __init__(self, segment: str, capacity_bytes: int = DEFAULT_CAPACITY_BYTES) -> None:
        """Create the segment, replacing one whose writer is gone.

        Raises:
            ConfigError: a bad segment name.
            SnapshotError: a running process writes this segment, or it cannot be created.
        """
        self.path = segment_path(segment)
        draft = self.path.with_name(f".{segment}.{os.getpid()}")
        try:
            self._descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SnapshotError(f"cannot create {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            # Reserved, not just sized: writing into a page that a full file system cannot give would kill the engine.
            os.posix_fallocate(self._descriptor, 0, _SLOT_HEADER_BYTES + capacity_bytes)
            self._inode = os.fstat(self._descriptor).st_ino
            memory = mmap.mmap(self._descriptor, _SLOT_HEADER_BYTES + capacity_bytes)
            self._slot: SeqlockWriter | None = SeqlockWriter(memoryview(memory))  # the slot keeps the mapping
            _link(draft, self.path)  # only now: a reader must not meet a slot without its header
        except OSError as error:
            os.close(self._descriptor)
            raise SnapshotError(f"cannot create {self.path}: {error.strerror}") from error
        except BaseException:
            os.close(self._descriptor)
            raise
        finally:
            draft.unlink(missing_ok=True)

    def publish(self, snapshot: Snapshot) -> None:
        """Replace the snapshot in the segment.

        Raises:
            SnapshotError: it does not fit (the older one then stays and grows stale), or the writer is closed.
        """
        wire.publish(snapshot, self.write)

    def write(self, data: bytes) -> None:
        """Replace the snapshot in the segment by one that is encoded already (:mod:`headway.snapshot.wire`).

        Raises:
            SnapshotError: as :meth:`publish`.
        """
        if self._slot is None:
            raise SnapshotError(f"{self.path} is closed")
        try:
            self._slot.write(data)
        except ValueError as error:
            raise SnapshotError(f"{self.path}: {error}") from error

    def close(self) -> None:
        """Unlink the segment and give it back. May be called twice."""
        if self._slot is None:
            return
        self._slot = None
        if _inode_of(self.path) == self._inode:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


class SharedMemoryReader:
    """Reads the snapshots of one segment, which need not exist yet."""

    def __init__(self, segment: str, *, instance_id: str | None = None) -> None:
        """``instance_id``, when given, replaces the one in the snapshots: the engine does not know the router's name.

        Raises:
            ConfigError: a bad segment name.
        """
        self.path = segment_path(segment)
        self._instance_id = instance_id
        self._slot: SeqlockReader | None = None
        self._inode: int | None = None
        self._last_write = 0
        self._last: tuple[int, int] | None = None

    def poll(self) -> Snapshot | None:
        """The newest snapshot if it is newer than the last one returned, else None. Cheap when nothing is new.

        Raises:
            SnapshotVersionError: a writer of another wire version.
            SnapshotTornError: the writer was inside on every attempt; the next poll may succeed.
            SnapshotError: the file is no snapshot segment or holds no valid snapshot.
        """
        slot = self._slot
        if slot is None or slot.sequence() == self._last_write:
            slot = self._follow()
        if slot is None:
            return None
        write = slot.sequence()
        if write == self._last_write:
            return None
        try:
            payload = slot.read()
        except SnapshotTornError:
            if self._follow() is slot:
                raise
            return self.poll()  # the engine that died inside it has a successor with a segment of its own
        self._last_write = write  # also when the bytes are bad: they are reported once, not on every poll
        if payload is None:
            return None
        snapshot = wire.decode(payload)
        # The slot may have been written between the two calls above: then the next poll meets these bytes again.
        if (snapshot.engine_start, snapshot.sequence) == self._last:
            return None
        self._last = (snapshot.engine_start, snapshot.sequence)
        if self._instance_id is not None:
            return msgspec.structs.replace(snapshot, instance_id=self._instance_id)
        return snapshot

    def close(self) -> None:
        """Give the mapping back. May be called twice; a later poll opens the segment again."""
        self._slot = None
        self._inode = None
        self._last_write = 0

    def _follow(self) -> SeqlockReader | None:
        """The slot in the file that now bears the segment's name; None when there is none."""
        inode = _inode_of(self.path)
        if inode is not None and inode == self._inode:
            return self._slot
        self.close()
        if inode is None:
            return None
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SnapshotError(f"cannot open {self.path}: {error.strerror}") from error
        try:
            self._slot = SeqlockReader(memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)))
            self._inode = os.fstat(descriptor).st_ino
        except (ValueError, OSError) as error:
            raise SnapshotError(f"{self.path} is no snapshot segment: {error}") from error
        finally:
            os.close(descriptor)
        return self._slot


def _link(draft: Path, path: Path) -> None:
    """Give the finished file its name, once whatever an earlier engine left there is gone."""
    while True:
        try:
            os.link(draft, path)
            return
        except FileExistsError:
            _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    """Unlink ``path`` when no process holds its lock.

    Raises:
        SnapshotError: a running engine writes it.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between open and lock another starter may have replaced the file: only the one we locked is ours to remove.
        if _inode_of(path) == os.fstat(descriptor).st_ino:
            path.unlink(missing_ok=True)
    except BlockingIOError as error:
        raise SnapshotError(f"{path} is in use by a running engine") from error
    finally:
        os.close(descriptor)


def _inode_of(path: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return os.stat(path).st_ino
    return None
