"""What waits for blocks or slots tells nothing of an engine's clock: an overload is not taken for a wrong one."""

from __future__ import annotations

import pytest

from headway.types import Outcome
from pools import FAST, LIMITS, book, instance, pool


def outcome(name: str, instance_id: str, ttft_s: float) -> Outcome:
    return Outcome(query_id=name, instance_id=instance_id, status="ok", ttft_s=ttft_s, total_s=ttft_s)


@pytest.mark.parametrize(
    ("waiting", "prompt_tokens", "waits"),
    [
        ([], 30_000, False),
        ([30_000] * 10, 10_000, False),
        ([30_000] * 10, 30_000, True),
        ([10] * LIMITS.max_num_seqs, 10, True),
    ],
)
def test_a_wait_for_room_says_nothing_of_the_clock(waiting: list[int], prompt_tokens: int, waits: bool) -> None:
    """Where blocks or slots must first come free, how long others' answers become decides: no pair is made of it."""
    router = pool(instance("a", step_time=FAST), queued={"a": waiting})
    router.fleet.age(0.0)
    view = router.fleet.views[0]
    assert view.waits_for_room(prompt_tokens) is waits
    router.fleet.book(
        request_id="q",
        instance_id="a",
        prompt_tokens=prompt_tokens,
        predicted_output_tokens=100.0,
        max_tokens=None,
        priority=0,
        now=0.0,
        predicted_ttft_s=9.0,
    )
    router.observe(outcome("q", "a", 0.5), 0.0)
    assert router.residuals.residual("a").num_pairs == (0 if waits else 1)


def test_an_overloaded_engine_is_not_taken_for_one_with_a_wrong_clock() -> None:
    """Answers far sooner than predicted, of requests that waited for memory, leave trust and correction alone."""
    router = pool(instance("a", step_time=FAST), queued={"a": [30_000] * 10})
    for number in range(40):
        book(router.fleet, f"w{number}", "a", prompt_tokens=1000)
        router.fleet.age(0.0)
        name = f"q{number}"
        router.fleet.book(
            request_id=name,
            instance_id="a",
            prompt_tokens=19_000,
            predicted_output_tokens=100.0,
            max_tokens=None,
            priority=0,
            now=0.0,
            predicted_ttft_s=50.0,
        )
        router.observe(outcome(name, "a", 5.0), 0.0)
    view = router.fleet.views[0]
    assert view.clock_trusted
    assert view.clock_scale == 1.0
