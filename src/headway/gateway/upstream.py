"""Calls model instances over HTTP: one shared session, bodies as bytes, answers as they arrive.

It turns what a transport can do wrong into Headway's upstream errors, which name the instance and never repeat
addresses or credentials. It refuses to retry, to follow redirects, to keep cookies, or to decompress: whether another
attempt is made is for the caller to say, who knows what the client has already seen.
"""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit, urlunsplit

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from headway.config import Config, InstanceConfig
from headway.config.secrets import api_key_of
from headway.errors import UpstreamConnectError, UpstreamError, UpstreamProtocolError

#: Longest wait for a TCP or TLS connection, seconds.
CONNECT_TIMEOUT_S = 3.0
#: Idle connections are closed by us first: engines close theirs after 5 s, and a request sent into a closing
#: connection is an error that nobody caused.
_KEEPALIVE_S = 4.0
_LARGE_BODY_BYTES = 1 << 20


class UpstreamTarget:
    """Where one instance is reached. ``api_key`` is resolved once, at start, and shows up nowhere."""

    __slots__ = ("_base", "_urls", "api_key", "health_url", "hosted", "instance_id", "metrics_url")

    def __init__(self, instance: InstanceConfig, api_key: str | None) -> None:
        self.instance_id = instance.id
        self.hosted = instance.engine == "hosted"
        self.api_key = api_key
        parts = urlsplit(instance.api_base.rstrip("/"))
        self._base = urlunsplit(parts)
        root = urlunsplit(parts._replace(path=parts.path.removesuffix("/v1")))
        self.health_url = URL(root + "/health")
        self.metrics_url = URL(root + "/metrics")
        self._urls: dict[str, URL] = {}

    def url(self, path: str) -> URL:
        """The instance's URL for one of the gateway's own paths (``/v1/…``)."""
        if path not in self._urls:
            self._urls[path] = URL(self._base + path.removeprefix("/v1"))
        return self._urls[path]


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
    """The HTTP session towards all instances. Open it inside the running event loop."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make the session ready."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S, ttl_dns_cache=30),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent",),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, connect=None, sock_read=None),
            raise_for_status=False,
        )

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def send(
        self, target: UpstreamTarget, path: str, query: bytes, headers: CIMultiDict[str], body: bytes
    ) -> aiohttp.ClientResponse:
        """The answer's status and headers; its body is still to be read. The caller must close it.

        Raises:
            UpstreamConnectError: no connection could be made, so nothing was sent.
            UpstreamProtocolError: the connection broke or spoke no HTTP before the answer's headers were complete.
        """
        assert self._session is not None, "the session is open while the gateway serves"
        url = target.url(path)
        if query:
            url = url.with_query(query.decode("latin-1"))
        data = io.BytesIO(body) if len(body) > _LARGE_BODY_BYTES else body
        if data is not body:
            headers["content-length"] = str(len(body))
        try:
            return await self._session.post(url, data=data, headers=headers, allow_redirects=False)
        except aiohttp.ClientError as error:
            raise translate(error, target.instance_id) from error
        except OSError as error:
            raise UpstreamProtocolError(
                f"the connection to instance '{target.instance_id}' broke", instance_id=target.instance_id
            ) from error

    @asynccontextmanager
    async def get(self, url: URL, *, timeout_s: float) -> AsyncIterator[aiohttp.ClientResponse]:
        """A free GET off the request path (health, gauges)."""
        assert self._session is not None
        limit = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.get(url, timeout=limit, allow_redirects=False) as response:
            yield response


def translate(error: BaseException, instance_id: str) -> UpstreamError:
    """A transport's error as one of Headway's; the message is fit for clients."""
    if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
        return UpstreamConnectError(f"instance '{instance_id}' cannot be reached", instance_id=instance_id)
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return UpstreamProtocolError(f"instance '{instance_id}' closed the connection", instance_id=instance_id)
    return UpstreamProtocolError(f"instance '{instance_id}' broke off or spoke no HTTP", instance_id=instance_id)
