"""Fake upstreams that publish snapshots of a state of the test's choosing, and pools of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from gateway_clients import chat
from headway.config import Config
from headway.profiles import load_profile
from headway.snapshot.shared_memory import SharedMemoryWriter
from headway.testing import (
    FakeUpstream,
    Reply,
    RunningGateway,
    pool,
    segment_name,
    snapshot,
    waiting_request,
)
from headway.types import Snapshot

SMALL = {
    "name": "small",
    "price": {"input_per_1m": 0.1, "output_per_1m": 0.1},
    "prior": {"quality": 0.5, "output_tokens": 50},
}
LARGE = {
    "name": "large",
    "price": {"input_per_1m": 9.0, "output_per_1m": 9.0},
    "prior": {"quality": 0.9, "output_tokens": 50},
}


class Engine:
    """A fake upstream with a snapshot segment of its own."""

    def __init__(self, name: str, profile: str, model: str) -> None:
        self.name, self.profile, self.model = name, profile, model
        self.limits = load_profile(profile).limits
        self.segment = segment_name()
        self.upstream = FakeUpstream(Reply(num_tokens=2))
        self.writer: SharedMemoryWriter | None = None
        self.sequence = 0

    def publish(self, *, waiting: int = 0, prompt_tokens: int = 8000, **rest: object) -> None:
        """Publish a snapshot with so many requests in the queue."""
        if self.writer is None:
            self.writer = SharedMemoryWriter(self.segment)
        self.sequence += 1
        queue = [waiting_request(f"other-{index}", prompt_tokens) for index in range(waiting)]
        shown: Snapshot = snapshot(waiting=queue, sequence=self.sequence, limits=self.limits)
        self.writer.publish(msgspec.structs.replace(shown, **rest))

    def instance(self) -> dict[str, object]:
        """Its entry in a configuration."""
        return {
            "id": self.name, "model": self.model, "api_base": self.upstream.url, "engine": "vllm-0.32",
            "profile": self.profile, "snapshots": {"shared_memory": self.segment},
        }  # fmt: skip


@asynccontextmanager
async def engines(*rows: tuple[str, str, str]) -> AsyncIterator[list[Engine]]:
    """Engines by (name, profile, model)."""
    made = [Engine(*row) for row in rows]
    try:
        for engine in made:
            await engine.upstream.start()
        yield made
    finally:
        for engine in made:
            await engine.upstream.stop()
            if engine.writer is not None:
                engine.writer.close()


def pool_of(made: list[Engine], **rest: object) -> Config:
    """The configuration of these engines, with the models they serve."""
    models = [model for model in (SMALL, LARGE) if model["name"] in {engine.model for engine in made}]
    return pool(models, [engine.instance() for engine in made], **rest)


async def explain(session: aiohttp.ClientSession, gateway: RunningGateway, **body: object) -> dict[str, object]:
    """The decision on a chat body, without sending it."""
    async with session.post(gateway.url + "/v1/route", json=chat(**body)) as response:
        assert response.status == 200
        return await response.json()
