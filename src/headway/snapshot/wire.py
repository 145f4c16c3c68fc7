"""The bytes of a snapshot: a small versioned header and a msgpack body, the same for every transport.

Header: ``b"HWS"``, one byte of wire version, CRC-32 of the body (little endian). The body is a map by field name, so a
newer writer may add fields that change nothing for older readers; what changes the meaning of others is a new version.
Version 2 knows asynchronous scheduling and prefix caching, and reads version 1 as an engine without either. Requests
are arrays, because a snapshot holds hundreds. Limits and engine version travel inside, so that a router sees a mismatch
with its profile. Bytes that are no snapshot of a known version, whose checksum does not hold or whose values no engine
could have are refused, never repaired. About 15 µs to encode and 80 µs to decode 64 running and 195 waiting requests.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Final

import msgspec

from headway.errors import SnapshotError, SnapshotTornError, SnapshotVersionError
from headway.types import Snapshot

MAGIC: Final = b"HWS"
WIRE_VERSION: Final = 2
_READ_VERSIONS: Final = (1, 2)

_HEADER = struct.Struct("<3sBI")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Snapshot)


def encode(snapshot: Snapshot) -> bytes:
    """The snapshot as bytes of the present wire version."""
    return framed(b"", 0, _encoder.encode(snapshot))


def publish(snapshot: Snapshot, write: Callable[[bytes], None]) -> None:
    """Hand the snapshot's bytes to a transport's ``write``; what it raises names the instance.

    Raises:
        SnapshotError: as ``write``.
    """
    try:
        write(encode(snapshot))
    except SnapshotError as error:
        error.instance_id = snapshot.instance_id
        raise


def framed(head: bytes, head_checksum: int, tail: bytes | memoryview) -> bytes:
    """The bytes of a snapshot whose msgpack body is ``head`` and ``tail``, made by an engine that encodes only what
    changed; ``head_checksum`` is the CRC-32 of ``head`` (0 of nothing)."""
    return b"".join((_HEADER.pack(MAGIC, WIRE_VERSION, zlib.crc32(tail, head_checksum)), head, tail))


def decode(data: bytes) -> Snapshot:
    """The snapshot that ``data`` holds.

    Raises:
        SnapshotVersionError: another wire version.
        SnapshotTornError: the checksum does not hold.
        SnapshotError: anything else that is no snapshot, with the field where there is one.
    """
    if len(data) < _HEADER.size:
        raise SnapshotError(f"{len(data)} bytes are too few for a snapshot")
    magic, version, checksum = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise SnapshotError("the bytes are no Headway snapshot")
    if version not in _READ_VERSIONS:
        read = " and ".join(str(known) for known in _READ_VERSIONS)
        raise SnapshotVersionError(f"wire version {version}, this build reads {read}")
    body = memoryview(data)[_HEADER.size :]
    if zlib.crc32(body) != checksum:
        raise SnapshotTornError("the snapshot's checksum does not hold")
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SnapshotError(f"malformed snapshot: {error}") from error
