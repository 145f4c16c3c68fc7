"""The native shared-memory slot: what a reader gets is one whole write, whatever the writer is doing."""

from __future__ import annotations

import mmap
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headway._core import SeqlockReader, SeqlockWriter
from headway.errors import SnapshotTornError

HEADER_BYTES = 64
SEQUENCE_OFFSET = 24
NUM_READS = 1_000_000


def new_slot(size_bytes: int = HEADER_BYTES + 1024) -> mmap.mmap:
    return mmap.mmap(-1, size_bytes)


def test_an_opened_slot_is_empty() -> None:
    """Before the first write a reader gets nothing, not an empty payload."""
    memory = new_slot()
    SeqlockWriter(memoryview(memory))
    reader = SeqlockReader(memoryview(memory))
    assert reader.sequence() == 0
    assert reader.read() is None


@pytest.mark.parametrize("size_bytes", [0, 1, 7, 8, 9, 1023, 1024])
def test_a_payload_of_any_size_comes_back_whole(size_bytes: int) -> None:
    """Payloads need not be whole words; a longer one before leaves no trace."""
    memory = new_slot()
    writer, reader = SeqlockWriter(memoryview(memory)), SeqlockReader(memoryview(memory))
    payload = bytes(i % 251 for i in range(size_bytes))
    writer.write(b"\xff" * 1024)
    writer.write(payload)
    assert reader.read() == payload
    assert reader.sequence() == 2


def test_a_payload_beyond_the_capacity_is_refused_and_changes_nothing() -> None:
    """A snapshot that does not fit is an error for the writer; the reader keeps the one before."""
    memory = new_slot()
    writer, reader = SeqlockWriter(memoryview(memory)), SeqlockReader(memoryview(memory))
    writer.write(b"before")
    with pytest.raises(ValueError, match="1025 bytes exceed the slot's capacity of 1024"):
        writer.write(b"x" * 1025)
    assert reader.read() == b"before"


def test_a_slot_needs_room_for_its_header() -> None:
    """A buffer too small for header and one word is refused by both sides."""
    for opened in (SeqlockWriter, SeqlockReader):
        with pytest.raises(ValueError, match="at least 72 bytes"):
            opened(memoryview(bytearray(71)))


def test_a_reader_refuses_what_is_no_slot() -> None:
    """A file of zeros, of rubbish, of another layout or of a false capacity is not read."""
    memory = new_slot()
    with pytest.raises(ValueError, match="magic"):
        SeqlockReader(memoryview(memory))
    SeqlockWriter(memoryview(memory))
    memory[8:16] = struct.pack("<Q", 9)
    with pytest.raises(ValueError, match="layout_version"):
        SeqlockReader(memoryview(memory))
    memory[8:24] = struct.pack("<QQ", 1, 1 << 20)
    with pytest.raises(ValueError, match="capacity_bytes"):
        SeqlockReader(memoryview(memory))
    with pytest.raises(ValueError, match="capacity_bytes"):
        SeqlockWriter(memoryview(memory))


def test_a_writer_that_died_inside_is_seen_as_torn_and_can_be_followed() -> None:
    """An odd sequence never yields a payload; the next writer carries on from it."""
    memory = new_slot()
    writer, reader = SeqlockWriter(memoryview(memory)), SeqlockReader(memoryview(memory))
    writer.write(b"one")
    memory[SEQUENCE_OFFSET : SEQUENCE_OFFSET + 8] = struct.pack("<Q", 3)
    with pytest.raises(SnapshotTornError):
        reader.read(max_attempts=5)
    SeqlockWriter(memoryview(memory)).write(b"two")
    assert reader.read() == b"two"
    assert reader.sequence() == 2


WRITER = """
import mmap, sys
from headway._core import SeqlockWriter
with open(sys.argv[1], "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
slot = SeqlockWriter(memoryview(memory))
payloads = [(word.to_bytes(8, "little")) * (1 + word * 37 % 128) for word in range(1, 4096)]
print("ready", flush=True)
while True:
    for payload in payloads:
        slot.write(payload)
"""


def test_no_torn_read_in_a_million_between_two_processes(tmp_path: Path) -> None:
    """While another process writes without a pause, every payload read is one write: its words and length agree."""
    path = tmp_path / "slot"
    path.write_bytes(bytes(HEADER_BYTES + 1024))
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    SeqlockWriter(memoryview(memory))
    reader = SeqlockReader(memoryview(memory))
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        num_reads = num_distinct = 0
        last = b""
        deadline = time.monotonic() + 120  # a hang must end the test, not the build
        # On a busy machine the two take turns for a while: go on until they have really met.
        while (num_reads < NUM_READS or num_distinct <= 1000) and time.monotonic() < deadline:
            try:
                payload = reader.read()
            except SnapshotTornError:
                continue  # said so, returned nothing: that is the contract
            if payload is None:
                continue
            word = payload[:8]
            assert len(payload) == 8 * (1 + int.from_bytes(word, "little") * 37 % 128)
            assert payload == word * (len(payload) // 8)
            num_reads += 1
            num_distinct += word != last
            last = word
    finally:
        process.kill()
        process.communicate()
    assert num_reads >= NUM_READS
    assert num_distinct > 1000
