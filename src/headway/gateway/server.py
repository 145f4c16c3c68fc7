"""Runs the gateway under uvicorn and ends it gracefully.

On SIGTERM or SIGINT ``/readyz`` turns 503 and new requests are refused while the socket stays open, so that a load
balancer notices; running streams get ``server.drain_s`` to finish, then an error event. The process ends with 0. A
second signal ends it at once. SIGHUP reads the configuration again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from headway.errors import HeadwayError
from headway.gateway.app import App
from headway.gateway.keys import warn_if_open
from headway.gateway.log import event
from headway.gateway.state import Gateway

#: How long a shutdown waits for cut streams to say goodbye, seconds.
_GOODBYE_S = 1.0
_TICK_S = 0.02
#: Idle client connections are kept longer than load balancers keep theirs.
_KEEP_ALIVE_S = 75


class Server(uvicorn.Server):
    """A uvicorn server that drains. ``on_listening`` gets the address once it accepts connections.

    ``handle_signals`` is for a process of its own; inside somebody else's, call :meth:`drain`.
    """

    def __init__(
        self,
        gateway: Gateway,
        listener: socket.socket,
        *,
        on_listening: Callable[[str], None] = lambda address: None,
        handle_signals: bool = True,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                App(gateway),
                loop="uvloop",
                http="httptools",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=2048,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )
        self.address = _address(listener)
        self._gateway, self._listener = gateway, listener
        self._on_listening, self._handle_signals = on_listening, handle_signals
        self._drain: asyncio.Task[None] | None = None

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal ends it."""
        super().run([self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, then say where."""
        await super().startup(sockets or [self._listener])
        warn_if_open(self.address, self._gateway.keys)
        self._on_listening(self.address)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain on the first signal, stop at once on the second; never raise them again, for the end is a clean one."""
        loop = asyncio.get_running_loop()
        handled = (signal.SIGTERM, signal.SIGINT) if self._handle_signals else ()
        for number in handled:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        if self._handle_signals:
            loop.add_signal_handler(signal.SIGHUP, self._gateway.reloader.reload, "SIGHUP")
        try:
            yield
        finally:
            for number in (*handled, *((signal.SIGHUP,) if self._handle_signals else ())):
                loop.remove_signal_handler(number)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        event(logging.INFO, "signal", signal=signal.Signals(sig).name)
        if self._drain is None:
            self._drain = asyncio.get_running_loop().create_task(self.drain())
        else:
            self.should_exit = self.force_exit = True

    async def drain(self) -> None:
        """Refuse new requests, let running ones finish, then let the server exit."""
        gateway, drain_s = self._gateway, self._gateway.config.server.drain_s
        gateway.draining = True
        event(logging.INFO, "draining", inflight=gateway.num_inflight, drain_s=drain_s)
        await self._until_idle(drain_s)
        if gateway.num_inflight > 0:
            event(logging.WARNING, "drain_time_over", inflight=gateway.num_inflight)
            for guard in list(gateway.guards):
                guard.shut_down()
            await self._until_idle(_GOODBYE_S)
        self.should_exit = True

    async def _until_idle(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        expires_s = loop.time() + seconds
        gateway = self._gateway
        while gateway.num_inflight and loop.time() < expires_s and not self.should_exit:  # noqa: ASYNC110 - the hot
            await asyncio.sleep(_TICK_S)  # path should not have to signal an event for this


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to ``host`` and ``port`` (0: any free one), not yet accepting.

    Raises:
        HeadwayError: it cannot be bound.
    """
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise HeadwayError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
