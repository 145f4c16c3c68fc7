"""The gateway under a server that knows ASGI and nothing else: what passes, and what a slow client holds up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from gateway_clients import CHAT, chat, pool_of, until
from headway.gateway.app import App
from headway.testing import FakeUpstream, Reply, RunningGateway, running_gateway

Message = MutableMapping[str, Any]
CONTENT = [b'data: {"choices":[{"index":0,"delta":{"content":"word %d"}}]}\n\n' % number for number in range(40)]
STREAM = (*CONTENT, b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n', b"data: [DONE]\n\n")


class Client:
    """A client that reads at once until ``reads_until`` is to be sent; then each ``send`` waits until it may go on."""

    def __init__(self, reads_until: bytes | None) -> None:
        self.sent: list[Message] = []
        self.may_go_on = asyncio.Event()
        self.gone = asyncio.Event()
        self.waits = False
        self._reads_until = reads_until
        self._body: bytes | None = json.dumps(chat()).encode()

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._reads_until is not None and self._reads_until in message.get("body", b""):
            self.waits = True
        if self.waits:
            await self.may_go_on.wait()
            await asyncio.sleep(0)
        self.sent.append(message)

    def ask(self, gateway: RunningGateway) -> asyncio.Task[None]:
        """Send a streamed request."""
        scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": []}
        return asyncio.create_task(App(gateway.gateway)(scope, self.receive, self.send))

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])


@pytest.mark.parametrize("reads_until", [None, b"word 0", b"word 7", b"[DONE]"])
async def test_a_stream_passes_whole_and_in_order(reads_until: bytes | None) -> None:
    """Every byte arrives once and in order, whether sending never waits or waits from some message on."""
    async with FakeUpstream(Reply(chunks=STREAM, interval_s=0.001)) as upstream:
        async with running_gateway(pool_of(upstream)) as gateway:
            client = Client(reads_until)
            asking = client.ask(gateway)
            await until(lambda: asking.done() or client.waits)
            client.may_go_on.set()
            await asking
    assert client.sent[0]["type"] == "http.response.start"
    assert [message["more_body"] for message in client.sent[1:]] == [True] * (len(client.sent) - 2) + [False]
    assert client.body == b"".join(STREAM)


async def test_a_client_that_leaves_while_it_is_waited_for_ends_the_stream() -> None:
    """A send that waits is given up with the client, the upstream is let go, and nothing is left in the ledger."""
    async with FakeUpstream(Reply(chunks=STREAM, interval_s=0.001)) as upstream:
        async with running_gateway(pool_of(upstream)) as gateway:
            client = Client(b"word 5")
            asking = client.ask(gateway)
            await until(lambda: client.waits)
            await asyncio.sleep(0.01)
            client.gone.set()
            await asking
            assert b"word 5" not in client.body
            assert gateway.gateway.fleet.views[0].num_outstanding == 0
            await until(lambda: upstream.num_open == 0)


async def test_a_client_that_reads_nothing_for_too_long_is_gone() -> None:
    """The idle limit ends a send that waits, at the client's cost: the instance is not to blame."""
    resilience = {"idle_timeout_s": 0.2, "breaker_failures": 1}
    async with FakeUpstream(Reply(chunks=STREAM, interval_s=0.001)) as upstream:
        async with running_gateway(pool_of(upstream, resilience=resilience)) as gateway:
            for reads_until in (b"word 5", b"[DONE]"):  # in the middle, and at the very end
                client = Client(reads_until)
                await asyncio.wait_for(client.ask(gateway), 5)
                assert client.waits
                assert reads_until not in client.body
            assert gateway.gateway.health.breakers["a"].state == "closed"
            assert gateway.gateway.fleet.views[0].num_outstanding == 0
