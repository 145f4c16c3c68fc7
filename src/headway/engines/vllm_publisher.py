"""What a publishing scheduler does beside scheduling: it publishes snapshots and logs steps, and harms nothing.

One object per engine. Every call from the scheduler comes back, whatever happens inside: a failure is counted and
logged once, and what failed is tried again later where that can help. Snapshots show the engine right after a batch was
scheduled, and after one ended. Two things are left out. An update after which all run on is what the batch in flight
said would come, and the next ``schedule()`` follows at once. And while two batches are in flight (asynchronous
scheduling) nothing is published, for a snapshot shows one. It refuses to hold the engine up: nothing here waits.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, Protocol

from headway.engines.vllm_limits import read_limits, unchecked
from headway.engines.vllm_outlets import Outlet, PublisherOptions, logger, outlets
from headway.engines.vllm_state import (
    SchedulerState,
    SnapshotEncoder,
    VllmRequest,
    VllmSchedulerOutput,
    VllmStepOutputs,
)
from headway.errors import HeadwayError
from headway.types import EngineLimits

_NOTHING: Final[Mapping[str, int]] = {}


class StepObserver(Protocol):
    """Who logs steps: :class:`headway.engines.vllm_steps.StepRecorder`."""

    def added(self, request: VllmRequest) -> None: ...
    def cancelled(self, request: VllmRequest) -> None: ...
    def preempted(self, request: VllmRequest) -> None: ...
    def scheduled(self, output: VllmSchedulerOutput, cached: list[tuple[str, int]], start_s: float) -> None: ...
    def updated(self, output: VllmSchedulerOutput, outputs: Mapping[int, VllmStepOutputs], end_s: float) -> None: ...
    def close(self) -> None: ...


P = ParamSpec("P")


def _harmless(
    method: Callable[Concatenate[EnginePublisher, P], None],
) -> Callable[Concatenate[EnginePublisher, P], None]:
    """The method, but what it raises is counted, and logged the first time that it does."""

    @functools.wraps(method)
    def call(self: EnginePublisher, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.note_failure(method.__name__, error)

    return call


class EnginePublisher:
    """Follows one scheduler. No method raises. ``num_failed`` counts the calls that did not come to their end."""

    def __init__(
        self, state: SchedulerState, encoder: SnapshotEncoder, sinks: Sequence[Outlet], steps: StepObserver | None
    ) -> None:
        self.num_failed = 0
        self.outlets = sinks
        self._state = state
        self._encoder = encoder
        self._steps = steps
        self._in_flight: deque[Mapping[str, int]] = deque()
        self._batch_start_s: float | None = None
        self._num_running = 0  # after the last ``schedule()``
        self._is_shown = False  # whether the last snapshot still holds
        self._fails: set[str] = set()

    @_harmless
    def added(self, request: VllmRequest) -> None:
        """A request came in."""
        self._is_shown = False
        self._state.queue_changed()
        if self._steps is not None:
            self._steps.added(request)

    @_harmless
    def aborted(self, requests: Sequence[VllmRequest]) -> None:
        """Requests were taken out from outside."""
        self._is_shown = False
        self._state.queue_changed()
        if self._steps is not None:
            for request in requests:
                self._steps.cancelled(request)

    @_harmless
    def preempted(self, request: VllmRequest) -> None:
        """A request lost its blocks."""
        self._is_shown = False
        if self._steps is not None:
            self._steps.preempted(request)
        self._state.preempted(request)

    @_harmless
    def scheduling(self) -> None:
        """``schedule()`` is about to run. Behind a batch in flight it makes the second one, which no snapshot shows, so
        what came since the last snapshot is shown now."""
        if self._in_flight and not self._is_shown:
            self.publish()

    @_harmless
    def scheduled(self, output: VllmSchedulerOutput, start_s: float) -> None:
        """``schedule()``, called at ``start_s``, made this batch."""
        tokens = output.num_scheduled_tokens
        if tokens:
            self._in_flight.append(tokens)
            if len(self._in_flight) == 1:
                self._batch_start_s = start_s
            self._is_shown = False
        self._num_running = self._state.num_running
        cached = self._state.admitted(output)
        if len(self._in_flight) <= 1 and not self._is_shown:
            self.publish()
        if self._steps is not None:
            self._steps.scheduled(output, cached, start_s)

    @_harmless
    def updated(self, output: VllmSchedulerOutput, outputs: Mapping[int, VllmStepOutputs], end_s: float) -> None:
        """The results of this batch, which came at ``end_s``, were applied."""
        if output.num_scheduled_tokens:
            if self._in_flight:
                self._in_flight.popleft()
            self._batch_start_s = end_s if self._in_flight else None
            self._is_shown = False
        all_run_on = not self._in_flight and self._state.num_running == self._num_running
        if len(self._in_flight) <= 1 and not self._is_shown and not all_run_on:
            self.publish()
        if self._steps is not None:
            self._steps.updated(output, outputs, end_s)

    @_harmless
    def publish(self) -> None:
        """Show the scheduler as it stands, on every transport."""
        if not self.outlets:
            return
        scheduled = self._in_flight[0] if self._in_flight else _NOTHING
        data = self._encoder.encode(scheduled, self._batch_start_s, time.monotonic())
        self._is_shown = True
        for outlet in self.outlets:
            outlet.write(data)

    @_harmless
    def close(self) -> None:
        """Give back segments, sockets and the log."""
        for outlet in self.outlets:
            outlet.close()
        if self._steps is not None:
            self._steps.close()

    def note_failure(self, name: str, error: Exception) -> None:
        """Count a failure of the method ``name``; log the first."""
        self.num_failed += 1
        if name not in self._fails:
            self._fails.add(name)
            logger.warning("Headway failed in %s, serving goes on: %s: %s", name, type(error).__name__, error)


def start_publisher(scheduler: Any, environment: Mapping[str, str]) -> EnginePublisher | None:
    """A publisher for a scheduler just made, its first snapshot out; None when nothing is asked for or it cannot be."""
    options = PublisherOptions.from_environment(environment)
    if not options.publishes and options.step_log is None:
        return None
    try:
        return _start(scheduler, options)
    except Exception as error:  # a version whose scheduler looks unlike the known ones; it serves all the same
        logger.warning("Headway publishes nothing, serving goes on: %s: %s", type(error).__name__, error)
        return None


def _start(scheduler: Any, options: PublisherOptions) -> EnginePublisher:
    version = vllm_version()
    is_async_class = any(base.__name__ == "AsyncScheduler" for base in type(scheduler).__mro__)
    limits = read_limits(scheduler)
    concerns = unchecked(scheduler, version, is_async_class=is_async_class)
    for concern in concerns:
        logger.warning("Headway's estimates were never checked on %s", concern)
    wall_offset_s = time.time() - time.monotonic()
    state = SchedulerState(scheduler, wall_offset_s=wall_offset_s)
    instance_id = options.instance or options.shared_memory or model_name(scheduler)
    encoder = SnapshotEncoder(
        state,
        instance_id=instance_id,
        engine_version=f"vllm-{version}",
        engine_start=time.time_ns(),
        limits=limits,
        unchecked=concerns,
    )
    sinks = outlets(options)
    publisher = EnginePublisher(state, encoder, sinks, _steps(state, limits, version, options, is_async_class))
    publisher.publish()
    places = ", ".join(outlet.name for outlet in sinks) or "no transport"
    logger.info("Headway publishes %s on %s", instance_id, places)
    return publisher


def _steps(
    state: SchedulerState, limits: EngineLimits, version: str, options: PublisherOptions, is_async: bool
) -> StepObserver | None:
    if options.step_log is None:
        return None
    from headway.engines.vllm_steps import open_step_log

    try:
        return open_step_log(
            options.step_log,
            state,
            limits,
            engine_version=f"vllm-{version}",
            hardware=hardware_name(),
            model=model_name(state.scheduler),
            names_requests=options.step_log_requests,
            is_async=is_async,
        )
    except HeadwayError as error:
        logger.warning("no steps are logged, serving goes on: %s", error)
        return None


def vllm_version() -> str:
    """The version of the vLLM in this process, without what a build appends (``0.32.0+cpu``)."""
    from importlib import import_module

    return str(import_module("vllm").__version__).partition("+")[0]


def model_name(scheduler: Any) -> str:
    """The name the model is served by."""
    config = scheduler.vllm_config.model_config
    served = config.served_model_name
    if isinstance(served, (list, tuple)):
        served = served[0] if served else None
    return str(served or config.model)


def hardware_name() -> str:
    """The name of the device this engine runs on, as vLLM tells it; of a processor, as the kernel does."""
    from importlib import import_module

    try:
        name = str(import_module("vllm.platforms").current_platform.get_device_name())
        if name == "cpu":
            lines = Path("/proc/cpuinfo").read_text().splitlines()
            name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except Exception:  # a platform that does not say
        return "unknown"
    return name or "unknown"
