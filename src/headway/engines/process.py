"""Runs a simulated engine as a process: sockets, signals, segment, and an end that leaves nothing behind.

SIGINT and SIGTERM end it at once, as a restart of a real engine would: answers under way break off, the segment is
unlinked, the exit code is 0. It refuses to serve on when its step loop has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import uvicorn
from msgspec import Struct

from headway.engines.openai_server import Message, OpenAIServer, Receive, Send
from headway.engines.simulated import SimulatedEngine, SnapshotSink, step_log_header
from headway.engines.step_log import StepLogWriter
from headway.engines.vllm_metrics import EngineMetrics
from headway.errors import ConfigError, HeadwayError, SnapshotError
from headway.profiles import TruthProfile
from headway.snapshot.shared_memory import SharedMemoryWriter
from headway.types import Snapshot

#: An ASGI application.
Application = Callable[[Message, Receive, Send], Awaitable[None]]

_KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that they close first


class EngineOptions(Struct, frozen=True, kw_only=True):
    """What ``headway engine`` was told. ``port`` 0 takes a free one; without ``segment`` (shared memory) and ``zeromq``
    (an address to bind) nothing is published, without ``step_log`` no steps are logged. ``around`` is put around the
    HTTP application, by tools that watch what it sends."""

    truth: TruthProfile
    model: str
    host: str
    port: int
    segment: str | None
    seed: int
    time_scale: float
    step_log: Path | None = None
    zeromq: str | None = None
    around: Callable[[Application], Application] | None = None


class _Everywhere:
    """Publishes to several sinks; one that fails keeps nothing from the others."""

    def __init__(self, sinks: Sequence[SnapshotSink]) -> None:
        self._sinks = sinks

    def publish(self, snapshot: Snapshot) -> None:
        """Hand the snapshot to every sink.

        Raises:
            SnapshotError: the first failure, once all had their turn.
        """
        failure: SnapshotError | None = None
        for sink in self._sinks:
            try:
                sink.publish(snapshot)
            except SnapshotError as error:
                failure = failure or error
        if failure is not None:
            raise failure


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling, which would end the process by the signal instead of with code 0."""

    published_on: str | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or []:
            host, port = bound.getsockname()[:2]
            print(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
        if self.published_on is not None:
            print(f"publishing on {self.published_on}", flush=True)


def serve(options: EngineOptions) -> None:
    """Serve until a signal comes.

    Raises:
        ConfigError: the address cannot be bound, or the step log not be written.
        SnapshotError: the segment or the address of the snapshots is in use or cannot be had.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(options))


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # slower, otherwise the same
        return None
    return uvloop.Loop


async def _serve(options: EngineOptions) -> None:
    with contextlib.ExitStack() as opened:
        bound = opened.enter_context(contextlib.closing(_bind(options.host, options.port)))
        step_sink: StepLogWriter | None = None
        if options.step_log is not None:
            step_sink = StepLogWriter(options.step_log, step_log_header(options.truth))
            opened.callback(step_sink.close)
        sinks: list[SnapshotSink] = []
        if options.segment is not None:
            sinks.append(opened.enter_context(contextlib.closing(SharedMemoryWriter(options.segment))))
        published_on = None
        if options.zeromq is not None:
            from headway.snapshot.zeromq import ZeroMQPublisher

            publisher = opened.enter_context(contextlib.closing(ZeroMQPublisher(options.zeromq)))
            sinks.append(publisher)
            published_on = publisher.address
        metrics = EngineMetrics(options.model, options.truth.limits)
        engine = SimulatedEngine(
            options.truth,
            seed=options.seed,
            instance_id=options.segment or options.model,
            observer=metrics,
            sink=_Everywhere(sinks) if sinks else None,
            step_sink=step_sink,
            time_scale=options.time_scale,
        )
        app: Application = OpenAIServer(engine, metrics, model=options.model, seed=options.seed)
        if options.around is not None:
            app = options.around(app)
        await _run(engine, app, bound, published_on)


async def _run(engine: SimulatedEngine, app: Application, bound: socket.socket, published_on: str | None) -> None:
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_level="critical",  # answers that break off on shutdown are no news
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
        ws="none",
    )
    server = _Server(config)
    server.published_on = published_on
    steps = asyncio.create_task(engine.run())

    def stop() -> None:
        server.should_exit = True
        engine.close()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    steps.add_done_callback(lambda _: stop())
    gc.collect()
    gc.freeze()  # what start-up made stays; a full collection would only delay a step
    try:
        await server.serve(sockets=[bound])
    finally:
        steps.cancel()
        gc.unfreeze()
        with contextlib.suppress(asyncio.CancelledError):
            await steps  # raises what ended the step loop, if anything did


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{host!r} is no address: {error.strerror}", key="host") from error
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise HeadwayError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return bound
