"""What travels over ZeroMQ and where to: messages survive or are refused, addresses are checked before any socket."""

from __future__ import annotations

import math
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError, SnapshotError, SnapshotTornError, SnapshotVersionError
from headway.snapshot import zeromq
from headway.snapshot.zeromq import check_address, seal, unseal
from headway.testing import snapshot, waiting_request

HOST = bytes(range(16))
messages = st.builds(seal, st.binary(max_size=100), st.floats(0, 1e12), st.binary(min_size=16, max_size=16))


@given(st.binary(max_size=100), st.floats(0, 1e12), st.binary(min_size=16, max_size=16))
def test_a_message_survives(body: bytes, sent_s: float, host: bytes) -> None:
    """Body, time and host come out as they went in."""
    assert unseal(seal(body, sent_s, host)) == (body, sent_s, host)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    """Bytes that are no message raise a SnapshotError and nothing else."""
    with pytest.raises(SnapshotError):
        unseal(data)


@given(messages, st.data())
def test_a_flipped_bit_of_the_envelope_is_refused(message: bytes, data: st.DataObject) -> None:
    """One flipped bit before the body, which has a checksum of its own, is noticed."""
    flipped = bytearray(message)
    flipped[data.draw(st.integers(0, 31))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(SnapshotError):
        unseal(bytes(flipped))


@given(st.integers(0, 31))
def test_a_truncated_envelope_is_refused(length: int) -> None:
    """A message that ends within its envelope is refused at every length."""
    with pytest.raises(SnapshotError, match="no message"):
        unseal(seal(b"", 1.0, HOST)[:length])


def test_another_envelope_version_is_named() -> None:
    """A publisher of another envelope version is told apart from rubbish."""
    stamp = struct.pack("<d16s", 1.0, HOST)
    with pytest.raises(SnapshotVersionError, match="envelope version 2, this build reads 1"):
        unseal(struct.pack("<3sBI", zeromq.MAGIC, 2, zlib.crc32(stamp)) + stamp)


def test_a_wrong_checksum_is_a_torn_message() -> None:
    """A stamp that changed under its checksum is reported as torn."""
    message = bytearray(seal(b"", 1.0, HOST))
    message[10] ^= 1
    with pytest.raises(SnapshotTornError):
        unseal(bytes(message))


@pytest.mark.parametrize("sent_s", [math.nan, math.inf, -1.0, 1e13])
def test_times_that_no_clock_shows_are_refused(sent_s: float) -> None:
    """A message cannot have been sent at no time, before the start of its host, or in thirty thousand years."""
    with pytest.raises(SnapshotError, match="sent_s"):
        unseal(seal(b"", sent_s, HOST))


def test_every_time_of_a_snapshot_is_moved() -> None:
    """The engine's time, the batch's start and all arrivals move together; nothing else changes."""
    shown = snapshot(waiting=[waiting_request("a", 10)], running=[waiting_request("b", 10)], engine_s=5.0)
    moved = zeromq.on_clock(shown, 100.0)
    assert (moved.engine_s, moved.batch_start_s) == (105.0, None)
    assert [request.arrival_s for request in (*moved.running, *moved.waiting)] == [100.0, 100.0]
    assert zeromq.on_clock(moved, -100.0) == shown


@pytest.mark.parametrize(
    "address",
    ["tcp://127.0.0.1:7101", "tcp://gpu-7.example.com:7101", "tcp://[::1]:7101", "tcp://[fe80::1%eth0]:65535"],
)
def test_addresses_to_connect_to(address: str) -> None:
    """A host by name or number, and a port."""
    assert check_address(address) == address
    assert check_address(address, bind=True) == address


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://127.0.0.1:*", "tcp://*:7101", "tcp://*:*"])
def test_only_a_publisher_takes_any_host_or_port(address: str) -> None:
    """Every interface, or a free port, is something to bind; nobody can connect there."""
    assert check_address(address, bind=True) == address
    with pytest.raises(ConfigError, match="must be tcp://HOST:PORT"):
        check_address(address)


@pytest.mark.parametrize(
    "address",
    ["", "127.0.0.1:7101", "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://:7101", "tcp://127.0.0.1:70000",
     "ipc:///tmp/x", "inproc://x", "udp://127.0.0.1:7101", "tcp://a b:1", "tcp://::1:7101", "tcp://h:7101\n",
     "tcp://eth0;10.0.0.1:7101", "tcp://h:7101/x"],
)  # fmt: skip
def test_anything_else_is_no_address(address: str) -> None:
    """Other transports, missing parts and what libzmq would read in its own way are refused, bound or connected."""
    for bind in (False, True):
        with pytest.raises(ConfigError, match="must be tcp://HOST:PORT") as caught:
            check_address(address, bind=bind)
        assert caught.value.key == "zeromq"
