"""What the gateway tests share: bodies, one-instance pools, a raw client that can hang up, and waiting for a state."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import aiohttp

from headway.config import Config
from headway.testing import FakeUpstream, RunningGateway, pool

CHAT = "/v1/chat/completions"


def chat(model: str = "auto", *, stream: bool = True, content: str = "hello", **rest: object) -> dict[str, object]:
    """A chat body."""
    return {"model": model, "messages": [{"role": "user", "content": content}], "stream": stream, **rest}


def pool_of(*upstreams: FakeUpstream, **rest: object) -> Config:
    """A pool of one model with an instance (``a``, ``b``, …) per upstream."""
    instances: list[dict[str, object]] = [
        {"id": "abcdefgh"[index], "model": "m", "api_base": upstream.url, "engine": "hosted"}
        for index, upstream in enumerate(upstreams)
    ]
    return pool([{"name": "m"}], instances, **rest)


async def until(condition: Callable[[], object], *, within_s: float = 5.0) -> None:
    """Wait until ``condition`` holds; the test fails when it does not in good time."""
    expires_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < expires_s, "the awaited state did not come"
        await asyncio.sleep(0.002)


async def post(session: aiohttp.ClientSession, gateway: RunningGateway, name: str = "", **body: object) -> int:
    """Send a chat request, under its own ``name`` if that is given; its status."""
    headers = {"x-request-id": name} if name else {}
    async with session.post(gateway.url + CHAT, json=chat(**body), headers=headers) as response:  # type: ignore[arg-type]
        await response.read()
        return response.status


def names(upstream: FakeUpstream) -> list[str]:
    """The request ids that reached an upstream, in order."""
    return [received.headers["x-request-id"] for received in upstream.requests]


async def metrics(session: aiohttp.ClientSession, gateway: RunningGateway) -> str:
    """The gateway's metrics as text."""
    async with session.get(gateway.url + "/metrics") as response:
        return await response.text()


class RawClient:
    """A request on a bare socket: sends what it is told, hangs up when it is told. Use as an async context manager."""

    def __init__(
        self, url: str, body: dict[str, object], *, path: str = CHAT, headers: dict[str, str] | None = None
    ) -> None:
        self._url = urlsplit(url)
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
        )
        head += "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._request = head.encode() + b"\r\n" + data

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection(self._url.hostname, self._url.port)
        self.writer.write(self._request)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hang_up()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    def hang_up(self) -> float:
        """Cut the connection; returns when (monotonic)."""
        now = time.monotonic()
        self.writer.transport.abort()
        return now

    async def read_until(self, mark: bytes) -> bytes:
        """Read up to and with ``mark``."""
        return await self.reader.readuntil(mark)
