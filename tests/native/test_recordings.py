"""The core and its reference against recorded runs of the real vLLM scheduler, without installing it."""

from __future__ import annotations

from collections import Counter

import pytest

from conformance.features import ANY_CLOCK, FEATURES, exercised
from headway._core import ReplayedEngine
from headway.types import EngineRequest
from recorded_runs import Recording, StepResult, first_mismatch, load_recordings
from reference_scheduler import ReferenceEngine


class RestoredEngine:
    """A native engine that is taken apart and rebuilt from its ``state()`` before every step."""

    def __init__(self, engine: ReplayedEngine) -> None:
        self.engine = engine

    def submit(self, request: EngineRequest) -> None:
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


@pytest.fixture(scope="module")
def recordings() -> list[Recording]:
    return load_recordings()


def test_the_core_repeats_every_recorded_run(recordings: list[Recording]) -> None:
    """Batch order, token counts, free blocks, preempted, finished and both queues agree at every step."""
    for recording in recordings:
        engine = ReplayedEngine(recording.workload.limits, ANY_CLOCK)
        assert first_mismatch(engine, recording.workload, recording.record) is None


def test_the_reference_repeats_every_recorded_run(recordings: list[Recording]) -> None:
    """The reference that the core is compared with is itself held to the real scheduler."""
    for recording in recordings:
        engine = ReferenceEngine(recording.workload.limits, ANY_CLOCK)
        assert first_mismatch(engine, recording.workload, recording.record) is None


def test_a_state_carries_everything_that_decides_the_future(recordings: list[Recording]) -> None:
    """An engine rebuilt from its own state before every step goes on as if nothing had happened (fcfs)."""
    for recording in recordings:
        if recording.workload.limits.policy == "fcfs":  # priority ties are broken by submission, which no state holds
            engine = RestoredEngine(ReplayedEngine(recording.workload.limits, ANY_CLOCK))
            assert first_mismatch(engine, recording.workload, recording.record) is None


def test_the_recordings_exercise_every_rule(recordings: list[Recording]) -> None:
    """Each rule changes what happened in at least one recorded run, so that its loss would show."""
    features: Counter[str] = Counter()
    for recording in recordings:
        features.update(exercised(recording.workload, recording.record))
    assert {feature for feature in FEATURES if features[feature] == 0} == set()
