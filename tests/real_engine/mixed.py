"""Part ``mixed``: minutes of load with cancels on two real engines, one of which is killed and started again.

Every request must come to one of these ends: a whole answer of the length asked for; left by its client; or, if it was
under way while the engine was down, an error event or a 5xx. In the logs of the engines no request may stand twice. At
the end nothing is under way any more, and the gateway's memory has not grown.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
import yaml

from headway.bench.processes import headway_command, serving_async
from headway.bench.soak import busy_gauges, memory_growth
from headway.bench.usage import memory_mb
from headway.calibrate.read_log import read_batches
from real_engine.client import Answered, ask, body_of, session_of
from real_engine.instance import CLIENT_CORE, ENGINE_CORE, MODEL, Instance, instance
from real_engine.steps import client_id
from real_engine.workload import CONTEXT_TOKENS, Asked, lengths

SEED: Final = 505
NUM_CLIENTS: Final = 6
CANCEL_SHARE: Final = 0.2
#: When the engine is killed, as a share of the run.
KILL_AT: Final = 0.3
_QUIET_WITHIN_S: Final = 60.0
_SLACK_S: Final = 2.0


class Mixed:
    """One run: what became of the requests, and what no rule allows."""

    def __init__(self, engines: dict[str, Instance], url: str, pid: int, seconds: float) -> None:
        self._engines, self._url, self._pid, self._seconds = engines, url, pid, seconds
        self._rows = lengths("poisson", 20000, SEED)
        self._number = 0
        self._down: tuple[float, float] | None = None
        self._memory: list[tuple[float, float]] = []
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self) -> None:
        """Play it, with the kill in the middle, and wait until all is quiet."""
        started_s = time.monotonic()
        until_s = started_s + self._seconds
        rngs = [np.random.default_rng([SEED, number]) for number in range(NUM_CLIENTS)]
        watching = asyncio.create_task(self._watch(started_s))
        async with session_of() as session, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._kill(started_s + KILL_AT * self._seconds))
            for rng in rngs:
                tasks.create_task(self._client(session, rng, until_s))
        watching.cancel()
        await self._quiet()
        if (growth := self.growth) is not None and growth > 0.05 and self._seconds >= 600:
            self.wrong.append(f"memory grew by {growth:.1%}")

    @property
    def growth(self) -> float | None:
        """Of the gateway's resident set, third to fourth quarter."""
        return memory_growth(self._memory) if len(self._memory) > 8 else None

    async def _client(self, session: aiohttp.ClientSession, rng: np.random.Generator, until_s: float) -> None:
        while time.monotonic() < until_s:
            prompt, output = self._rows[self._number % len(self._rows)]
            asked = Asked(self._number, 0.0, prompt, output)
            self._number += 1
            leave_s = float(rng.exponential(1.0)) if rng.random() < CANCEL_SHARE else None
            started_s = time.monotonic()
            try:
                async with asyncio.timeout(leave_s):
                    answered = await ask(session, f"{self._url}/v1", asked, body_of(asked, SEED, MODEL), name="mixed")
            except TimeoutError:
                self.counts["left by the client"] += 1
                continue
            self._judge(answered, started_s)
            await asyncio.sleep(float(rng.exponential(0.2)))

    def _judge(self, answered: Answered, started_s: float) -> None:
        if answered.error is None:
            self.counts["whole answers"] += 1
            return
        now = time.monotonic()
        down = self._down is not None and started_s < self._down[1] + _SLACK_S and now > self._down[0] - _SLACK_S
        if down and answered.status == 200:
            self.counts["ended by an error event"] += 1
        elif down and answered.status in (502, 503, 504):
            self.counts["refused with a 5xx while the engine was down"] += 1
        else:
            self.counts["wrong"] += 1
            self.wrong.append(f"{answered.request_id} on {answered.instance}: {answered.status} {answered.error}")

    async def _kill(self, at_s: float) -> None:
        """Kill one engine as a crash would, and start it again."""
        await asyncio.sleep(at_s - time.monotonic())
        killed = self._engines["killed"]
        from_s = time.monotonic()
        self._down = (from_s, float("inf"))
        killed.kill()
        await asyncio.sleep(2.0)
        killed.start()
        await asyncio.to_thread(killed.wait_ready)
        killed.bind(server_core=CLIENT_CORE)
        self._down = (from_s, time.monotonic())
        self.counts["engine killed and started again"] += 1

    async def _watch(self, started_s: float) -> None:
        while True:
            self._memory.append((time.monotonic() - started_s, memory_mb(self._pid)[0]))
            await asyncio.sleep(1.0)

    async def _quiet(self) -> None:
        until_s = time.monotonic() + _QUIET_WITHIN_S
        async with session_of() as session:
            while True:
                async with session.get(f"{self._url}/metrics") as answer:
                    busy = busy_gauges(await answer.text())
                if not busy:
                    return
                if time.monotonic() > until_s:
                    self.wrong.append(f"not at zero: {', '.join(busy)}")
                    return
                await asyncio.sleep(0.5)


async def mixed(directory: Path, *, minutes: float) -> dict[str, Any]:
    """Run it for so long."""
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(instance(name, directory / f"mixed-{name}", size="256x4", core=core))
            for name, core in (("stays", ENGINE_CORE), ("killed", CLIENT_CORE))
        }
        path = directory / "mixed.gateway.yaml"
        path.write_text(_config(engines, directory / "profile.yaml"))
        async with serving_async(headway_command("serve", str(path))) as gateway:
            run = Mixed(engines, gateway.url, gateway.pid, 60.0 * minutes)
            await run.run()
            for engine in engines.values():
                await engine.idle()
        twice = _twice(engines)
    return {
        "seconds": 60.0 * minutes, "requests": dict(run.counts.most_common()), "requests_standing_twice": twice,
        "memory_growth": run.growth, "wrong": run.wrong[:10], "num_wrong": len(run.wrong) + len(twice),
    }  # fmt: skip


def _twice(engines: dict[str, Instance]) -> list[str]:
    """Requests that stand twice in the engines' logs; that of the killed one begins with its restart."""
    seen: Counter[str] = Counter()
    for engine in engines.values():
        if not engine.step_log.stat().st_size:  # it served nothing since its restart
            continue
        _, batches = read_batches(engine.step_log)
        seen.update(client_id(one.request_id) for batch in batches for one in batch.arrivals)
    return [name for name, times in seen.items() if times > 1]


def _config(engines: dict[str, Instance], profile: Path) -> str:
    return yaml.safe_dump(
        {
            "models": [{"name": MODEL, "context_tokens": CONTEXT_TOKENS, "prior": {"output_tokens": 200}}],
            "instances": [
                {
                    "id": name, "model": MODEL, "api_base": engine.url, "engine": "vllm-0.32", "profile": str(profile),
                    "snapshots": {"shared_memory": engine.segment},
                }
                for name, engine in engines.items()
            ],
            "resilience": {"deadline_s": 300, "first_byte_timeout_s": 120, "breaker_open_s": 1.0},
            "server": {"port": 0},
        }
    )  # fmt: skip
