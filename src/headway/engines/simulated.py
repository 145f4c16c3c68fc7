"""A simulated engine: the replayed scheduler under a truth profile, with a virtual clock that real time follows.

A batch starts when the one before ended, or when a request arrives at an idle engine, lasts what the truth profile
says, and gives its tokens at its end. All that happens on the virtual clock, which counts on the machine's monotonic
clock but only ever waits for it: a process that wakes late does not push later batches back, and a request that came
after a batch's virtual start does not join it, however late the process ran. No model, no GPU, no tokens of meaning;
and no estimator may look in here: snapshots, and a step log to calibrate from, are all that leaves it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec
import numpy as np

from headway._core import ReplayedEngine
from headway.engines.engine_view import EngineView, Resident
from headway.engines.step_log import LoggedLimits, StepLogHeader, StepSink, logged_step
from headway.errors import EngineInputError, SnapshotError
from headway.profiles import TruthProfile
from headway.types import EngineRequest, Snapshot

FinishReason = Literal["stop", "length", "abort"]

#: An idle engine, and one inside a long batch, publishes again this often: silence then means that it is gone.
HEARTBEAT_S = 0.5

_LAG_WARNING_S = 1.0
_logger = logging.getLogger(__name__)


class SnapshotSink(Protocol):
    """Where snapshots go: :class:`headway.snapshot.shared_memory.SharedMemoryWriter`, or a test's list."""

    def publish(self, snapshot: Snapshot) -> None: ...


class EngineObserver(Protocol):
    """What the engine's metrics want to know. Times are simulated seconds."""

    def first_token(self, ttft_s: float, queue_s: float) -> None: ...
    def preempted(self, num_requests: int) -> None: ...
    def step(self, prompt_tokens: int, output_tokens: int) -> None: ...
    def finished(self, reason: FinishReason) -> None: ...


class Generation(Resident):
    """One request and what came out of it so far. ``ttft_s`` and ``queue_s`` are simulated seconds, on the engine's
    own clock: from arrival to the end of the batch that gave the first token, and to the start of the first batch."""

    __slots__ = (
        "finish_reason",
        "num_tokens",
        "on_progress",
        "prefix_blocks",
        "queue_s",
        "target_output_tokens",
        "ttft_s",
    )

    def __init__(
        self,
        request: EngineRequest,
        *,
        max_tokens: int,
        arrival_s: float,
        on_progress: Callable[[], None],
        prefix_blocks: Sequence[int],
    ) -> None:
        super().__init__(
            request_id=request.request_id,
            prompt_tokens=request.prompt_tokens,
            max_tokens=max_tokens,
            priority=request.priority,
            arrival_s=arrival_s,
        )
        self.target_output_tokens = request.target_output_tokens
        self.on_progress = on_progress
        self.prefix_blocks = prefix_blocks
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.queue_s: float | None = None
        self.ttft_s: float | None = None


class StepClock:
    """Draws how long a batch really takes. Every step takes the same number of draws, so that runs can be compared."""

    def __init__(self, truth: TruthProfile, seed: int) -> None:
        self._truth = truth
        # Engines of one pool may be given one seed; their noise must not march in step.
        self._rng = np.random.default_rng([seed, zlib.crc32(truth.name.encode())])

    def duration_s(self, time_s: float) -> float:
        """Simulated seconds of a batch whose noiseless duration is ``time_s``."""
        truth, rng = self._truth, self._rng
        noise = np.exp(truth.step_noise * rng.standard_normal())
        stall_s = truth.stall_mean_s * rng.standard_exponential()
        stalls = rng.random() < truth.stall_probability
        gap_s = rng.uniform(*truth.host_gap_s)
        return float(time_s * noise + (stall_s if stalls else 0.0) + gap_s)


def step_log_header(truth: TruthProfile) -> StepLogHeader:
    """The first line of a simulated engine's step log. It says that nothing real was measured."""
    return StepLogHeader(
        step_log=1,
        engine_version=truth.engine_version,
        hardware=f"simulated {truth.hardware} (truth profile {truth.name})",
        model=truth.model,
        limits=LoggedLimits(**msgspec.structs.asdict(truth.limits)),
    )


class SimulatedEngine:
    """One engine. ``time_scale`` X makes one simulated second last X seconds of the machine's clock."""

    def __init__(
        self,
        truth: TruthProfile,
        *,
        seed: int,
        instance_id: str,
        observer: EngineObserver,
        sink: SnapshotSink | None = None,
        step_sink: StepSink | None = None,
        time_scale: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if truth.limits.async_scheduling:
            raise EngineInputError("async_scheduling", "must be off: a simulated engine schedules between its batches")
        self.truth = truth
        self.view: EngineView[Generation] = EngineView(truth.limits)
        self._caches = truth.limits.prefix_caching
        make_engine = ReplayedEngine.with_block_pool if self._caches else ReplayedEngine
        self._engine = make_engine(truth.limits, truth.step_time)
        self._step_clock = StepClock(truth, seed)
        self._generations: dict[str, Generation] = {}
        self._arrivals: deque[Generation] = deque()  # not yet handed to the scheduler: the virtual clock is behind them
        self._observer = observer
        self._sink = sink
        self._step_sink = step_sink
        self._first_step_s: float | None = None
        self._time_scale = time_scale
        self._clock = clock
        self._instance_id = instance_id
        self._engine_start = time.time_ns()
        self._sequence = 0
        self._batch_start_s: float | None = None
        self._end_s = -np.inf
        self._arrived = asyncio.Event()
        self._last_lag_warning_s = -np.inf
        self._snapshot_fits = True

    def submit(
        self,
        request: EngineRequest,
        *,
        arrival_s: float,
        on_progress: Callable[[], None],
        prefix_blocks: Sequence[int] = (),
    ) -> Generation:
        """Queue a request that arrived at ``arrival_s`` (monotonic). ``on_progress`` is called on every output.

        ``prefix_blocks`` names the full blocks of its prompt (``headway.predict.prefix``), for the prefix cache of an
        engine that has one.

        Raises:
            EngineInputError: the prompt leaves no room for an output token.
        """
        room = self.truth.limits.max_model_len - request.prompt_tokens
        if room < 1:
            limit = self.truth.limits.max_model_len - 1
            raise EngineInputError("prompt_tokens", f"must be at most {limit}, not {request.prompt_tokens}")
        max_tokens = min(room, request.max_tokens or room)
        generation = Generation(
            request,
            max_tokens=max_tokens,
            arrival_s=arrival_s,
            on_progress=on_progress,
            prefix_blocks=prefix_blocks[: request.prompt_tokens // self.truth.limits.block_size],
        )
        generation.request_id = self._unused(request.request_id)
        self._look_up(generation)
        self._generations[generation.request_id] = generation
        self._arrivals.append(generation)
        self.view.submit(generation)
        self._arrived.set()
        if self._batch_start_s is not None:  # else the batch it starts is published in a moment
            self._publish()
        return generation

    def cancel(self, generation: Generation) -> None:
        """Drop a request wherever it is and free its blocks at once. Nothing happens when it has ended."""
        if generation.finish_reason is not None:
            return
        before = self._engine.free_blocks
        if self._engine.cancel(generation.request_id):
            num_freed = self._engine.free_blocks - before
        else:  # the scheduler has let it go already: its last output comes with the batch in flight
            num_freed = min(generation.num_blocks, before - self.view.free_blocks)
        with contextlib.suppress(ValueError):
            self._arrivals.remove(generation)
        self.view.remove(generation, num_freed)
        self._finish(generation, "abort")
        generation.on_progress()
        self._publish()

    def close(self) -> None:
        """Cancel everything."""
        for generation in list(self._generations.values()):
            self.cancel(generation)

    async def run(self) -> None:
        """Step for ever: each batch when it is due, or as soon as the process gets to it."""
        heartbeat = asyncio.create_task(self._beat())
        try:
            while True:
                end_s = self.begin()
                if end_s is None:
                    self._arrived.clear()
                    await self._arrived.wait()
                    continue
                await self._sleep_until(end_s)
                self.end()
        finally:
            heartbeat.cancel()

    def begin(self) -> float | None:
        """Start the next batch at the virtual time it is due and publish it; returns its virtual end.

        None when there is nothing to do; then the idle engine is published.
        """
        start_s = self._end_s
        if not (self._engine.num_running or self._engine.num_waiting):
            if not self._arrivals:
                self._publish()
                return None
            start_s = max(start_s, self._arrivals[0].arrival_s)
        self._admit(start_s)
        batch = self._engine.step()
        if not batch.num_scheduled_tokens and not batch.preempted:
            self._publish()
            return None
        scheduled = self.view.schedule(batch)
        for generation in scheduled:
            if generation.queue_s is None:
                generation.queue_s = (start_s - generation.arrival_s) / self._time_scale
        if batch.preempted:
            self._observer.preempted(len(batch.preempted))
        if self.view.waiting:
            self._look_up(self.view.waiting[0])
        duration_s = self._step_clock.duration_s(batch.time_s)
        self._end_s = start_s + duration_s * self._time_scale
        self._batch_start_s = start_s
        if self._step_sink is not None:
            self._log_step(scheduled, start_s, duration_s, len(batch.finished))
        self._publish()
        self._watch_lag()
        return self._end_s

    def end(self) -> None:
        """Give out what the batch in flight produced."""
        self._batch_start_s = None
        prompt_tokens = output_tokens = 0
        for generation, ended in self.view.update(self._engine.free_blocks):
            generation.num_tokens = generation.output_tokens
            output_tokens += 1
            if generation.ttft_s is None:
                generation.ttft_s = (self._end_s - generation.arrival_s) / self._time_scale
                self._observer.first_token(generation.ttft_s, generation.queue_s or 0.0)
                prompt_tokens += generation.prompt_tokens
            if ended:
                stopped = generation.output_tokens >= generation.target_output_tokens < generation.max_tokens
                self._finish(generation, "stop" if stopped else "length")
            generation.on_progress()
        self._observer.step(prompt_tokens, output_tokens)

    def snapshot(self) -> Snapshot:
        """The engine as it stands: right after the scheduling of the batch in flight, or between steps."""
        running, waiting = self.view.publish()
        self._sequence += 1
        return Snapshot(
            instance_id=self._instance_id,
            engine_version=self.truth.engine_version,
            engine_start=self._engine_start,
            sequence=self._sequence,
            engine_s=self._clock(),
            limits=self.truth.limits,
            running=running,
            waiting=waiting,
            free_blocks=self.view.free_blocks,
            batch_start_s=self._batch_start_s,
        )

    def _admit(self, start_s: float) -> None:
        """Hand the scheduler what arrived up to the virtual start of a batch, and nothing that came later."""
        while self._arrivals and self._arrivals[0].arrival_s <= start_s:
            generation = self._arrivals.popleft()
            self._engine.submit(
                EngineRequest(
                    request_id=generation.request_id,
                    prompt_tokens=generation.prompt_tokens,
                    target_output_tokens=generation.target_output_tokens,
                    max_tokens=generation.max_tokens,
                    priority=generation.priority,
                    arrival_s=generation.arrival_s,
                ),
                generation.prefix_blocks if self._caches else (),
            )

    def _look_up(self, generation: Generation) -> None:
        """Show what a waiting prompt would find in the prefix cache now."""
        if not self._caches:
            return
        found = self._engine.look_up(generation.prefix_blocks, generation.prompt_tokens)
        if found != (generation.cached_tokens, generation.shared_blocks):
            generation.cached_tokens, generation.shared_blocks = found
            generation.published = None

    def _log_step(self, scheduled: list[Generation], start_s: float, duration_s: float, num_finished: int) -> None:
        assert self._step_sink is not None
        if self._first_step_s is None:
            self._first_step_s = start_s
        since_first_s = (start_s - self._first_step_s) / self._time_scale
        step = logged_step(scheduled, start_s=since_first_s, time_s=duration_s, num_finished=num_finished)
        self._step_sink.write(step)

    def _finish(self, generation: Generation, reason: FinishReason) -> None:
        generation.finish_reason = reason
        del self._generations[generation.request_id]
        self._observer.finished(reason)

    def _unused(self, request_id: str) -> str:
        """``request_id``, with a number behind it while another request inside the engine bears it."""
        unused, number = request_id, 2
        while unused in self._generations:
            unused = f"{request_id}-{number}"
            number += 1
        return unused

    async def _sleep_until(self, end_s: float) -> None:
        while True:
            # At least one turn of the loop per step, so that sockets live also while the virtual clock catches up.
            await asyncio.sleep(max(0.0, end_s - self._clock()))
            if self._clock() >= end_s:
                return

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._publish()

    def _publish(self) -> None:
        if self._sink is None:
            return
        try:
            self._sink.publish(self.snapshot())
            self._snapshot_fits = True
        except SnapshotError as error:
            # The router sees the last snapshot grow stale and says so; serving goes on.
            if self._snapshot_fits:
                _logger.warning("snapshot not published: %s", error)
            self._snapshot_fits = False

    def _watch_lag(self) -> None:
        now_s = self._clock()
        if now_s - self._end_s > _LAG_WARNING_S and now_s - self._last_lag_warning_s > 10 * _LAG_WARNING_S:
            self._last_lag_warning_s = now_s
            _logger.warning(
                "the machine is too slow: the engine runs %.1f s behind its own clock; a larger --time-scale helps",
                now_s - self._end_s,
            )
