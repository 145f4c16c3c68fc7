"""Plays a recorded workload against an OpenAI address, every request at its time, and times the first token.

One event loop, and no more parsing than the first token and the last events need, so that the client takes little of
the machine that the engine runs on. It refuses to hide anything: what ends without a whole answer carries an error.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from real_engine.workload import Asked, token_ids

_PATIENCE_S = 300.0


class Answered(Struct, kw_only=True):
    """What a client saw of one request. Times are seconds; ``sent_s`` and ``first_s`` are monotonic.

    ``predicted_s`` and the two fields after it come from the gateway's headers, None where there is no gateway.
    """

    request_id: str
    number: int
    prompt_tokens: int
    output_tokens: int
    sent_s: float
    lateness_s: float
    first_s: float | None = None
    end_s: float | None = None
    num_tokens: int = 0
    predicted_s: float | None = None
    decision: str | None = None
    instance: str | None = None
    status: int | None = None
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """From the request's first byte to the first content of its answer."""
        return None if self.first_s is None else self.first_s - self.sent_s


def body_of(asked: Asked, seed: int, model: str) -> bytes:
    """A completions body whose prompt and answer have exactly the lengths asked for."""
    fields = {
        "model": model, "prompt": token_ids(asked, seed), "max_tokens": asked.output_tokens, "ignore_eos": True,
        "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    return msgspec.json.encode(fields)


async def play(
    workload: Sequence[Asked],
    url: str,
    *,
    name: str,
    model: str,
    seed: int,
    headers: dict[str, str] | None = None,
    on_end: Callable[[Answered], None] = lambda answered: None,
) -> list[Answered]:
    """Send all of it to ``url`` (with ``/v1``); request ids begin with ``name``. Returns in the workload's order."""
    bodies = [body_of(asked, seed, model) for asked in workload]
    async with session_of() as session, asyncio.TaskGroup() as tasks:
        start_s = time.monotonic() + 0.1
        sent = []
        for asked, body in zip(workload, bodies, strict=True):
            due_s = start_s + asked.arrival_s
            await asyncio.sleep(due_s - time.monotonic())

            async def one(asked: Asked = asked, body: bytes = body, due_s: float = due_s) -> Answered:
                answered = await ask(session, url, asked, body, name=name, headers=headers, due_s=due_s)
                on_end(answered)
                return answered

            sent.append(tasks.create_task(one()))
    return [task.result() for task in sent]


def session_of() -> aiohttp.ClientSession:
    """A session without limits on connections, that waits long."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=_PATIENCE_S),
        auto_decompress=False,
    )


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    asked: Asked,
    body: bytes,
    *,
    name: str,
    headers: dict[str, str] | None = None,
    due_s: float | None = None,
) -> Answered:
    """One request from its sending to its end."""
    sent_s = time.monotonic()
    answered = Answered(
        request_id=f"{name}-{asked.number:04d}", number=asked.number, prompt_tokens=asked.prompt_tokens,
        output_tokens=asked.output_tokens, sent_s=sent_s, lateness_s=0.0 if due_s is None else sent_s - due_s,
    )  # fmt: skip
    named = {"content-type": "application/json", "x-request-id": answered.request_id, **(headers or {})}
    try:
        async with session.post(f"{url}/completions", data=body, headers=named) as response:
            answered.status = response.status
            answered.instance = response.headers.get("x-headway-instance")
            answered.decision = response.headers.get("x-headway-decision")
            shown = response.headers.get("x-headway-predicted-ttft-ms")
            answered.predicted_s = None if shown is None else float(shown) / 1e3
            if response.status != 200:
                answered.error = (await response.text())[:300]
            else:
                await _read(response, answered)
    except (aiohttp.ClientError, TimeoutError) as error:
        answered.error = f"{type(error).__name__}: {error}"
    answered.end_s = time.monotonic()
    return answered


async def _read(response: aiohttp.ClientResponse, answered: Answered) -> None:
    usage: dict[str, Any] | None = None
    done = False
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            done = True
        elif answered.first_s is None or b'"choices":[]' in line or b'"error"' in line:
            event = json.loads(line[6:])
            if "error" in event:
                answered.error = str(event["error"])[:300]
                return
            usage = event.get("usage") or usage
            choices = event.get("choices") or [{}]
            if answered.first_s is None and choices[0].get("text"):
                answered.first_s = time.monotonic()
    answered.num_tokens = 0 if usage is None else int(usage["completion_tokens"])
    if not done:
        answered.error = "ended without [DONE]"
    elif answered.num_tokens != answered.output_tokens:
        answered.error = f"{answered.num_tokens} tokens came, {answered.output_tokens} were asked for"
