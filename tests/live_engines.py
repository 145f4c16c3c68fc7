"""Simulated engines on real sockets that publish nothing, to be started anew, and gateways that must do without."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import yaml

from headway.engines.openai_server import OpenAIServer
from headway.engines.simulated import SimulatedEngine
from headway.engines.vllm_metrics import EngineMetrics
from headway.profiles import PROFILE_DIRECTORY, TruthProfile, load_truth


class LiveEngine:
    """A served engine of a truth profile, every simulated second lasting ``time_scale``."""

    def __init__(self, name: str, model: str, *, time_scale: float = 1.0, prefix_caching: bool = False) -> None:
        truth = load_truth(name)
        limits = msgspec.structs.replace(truth.limits, prefix_caching=prefix_caching)
        self.truth: TruthProfile = msgspec.structs.replace(truth, limits=limits)
        self.name, self.model, self._time_scale = name, model, time_scale
        self.num_starts = 0
        self.url = ""
        self.engine: SimulatedEngine
        self._app: OpenAIServer
        self._steps: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin, or begin anew with nothing: what was under way breaks off."""
        if self._steps is not None:
            self.engine.close()
            self._steps.cancel()
            await asyncio.gather(self._steps, return_exceptions=True)
        self.num_starts += 1
        metrics = EngineMetrics(self.model, self.truth.limits)
        self.engine = SimulatedEngine(
            self.truth, seed=self.num_starts, instance_id="e", observer=metrics, time_scale=self._time_scale
        )
        self._app = OpenAIServer(self.engine, metrics, model=self.model, seed=self.num_starts)
        self._steps = asyncio.create_task(self.engine.run())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)

    async def stop(self) -> None:
        """End without leaving anything."""
        assert self._steps is not None
        self.engine.close()
        self._steps.cancel()
        await asyncio.gather(self._steps, return_exceptions=True)

    def instance(self, name: str, profile: Path | str | None = None, **more: object) -> dict[str, object]:
        """Its entry in a configuration, without snapshots."""
        return {
            "id": name, "model": self.model, "api_base": f"{self.url}/v1", "engine": "vllm-0.32",
            "profile": str(profile or self.name), **more,
        }  # fmt: skip


@asynccontextmanager
async def serving(*engines: LiveEngine) -> AsyncIterator[None]:
    """Serve engines on free ports."""
    servers, tasks = [], []
    for engine in engines:
        await engine.start()
        server = uvicorn.Server(uvicorn.Config(engine, lifespan="off", log_level="critical", ws="none"))
        bound = socket.create_server(("127.0.0.1", 0))
        engine.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        tasks.append(asyncio.create_task(server._serve([bound])))  # serve() would take this process's signal handlers
        servers.append(server)
    try:
        yield
    finally:
        for engine in engines:
            engine.engine.close()
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*tasks)
        for engine in engines:
            await engine.stop()


def scaled_profile(directory: Path, name: str, scale: float) -> Path:
    """A profile whose every time is ``scale`` as long, for an engine of that time scale."""
    profile = yaml.safe_load((PROFILE_DIRECTORY / f"{name}.yaml").read_text())
    step_time, calibration = profile["step_time"], profile["calibration"]
    profile["step_time"] = {
        key: value if key in ("form", "knee") else float(value) * scale for key, value in step_time.items()
    }
    for key, factor in (
        ("prefill_tokens_per_s", 1 / scale),
        ("decode_step_s", scale),
        ("service_rate_per_s", 1 / scale),
    ):
        calibration[key] = float(calibration[key]) * factor
    profile["name"] = f"{name}-scaled"
    path = directory / f"{name}-scaled.yaml"
    path.write_text(yaml.safe_dump(profile))
    return path
