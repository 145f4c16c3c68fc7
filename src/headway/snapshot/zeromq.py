"""Snapshots across hosts: the engine publishes on a ZeroMQ PUB socket, every router subscribes to it.

Each message is one frame and a whole snapshot, so nothing depends on an earlier one. What was last published is sent
again while the engine is silent: that is how a late joiner gets its first snapshot. (ZeroMQ's welcome message would
leave in the engine's own thread at its next call, and an idle engine makes none.) Towards each subscriber the publisher
keeps the newest message only, and never waits. Times in a snapshot are put onto the reader's clock. It refuses what it
cannot read, but neither encrypts nor authenticates: publish on a network whose members you trust.
"""

from __future__ import annotations

import logging
import re
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec
import zmq

from headway.errors import ConfigError, SnapshotError, SnapshotTornError, SnapshotVersionError
from headway.snapshot import wire
from headway.snapshot.clock import HOST_BYTES, ClockOffset, host_identity
from headway.types import Snapshot, SnapshotRequest

#: Silence after which the last snapshot is sent again, seconds.
HEARTBEAT_S: Final = 0.5
#: The longest message, as large as a shared-memory segment: about 40,000 requests.
MAX_MESSAGE_BYTES: Final = 4 << 20

MAGIC: Final = b"HWZ"
ENVELOPE_VERSION: Final = 1

_HEADER = struct.Struct("<3sBI")  # magic, version, CRC-32 of the stamp
_STAMP = struct.Struct(f"<d{HOST_BYTES}s")  # monotonic time of sending, whose clock that is
_ENVELOPE_BYTES = _HEADER.size + _STAMP.size
_MAX_TIME_S = 1e12

_ADDRESS = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[A-Za-z0-9._-]+):(\d{1,5}|\*)")
_RECEIVED_MESSAGES = 64  # kept for a reader that is slow; then the sender replaces old by new
_MOST_AT_ONCE = 1024
_SOCKET_BUFFER_BYTES = 256 << 10  # what a slow link holds back is old when it arrives, so it holds little
_MAX_SUBSCRIPTION_BYTES = 64 << 10
_PEER_SILENCE_MS = 3000
_logger = logging.getLogger(__name__)


def check_address(address: str, *, bind: bool = False) -> str:
    """``address`` itself. With ``bind`` its host may be ``*`` (every interface) and its port 0 or ``*`` (a free one).

    Raises:
        ConfigError: it is no ``tcp://HOST:PORT``.
    """
    match = _ADDRESS.fullmatch(address)
    host, port = (match[1], match[2]) if match is not None else ("", "")
    number = int(port) if port.isdigit() else 0
    if not host or number > 65535 or (not bind and (host == "*" or number == 0)):
        example = "tcp://127.0.0.1:0" if bind else "tcp://10.0.0.5:7101"
        raise ConfigError(f"must be tcp://HOST:PORT such as {example}, not {address!r}", key="zeromq")
    return address


def seal(body: bytes, sent_s: float, host: bytes) -> bytes:
    """A message: ``body`` (see :mod:`headway.snapshot.wire`) behind the time and clock of its sending."""
    stamp = _STAMP.pack(sent_s, host)
    return _HEADER.pack(MAGIC, ENVELOPE_VERSION, zlib.crc32(stamp)) + stamp + body


def unseal(data: bytes) -> tuple[bytes, float, bytes]:
    """Body, time of sending and host of a message.

    Raises:
        SnapshotVersionError: an envelope of another version.
        SnapshotTornError: the checksum does not hold.
        SnapshotError: anything else that is no message of a publisher.
    """
    if len(data) < _ENVELOPE_BYTES or not data.startswith(MAGIC):
        raise SnapshotError("what came is no message of a Headway publisher")
    _, version, checksum = _HEADER.unpack_from(data)
    if version != ENVELOPE_VERSION:
        raise SnapshotVersionError(f"ZeroMQ envelope version {version}, this build reads {ENVELOPE_VERSION}")
    stamp = data[_HEADER.size : _ENVELOPE_BYTES]
    if zlib.crc32(stamp) != checksum:
        raise SnapshotTornError("the checksum of the envelope does not hold")
    sent_s, host = _STAMP.unpack(stamp)
    if not 0.0 <= sent_s <= _MAX_TIME_S:  # false for NaN too
        raise SnapshotError(f"sent_s must be between 0 and {_MAX_TIME_S:g}, not {sent_s}")
    return data[_ENVELOPE_BYTES:], sent_s, host


class ZeroMQPublisher:
    """Publishes one engine's snapshots to whoever subscribes. ``address`` is the one bound, with its real port.

    ``num_failed`` counts what could not be sent. A reader that is slow or gone is no failure and costs nothing.
    """

    def __init__(
        self,
        address: str,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        clock: Callable[[], float] = time.monotonic,
        host: bytes | None = None,
    ) -> None:
        """Bind. ``clock`` is the one of the snapshots' times, ``host`` its identity (this machine's by default).

        Raises:
            ConfigError: no address to bind.
            SnapshotError: the address is in use or not of this machine.
        """
        check_address(address, bind=True)
        self.num_failed = 0
        self._clock = clock
        self._host = host_identity() if host is None else host
        self._heartbeat_s = heartbeat_s
        self._body: bytes | None = None
        self._sent_s = time.monotonic()
        self._lock = threading.Lock()  # a socket may change threads, but not be in two
        self._closing = threading.Event()
        self._socket = _socket(zmq.PUB, address)
        self._socket.setsockopt(zmq.CONFLATE, 1)  # one message per subscriber, the newest; frames are never split
        self._socket.setsockopt(zmq.SNDBUF, _SOCKET_BUFFER_BYTES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_SUBSCRIPTION_BYTES)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise SnapshotError(f"cannot publish on {address}: {error.strerror}") from error
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._beat, name="snapshot-heartbeat", daemon=True)
        self._thread.start()

    def publish(self, snapshot: Snapshot) -> None:
        """Send the snapshot to every subscriber. Never waits; about 15 µs above encoding it.

        Raises:
            SnapshotError: it is too large (the older one is then sent on and grows stale), or cannot be sent.
        """
        wire.publish(snapshot, self.write)

    def write(self, data: bytes) -> None:
        """Send a snapshot that is encoded already (:mod:`headway.snapshot.wire`) to every subscriber. Never waits.

        Raises:
            SnapshotError: as :meth:`publish`.
        """
        if len(data) > MAX_MESSAGE_BYTES - _ENVELOPE_BYTES:
            self.num_failed += 1
            raise SnapshotError(f"{self.address}: {len(data)} bytes do not fit into a message of {MAX_MESSAGE_BYTES}")
        with self._lock:
            try:
                self._send(data)
            except zmq.ZMQError as error:
                raise SnapshotError(f"{self.address}: {error.strerror}") from error
            self._body = data

    def close(self) -> None:
        """Unbind; the port is free a moment later. May be called twice."""
        self._closing.set()
        self._thread.join()
        self._socket.close()

    def _send(self, body: bytes) -> None:
        try:
            self._socket.send(seal(body, self._clock(), self._host), zmq.NOBLOCK)
        except zmq.ZMQError:
            self.num_failed += 1
            raise
        self._sent_s = time.monotonic()

    def _beat(self) -> None:
        """Send the last snapshot again while the engine is silent: it stays as old as it is, but a newcomer gets it."""
        wait_s, fails = self._heartbeat_s, False
        while not self._closing.wait(wait_s):
            with self._lock:
                silent_s = time.monotonic() - self._sent_s
                if silent_s < self._heartbeat_s:
                    wait_s = self._heartbeat_s - silent_s
                    continue
                wait_s = self._heartbeat_s
                try:
                    if self._body is not None:
                        self._send(self._body)
                    fails = False
                except zmq.ZMQError as error:
                    if not fails:
                        _logger.warning("snapshot not sent again on %s: %s", self.address, error.strerror)
                    fails = True


class ZeroMQSubscriber:
    """Reads one engine's snapshots. The publisher need not be there yet, and may go and come back."""

    def __init__(
        self,
        address: str,
        *,
        instance_id: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        host: bytes | None = None,
    ) -> None:
        """``instance_id``, when given, replaces the one in the snapshots. ``clock`` is the one their times are put on.

        Raises:
            ConfigError: no address to connect to.
        """
        self.address = check_address(address)
        #: Seconds added to the engine's times; 0 where it runs on this host's clock, None before the first message.
        self.clock_offset_s: float | None = None
        self._instance_id = instance_id
        self._clock = clock
        self._host = host_identity() if host is None else host
        self._their_host = b""
        self._offset = ClockOffset()
        self._newest: tuple[bytes, float] | None = None
        self._engine_start: int | None = None
        self._sequence = -1
        self._ended_starts: deque[int] = deque(maxlen=16)
        self._socket = _socket(zmq.SUB, address)
        # No CONFLATE here: a peer that sends messages of several parts makes libzmq end the process under it.
        self._socket.setsockopt(zmq.RCVHWM, _RECEIVED_MESSAGES)
        self._socket.setsockopt(zmq.RCVBUF, _SOCKET_BUFFER_BYTES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, _PEER_SILENCE_MS)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(address)

    def fileno(self) -> int:
        """A descriptor that becomes readable when :meth:`receive` has something to do, for an event loop to watch."""
        return int(self._socket.getsockopt(zmq.FD))

    def receive(self) -> None:
        """Empty the socket, keep the newest message and the time. The sooner after its arrival, the better the clock.

        About 5 µs when nothing came.
        """
        if self._socket.closed:
            return
        data = None
        for _ in range(_MOST_AT_ONCE):  # a peer that never pauses must not keep us here
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                break
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:  # the peer went between the two calls
                break
        if data is not None:
            self._newest = data, self._clock()

    def poll(self) -> Snapshot | None:
        """The newest snapshot if it is newer than the last one returned, else None. Never waits.

        Raises:
            SnapshotVersionError: a publisher of another wire or envelope version.
            SnapshotError: what came is no valid snapshot. Said once per message; the next may be good.
        """
        self.receive()
        if self._newest is None:
            return None
        (data, received_s), self._newest = self._newest, None
        body, sent_s, host = unseal(data)
        snapshot = wire.decode(body)
        is_newer = self._is_newer(snapshot)
        if not is_newer and host != self._their_host:
            return None
        offset_s = self._observe_clock(host, sent_s, received_s)
        if not is_newer:
            return None
        if offset_s:
            snapshot = on_clock(snapshot, offset_s)
        if self._instance_id is not None:
            return msgspec.structs.replace(snapshot, instance_id=self._instance_id)
        return snapshot

    def close(self) -> None:
        """Disconnect. May be called twice; a later poll returns None."""
        self._socket.close()
        self._newest = None

    def _is_newer(self, snapshot: Snapshot) -> bool:
        """Whether the snapshot comes after all that were returned: a later one of the same start, or of a new start."""
        start = snapshot.engine_start
        if start == self._engine_start:
            if snapshot.sequence <= self._sequence:
                return False
        elif start in self._ended_starts:  # starts need not rise: a wall clock may have been set back in between
            return False
        elif self._engine_start is not None:
            self._ended_starts.append(self._engine_start)
        self._engine_start, self._sequence = start, snapshot.sequence
        return True

    def _observe_clock(self, host: bytes, sent_s: float, received_s: float) -> float:
        if host != self._their_host:
            self._their_host = host
            self._offset.forget()
        offset_s = self._offset.observe(sent_s, received_s)
        # Cloned virtual machines may share an identity and not a clock: what came before it was sent gives them away.
        if host == self._host and offset_s >= 0.0:
            offset_s = 0.0
        self.clock_offset_s = offset_s
        return offset_s


def on_clock(snapshot: Snapshot, offset_s: float) -> Snapshot:
    """The snapshot with ``offset_s`` added to every time in it."""

    def moved(requests: list[SnapshotRequest]) -> list[SnapshotRequest]:
        return [msgspec.structs.replace(request, arrival_s=request.arrival_s + offset_s) for request in requests]

    start_s = snapshot.batch_start_s
    return msgspec.structs.replace(
        snapshot,
        engine_s=snapshot.engine_s + offset_s,
        batch_start_s=None if start_s is None else start_s + offset_s,
        running=moved(snapshot.running),
        waiting=moved(snapshot.waiting),
    )


def _socket(kind: int, address: str) -> zmq.Socket[bytes]:
    """A socket of the process's one context. A peer that vanished without a word is given up after a few seconds."""
    made: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.IPV6, int("[" in address))
    made.setsockopt(zmq.HEARTBEAT_IVL, _PEER_SILENCE_MS // 3)
    made.setsockopt(zmq.HEARTBEAT_TIMEOUT, _PEER_SILENCE_MS)
    return made
