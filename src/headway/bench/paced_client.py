"""A client that keeps so many streams open and times their first tokens, in a process of its own.

``python -m headway.bench.paced_client URL CONCURRENCY STREAMS``: each of CONCURRENCY slots sends streams one after the
other on a connection that it keeps, the slots staggered over the length of one stream. It counts events in the bytes as
they come instead of parsing them. It prints one JSON object and refuses to hide a stream that was cut: it fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from urllib.parse import urlsplit

_DONE = b"data: [DONE]"
_CONTENT = b'"content"'
_END = b"0\r\n\r\n"
NUM_TOKENS = 50
STREAM_S = 1.0
_TIMEOUT_S = 30.0


class BrokenStreamError(Exception):
    """An answer that was no whole stream."""


def request_bytes(url: str, *, num_tokens: int = NUM_TOKENS, headers: str = "") -> bytes:
    """A streamed chat request as it goes over the wire."""
    place = urlsplit(url)
    body = json.dumps(
        {
            "model": "m",
            "stream": True,
            "max_tokens": num_tokens,
            "messages": [{"role": "user", "content": "Tell me of the time between one train and the next."}],
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {place.netloc}\r\ncontent-type: application/json\r\n"
        f"accept: text/event-stream\r\n{headers}content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def one_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[float, int]:
    """Seconds to the first content, and the number of content events, of one stream read to its end.

    Raises:
        BrokenStreamError: it ended early, or was no stream.
    """
    started_s = time.perf_counter()
    writer.write(request)
    ttft_s, num_events, tail, done = None, 0, b"", False
    while True:
        data = await reader.read(65536)
        if not data:
            raise BrokenStreamError("the connection was closed")
        seen = tail + data
        if ttft_s is None:
            if not seen.startswith(b"HTTP/1.1 200"):
                raise BrokenStreamError(seen[:200].decode(errors="replace"))
            if _CONTENT not in seen:
                tail = seen
                continue
            ttft_s = time.perf_counter() - started_s
        num_events += seen.count(_CONTENT) - tail.count(_CONTENT)  # what the tail held has been counted
        done = done or _DONE in seen
        if done and seen.endswith(_END):
            return ttft_s, num_events
        tail = seen[-len(_DONE) :]


async def run(url: str, concurrency: int, num_streams: int) -> dict[str, object]:
    """Sorted TTFTs in seconds and the number of events of ``num_streams`` streams."""
    place, request = urlsplit(url), request_bytes(url)
    left = num_streams
    ttfts_s: list[float] = []
    num_events = 0

    async def slot(number: int) -> None:
        nonlocal left, num_events
        await asyncio.sleep(STREAM_S * number / concurrency)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        try:
            while left > 0:
                left -= 1
                ttft_s, events = await asyncio.wait_for(one_stream(reader, writer, request), _TIMEOUT_S)
                ttfts_s.append(ttft_s)
                num_events += events
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async with asyncio.TaskGroup() as slots:
        for number in range(concurrency):
            slots.create_task(slot(number))
    return {"ttft_s": sorted(ttfts_s), "num_streams": len(ttfts_s), "num_events": num_events}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("concurrency", type=int)
    parser.add_argument("streams", type=int)
    asked = parser.parse_args()
    import uvloop

    print(json.dumps(uvloop.run(run(asked.url, asked.concurrency, asked.streams))))


if __name__ == "__main__":
    main()
