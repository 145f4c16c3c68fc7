"""The soak: mixed load on the simulated pool for minutes, with everything going wrong that goes wrong.

``python -m headway.bench.soak --minutes 30``: clients that cancel, read slowly, hang up at once or send nonsense;
engines killed and started again; configurations reloaded. Every answer is compared byte for byte with what the engine
says it sent, the ledger and all gauges must be at zero in the end, and memory must not grow. It refuses to forgive: an
answer that no rule allows fails the run, and its first few are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np

from headway.bench.processes import MeasuredAsync, serving_async
from headway.bench.soak_client import SoakClient
from headway.bench.soak_pool import SoakEngine, SoakPool, gateway_config
from headway.bench.usage import memory_mb
from headway.errors import HeadwayError

NUM_CLIENTS: Final = 16
#: Pauses between two disturbances, drawn uniformly, seconds.
KILL_EVERY_S: Final = (12.0, 25.0)
DOWN_S: Final = (0.5, 3.0)
RELOAD_EVERY_S: Final = (8.0, 20.0)
#: The resident set may grow by this share from the middle of the run to its end.
MAX_GROWTH: Final = 0.05
#: Runs shorter than this fill caches for the most part: their growth is reported and not judged, seconds.
MEMORY_FROM_S: Final = 600.0
_MEMORY_EVERY_S: Final = 1.0
_QUIET_WITHIN_S: Final = 30.0
_MAX_SHOWN: Final = 10


class Soak:
    """One run. ``failures`` holds what no rule allows, ``counts`` what became of the requests."""

    def __init__(self, *, minutes: float, seed: int, progress: Callable[[str], None] = lambda text: None) -> None:
        self._seconds, self._seed, self._progress = 60 * minutes, seed, progress
        self.failures: list[str] = []
        self.counts: Counter[str] = Counter()
        self.disturbances: Counter[str] = Counter()
        self._memory: list[tuple[float, float]] = []  # (seconds since start, MB)

    async def run(self) -> dict[str, object]:
        """Play it and report.

        Raises:
            HeadwayError: a process did not start.
        """
        with tempfile.TemporaryDirectory(prefix="headway-soak-") as folder:
            async with SoakPool(self._seed) as pool:
                path = Path(folder) / "gateway.yaml"
                path.write_text(gateway_config(pool.engines, turn=0))
                command = [sys.executable, "-m", "headway", "serve", str(path)]
                connector = aiohttp.TCPConnector(limit=0)
                async with (
                    serving_async(command) as gateway,
                    aiohttp.ClientSession(connector=connector, auto_decompress=False) as session,
                ):
                    await self._play(pool, gateway, path, session)
                    await self._expect_quiet(session, gateway.url)
        return self._report()

    async def _play(self, pool: SoakPool, gateway: MeasuredAsync, path: Path, session: aiohttp.ClientSession) -> None:
        seeds = np.random.SeedSequence(self._seed).spawn(NUM_CLIENTS + 2)
        started_s = time.monotonic()
        until_s = started_s + self._seconds
        clients = [
            SoakClient(
                session,
                gateway.url,
                pool,
                rng=np.random.default_rng(seed),
                counts=self.counts,
                failures=self.failures,
            )
            for seed in seeds[:NUM_CLIENTS]
        ]
        playing = asyncio.gather(
            self._kill(pool, np.random.default_rng(seeds[-2]), until_s),
            self._reload(pool, path, gateway.pid, np.random.default_rng(seeds[-1]), until_s),
            *(client.run(until_s, number) for number, client in enumerate(clients)),
        )
        watching = asyncio.create_task(self._watch_memory(gateway.pid, started_s))
        try:
            both: set[asyncio.Future[Any]] = {playing, watching}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                raise HeadwayError("the gateway is gone") from watching.exception()
            await playing
        finally:
            playing.cancel()
            watching.cancel()
            await asyncio.gather(playing, watching, return_exceptions=True)

    async def _kill(self, pool: SoakPool, rng: np.random.Generator, until_s: float) -> None:
        """Kill one engine after the other, and start it again a little later."""
        while True:
            pause_s = rng.uniform(*KILL_EVERY_S)
            if time.monotonic() + pause_s + DOWN_S[1] > until_s:
                return
            await asyncio.sleep(pause_s)
            engine: SoakEngine = pool.engines[int(rng.integers(len(pool.engines)))]
            await engine.kill()
            self.disturbances["engine killed"] += 1
            await asyncio.sleep(rng.uniform(*DOWN_S))
            await engine.start()

    async def _reload(self, pool: SoakPool, path: Path, pid: int, rng: np.random.Generator, until_s: float) -> None:
        """Reload a changed configuration, and now and then a broken one, which must change nothing."""
        turn = 0
        while True:
            pause_s = rng.uniform(*RELOAD_EVERY_S)
            if time.monotonic() + pause_s > until_s:
                return
            await asyncio.sleep(pause_s)
            turn += 1
            broken = rng.random() < 0.2
            reload(path, pid, "models: [" if broken else gateway_config(pool.engines, turn=turn))
            self.disturbances["broken reload" if broken else "reload"] += 1

    async def _watch_memory(self, pid: int, started_s: float) -> None:
        while True:
            self._memory.append((time.monotonic() - started_s, memory_mb(pid)[0]))
            self._progress(f"{self._memory[-1][0]:.0f} s: {self.counts.total()} noted, {len(self.failures)} wrong")
            await asyncio.sleep(_MEMORY_EVERY_S)

    async def _expect_quiet(self, session: aiohttp.ClientSession, url: str) -> None:
        """With nobody asking, every gauge of work under way comes to zero."""
        until_s = time.monotonic() + _QUIET_WITHIN_S
        while True:
            async with session.get(f"{url}/metrics") as answer:
                busy = busy_gauges(await answer.text())
            if not busy:
                return
            if time.monotonic() > until_s:
                self.failures.append(f"not at zero after {_QUIET_WITHIN_S:.0f} s without load: {', '.join(busy)}")
                return
            await asyncio.sleep(0.2)

    def _report(self) -> dict[str, object]:
        growth = memory_growth(self._memory)
        if growth > MAX_GROWTH and self._seconds >= MEMORY_FROM_S:
            self.failures.append(f"memory grew by {growth:.1%} in the second half")
        if not self.counts["compared whole"]:
            self.failures.append("no answer was compared with what its engine sent")
        return {
            "seconds": self._seconds,
            "seed": self._seed,
            "requests": dict(self.counts.most_common()),
            "disturbances": dict(self.disturbances),
            "rss_mb_end": round(self._memory[-1][1], 1),
            "rss_growth_second_half": round(growth, 4),
            "num_wrong": len(self.failures),
            "wrong": self.failures[:_MAX_SHOWN],
        }


def busy_gauges(metrics: str) -> list[str]:
    """The gauges of work under way that are not at zero, out of a Prometheus text."""
    names = ("headway_inflight{", "headway_requests_inflight ", "headway_queue_length ")
    lines = [line for line in metrics.splitlines() if line.startswith(names)]
    return [line for line in lines if float(line.rsplit(" ", 1)[1]) != 0.0]


def memory_growth(samples: list[tuple[float, float]]) -> float:
    """From the median of the third quarter to that of the fourth, as a share: what comes and goes is no growth."""
    end_s = samples[-1][0]
    third = [mb for at_s, mb in samples if 0.5 * end_s <= at_s < 0.75 * end_s]
    fourth = [mb for at_s, mb in samples if at_s >= 0.75 * end_s]
    if not third or not fourth:
        raise HeadwayError("too short a run to speak of memory")
    return float(np.median(fourth) / np.median(third) - 1.0)


def reload(path: Path, pid: int, text: str) -> None:
    """Give the gateway process ``pid`` another configuration file and the signal to read it."""
    path.write_text(text)
    os.kill(pid, signal.SIGHUP)


def main() -> int:
    """Run it; exit 1 when anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()

    def show(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    report = asyncio.run(Soak(minutes=asked.minutes, seed=asked.seed, progress=show).run())
    print(json.dumps(report, indent=2))
    return 1 if report["num_wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
