"""An OpenAI-compatible server that does nothing but pace: ``python -m headway.bench.paced_upstream``.

Every POST is answered by a stream of ``max_tokens`` content events, one per ``interval_ms``, then ``[DONE]``. It parses
no more than it must, so that it takes little of a machine on which something else is measured. The header
``x-pause-after: N`` makes a stream stop after N events until the client leaves. It prints its address and serves until
it is ended.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from functools import partial
from typing import cast

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_TOKENS = re.compile(rb'"max_tokens": *(\d+)')
_PAUSE = re.compile(rb"\r\nx-pause-after: *(\d+)", re.IGNORECASE)
_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_SMALL = b'{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"bench"}],"status":"ok"}'
_EVENT = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
)
_LAST = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


_EVENT_CHUNK, _LAST_CHUNKS = _chunk(_EVENT), _chunk(_LAST) + b"0\r\n\r\n"


class PacedConnection(asyncio.Protocol):
    """One connection; its requests are answered one after the other."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._seen = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop writing."""
        if self._timer is not None:
            self._timer.cancel()
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """Answer once a request is complete."""
        self._seen += data
        head, mark, body = self._seen.partition(b"\r\n\r\n")
        if not mark:
            return
        length = _LENGTH.search(head)
        if length is not None and len(body) < int(length[1]):
            return
        self._seen = b""
        assert self._transport is not None
        if not head.startswith(b"POST"):
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                % (len(_SMALL), _SMALL)
            )
            return
        tokens, pause = _TOKENS.search(body), _PAUSE.search(head)
        self._transport.write(_HEAD)
        self._send(0, int(tokens[1]) if tokens else 16, int(pause[1]) if pause else None)

    def _send(self, num_sent: int, num_tokens: int, pause_after: int | None) -> None:
        if self._transport is None or num_sent == pause_after:
            return
        if num_sent == num_tokens:
            self._transport.write(_LAST_CHUNKS)
            return
        self._transport.write(_EVENT_CHUNK)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._interval_s, self._send, num_sent + 1, num_tokens, pause_after)


async def _serve(interval_s: float) -> None:
    server = await asyncio.get_running_loop().create_server(
        partial(PacedConnection, interval_s), "127.0.0.1", 0, backlog=4096
    )
    host, port = server.sockets[0].getsockname()[:2]
    print(f"listening on http://{host}:{port}", flush=True)
    async with server:
        await server.serve_forever()


def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interval-ms", type=float, default=20.0)
    asked = parser.parse_args()
    import uvloop

    uvloop.run(_serve(asked.interval_ms / 1e3))


if __name__ == "__main__":
    main()
