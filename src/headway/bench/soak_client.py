"""One client of the soak: requests of every kind, and a judge for each answer.

What is allowed: a whole answer, equal byte for byte to what the instance says it sent; a prefix of it where the client
left; an error event or a 5xx where an engine that was, or could have been, chosen was killed meanwhile, or has yet to
prove itself; a 4xx for nonsense. Everything else is written down as wrong.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from typing import Final

import aiohttp
import msgspec
import numpy as np
from msgspec import Struct

from headway.bench.soak_pool import SoakEngine, SoakPool

_CHAT: Final = "/v1/chat/completions"
_KINDS: Final = ("plain", "whole", "cancel", "slow", "hang up", "nonsense")
_SHARES: Final = (0.48, 0.15, 0.17, 0.08, 0.06, 0.06)
_THINK_S: Final = 0.15
_SLOW_READ_BYTES: Final = 512
_ANSWER_WITHIN_S: Final = 90.0
_SLOW_PAUSE_S: Final = 0.02
#: An engine that is back proves itself by one request, if that is not streamed by its whole answer; until then its
#: model is refused. The longest answer of this load takes the largest engine about four seconds, a probe half of one.
_TRIAL_S: Final = 6.0
_EVENT: Final = re.compile(rb".*?\n\n", re.DOTALL)
_USAGE: Final = b'"choices":[]'
_DONE: Final = b"data: [DONE]\n\n"


class Ask(Struct, frozen=True):
    """One request as the client means it."""

    kind: str
    model: str
    body: bytes
    headers: dict[str, str]
    leave_after_s: float
    wants_usage: bool


class SoakClient:
    """Asks until the time is up. ``counts`` and ``failures`` are shared by all clients."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        pool: SoakPool,
        *,
        rng: np.random.Generator,
        counts: Counter[str],
        failures: list[str],
    ) -> None:
        self._session, self._url, self._pool, self._rng = session, url, pool, rng
        self._counts, self._failures = counts, failures

    async def run(self, until_s: float, number: int) -> None:
        """Ask, judge, think, and again."""
        turn = 0
        while time.monotonic() < until_s:
            turn += 1
            ask = self._ask(f"soak-{number}-{turn}")
            self._counts[ask.kind] += 1
            try:
                await self._send(ask)
            except aiohttp.ClientError as error:
                self._wrong(ask, f"{type(error).__name__}: {error}")
            await asyncio.sleep(self._rng.exponential(_THINK_S))

    def _ask(self, request_id: str) -> Ask:
        rng = self._rng
        kind = str(rng.choice(_KINDS, p=_SHARES))
        wants_usage = bool(rng.random() < 0.5)
        model = "auto" if rng.random() < 0.8 else self._pool.engines[int(rng.integers(3))].model
        fields: dict[str, object] = {
            "model": model,
            "messages": [{"role": "user", "content": "wörd " * int(rng.choice([5, 40, 400, 3000]))}],
            "max_tokens": int(rng.integers(1, 120)),
            "stream": kind != "whole",
        }
        if wants_usage and kind != "whole":
            fields["stream_options"] = {"include_usage": True}
        headers = {"content-type": "application/json", "x-request-id": request_id}
        if rng.random() < 0.5:
            headers["x-slo-ttft-ms"] = str(int(rng.integers(20, 2000)))
        body = msgspec.json.encode(fields)
        if kind == "nonsense":
            body = [body[: len(body) // 2], b"[]", b'{"model": "no-such-model", "messages": []}'][int(rng.integers(3))]
        leave_after_s = 0.0 if kind == "hang up" else float(rng.exponential(0.4))
        return Ask(kind, model, body, headers, leave_after_s, wants_usage)

    async def _send(self, ask: Ask) -> None:
        leaves = ask.kind in ("cancel", "hang up")
        received = bytearray()
        response: aiohttp.ClientResponse | None = None
        started_s = time.monotonic()
        try:
            async with (
                asyncio.timeout(ask.leave_after_s if leaves else _ANSWER_WITHIN_S),
                self._session.post(self._url + _CHAT, data=ask.body, headers=ask.headers) as response,
            ):
                if ask.kind == "slow":
                    while chunk := await response.content.read(_SLOW_READ_BYTES):
                        received += chunk
                        await asyncio.sleep(_SLOW_PAUSE_S)
                else:
                    async for chunk in response.content.iter_any():
                        received += chunk
        except TimeoutError:
            if not leaves:
                self._wrong(ask, f"no end after {_ANSWER_WITHIN_S:.0f} s")
            elif response is None or response.status != 200:
                self._counts["left before anything came"] += 1
            else:
                await self._compare(ask, response, bytes(received), started_s, whole=False)
            return
        await self._judge(ask, response, bytes(received), started_s)

    async def _judge(self, ask: Ask, response: aiohttp.ClientResponse, received: bytes, started_s: float) -> None:
        """What an answer that came to an end must look like."""
        status = response.status
        if ask.kind == "nonsense":
            self._expect(ask, status in (400, 404), f"nonsense was answered {status}")
        elif status == 200 and (ask.kind == "whole" or received.endswith(_DONE)):
            await self._compare(ask, response, received, started_s, whole=True)
        elif status == 200:
            told = b'"error"' in received.rsplit(b"data: ", 1)[-1]
            self._expect(ask, told, "a stream ended without an end mark or an error event")
            self._expect(ask, self._someone_down(started_s), f"interrupted with no engine down: {received[-200:]!r}")
            self._counts["interrupted by a kill"] += 1
        else:
            down = self._someone_down(started_s) or self._on_trial(ask.model, started_s)
            self._expect(ask, status in (502, 503, 504) and down, f"{status} without cause: {received[:200]!r}")
            self._counts["refused after a kill"] += 1

    async def _compare(
        self, ask: Ask, response: aiohttp.ClientResponse, received: bytes, started_s: float, *, whole: bool
    ) -> None:
        """Compare with what the engine sent; one that was killed since has forgotten it."""
        engine = self._pool.by_name(response.headers["x-headway-instance"])
        sent = await self._recorded(engine, ask.headers["x-request-id"])
        if sent is None:
            self._expect(ask, engine.was_down(started_s, time.monotonic()), f"{engine.name} knows nothing of it")
            self._counts["not compared: its engine was killed"] += 1
            return
        if ask.kind != "whole" and not ask.wants_usage:
            sent = _without_usage(sent)
        same = received == sent if whole else sent.startswith(received)
        self._expect(ask, same, f"{engine.name} sent {sent[-120:]!r}, {received[-120:]!r} came")
        self._counts["compared whole" if whole else "compared in part"] += 1

    async def _recorded(self, engine: SoakEngine, request_id: str) -> bytes | None:
        """What the engine sent last under that id; where it was asked twice, the id carries a suffix."""
        for name in (f"{request_id}.3", f"{request_id}.2", request_id):
            try:
                async with self._session.get(f"{engine.url}/recorded/{name}") as answer:
                    if answer.status == 200:
                        return await answer.read()
            except aiohttp.ClientError:
                return None
        return None

    def _someone_down(self, started_s: float) -> bool:
        return any(engine.was_down(started_s, time.monotonic()) for engine in self._pool.engines)

    def _on_trial(self, model: str, started_s: float) -> bool:
        """Whether the only engine of a model that was asked for by name may still have had to prove itself."""
        now = time.monotonic()
        return any(e.model == model and e.was_down(started_s, now, slack_s=_TRIAL_S) for e in self._pool.engines)

    def _expect(self, ask: Ask, holds: bool, complaint: str) -> None:
        if not holds:
            self._wrong(ask, complaint)

    def _wrong(self, ask: Ask, complaint: str) -> None:
        self._counts["wrong"] += 1
        self._failures.append(f"{ask.headers['x-request-id']} ({ask.kind}): {complaint}")


def _without_usage(sent: bytes) -> bytes:
    """A stream less the usage event that the gateway asked for on its own account."""
    return b"".join(event for event in _EVENT.findall(sent) if _USAGE not in event)
