"""Part ``errors``: what the predicted times to first token miss, taken apart. Reads the passes; runs nothing.

Of each request of the passes with snapshots, predicted − observed is the exact sum of: *step time*, fitted against
measured time of the very batches that the engine ran from its first sight of the request to its first token; *batch in
flight*, the same for what was left of the batch that ran at the decision; *arrival delay*, from that batch's end to the
one that saw the request; *HTTP*, from the client to the decision and the first token's way back; the *correction* that
was learned; and the *rest*, mostly requests that came later and made its batches longer. *Unknown lengths* stand
beside: the replay with every answer as long as the trace's mean against the replay with true lengths, both with fitted
step times.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from headway._core import LengthRule, ReplayedEngine
from headway.calibrate.read_log import read_step_log
from headway.calibrate.step_table import Column, predict_s
from headway.profiles import Profile, load_profile
from headway.types import EngineRequest, EngineState
from real_engine.mirror import Run, along, newcomers_of, read_run
from real_engine.passes import Pass, Row, State, pass_files, read_pass
from real_engine.steps import EngineTimes, client_id
from real_engine.workload import SHAPES, mean_output_tokens

#: The first requests of a pass, from which corrections and histories learn; left out of every figure alike.
WARM_UP: Final = 5
_STATES: Final[tuple[State, ...]] = ("snapshots", "again")
_LENGTHS: Final = LengthRule("survival")
_NO_LIMIT: Final = 0


def errors(directory: Path) -> dict[str, Any]:
    """The error of each shape by cause, in milliseconds and as a share of the observed time to first token."""
    profile = load_profile(directory / "profile.yaml")
    found = {}
    for shape in SHAPES:
        parts: dict[str, list[float]] = {}
        for state in _STATES:
            done = read_pass(directory, shape, state)
            if done is not None:
                _collect(parts, done, pass_files(directory, shape, state)[1], profile)
        if parts:
            found[shape] = _summary(parts)
    return found


def usable(done: Pass) -> list[Row]:
    """The rows that count: whole answers behind the warm-up whose engine times are known."""
    return [
        row
        for row in done.rows[WARM_UP:]
        if row.client.error is None and row.client.first_s is not None and row.engine is not None
    ]


def _collect(parts: dict[str, list[float]], done: Pass, log: Path, profile: Profile) -> None:
    run = read_run(log)
    table = read_step_log(log).steps
    fitted_s = predict_s(profile.step_time, table)
    lengths = _length_errors(run, done, profile)
    for row in usable(done):
        client, engine = row.client, row.engine
        assert engine is not None
        if row.decided_s is None or client.first_s is None or client.predicted_s is None:
            continue
        if row.raw_s is None:
            continue
        ran = slice(engine.seen, engine.first_token + 1)
        observed_s = client.first_s - client.sent_s
        left_s, fitted_left_s = _left_s(run, fitted_s, done.zero_s, row.decided_s, engine)
        values = {
            "observed": observed_s,
            "total": client.predicted_s - observed_s,
            "step_time": float((fitted_s[ran] - table.time_s[ran]).sum()),
            "in_flight": fitted_left_s - left_s,
            "arrival_delay": -(engine.seen_s - row.decided_s - left_s),
            "http": -(row.decided_s - client.sent_s) - (client.first_s - engine.first_token_s),
            "correction": client.predicted_s - row.raw_s,
            "rest": row.raw_s - fitted_left_s - float(fitted_s[ran].sum()),
            "unknown_lengths": lengths[client.request_id],
        }
        for name, value in values.items():
            parts.setdefault(name, []).append(value)


def _left_s(run: Run, fitted_s: Column, zero_s: float, decided_s: float, engine: EngineTimes) -> tuple[float, float]:
    """What was left of the batch in flight at the decision, as measured and by its fitted time; 0 where none was."""
    for index in range(engine.seen - 1, -1, -1):
        batch = run.batches[index]
        if batch.start_s + zero_s <= decided_s:
            into_s = decided_s - batch.start_s - zero_s
            if into_s >= batch.time_s:
                return 0.0, 0.0
            return batch.time_s - into_s, max(float(fitted_s[index]) - into_s, 0.0)
    return 0.0, 0.0


def _length_errors(run: Run, done: Pass, profile: Profile) -> dict[str, float]:
    """Replay with the mean length − replay with true lengths, by client's id, at the batch that saw each request."""
    decided = {row.client.request_id: row.decided_s for row in done.rows if row.decided_s is not None}
    times = {row.client.request_id: row.engine for row in done.rows if row.engine is not None}
    mean = mean_output_tokens(done.shape)
    by_seen: dict[int, list[tuple[str, EngineRequest]]] = {}
    for one in newcomers_of(run, decided, times):
        name = one.request.request_id
        by_seen.setdefault(one.times.seen - 1, []).append((name, one.request))
    found: dict[str, float] = {}
    for index, engine in along(run, profile.step_time):
        arrivals = by_seen.get(index)
        if not arrivals:
            continue
        state = engine.state()
        known = ReplayedEngine.from_state(state, profile.step_time)
        unknown = ReplayedEngine.from_state(_guessed(state, mean), profile.step_time)
        for name, request in arrivals:
            expected = msgspec.structs.replace(request, target_output_tokens=round(mean), max_tokens=None)
            found[client_id(name)] = unknown.replay(expected).ttft_s - known.replay(request).ttft_s
            known.submit(request)
            unknown.submit(expected)
    return found


def _guessed(state: EngineState, mean: float) -> EngineState:
    """The state with every answer as long as a gateway that knows only the mean expects it to become."""

    def guess(request: EngineRequest) -> EngineRequest:
        target = _LENGTHS.target_tokens(mean, request.prompt_tokens, request.output_tokens, _NO_LIMIT)
        return msgspec.structs.replace(request, target_output_tokens=target, max_tokens=None)

    return msgspec.structs.replace(
        state, running=[guess(one) for one in state.running], waiting=[guess(one) for one in state.waiting]
    )


def _summary(parts: dict[str, list[float]]) -> dict[str, Any]:
    observed = np.array(parts["observed"])
    causes = {}
    for name, values in parts.items():
        if name == "observed":
            continue
        value = np.array(values)
        causes[name] = {
            "mean_ms": float(value.mean() * 1e3),
            "mean_absolute_ms": float(np.abs(value).mean() * 1e3),
            "mean_absolute_share": float((np.abs(value) / observed).mean()),
        }
    return {"num": len(observed), "mean_observed_ms": float(observed.mean() * 1e3), "causes": causes}
