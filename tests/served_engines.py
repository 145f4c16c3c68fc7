"""Simulated engines for the tests: served inside the test's process, to be looked into, and as processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import uvicorn

from headway.engines.openai_server import OpenAIServer
from headway.engines.simulated import SimulatedEngine
from headway.engines.vllm_metrics import EngineMetrics
from headway.profiles import load_truth

MODEL = "qwen3-8b"


class ServedEngine:
    """An engine served inside this process, and a client for it."""

    def __init__(self, engine: SimulatedEngine, client: aiohttp.ClientSession, url: str) -> None:
        self.engine = engine
        self.client = client
        self.url = url

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Return once ``condition`` holds."""
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - the engine has no event for what tests look at
                await asyncio.sleep(0.001)


@asynccontextmanager
async def serving_engine() -> AsyncIterator[ServedEngine]:
    """An engine whose simulated second lasts 50 ms, so that answers come quickly."""
    truth = load_truth("h100-qwen3-8b")
    metrics = EngineMetrics(MODEL, truth.limits)
    engine = SimulatedEngine(truth, seed=1, instance_id="e", observer=metrics, time_scale=0.05)
    app = OpenAIServer(engine, metrics, model=MODEL, seed=1)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="critical", ws="none"))
    bound = socket.create_server(("127.0.0.1", 0))
    steps = asyncio.create_task(engine.run())
    serving = asyncio.create_task(server._serve([bound]))  # serve() would take this process's signal handlers
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    async with aiohttp.ClientSession(url) as client:
        yield ServedEngine(engine, client, url)
    engine.close()
    server.should_exit = True
    await serving
    steps.cancel()
    await asyncio.gather(steps, return_exceptions=True)


class EngineProcess:
    """``headway engine`` as a process on a free port, serving ``model``."""

    def __init__(self, *options: str, model: str = MODEL) -> None:
        self.segment = f"headway-test-{os.getpid()}-{uuid.uuid4().hex}"
        command = [sys.executable, "-m", "headway", "engine", "--profile", "h100-qwen3-8b", "--model", model]
        command += ["--port", "0", "--shared-memory", self.segment, *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        match = re.fullmatch(r"listening on (http://127\.0\.0\.1:\d+)\n", self.process.stdout.readline())
        assert match, self.process.communicate()[1]
        self.url = match[1]

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal; the exit code and what stood on stderr."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        stderr = self.process.communicate(timeout=20)[1]
        return self.process.returncode, stderr
