"""Calls model instances over HTTP: connections kept between requests, bodies as bytes, answers as they arrive.

It turns what a transport can do wrong into Headway's upstream errors, which name the instance and never repeat
addresses or credentials. It refuses to retry, to follow redirects, to keep cookies, or to decompress: whether another
attempt is made is for the caller to say, who knows what the client has already seen.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit, urlunsplit

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from headway.config import Config, InstanceConfig
from headway.config.secrets import api_key_of
from headway.errors import UpstreamConnectError, UpstreamError, UpstreamProtocolError
from headway.gateway.connection import BrokenAnswerError, Connection
from headway.gateway.connections import CONNECT_TIMEOUT_S, Connections, Origin

#: Up to this size a body goes into one piece with its headers, which is one call of the system.
_SMALL_BODY_BYTES = 1 << 16


class UpstreamTarget:
    """Where one instance is reached. ``api_key`` is resolved once, at start, and shows up nowhere."""

    __slots__ = ("_base", "_heads", "api_key", "health_url", "hosted", "instance_id", "metrics_url", "origin")

    def __init__(self, instance: InstanceConfig, api_key: str | None) -> None:
        self.instance_id = instance.id
        self.hosted = instance.engine == "hosted"
        self.api_key = api_key
        parts = urlsplit(instance.api_base.rstrip("/"))
        root = urlunsplit(parts._replace(path=parts.path.removesuffix("/v1")))
        self.health_url = URL(root + "/health")
        self.metrics_url = URL(root + "/metrics")
        self._base = URL(urlunsplit(parts))
        self.origin = Origin(self._base.raw_host or "", self._base.port or 80, self._base.scheme == "https")
        self._heads: dict[str, tuple[bytes, bytes]] = {}

    def url(self, path: str) -> URL:
        """The instance's URL for one of the gateway's own paths (``/v1/…``)."""
        return self._base.with_path(self._base.raw_path.rstrip("/") + path.removeprefix("/v1"), encoded=True)

    def head(self, path: str, query: bytes) -> bytes:
        """Request line and ``Host`` of a POST to :meth:`url`, with the client's query."""
        found = self._heads.get(path)
        if found is None:
            url = self.url(path)
            host = f" HTTP/1.1\r\nHost: {url.host_port_subcomponent}\r\n"
            found = self._heads[path] = f"POST {url.raw_path}".encode("ascii"), host.encode("ascii")
        return (b"?" + query if query else b"").join(found)


def resolve_targets(config: Config) -> dict[str, UpstreamTarget]:
    """Instance id → target, with API keys taken from the environment.

    Raises:
        ConfigError: an ``env:`` variable is not set; the message names it.
    """
    targets = {}
    for index, instance in enumerate(config.instances):
        targets[instance.id] = UpstreamTarget(instance, api_key_of(config, index))
    return targets


class Upstreams:
    """The connections towards all instances. Open it inside the running event loop."""

    def __init__(self) -> None:
        self._connections: Connections | None = None
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make them ready."""
        self._connections = Connections()
        self._session = aiohttp.ClientSession(
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent",),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        )

    async def close(self) -> None:
        """Close all connections."""
        if self._connections is not None:
            self._connections.close()
            self._connections = None
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def send(
        self, target: UpstreamTarget, path: str, query: bytes, headers: CIMultiDict[str], body: bytes
    ) -> Connection:
        """The answer's status and headers; its body is still to be read. The caller must :meth:`end` it.

        Raises:
            UpstreamConnectError: no connection could be made, so nothing was sent.
            UpstreamProtocolError: the connection broke or spoke no HTTP before the answer's headers were complete.
        """
        assert self._connections is not None, "they are open while the gateway serves"
        try:
            connection = await self._connections.take(target.origin)
        except OSError as error:  # a name that cannot be found and a time-out too
            raise UpstreamConnectError(
                f"instance '{target.instance_id}' cannot be reached", instance_id=target.instance_id
            ) from error
        lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
        lines.append(f"Content-Length: {len(body)}\r\n\r\n")
        head = target.head(path, query) + "".join(lines).encode("latin-1")
        try:
            await connection.ask((head + body,) if len(body) < _SMALL_BODY_BYTES else (head, body))
        except BaseException as error:
            connection.close()
            if isinstance(error, BrokenAnswerError):
                raise translate(error, target.instance_id) from error
            raise
        return connection

    def end(self, target: UpstreamTarget, connection: Connection) -> None:
        """Nothing more is wanted of this answer: its connection serves the next request, or is closed."""
        if self._connections is None:
            connection.close()
        else:
            self._connections.give_back(target.origin, connection)

    @asynccontextmanager
    async def get(self, url: URL, *, timeout_s: float) -> AsyncIterator[aiohttp.ClientResponse]:
        """A free GET off the request path (health, gauges)."""
        assert self._session is not None
        limit = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.get(url, timeout=limit, allow_redirects=False) as response:
            yield response


def translate(error: BrokenAnswerError, instance_id: str) -> UpstreamError:
    """A connection's error as one of Headway's; the message is fit for clients."""
    what = "closed the connection" if error.closed else "broke off or spoke no HTTP"
    return UpstreamProtocolError(f"instance '{instance_id}' {what}", instance_id=instance_id)
