"""Snapshots through /dev/shm: whoever comes, goes or dies, a reader gets each snapshot once or an honest nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

from headway.errors import ConfigError, SnapshotError, SnapshotVersionError
from headway.snapshot import wire
from headway.snapshot.shared_memory import SharedMemoryReader, SharedMemoryWriter, segment_path
from headway.types import EngineLimits, Snapshot, SnapshotRequest

LIMITS = EngineLimits(
    max_num_batched_tokens=2048, max_num_seqs=256, max_model_len=32768, block_size=16, num_blocks=4096
)


def snapshot(sequence: int, *, engine_start: int = 1, num_waiting: int = 1) -> Snapshot:
    waiting = [SnapshotRequest(f"cmpl-{i}", 100, 0, 0, 0, 0, 0, 1.0, 0) for i in range(num_waiting)]
    return Snapshot(
        instance_id="engine",
        engine_version="vllm-0.32.0",
        engine_start=engine_start,
        sequence=sequence,
        engine_s=float(sequence),
        limits=LIMITS,
        running=[],
        waiting=waiting,
        free_blocks=4095,
    )


@pytest.fixture
def segment() -> Iterator[str]:
    name = f"headway-test-{os.getpid()}-{uuid.uuid4().hex}"
    yield name
    segment_path(name).unlink(missing_ok=True)


def test_a_reader_gets_each_snapshot_once(segment: str) -> None:
    """A poll returns what is new since the last one, the newest only, and None when nothing is."""
    writer, reader = SharedMemoryWriter(segment), SharedMemoryReader(segment)
    assert reader.poll() is None
    writer.publish(snapshot(1))
    assert reader.poll() == snapshot(1)
    assert reader.poll() is None
    writer.publish(snapshot(2))
    writer.publish(snapshot(3))
    assert reader.poll() == snapshot(3)
    assert reader.poll() is None
    reader.close()
    writer.close()


def test_a_reopened_reader_does_not_repeat_a_snapshot(segment: str) -> None:
    """A reader that was closed in between still knows what it returned."""
    writer, reader = SharedMemoryWriter(segment), SharedMemoryReader(segment)
    writer.publish(snapshot(1))
    assert reader.poll() == snapshot(1)
    reader.close()
    assert reader.poll() is None
    reader.close()
    writer.close()


def test_a_reader_waits_for_a_segment_and_follows_a_new_one(segment: str) -> None:
    """The segment may come after the reader, go away, and come back as another file."""
    reader = SharedMemoryReader(segment)
    assert reader.poll() is None
    first = SharedMemoryWriter(segment)
    first.publish(snapshot(1))
    assert reader.poll() == snapshot(1)
    first.close()
    assert not segment_path(segment).exists()
    assert reader.poll() is None
    second = SharedMemoryWriter(segment)
    assert reader.poll() is None
    second.publish(snapshot(1, engine_start=2))
    assert reader.poll() == snapshot(1, engine_start=2)
    second.close()
    reader.close()


def test_the_reader_may_rename_the_instance(segment: str) -> None:
    """An engine does not know what the router calls it."""
    writer, reader = SharedMemoryWriter(segment), SharedMemoryReader(segment, instance_id="h100-a")
    writer.publish(snapshot(1))
    received = reader.poll()
    assert received is not None
    assert received.instance_id == "h100-a"
    assert received.sequence == 1
    reader.close()
    writer.close()


def test_two_writers_on_one_segment_are_refused(segment: str) -> None:
    """The second engine on a segment in use is told so, and the first one is not disturbed."""
    writer, reader = SharedMemoryWriter(segment), SharedMemoryReader(segment)
    with pytest.raises(SnapshotError, match="in use by a running engine"):
        SharedMemoryWriter(segment)
    writer.publish(snapshot(1))
    assert reader.poll() == snapshot(1)
    reader.close()
    writer.close()


KILLED_WRITER = """
import sys, time
from headway.snapshot.shared_memory import SharedMemoryWriter
writer = SharedMemoryWriter(sys.argv[1])
print("ready", flush=True)
time.sleep(60)
"""


def test_a_killed_engine_leaves_a_segment_that_the_next_one_replaces(segment: str) -> None:
    """What SIGKILL left behind blocks nobody, and no draft of it stays either."""
    process = subprocess.Popen([sys.executable, "-c", KILLED_WRITER, segment], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    with pytest.raises(SnapshotError, match="in use"):
        SharedMemoryWriter(segment)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    path = segment_path(segment)
    assert path.exists()
    writer = SharedMemoryWriter(segment)
    writer.publish(snapshot(1))
    reader = SharedMemoryReader(segment)
    assert reader.poll() == snapshot(1)
    writer.close()
    assert [entry.name for entry in path.parent.iterdir() if segment in entry.name] == []
    reader.close()


def test_closing_spares_the_file_of_a_later_writer(segment: str) -> None:
    """A writer unlinks its own file only; close may be called twice, and nothing is published after it."""
    writer = SharedMemoryWriter(segment)
    segment_path(segment).unlink()
    later = SharedMemoryWriter(segment)
    writer.close()
    writer.close()
    assert segment_path(segment).exists()
    with pytest.raises(SnapshotError, match="closed"):
        writer.publish(snapshot(1))
    later.close()


def test_a_snapshot_that_does_not_fit_is_an_error_and_the_older_one_stays(segment: str) -> None:
    """An oversized snapshot is never cut: the writer hears of it, the reader's last one grows stale."""
    writer, reader = SharedMemoryWriter(segment, capacity_bytes=4096), SharedMemoryReader(segment)
    writer.publish(snapshot(1))
    with pytest.raises(SnapshotError, match="capacity of 4096"):
        writer.publish(snapshot(2, num_waiting=1000))
    assert reader.poll() == snapshot(1)
    reader.close()
    writer.close()


def test_a_foreign_file_is_no_segment(segment: str) -> None:
    """A file of that name that holds something else is an error, not a crash."""
    reader = SharedMemoryReader(segment)
    for content in (b"", b"short", bytes(4096), b"rubbish!" * 512):
        segment_path(segment).write_bytes(content)
        with pytest.raises(SnapshotError, match="no snapshot segment"):
            reader.poll()
        segment_path(segment).unlink()


def test_bytes_of_another_wire_version_are_reported_once(segment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer engine is named as such on the first poll that sees it; the next write is looked at afresh."""
    writer, reader = SharedMemoryWriter(segment), SharedMemoryReader(segment)
    with monkeypatch.context() as newer:
        newer.setattr(wire, "WIRE_VERSION", 9)
        writer.publish(snapshot(1))
    with pytest.raises(SnapshotVersionError, match="wire version 9"):
        reader.poll()
    assert reader.poll() is None
    writer.publish(snapshot(2))
    assert reader.poll() == snapshot(2)
    reader.close()
    writer.close()


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "-x", "a/b", "../x", "a\0b", "ä", "x" * 201, "a b", "a\n"])
def test_a_segment_name_is_one_plain_file_name(name: str) -> None:
    """Nothing that leaves the directory, hides or needs quoting is a segment name."""
    with pytest.raises(ConfigError, match="letters, digits"):
        SharedMemoryReader(name)
