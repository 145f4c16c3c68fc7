"""The soak's engines: three recorded simulated engines on fixed ports that can be killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

import yaml

from headway.bench.processes import MeasuredAsync, free_port, serving_async
from headway.snapshot.shared_memory import segment_path

#: (instance, profile, model, quality, USD per million output tokens)
_ENGINES: Final = (
    ("small", "h100-qwen3-0.6b", "qwen3-0.6b", 0.35, 0.173),
    ("medium", "h100-qwen3-8b", "qwen3-8b", 0.79, 0.287),
    ("large", "h100-qwen3-32b", "qwen3-32b", 0.9, 0.64),
)


class SoakEngine:
    """One engine. ``kills_s`` holds when it was killed, and when it was back (monotonic)."""

    def __init__(self, name: str, profile: str, model: str, quality: float, price: float) -> None:
        self.name, self.profile, self.model, self.quality, self.price = name, profile, model, quality, price
        self.port = free_port()
        self.segment = f"headway-soak-{os.getpid()}-{name}"
        self.kills_s: list[tuple[float, float]] = []
        self._opened = contextlib.AsyncExitStack()
        self._process: MeasuredAsync | None = None

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start it and wait until it answers."""
        command = [
            sys.executable, "-m", "headway.bench.recorded_engine", self.profile, self.model, str(self.port),
            self.segment,
        ]  # fmt: skip
        self._process = await self._opened.enter_async_context(serving_async(command))
        if self.kills_s:
            self.kills_s[-1] = (self.kills_s[-1][0], time.monotonic())

    async def kill(self) -> None:
        """End it at once, as ``kill -9`` does: nothing is said to anybody."""
        assert self._process is not None
        self.kills_s.append((time.monotonic(), float("inf")))
        self._process.process.kill()
        await self._process.process.wait()
        await self._opened.aclose()

    def was_down(self, from_s: float, to_s: float, *, slack_s: float = 1.0) -> bool:
        """Whether it was killed, or not there, at some time between two times (monotonic), give or take ``slack_s``."""
        return any(killed <= to_s and from_s <= back + slack_s for killed, back in self.kills_s)

    async def close(self) -> None:
        """End it, and its segment."""
        await self._opened.aclose()
        segment_path(self.segment).unlink(missing_ok=True)


class SoakPool:
    """The three engines. Use as an async context manager."""

    def __init__(self, seed: int) -> None:
        self.engines = [SoakEngine(*row) for row in _ENGINES]

    async def __aenter__(self) -> Self:
        try:
            await asyncio.gather(*(engine.start() for engine in self.engines))
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        for engine in self.engines:
            await engine.close()

    def by_name(self, name: str) -> SoakEngine:
        """The engine of an instance. Raises KeyError."""
        return {engine.name: engine for engine in self.engines}[name]


def gateway_config(engines: Sequence[SoakEngine], *, turn: int) -> str:
    """The gateway's configuration; every ``turn`` weighs costs a little differently, so that it is a new one."""
    return yaml.safe_dump(
        {
            "models": [
                {
                    "name": engine.model, "price": {"input_per_1m": engine.price / 3, "output_per_1m": engine.price},
                    "prior": {"quality": engine.quality, "output_tokens": 100},
                }
                for engine in engines
            ],
            "instances": [
                {
                    "id": engine.name, "model": engine.model, "api_base": f"{engine.url}/v1", "engine": "vllm-0.32",
                    "profile": engine.profile, "snapshots": {"shared_memory": engine.segment},
                }
                for engine in engines
            ],
            "routing": {"policy": "bear", "lambda_per_musd": 5e-4 + 1e-6 * turn},
            "resilience": {"breaker_open_s": 0.5},
            "server": {"port": 0},
        }
    )  # fmt: skip
