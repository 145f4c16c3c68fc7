"""The core and its reference against recorded runs of the real vLLM scheduler, without installing it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

from conformance.features import exercised, features_of
from headway._core import ReplayedEngine
from headway.types import EngineRequest
from random_states import KINDS
from recorded_runs import (
    ANY_CLOCK,
    Recording,
    StepResult,
    first_mismatch,
    load_recordings,
    native_engine,
    reference_engine,
)

COUNTED_KINDS = [kind for kind in KINDS if "prefix" not in kind]


class RestoredEngine:
    """A native engine that is taken apart and rebuilt from its ``state()`` before every step."""

    def __init__(self, engine: ReplayedEngine) -> None:
        self.engine = engine

    def submit(self, request: EngineRequest, block_hashes: Sequence[int]) -> None:
        self.engine.submit(request)

    def cancel(self, request_id: str) -> bool:
        return self.engine.cancel(request_id)

    def step(self) -> StepResult:
        self.engine = ReplayedEngine.from_state(self.engine.state(), ANY_CLOCK)
        return self.engine.step()

    @property
    def running(self) -> list[EngineRequest]:
        return self.engine.running

    @property
    def waiting(self) -> list[EngineRequest]:
        return self.engine.waiting


@cache
def recordings(kind: str) -> list[Recording]:
    return load_recordings(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_the_core_repeats_every_recorded_run(kind: str) -> None:
    """Batch order, token counts, free blocks, preempted, finished and both queues agree at every step."""
    for recording in recordings(kind):
        engine = native_engine(recording.workload.limits)
        assert first_mismatch(engine, recording.workload, recording.record) is None


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_repeats_every_recorded_run(kind: str) -> None:
    """The reference that the core is compared with is itself held to the real scheduler."""
    for recording in recordings(kind):
        engine = reference_engine(recording.workload.limits)
        assert first_mismatch(engine, recording.workload, recording.record) is None


@pytest.mark.parametrize("kind", COUNTED_KINDS)
def test_a_state_carries_everything_that_decides_the_future(kind: str) -> None:
    """An engine rebuilt from its own state before every step goes on as if nothing had happened (fcfs)."""
    for recording in recordings(kind):
        if recording.workload.limits.policy == "fcfs":  # priority ties are broken by submission, which no state holds
            engine = RestoredEngine(ReplayedEngine(recording.workload.limits, ANY_CLOCK))
            assert first_mismatch(engine, recording.workload, recording.record) is None


@pytest.mark.parametrize("kind", KINDS)
def test_the_recordings_exercise_every_rule(kind: str) -> None:
    """Each rule changes what happened in at least one recorded run, so that its loss would show."""
    missing = set(features_of(recordings(kind)[0].workload.limits))
    for recording in recordings(kind):
        missing -= exercised(recording.workload, recording.record)
        if not missing:
            break
    assert missing == set()
