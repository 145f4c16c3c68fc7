"""Logs the steps of a vLLM engine for ``headway calibrate``, and on request whose they were.

A step of a synchronous engine lasts from its ``schedule()`` to the next one: all of the engine's own work is in it. In
an asynchronous one batches follow each other without a gap, and a step lasts from the end of the batch before it (or
its own ``schedule()``, when the engine was idle) to its own end. Lines are written when a step's time is known and
flushed when the engine idles. A log that cannot be written is given up, once and aloud; the engine goes on.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from headway.engines.step_log import (
    Chunk,
    LoggedArrival,
    LoggedBatch,
    LoggedEnd,
    LoggedLimits,
    LoggedStep,
    StepFeatures,
    StepLogHeader,
    StepLogWriter,
    batch_features,
)
from headway.engines.vllm_state import SchedulerState, VllmRequest, VllmSchedulerOutput, VllmStepOutputs
from headway.types import EngineLimits

_LEAST_S = 1e-9  # two readings of a clock may be one


class _Step(Struct):
    """A step whose line is not written yet."""

    output: VllmSchedulerOutput
    features: StepFeatures
    start_s: float
    free_blocks: int
    cached: list[tuple[str, int]]
    arrivals: list[LoggedArrival]
    cancelled: list[LoggedEnd]
    preempted: list[str]
    num_outputs: int = 0
    num_finished: int = 0
    ended: list[LoggedEnd] = []


class StepRecorder:
    """One engine's log. Its caller, :class:`headway.engines.vllm_publisher.EnginePublisher`, takes what it raises."""

    def __init__(self, writer: StepLogWriter, state: SchedulerState, *, names_requests: bool, is_async: bool) -> None:
        self._writer: StepLogWriter | None = writer
        self._state = state
        self._names_requests = names_requests
        self._is_async = is_async
        self._open: deque[_Step] = deque()
        self._requests: dict[str, VllmRequest] = {}
        self._arrivals: list[VllmRequest] = []
        self._cancelled: list[LoggedEnd] = []
        self._preempted: list[str] = []
        self._zero_s: float | None = None
        self._last_end_s = float("-inf")

    def added(self, request: VllmRequest) -> None:
        """A request came in."""
        if self._names_requests and self._state.scheduler.requests.get(request.request_id) is request:
            self._requests[request.request_id] = request
            self._arrivals.append(request)

    def cancelled(self, request: VllmRequest) -> None:
        """A request was taken out from outside."""
        if self._requests.pop(request.request_id, None) is not None:
            self._cancelled.append(self._logged_end(request))

    def preempted(self, request: VllmRequest) -> None:
        """A request lost its blocks."""
        self._preempted.append(request.request_id)

    def scheduled(self, output: VllmSchedulerOutput, cached: list[tuple[str, int]], start_s: float) -> None:
        """``schedule()``, called at ``start_s``, made this batch."""
        if self._writer is None:
            return
        if self._zero_s is None:
            self._zero_s = start_s
        if not self._is_async:
            self._end(start_s)
        preempted, self._preempted = self._preempted, []
        if not output.num_scheduled_tokens and not preempted and not self._open:
            try:
                self._writer.flush()
            except BaseException:
                self._give_up()
                raise
            return
        features = batch_features(self._chunk(name, tokens) for name, tokens in output.num_scheduled_tokens.items())
        arrivals, self._arrivals = [self._arrival(request) for request in self._arrivals], []
        cancelled, self._cancelled = self._cancelled, []
        self._open.append(
            _Step(output, features, start_s, self._state.free_blocks, cached, arrivals, cancelled, preempted)
        )

    def updated(self, output: VllmSchedulerOutput, outputs: Mapping[int, VllmStepOutputs], end_s: float) -> None:
        """The results of this batch, which came at ``end_s``, were applied."""
        if not self._open or self._open[0].output is not output:
            return
        step, ended = self._open[0], []
        for client in outputs.values():
            for one in client.outputs:
                step.num_outputs += len(one.new_token_ids)
                if one.finish_reason is not None:
                    step.num_finished += 1
                    request = self._requests.pop(one.request_id, None)
                    if request is not None:
                        ended.append(self._logged_end(request))
        step.ended = ended
        if self._is_async:
            step.start_s = max(step.start_s, self._last_end_s)
            self._last_end_s = end_s
            self._end(end_s)

    def close(self) -> None:
        """Write what is known. The step in flight has no time yet and is left out."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _end(self, end_s: float) -> None:
        """The first open step, if there is one, lasted until ``end_s``."""
        if not self._open or self._writer is None or self._zero_s is None:
            return
        step = self._open.popleft()
        known = LoggedStep(
            **msgspec.structs.asdict(step.features),
            start_s=step.start_s - self._zero_s,
            time_s=max(end_s - step.start_s, _LEAST_S),
            num_outputs=step.num_outputs,
            num_finished=step.num_finished,
        )
        try:
            self._writer.write(self._named(known, step) if self._names_requests else known)
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """Close a log that lacks a line: it would tell of another run."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()

    @staticmethod
    def _named(known: LoggedStep, step: _Step) -> LoggedBatch:
        return LoggedBatch(
            **msgspec.structs.asdict(known),
            arrivals=step.arrivals,
            cancelled=[gone.request_id for gone in step.cancelled],
            cancelled_ends=step.cancelled,
            scheduled=list(step.output.num_scheduled_tokens.items()),
            cached=step.cached,
            preempted=step.preempted,
            free_blocks=step.free_blocks,
            ended=step.ended,
        )

    def _chunk(self, request_id: str, tokens: int) -> Chunk:
        """A request's share, right after ``schedule()`` counted it as computed.

        Under asynchronous scheduling each sample in flight is a placeholder, the one of this very batch included.
        """
        request = self._state.request(request_id)
        has_output = request.num_output_tokens > 0 or request.num_output_placeholders > 1
        is_decode = tokens == 1 and has_output and not request.is_prefill_chunk
        return tokens, request.num_computed_tokens - tokens, is_decode

    def _arrival(self, request: VllmRequest) -> LoggedArrival:
        assert self._zero_s is not None
        prompt_blocks = request.num_prompt_tokens // self._state.block_size
        return LoggedArrival(
            request.request_id,
            request.num_prompt_tokens,
            request.max_tokens,
            request.priority,
            self._state.arrival_s(request) - self._zero_s,
            [_short(value) for value in request.block_hashes[:prompt_blocks]],
        )

    def _logged_end(self, request: VllmRequest) -> LoggedEnd:
        prompt_blocks = request.num_prompt_tokens // self._state.block_size
        blocks = [_short(value) for value in request.block_hashes[prompt_blocks:]]
        return LoggedEnd(request.request_id, request.num_output_tokens, blocks)


def open_step_log(
    path: Path,
    state: SchedulerState,
    limits: EngineLimits,
    *,
    engine_version: str,
    hardware: str,
    model: str,
    names_requests: bool,
    is_async: bool,
) -> StepRecorder:
    """A recorder that replaces what was at ``path``.

    Raises:
        ConfigError: the file cannot be opened.
    """
    header = StepLogHeader(
        step_log=1,
        engine_version=engine_version,
        hardware=hardware,
        model=model,
        limits=LoggedLimits(**msgspec.structs.asdict(limits)),
    )
    return StepRecorder(StepLogWriter(path, header), state, names_requests=names_requests, is_async=is_async)


def _short(block_hash: bytes) -> int:
    """64 bits of a block's hash, which is long enough to tell the blocks of one run apart."""
    return int.from_bytes(block_hash[:8], "little") >> 1  # within a signed 64-bit integer
