"""The snapshot codec: what goes in comes out, and whatever else comes in is refused by a SnapshotError."""

from __future__ import annotations

import math
import struct
import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import SnapshotError, SnapshotTornError, SnapshotVersionError
from headway.snapshot import wire
from headway.types import MAX_COUNT, EngineLimits, Snapshot, SnapshotRequest

LIMITS = EngineLimits(
    max_num_batched_tokens=2048, max_num_seqs=256, max_model_len=32768, block_size=16, num_blocks=4096
)

counts = st.integers(0, MAX_COUNT)
times = st.floats(0, 1e9)
requests = st.builds(
    SnapshotRequest, st.text(max_size=40), counts, counts, counts, counts, counts, st.integers(-9, 9), times, counts
)
snapshots = st.builds(
    Snapshot,
    instance_id=st.text(max_size=20),
    engine_version=st.text(max_size=20),
    engine_start=st.integers(0, 2**63 - 1),
    sequence=st.integers(0, 2**63 - 1),
    engine_s=times,
    limits=st.just(LIMITS),
    running=st.lists(requests, max_size=5),
    waiting=st.lists(requests, max_size=5),
    free_blocks=counts,
    batch_start_s=st.none() | times,
)


def example(**changes: object) -> Snapshot:
    fields: dict[str, object] = {
        "instance_id": "a",
        "engine_version": "vllm-0.32.0",
        "engine_start": 1,
        "sequence": 7,
        "engine_s": 12.5,
        "limits": LIMITS,
        "running": [SnapshotRequest("chatcmpl-x", 900, 901, 1, 57, 200, 0, 11.0, 1)],
        "waiting": [SnapshotRequest("cmpl-y-0", 1200, 0, 0, 0, 0, 0, 12.0, 0)],
        "free_blocks": 4038,
        "batch_start_s": 12.4,
    }
    return Snapshot(**(fields | changes))  # type: ignore[arg-type]


def with_body(body: bytes, version: int = wire.WIRE_VERSION) -> bytes:
    return struct.pack("<3sBI", wire.MAGIC, version, zlib.crc32(body)) + body


@given(snapshots)
def test_decode_returns_what_encode_took(snapshot: Snapshot) -> None:
    """A snapshot survives the wire unchanged, limits and engine version included."""
    assert wire.decode(wire.encode(snapshot)) == snapshot


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    """Bytes that are no snapshot raise a SnapshotError and nothing else."""
    with pytest.raises(SnapshotError):
        wire.decode(data)


@given(st.binary(max_size=200))
def test_a_right_header_over_a_wrong_body_is_refused(body: bytes) -> None:
    """A body that is no snapshot is refused also when its checksum holds."""
    with pytest.raises(SnapshotError):
        wire.decode(with_body(body))


@given(snapshots, st.data())
def test_a_truncated_snapshot_is_refused(snapshot: Snapshot, data: st.DataObject) -> None:
    """A snapshot that lost its end is refused at every length."""
    whole = wire.encode(snapshot)
    with pytest.raises(SnapshotError):
        wire.decode(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(snapshots, st.data())
def test_a_flipped_bit_is_refused(snapshot: Snapshot, data: st.DataObject) -> None:
    """One flipped bit anywhere, header or body, is noticed."""
    whole = bytearray(wire.encode(snapshot))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(SnapshotError):
        wire.decode(bytes(whole))


def test_another_wire_version_is_named() -> None:
    """A snapshot of another wire version says which one it is and which one is read."""
    with pytest.raises(SnapshotVersionError, match="wire version 3, this build reads 1 and 2"):
        wire.decode(with_body(msgspec.msgpack.encode(example()), version=3))


def test_a_snapshot_of_the_first_wire_version_is_one_without_prefix_cache() -> None:
    """Its requests are shorter and its limits name fewer settings: what is missing is off."""
    body = msgspec.to_builtins(example())
    for setting in ("async_scheduling", "prefix_caching"):
        del body["limits"][setting]
    body["running"] = [request[:9] for request in body["running"]]
    body["waiting"] = [request[:9] for request in body["waiting"]]
    assert wire.decode(with_body(msgspec.msgpack.encode(body), version=1)) == example()


def test_a_wrong_checksum_is_a_torn_snapshot() -> None:
    """A body that changed under its checksum is reported as torn, not as malformed."""
    whole = bytearray(wire.encode(example()))
    whole[-1] ^= 1
    with pytest.raises(SnapshotTornError):
        wire.decode(bytes(whole))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"free_blocks": -1}, "free_blocks"),
        ({"sequence": -1}, "sequence"),
        ({"engine_s": math.nan}, "engine_s"),
        ({"batch_start_s": math.inf}, "batch_start_s"),
        ({"running": [SnapshotRequest("x", -3, 0, 0, 0, 0, 0, 0.0, 0)]}, r"running\[0\]\[1\]"),
        ({"waiting": [SnapshotRequest("x", 3, 2**40, 0, 0, 0, 0, 0.0, 0)]}, r"waiting\[0\]\[2\]"),
    ],
)
def test_values_that_no_engine_has_are_refused_with_their_field(changes: dict[str, object], field: str) -> None:
    """Negative or absurd counts and times that are no numbers never reach the router."""
    with pytest.raises(SnapshotError, match=field):
        wire.decode(wire.encode(example(**changes)))


def test_limits_that_no_engine_accepts_are_refused() -> None:
    """A snapshot whose limits are impossible is refused by the same rule as a configuration."""
    body = msgspec.to_builtins(example())
    body["limits"]["block_size"] = 0
    with pytest.raises(SnapshotError, match="block_size"):
        wire.decode(with_body(msgspec.msgpack.encode(body)))


def test_fields_added_by_a_newer_writer_are_passed_over() -> None:
    """A writer of the same wire version may add fields without breaking an older reader."""
    body = msgspec.to_builtins(example())
    body["prefix_cache_hits"] = 12
    assert wire.decode(with_body(msgspec.msgpack.encode(body))) == example()
