"""The gateway's own HTTP connections: every shape of an answer, cut anywhere; what breaks, and what is used again."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import cast

import pytest

from headway.gateway.connection import BrokenAnswerError, Connection
from headway.gateway.connections import Connections, Origin

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-One: 1\r\n\r\n"
HELLO, WORLD = b"5\r\nhello\r\n", b"6;x=y\r\n world\r\n"
CHUNKED = HEAD + HELLO + WORLD + b"0\r\nT: t\r\n\r\n"
LENGTH = b"HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\nhello world"
UNTIL_CLOSED = b"HTTP/1.0 200 OK\r\n\r\nhello world"
INTERIM = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + LENGTH


class Peer:
    """A server on 127.0.0.1 that answers each request with the next of ``answers``, in the pieces given.

    A piece of None ends the connection. ``num_connections`` counts those that came.
    """

    def __init__(self, *answers: list[bytes | None], tls: ssl.SSLContext | None = None) -> None:
        self.answers, self.tls = list(answers), tls
        self.num_connections = 0
        self.requests: list[bytes] = []
        self._serving: list[asyncio.Task[None]] = []
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.origin = Origin("127.0.0.1", 0, tls is not None)

    async def __aenter__(self) -> Peer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls)
        self.origin = self.origin._replace(port=self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await asyncio.sleep(0.01)  # transports close a little later

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._serving.append(cast("asyncio.Task[None]", asyncio.current_task()))
        try:
            await self._answer(reader, writer)
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while self.answers:
                self.requests.append(await reader.readuntil(b"!"))
                for piece in self.answers.pop(0):
                    await self.go_on.wait()
                    if piece is None:
                        writer.close()
                        await writer.wait_closed()
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
            await reader.read()


@pytest.fixture
async def connections() -> AsyncIterator[Connections]:
    """A pool of connections."""
    made = Connections()
    yield made
    made.close()
    await asyncio.sleep(0.01)


async def whole(connection: Connection, by: str) -> bytes:
    """The rest of a body, by one of the two ways."""
    parts: list[bytes] = []
    if by == "pump":
        await connection.pump(parts.append)
    else:
        while chunk := await connection.read():
            parts.append(chunk)
    return b"".join(parts)


@pytest.mark.parametrize("by", ["read", "pump"])
@pytest.mark.parametrize("answer", [CHUNKED, LENGTH, UNTIL_CLOSED, INTERIM], ids=["chunks", "length", "end", "interim"])
@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_a_body_is_whole_however_it_is_cut(connections: Connections, answer: bytes, size: int, by: str) -> None:
    """Chunks, a length, the connection's end, and an interim answer before it: the same body, without its framing."""
    pieces: list[bytes | None] = [answer[at : at + size] for at in range(0, len(answer), size)]
    if answer is UNTIL_CLOSED:
        pieces.append(None)
    async with Peer(pieces) as peer:
        connection = await connections.take(peer.origin)
        await connection.ask((b"ask!",))
        assert connection.status == 200
        assert (b"link", b"x") not in connection.headers
        assert await whole(connection, by) == b"hello world"
        assert connection.reusable is (answer is not UNTIL_CLOSED)
        connection.close()


@pytest.mark.parametrize("by", ["read", "pump"])
@pytest.mark.parametrize(
    ("answer", "received"),
    [
        (HEAD + HELLO, b"hello"),
        (HEAD + HELLO + WORLD[:-4], b"hello wor"),
        (CHUNKED[:-7], b"hello world"),
        (LENGTH[:-3], b"hello wo"),
        (LENGTH.replace(b"content", b"transfer-encoding: chunked\r\ncontent"), None),
        (b"SSH-2.0-x\r\n\r\n", None),
        (b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", None),
        (b"HTTP/1.1 2", None),
        (b"", None),
    ],
)
async def test_a_broken_answer_is_never_taken_for_a_whole_one(
    connections: Connections, answer: bytes, received: bytes | None, by: str
) -> None:
    """Cut, or no HTTP: what came in can be read, then it is an error; nothing is used again."""
    async with Peer([answer, None]) as peer:
        connection = await connections.take(peer.origin)
        parts: list[bytes] = []

        async def all_of_it() -> None:
            await connection.ask((b"ask!",))
            if by == "pump":
                await connection.pump(parts.append)
            while chunk := await connection.read():
                parts.append(chunk)

        with pytest.raises(BrokenAnswerError) as broken:
            await all_of_it()
        assert b"".join(parts) == (received or b"")
        assert broken.value.closed is (received is not None or len(answer) <= len(b"HTTP/1.1 2"))
        assert not connection.reusable
        connections.give_back(peer.origin, connection)
        with pytest.raises(BrokenAnswerError):
            await connection.ask((b"again!",))


async def test_an_endless_head_is_refused(connections: Connections) -> None:
    """Headers without end fill no memory."""
    async with Peer([b"HTTP/1.1 200 OK\r\n" + b"x-long: " + b"x" * (1 << 19)]) as peer:
        connection = await connections.take(peer.origin)
        with pytest.raises(BrokenAnswerError, match="no HTTP"):
            await connection.ask((b"ask!",))
        connection.close()


async def test_a_connection_serves_one_request_after_the_other(connections: Connections) -> None:
    """What was read to its end is used again; what was not, or is not wanted to be kept, is closed."""
    closing = LENGTH.replace(b"content", b"connection: close\r\ncontent")
    async with Peer([LENGTH], [CHUNKED], [LENGTH], [closing], [LENGTH]) as peer:
        for number in range(5):
            connection = await connections.take(peer.origin)
            await connection.ask((b"ask", b" %d!" % number))
            if number != 2:  # of which only the beginning is read
                assert await whole(connection, "read") == b"hello world"
            connections.give_back(peer.origin, connection)
        assert peer.requests == [b"ask %d!" % number for number in range(5)]
        assert peer.num_connections == 3


async def test_bytes_that_nobody_asked_for_end_a_connection(connections: Connections) -> None:
    """A second answer to one request, beside the first or later, is never given to the next request."""
    async with Peer([LENGTH + LENGTH], [LENGTH, b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nbad"], [LENGTH]) as peer:
        for _ in range(3):
            connection = await connections.take(peer.origin)
            await connection.ask((b"ask!",))
            assert await whole(connection, "read") == b"hello world"
            connections.give_back(peer.origin, connection)
            await asyncio.sleep(0.05)  # what else there is comes in
        assert peer.num_connections == 3


async def test_a_slow_taker_holds_the_peer_up(connections: Connections) -> None:
    """While a taker waits, little more than what a socket holds is taken in; afterwards the rest comes, in order."""
    size = 32 << 20
    body = bytes(range(256)) * (size // 256)
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size
    async with Peer([head, *(body[at : at + (1 << 16)] for at in range(0, size, 1 << 16))]) as peer:
        connection = await connections.take(peer.origin)
        await connection.ask((b"ask!",))
        gate = asyncio.Event()
        taken = bytearray()

        def take(chunk: bytes) -> Awaitable[None] | None:
            taken.extend(chunk)
            return None if gate.is_set() else _until(gate)

        pumping = asyncio.create_task(connection.pump(take))
        await asyncio.sleep(0.3)
        assert len(taken) < 1 << 20
        assert len(peer.answers) == 0
        gate.set()
        await pumping
        assert taken == body
        connection.close()


async def _until(gate: asyncio.Event) -> None:
    await gate.wait()


async def test_what_a_taker_raises_reaches_who_pumps(connections: Connections) -> None:
    """A failure while bytes are passed on is the request's own, not lost in the event loop."""

    def take(chunk: bytes) -> None:
        raise ValueError(chunk)

    async with Peer([HEAD, HELLO]) as peer:
        connection = await connections.take(peer.origin)
        await connection.ask((b"ask!",))
        with pytest.raises(ValueError, match="hello"):
            await connection.pump(take)
        connection.close()


async def test_a_cancelled_pump_takes_nothing_more(connections: Connections) -> None:
    """Who is cancelled while he waits gets no more calls; the connection can only be closed."""
    async with Peer([HEAD + HELLO, WORLD]) as peer:
        connection = await connections.take(peer.origin)
        await connection.ask((b"ask!",))
        parts: list[bytes] = []
        peer.go_on.clear()
        pumping = asyncio.create_task(connection.pump(parts.append))
        await asyncio.sleep(0.02)
        pumping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pumping
        before = list(parts)
        peer.go_on.set()
        await asyncio.sleep(0.05)
        assert parts == before
        assert not connection.reusable
        connection.close()


async def test_nobody_there_and_no_such_name(connections: Connections) -> None:
    """A closed port and a name that does not exist are errors of the system; a later look-up is made anew."""
    async with Peer() as peer:
        closed = peer.origin
    for origin in (closed, Origin("no-such-host.invalid", 80, False), Origin("no-such-host.invalid", 80, False)):
        with pytest.raises(OSError):
            await connections.take(origin)


async def test_tls_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An https instance is reached where its certificate is trusted and is its own, and not otherwise."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate, and is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(  # noqa: ASYNC221 - a few milliseconds, before anything is served
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    async with Peer([CHUNKED], tls=context) as peer:
        named = peer.origin._replace(host="localhost")
        untrusting = Connections()
        with pytest.raises(ssl.SSLCertVerificationError):
            await untrusting.take(named)
        untrusting.close()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        trusting = Connections()
        with pytest.raises(ssl.SSLCertVerificationError):
            await trusting.take(peer.origin)  # the certificate is for a name
        connection = await trusting.take(named)
        await connection.ask((b"ask!",))
        assert await whole(connection, "pump") == b"hello world"
        trusting.give_back(named, connection)
        trusting.close()
        await asyncio.sleep(0.01)
