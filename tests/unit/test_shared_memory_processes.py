"""Snapshots through /dev/shm between real processes: restarts, deaths amid a write, corruption and a full memory."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from headway.errors import SnapshotError, SnapshotTornError
from headway.snapshot.shared_memory import SharedMemoryReader, SharedMemoryWriter, segment_path
from headway.testing import segment_name, snapshot, waiting_request
from headway.types import Snapshot

_SEQUENCE_OFFSET, _PAYLOAD_OFFSET = 24, 64

#: Reads lines "FIRST LAST NUM_WAITING" and publishes that range of sequence numbers; answers "done".
_ENGINE = """
import sys
import msgspec
from headway.snapshot.shared_memory import SharedMemoryWriter
from headway.testing import snapshot, waiting_request
writer, start = SharedMemoryWriter(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
for line in sys.stdin:
    first, last, num_waiting = map(int, line.split())
    waiting = [waiting_request(f"chatcmpl-{i:032d}", 100) for i in range(num_waiting)]
    shown = snapshot(waiting=waiting)
    for sequence in range(first, last + 1):
        writer.publish(msgspec.structs.replace(shown, sequence=sequence, engine_start=start, free_blocks=sequence))
    print("done", flush=True)
writer.close()
"""


class EngineProcess:
    """An engine that publishes on demand."""

    def __init__(self, segment: str, start: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", _ENGINE, segment, str(start)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.answer()

    def begin(self, first: int, last: int, num_waiting: int = 1) -> None:
        """Start to publish these sequence numbers."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{first} {last} {num_waiting}\n")
        self.process.stdin.flush()

    def publish(self, first: int, last: int | None = None, num_waiting: int = 1) -> None:
        """Publish them."""
        self.begin(first, first if last is None else last, num_waiting)
        self.answer()

    def answer(self) -> None:
        """Wait until what was begun is done."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline()

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def end(self) -> None:
        """Let it end by itself."""
        self.process.communicate(timeout=20)
        assert self.process.returncode == 0


@pytest.fixture
def segment() -> Iterator[str]:
    name = segment_name()
    yield name
    segment_path(name).unlink(missing_ok=True)


@pytest.fixture
def start(segment: str) -> Iterator[Callable[[int], EngineProcess]]:
    """Starts engines on the segment and ends them with the test."""
    started: list[EngineProcess] = []

    def start_one(engine_start: int) -> EngineProcess:
        started.append(EngineProcess(segment, engine_start))
        return started[-1]

    yield start_one
    for engine in started:
        if engine.process.poll() is None:
            engine.kill()


Start = Callable[[int], EngineProcess]


def poll_until(reader: SharedMemoryReader, condition: Callable[[Snapshot], bool]) -> list[Snapshot]:
    """Every new snapshot up to the first for which ``condition`` holds."""
    seen, deadline_s = [], time.monotonic() + 20.0
    while time.monotonic() < deadline_s:
        try:
            shown = reader.poll()
        except SnapshotTornError:
            continue  # said so, returned nothing: that is the contract
        if shown is not None:
            seen.append(shown)
            if condition(shown):
                return seen
    raise AssertionError(f"not seen among {len(seen)} snapshots")


def test_another_process_is_read_in_order_whole_and_up_to_the_last(segment: str, start: Start) -> None:
    """While an engine publishes without a pause, what is read only gets newer, is never a mixture, and ends with the
    last one."""
    engine = start(1)
    reader = SharedMemoryReader(segment)
    engine.begin(1, 3000, num_waiting=40)
    seen = poll_until(reader, lambda shown: shown.sequence == 3000)
    engine.answer()
    assert all(early.sequence < late.sequence for early, late in pairwise(seen))
    assert all(shown.free_blocks == shown.sequence and len(shown.waiting) == 40 for shown in seen)
    assert reader.poll() is None
    reader.close()
    engine.end()
    assert not segment_path(segment).exists()


def test_a_late_reader_gets_the_whole_state_of_a_silent_engine(segment: str, start: Start) -> None:
    """Whoever comes after the last snapshot has all of it at once."""
    engine = start(1)
    engine.publish(1, 7, num_waiting=5)
    reader = SharedMemoryReader(segment)
    shown = reader.poll()
    assert shown is not None
    assert (shown.sequence, len(shown.waiting)) == (7, 5)
    reader.close()


def test_a_killed_engine_is_followed_into_its_next_life(segment: str, start: Start) -> None:
    """SIGKILL, then a new engine on the same segment: one reader sees both, told apart by their starts."""
    reader = SharedMemoryReader(segment)
    first = start(200)
    first.publish(1, 50)
    assert [shown.sequence for shown in poll_until(reader, lambda shown: True)] == [50]
    first.kill()
    assert reader.poll() is None
    second = start(100)  # its wall clock was set back
    assert reader.poll() is None
    second.publish(1)
    (shown,) = poll_until(reader, lambda shown: True)
    assert (shown.engine_start, shown.sequence) == (100, 1)
    second.publish(2)
    poll_until(reader, lambda shown: shown.sequence == 2)
    reader.close()


def test_an_engine_that_died_amid_a_write_shows_nothing_of_it(segment: str, start: Start) -> None:
    """A half-written slot: who read before keeps what was whole, who comes new is told, the next engine is read."""
    engine = start(1)
    engine.publish(1)
    early = SharedMemoryReader(segment)
    assert early.poll() is not None
    engine.kill()
    with segment_path(segment).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    (sequence,) = struct.unpack_from("<Q", memory, _SEQUENCE_OFFSET)
    struct.pack_into("<Q", memory, _SEQUENCE_OFFSET, sequence + 1)  # odd: the writer is inside
    memory[_PAYLOAD_OFFSET + 8 : _PAYLOAD_OFFSET + 40] = bytes(32)
    assert early.poll() is None
    late = SharedMemoryReader(segment)
    with pytest.raises(SnapshotTornError):
        late.poll()
    start(2).publish(9)
    for reader in (early, late):
        (shown,) = poll_until(reader, lambda shown: True)
        assert (shown.engine_start, shown.sequence) == (2, 9)
        reader.close()


def test_bytes_that_changed_in_the_segment_are_told_once(segment: str) -> None:
    """A complete write whose bytes do not match their checksum is reported, not returned; the next one is good."""
    writer, reader = SharedMemoryWriter(segment), SharedMemoryReader(segment)
    writer.publish(snapshot(waiting=[waiting_request("a", 10)]))
    with segment_path(segment).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    memory[_PAYLOAD_OFFSET + 60] ^= 1
    with pytest.raises(SnapshotError, match="checksum"):
        reader.poll()
    assert reader.poll() is None
    good = snapshot(sequence=2)
    writer.publish(good)
    assert reader.poll() == good
    reader.close()
    writer.close()


_FULL = """
import resource, sys
from headway.errors import SnapshotError
from headway.snapshot.shared_memory import SharedMemoryWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))  # as little memory as that is left
try:
    SharedMemoryWriter(sys.argv[1])
except SnapshotError as error:
    print(error)
"""


def test_a_segment_that_does_not_fit_into_memory_is_refused_before_anything_is_written(segment: str) -> None:
    """No process dies of a page that cannot be had: the lack is an error at the start, and leaves no file behind."""
    ended = subprocess.run(
        [sys.executable, "-c", _FULL, segment], capture_output=True, text=True, timeout=30, check=True
    )
    assert "cannot create" in ended.stdout
    assert [entry for entry in Path("/dev/shm").iterdir() if segment in entry.name] == []
    writer = SharedMemoryWriter(segment)
    blocks = os.stat(segment_path(segment)).st_blocks
    assert blocks * 512 >= 4 << 20  # all of it is there already
    writer.close()
