"""Connections to instances, kept between requests: one pool for all, by scheme, host and port.

Names are looked up at most once in half a minute, and of several addresses of a host the first that answers is taken.
It refuses to send anything.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohappyeyeballs

from headway.gateway.connection import Connection

#: Longest wait for a TCP or TLS connection, the look-up of its name included, seconds.
CONNECT_TIMEOUT_S = 3.0
#: Idle connections are closed by us first: engines close theirs after 5 s, and a request sent into a closing
#: connection is an error that nobody caused.
_KEEPALIVE_S = 4.0
_SWEEP_S = 1.0
_NAMES_KEPT_S = 30.0
#: After so long without an answer the next address of a host is tried beside the one before (RFC 8305).
_NEXT_ADDRESS_S = 0.25

_Addresses = Sequence[tuple[int, int, int, str, tuple[Any, ...]]]


class Origin(NamedTuple):
    """Where to connect."""

    host: str
    port: int
    secure: bool


class Connections:
    """Open connections that wait for their next request."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._idle: dict[Origin, list[Connection]] = {}  # the one used last comes last
        self._names: dict[tuple[str, int], tuple[float, asyncio.Task[_Addresses]]] = {}
        self._tls: ssl.SSLContext | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def take(self, origin: Origin) -> Connection:
        """A connection that serves no other request; give it back, or close it.

        Raises:
            OSError: none could be made; TimeoutError, in time.
        """
        idle = self._idle.get(origin)
        oldest_s = self._loop.time() - _KEEPALIVE_S
        while idle:
            connection = idle.pop()
            if connection.reusable and connection.idle_since_s > oldest_s:
                return connection
            connection.close()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            return await self._connect(origin)

    def give_back(self, origin: Origin, connection: Connection) -> None:
        """Keep a connection for the next request, or close it where it cannot serve one."""
        if self._is_closed or not connection.reusable:
            connection.close()
            return
        connection.idle_since_s = self._loop.time()
        self._idle.setdefault(origin, []).append(connection)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep)

    def close(self) -> None:
        """Close all that are idle; those in use are closed when they come back."""
        self._is_closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        self._idle.clear()

    def _sweep(self) -> None:
        """Close what was idle for too long, and forget what was closed by the other side."""
        oldest_s = self._loop.time() - _KEEPALIVE_S
        for origin in list(self._idle):
            kept = []
            for connection in self._idle[origin]:
                if connection.reusable and connection.idle_since_s > oldest_s:
                    kept.append(connection)
                else:
                    connection.close()
            if kept:
                self._idle[origin] = kept
            else:
                del self._idle[origin]
        self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep) if self._idle else None

    async def _connect(self, origin: Origin) -> Connection:
        addresses = await self._look_up(origin.host, origin.port)
        connected = await aiohappyeyeballs.start_connection(addresses, happy_eyeballs_delay=_NEXT_ADDRESS_S)
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            _, connection = await self._loop.create_connection(
                Connection,
                sock=connected,
                ssl=self._tls_context() if origin.secure else None,
                server_hostname=origin.host.rstrip(".") if origin.secure else None,
            )
        except BaseException:
            connected.close()
            raise
        return connection

    async def _look_up(self, host: str, port: int) -> _Addresses:
        """The addresses of a host. Who asks while somebody asks already waits for the same answer."""
        known = self._names.get((host, port))
        if known is None or known[0] < self._loop.time() or _has_failed(known[1]):
            looking = self._loop.create_task(self._ask(host, port))
            known = self._names[host, port] = self._loop.time() + _NAMES_KEPT_S, looking
        return await asyncio.shield(known[1])

    async def _ask(self, host: str, port: int) -> _Addresses:
        found: _Addresses = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return found

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(("http/1.1",))
        return self._tls


def _has_failed(looking: asyncio.Task[_Addresses]) -> bool:
    return looking.done() and (looking.cancelled() or looking.exception() is not None)
