"""The real engine's step log played on the native mirror: batch by batch, and by the clock.

Given the call of ``schedule()`` that first saw each request and the true lengths, the mirror must repeat every batch.
Given only when the gateway decided, and fitted step times, it says in which batch a newcomer will be admitted. Nothing
here is repaired to fit: the first batch that differs is reported.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from headway._core import ReplayedEngine
from headway.calibrate.read_log import read_batches
from headway.calibrate.step_table import StepTable, predict_s
from headway.engines.step_log import LoggedBatch
from headway.types import EngineLimits, EngineRequest, StepTime
from real_engine.steps import EngineTimes, client_id

ANY_CLOCK = StepTime.linear(b0=1e-3, b1=1e-6, b2=1e-8, b3=1e-10)


class Repeated(Struct, frozen=True):
    """How much of a log the mirror repeated: all batches before ``first_difference``, None where it did all."""

    num_batches: int
    num_repeated: int
    num_requests: int
    num_cached: int
    num_preempted: int
    first_difference: str | None


class Newcomer(Struct, frozen=True):
    """A request that the gateway decided on at ``decided_s``, and what the engine did with it."""

    request: EngineRequest
    decided_s: float
    times: EngineTimes


class Run(Struct, frozen=True):
    """A log with its requests by the engine's ids, true lengths in ``target_output_tokens``."""

    limits: EngineLimits
    batches: list[LoggedBatch]
    requests: dict[str, EngineRequest]
    blocks: dict[str, list[int]]


def read_run(log: Path) -> Run:
    """The run that a log naming its requests holds."""
    header, batches = read_batches(log)
    limits = EngineLimits(**{name: getattr(header.limits, name) for name in EngineLimits.__struct_fields__})
    ends = {end.request_id: end for batch in batches for end in batch.ended}
    came_to = ends | {end.request_id: end for batch in batches for end in batch.cancelled_ends}
    requests: dict[str, EngineRequest] = {}
    blocks: dict[str, list[int]] = {}
    for batch in batches:
        for one in batch.arrivals:
            end = ends.get(one.request_id)
            requests[one.request_id] = EngineRequest(
                request_id=one.request_id, prompt_tokens=one.prompt_tokens, priority=one.priority,
                arrival_s=one.arrival_s,  # vLLM orders equal priorities by it
                target_output_tokens=one.max_tokens if end is None else end.output_tokens, max_tokens=one.max_tokens,
            )  # fmt: skip
            far = came_to.get(one.request_id)
            blocks[one.request_id] = [*one.prompt_blocks, *([] if far is None else far.output_blocks)]
    return Run(limits, batches, requests, blocks)


def repeated(run: Run, *, block_pool: bool = False) -> Repeated:
    """Play the run on the mirror, which looks prefixes up by itself where ``block_pool`` says so."""
    engine = ReplayedEngine.with_block_pool(run.limits, ANY_CLOCK) if block_pool else _empty(run.limits)
    num_cached = num_preempted = 0
    num_repeated, difference = len(run.batches), None
    for index, batch in enumerate(run.batches):
        for one in batch.arrivals:
            if block_pool:
                engine.submit(run.requests[one.request_id], run.blocks[one.request_id])
            else:
                engine.submit(run.requests[one.request_id])
        for name in batch.cancelled:
            engine.cancel(name)
        made = engine.step()
        logged = (list(batch.scheduled), list(batch.preempted), batch.free_blocks)
        mirrored = (list(made.num_scheduled_tokens.items()), list(made.preempted), made.free_blocks)
        if logged != mirrored:
            num_repeated, difference = index, f"batch {index}: the engine {logged}, the mirror {mirrored}"
            break
        num_cached += len(batch.cached)
        num_preempted += len(batch.preempted)
    return Repeated(len(run.batches), num_repeated, len(run.requests), num_cached, num_preempted, difference)


def along(run: Run, step_time: StepTime) -> Iterator[tuple[int, ReplayedEngine]]:
    """The mirror after each batch, by the batch's index; -1 first, the empty engine. Clone it, do not change it."""
    engine = ReplayedEngine(run.limits, step_time)
    yield -1, engine
    for index, batch in enumerate(run.batches):
        for one in batch.arrivals:
            engine.submit(run.requests[one.request_id])
        for name in batch.cancelled:
            engine.cancel(name)
        engine.step()
        yield index, engine


def admissions(
    run: Run, newcomers: Sequence[Newcomer], *, zero_s: float, step_time: StepTime, table: StepTable, known_s: float
) -> list[tuple[int, bool]]:
    """By how many batches the predicted admission misses the real one, by the clock and fitted step times, and whether
    the newcomer really had to wait for room.

    The mirror is known as it was when the batch in flight ``known_s`` before the decision was scheduled. From there it
    runs by fitted step times, and takes in whoever was decided on meanwhile at that very moment.
    """
    fitted_s = predict_s(step_time, table)
    starts_s = [batch.start_s + zero_s for batch in run.batches]
    waiting = sorted(newcomers, key=lambda one: one.decided_s)
    by_batch: dict[int, list[int]] = {}
    for place, one in enumerate(waiting):
        by_batch.setdefault(_in_flight(starts_s, one.decided_s - known_s), []).append(place)
    missed: list[tuple[int, bool]] = []
    for index, engine in along(run, step_time):
        for place in by_batch.get(index, ()):
            one = waiting[place]
            between = [other for other in waiting[: place + 1] if other.times.seen > index]
            ends_s = float("-inf")
            known_at_s = one.decided_s - known_s
            if index >= 0 and starts_s[index] + run.batches[index].time_s > known_at_s:  # seen in flight at that moment
                ends_s = max(starts_s[index] + float(fitted_s[index]), known_at_s)
            admitted = _admitted(engine.clone(), index, ends_s, between)
            missed.append((admitted - one.times.admitted, one.times.admitted > one.times.seen))
    return missed


def _admitted(engine: ReplayedEngine, index: int, at_s: float, arriving: Sequence[Newcomer]) -> int:
    """The batch that admits the last of ``arriving``; ``at_s`` is when batch ``index`` ends."""
    for one in arriving:
        if one.decided_s > at_s:
            if engine.num_running or engine.num_waiting:
                index += engine.advance(one.decided_s - at_s)
            at_s = one.decided_s + engine.residual_s
            engine.advance(engine.residual_s)
        engine.submit(one.request)
    name = arriving[-1].request.request_id
    while True:
        index += 1
        made = engine.step()
        if name in made.num_scheduled_tokens:
            return index
        if not made.num_scheduled_tokens and not made.preempted:
            return index + 10**6  # it never will be


def _in_flight(starts_s: Sequence[float], at_s: float) -> int:
    """The last batch that had begun by then, -1 before the first."""
    return bisect_right(starts_s, at_s) - 1


def newcomers_of(run: Run, decided: dict[str, float], times: dict[str, EngineTimes]) -> list[Newcomer]:
    """The requests of a run whose decision time is known (by client's id)."""
    return [
        Newcomer(request, decided[client_id(name)], times[client_id(name)])
        for name, request in run.requests.items()
        if client_id(name) in decided and client_id(name) in times
    ]


def _empty(limits: EngineLimits) -> ReplayedEngine:
    return ReplayedEngine(limits, ANY_CLOCK)
