"""Holds the native replay of one random case to the Python reference.

Shared by ``make test`` (10,000 cases) and ``make conformance`` (100,000). Times agree to 1e-9 relative, because the
core sums features in closed form and the reference adds step by step; step counts and infinities agree exactly.
"""

from __future__ import annotations

import math

from headway._core import ReplayedEngine
from headway.types import Replay
from random_states import Case, random_case
from reference_scheduler import reference_replay


def same_time(left_s: float, right_s: float) -> bool:
    """Whether two times agree to 1e-9 relative (both infinite counts as agreement)."""
    return left_s == right_s or math.isclose(left_s, right_s, rel_tol=1e-9, abs_tol=0.0)


def same_replay(native: Replay, expected: tuple[float, float, int]) -> bool:
    """Whether a native replay equals (ttft_s, wait_s, num_steps); the steps of one that never ends do not count."""
    ttft_s, wait_s, num_steps = expected
    return (
        same_time(native.ttft_s, ttft_s)
        and same_time(native.wait_s, wait_s)
        and (math.isinf(ttft_s) or native.num_steps == num_steps)
    )


def first_token(engine: ReplayedEngine, case: Case) -> Replay:
    """The native answer for the newcomer of a case."""
    newcomer = case.newcomer
    return engine.first_token(
        newcomer.prompt_tokens,
        newcomer.priority,
        newcomer.arrival_s,
        newcomer.cached_tokens,
        newcomer.shared_blocks,
    )


def replay_difference(case: Case, expected: tuple[float, float, int]) -> str | None:
    """How the native replay of a case differs from the expected one; None when it does not."""
    engine = ReplayedEngine.from_state(case.state, case.step_time)
    for asked in ("the first time", "a second time"):  # the second answer comes from the cached trajectory
        native = first_token(engine, case)
        if not same_replay(native, expected):
            return f"seed {case.seed}: reference {expected}, native, asked {asked}, {native}"
    return None


def replay_differences(first_seed: int, num_cases: int) -> tuple[list[str], int]:
    """The differences over a range of seeds, and how many of the newcomers never got a first token."""
    differences: list[str] = []
    num_never = 0
    for seed in range(first_seed, first_seed + num_cases):
        case = random_case(seed)
        expected = reference_replay(case.state, case.newcomer, case.step_time)
        num_never += math.isinf(expected[0])
        difference = replay_difference(case, expected)
        if difference is not None:
            differences.append(difference)
    return differences, num_never
