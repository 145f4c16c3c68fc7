"""Part ``passes``: the same workloads through gateways that know the engine in different ways.

Each pass starts a fresh gateway, sends one recorded workload through it, and keeps per request what the gateway
predicted, what the client saw, and what the engine's own log says. Answers have the length asked for, and the gateway
may take ``max_tokens`` for it: lengths are known, so that the replay is tested and not a length predictor. What a pass
found is written at once; a pass that is there already is not run again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from headway.config import Config
from headway.profiles import Profile, load_profile
from headway.testing import RunningGateway, pool, running_gateway
from real_engine.client import Answered, play
from real_engine.instance import CLIENT_CORE, MODEL, Instance, instance
from real_engine.steps import EngineTimes, engine_times
from real_engine.workload import CONTEXT_TOKENS, SHAPES, Shape, capacity_per_s, workload

#: What a pass's gateway knows: the engine's snapshots (twice, for the noise; a second router beside it estimates the
#: same requests by prefill throughput), its own dispatches and a profile, and nothing but the times it has seen.
State = Literal["snapshots", "again", "shadow", "history"]
STATES: Final[tuple[State, ...]] = ("snapshots", "again", "shadow", "history")
_SHOWN: Final[tuple[State, ...]] = ("snapshots", "again")
SEED: Final = 202
#: Of the engine's capacity for the shape's lengths.
LOAD: Final[dict[Shape, float]] = {"poisson": 0.75, "bursty": 0.6, "decode_heavy": 0.75}
#: What a workload's last answers take after its last arrival, and a gateway's start, seconds.
_TAIL_S: Final = 15.0
_MIN_REQUESTS: Final = 12


class Row(Struct, kw_only=True):
    """One request of a pass. ``engine`` is None where the log does not have it; times are seconds.

    ``decided_s`` is the gateway's monotonic time of the decision. ``raw_s`` is the replay before any correction,
    ``throughput_s`` the estimate by prefill throughput at the same moment, where there was one.
    """

    client: Answered
    source: str | None = None
    raw_s: float | None = None
    throughput_s: float | None = None
    decided_s: float | None = None
    gateway_ttft_s: float | None = None
    engine: EngineTimes | None = None


class Pass(Struct, kw_only=True):
    """One workload through one gateway. ``zero_s`` is the log's zero on the monotonic clock.

    ``load_average`` is the machine's over the last minute of the pass: above 2 somebody else was at work too.
    """

    shape: Shape
    state: State
    num: int
    rate_per_s: float
    seed: int
    zero_s: float
    rows: list[Row]
    load_average: float | None = None


def pass_files(directory: Path, shape: Shape, state: State) -> tuple[Path, Path]:
    """Where a pass and its part of the step log are kept."""
    return directory / f"pass-{shape}-{state}.json", directory / f"pass-{shape}-{state}.steps.jsonl"


def read_pass(directory: Path, shape: Shape, state: State) -> Pass | None:
    """A pass that was run, None where it was not."""
    path = pass_files(directory, shape, state)[0]
    return msgspec.json.decode(path.read_bytes(), type=Pass) if path.exists() else None


async def passes(
    directory: Path, *, minutes: float, say: Callable[[str], None], shapes: Sequence[Shape] = SHAPES
) -> dict[str, Any]:
    """Run every pass that is missing; all of them together take about ``minutes``."""
    profile = load_profile(directory / "profile.yaml")
    seconds = max(60.0 * minutes / (len(SHAPES) * len(STATES)) - _TAIL_S, 10.0)
    missing = [(shape, state) for shape in shapes for state in STATES if read_pass(directory, shape, state) is None]
    if missing:
        os.sched_setaffinity(0, {CLIENT_CORE})
        with instance("passes", directory / "passes") as engine:
            for shape, state in missing:
                capacity = capacity_per_s(shape, profile.limits, profile.step_time)
                rate_per_s = round(LOAD[shape] * capacity, 3)
                say(f"pass {shape} {state}: {rate_per_s:g} requests/s for {seconds:.0f} s")
                await run_pass(engine, directory, profile, shape, state, rate_per_s=rate_per_s, seconds=seconds)
    return {"passes": [f"{shape} {state}" for shape in shapes for state in STATES]}


async def run_pass(
    engine: Instance, directory: Path, profile: Profile, shape: Shape, state: State, *, rate_per_s: float,
    seconds: float,
) -> None:  # fmt: skip
    """Run one pass and write it."""
    num = max(round(rate_per_s * seconds), _MIN_REQUESTS)
    asked = workload(shape, num=num, rate_per_s=rate_per_s, seed=SEED)
    await engine.idle()
    engine.mark()
    async with running_gateway(config_of(engine, state, directory / "profile.yaml")) as running:
        await asyncio.sleep(0.5)
        tie = asyncio.create_task(engine.some_arrival())
        answers = await play(asked, f"{running.url}/v1", name=f"{shape}-{state}", model=MODEL, seed=SEED)
        load_average = os.getloadavg()[0]
        await engine.idle()
        rows = [_row(running, answered) for answered in answers]
    path, log = pass_files(directory, shape, state)
    engine.take_log(log)
    times, zero_s = engine_times(log, *await tie)
    for row in rows:
        row.engine = times.get(row.client.request_id)
    done = Pass(
        shape=shape, state=state, num=num, rate_per_s=rate_per_s, seed=SEED, zero_s=zero_s, rows=rows,
        load_average=load_average,
    )  # fmt: skip
    draft = path.with_suffix(".draft")
    draft.write_bytes(msgspec.json.encode(done))
    draft.rename(path)


def config_of(engine: Instance, state: State, profile: Path) -> Config:
    """A pool of this one engine, of which the gateway knows what ``state`` says."""
    one: dict[str, object] = {"id": "real", "model": MODEL, "api_base": engine.url, "engine": "vllm-0.32"}
    if state != "history":
        one["profile"] = str(profile)
    if state in _SHOWN:
        one["snapshots"] = {"shared_memory": engine.segment}
    return pool(
        # Longer than any answer: what is expected of one is then its own max_tokens.
        [{"name": MODEL, "context_tokens": CONTEXT_TOKENS, "prior": {"output_tokens": CONTEXT_TOKENS}}],
        [one],
        routing={"policy": "bear"},
        **({"shadow": {"policy": "bear_throughput", "sample": 1.0}} if state in _SHOWN else {}),
        resilience={"deadline_s": 600.0, "first_byte_timeout_s": 300.0, "idle_timeout_s": 300.0},
    )


def _row(running: RunningGateway, answered: Answered) -> Row:
    row = Row(client=answered)
    record = None if answered.decision is None else running.gateway.decisions.get(answered.decision)
    if record is None or record.decision.candidate is None:
        return row
    estimate = record.decision.candidate.estimate
    if estimate is not None:
        row.source, row.raw_s, answered.predicted_s = estimate.source, estimate.raw_ttft_s, estimate.ttft_s
    if record.shadow is not None and record.shadow.chosen is not None and record.shadow.chosen.estimate is not None:
        row.throughput_s = record.shadow.chosen.estimate.ttft_s
    row.decided_s = record.decision.arrival_s
    row.gateway_ttft_s = None if record.outcome is None else record.outcome.ttft_s
    return row
