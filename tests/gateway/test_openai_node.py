"""The official OpenAI client for Node, unmodified, against the gateway.

``make clients`` installs it once with npm, outside the clone; without it these tests are skipped.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway_clients import pool_of, until
from headway.testing import FakeUpstream, Reply, RunningGateway, running_gateway

SOURCE = Path(__file__).parent / "node"


def installed() -> Path | None:
    """A directory with the client and the script, made with npm where ``HEADWAY_CLIENTS`` asks for it."""
    npm = shutil.which("npm")
    if npm is None:
        return None
    root = os.environ.get("HEADWAY_CACHE") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    key = hashlib.sha256((SOURCE / "package-lock.json").read_bytes()).hexdigest()[:16]
    directory = Path(root) / "headway" / f"node-client-{key}"
    complete = directory / ".complete"
    if not complete.exists():
        if "HEADWAY_CLIENTS" not in os.environ:
            return None
        directory.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(SOURCE / name, directory / name)
        subprocess.run([npm, "ci", "--silent", "--no-audit", "--no-fund"], cwd=directory, check=True)
        complete.touch()
    shutil.copy(SOURCE / "client.mjs", directory / "client.mjs")
    return directory


CLIENT = installed()
pytestmark = pytest.mark.skipif(CLIENT is None, reason="the Node client is not installed: run `make clients`")


async def run(gateway: RunningGateway, case: str) -> Any:
    """What the client saw in a case."""
    assert CLIENT is not None
    process = await asyncio.create_subprocess_exec(
        "node", str(CLIENT / "client.mjs"), f"{gateway.url}/v1", case,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, errors = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0, errors.decode()
    return json.loads(out)


@pytest.mark.parametrize("case", ["chat", "stream"])
async def test_answers_arrive(case: str) -> None:
    """Whole and streamed answers come with their text and usage."""
    async with FakeUpstream(Reply(num_tokens=3)) as upstream, running_gateway(pool_of(upstream)) as gateway:
        assert await run(gateway, case) == {"text": "tok tok tok ", "tokens": 3}


def _events(*deltas: dict[str, object]) -> Sequence[bytes]:
    head = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    events = [{**head, "choices": [{"index": 0, "finish_reason": None, "delta": delta}]} for delta in deltas]
    events.append({**head, "choices": [{"index": 0, "finish_reason": "tool_calls", "delta": {}}]})
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]


async def test_tool_calls_are_put_together() -> None:
    """A tool call that comes in pieces reaches the client whole."""
    function = {"name": "look_up", "arguments": ""}
    pieces = _events(
        {"role": "assistant", "tool_calls": [{"index": 0, "id": "c", "type": "function", "function": function}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
    )
    reply = Reply(chunks=(*pieces, b"data: [DONE]\n\n"))
    async with FakeUpstream(reply) as upstream, running_gateway(pool_of(upstream)) as gateway:
        seen = await run(gateway, "tools")
    assert seen == {"called": "look_up", "arguments": '{"a": 1}', "finish": "tool_calls"}


async def test_targets_models_and_errors() -> None:
    """Headers carry targets and decisions; models are listed; errors are the client's own types."""
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
        assert await run(gateway, "target") == {"instance": "a", "slo": "met-expected"}
        assert set((await run(gateway, "models"))["names"]) == {"auto", "m"}
        assert await run(gateway, "error") == {"kind": "NotFoundError", "status": 404, "code": "model_not_found"}


async def test_its_own_retries_do_not_multiply_ours() -> None:
    """An upstream that always fails is called as often as we mean to, not once more for each retry of the client."""
    async with FakeUpstream(Reply(status=503)) as upstream, running_gateway(pool_of(upstream)) as gateway:
        assert (await run(gateway, "failing"))["status"] == 503
        assert len(upstream.requests) <= 2


async def test_leaving_a_stream_cancels_the_upstream() -> None:
    """A client that breaks out of its loop is noticed upstream, and nothing stays booked."""
    reply = Reply(num_tokens=1000, interval_s=0.02)
    async with FakeUpstream(reply) as upstream, running_gateway(pool_of(upstream)) as gateway:
        assert await run(gateway, "cancel") == {"left": True}
        await until(lambda: upstream.requests[0].disconnected_s is not None)
        await until(lambda: gateway.gateway.fleet.views[0].num_outstanding == 0)
