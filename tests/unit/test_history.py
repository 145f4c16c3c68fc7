"""What an instance was seen to do lately: medians that no outlier moves, prompts that cost, silence that counts."""

from __future__ import annotations

import math

import pytest

from headway.estimate.history import HistoryEstimator
from headway.estimate.queueing import QueueingEstimator
from headway.fleet import FleetView
from headway.types import Estimate, Instance, Outcome, OutcomeStatus, Query
from pools import book as book_one

HOSTED = Instance(id="api", model="m")
QUERY = Query(id="q", arrival_s=0.0, prompt_text="", prompt_tokens={"m": 100})


def history() -> HistoryEstimator:
    return HistoryEstimator(QueueingEstimator())


def ended(
    ttft_s: float | None, total_s: float | None = None, status: OutcomeStatus = "ok", prompt_tokens: int | None = 100
) -> Outcome:
    return Outcome(
        query_id="q", instance_id="api", status=status, ttft_s=ttft_s, total_s=total_s, prompt_tokens=prompt_tokens
    )


def ask(estimator: HistoryEstimator, fleet: FleetView, now: float = 0.0, tokens: int = 100) -> Estimate:
    (estimate,) = estimator.estimate(QUERY, fleet, [tokens], now)
    return estimate


def book(fleet: FleetView, instance_id: str, count: int, now: float, tag: str = "r") -> None:
    for number in range(count):
        book_one(fleet, f"{tag}{number}", instance_id, now=now)


def test_before_three_samples_another_estimator_speaks() -> None:
    """The source tells who: the default before, history after."""
    fleet, estimator = FleetView([HOSTED]), history()
    sources = []
    for second in range(4):
        sources.append(ask(estimator, fleet, float(second)).source)
        estimator.observe(ended(0.3, 1.0), HOSTED, float(second))
    assert sources == ["default", "default", "default", "history"]


def test_one_slow_cold_sample_does_not_condemn_an_instance() -> None:
    """Two samples say nothing yet, and a third fast one leaves the slow one an outlier."""
    fleet, estimator = FleetView([HOSTED]), history()
    estimator.observe(ended(30.0, 31.0), HOSTED, 1.0)
    assert ask(estimator, fleet, 1.0).ttft_s == 0.5
    estimator.observe(ended(0.3, 1.0), HOSTED, 2.0)
    assert ask(estimator, fleet, 2.0).ttft_s == 0.5
    estimator.observe(ended(0.32, 1.0), HOSTED, 3.0)
    assert ask(estimator, fleet, 3.0).ttft_s == pytest.approx(0.32)


def test_the_median_follows_a_lasting_change() -> None:
    """When the provider slows down for good, so does the estimate, p90 with it."""
    fleet, estimator = FleetView([HOSTED]), history()
    for second in range(40):
        estimator.observe(ended(0.3, 2.0), HOSTED, float(second))
    for second in range(40, 75):
        estimator.observe(ended(1.2 + 0.01 * second, 2.0), HOSTED, float(second))
    estimate = ask(estimator, fleet, 75.0)
    assert 1.6 <= estimate.ttft_s <= 1.8
    assert estimate.ttft_s < estimate.ttft_p90_s <= 1.95


def test_an_instance_that_gets_no_traffic_is_forgotten_and_tried_again() -> None:
    """A condemned instance would never be measured again: after two minutes the default is back."""
    fleet, estimator = FleetView([HOSTED]), history()
    for second in range(5):
        estimator.observe(ended(9.0, 10.0), HOSTED, float(second))
    assert ask(estimator, fleet, 100.0).ttft_s == 9.0
    assert ask(estimator, fleet, 125.0).ttft_s == 0.5


def test_a_request_given_up_without_a_token_counts_as_at_least_that_slow() -> None:
    """Three timeouts of 20 s make a stuck instance slow; quick cancels and errors teach nothing of its speed."""
    fleet, stuck, fine = FleetView([HOSTED]), history(), history()
    for second in range(3):
        stuck.observe(ended(None, 20.0, "timeout"), HOSTED, float(second))
        fine.observe(ended(None, 0.1, "cancelled"), HOSTED, float(second))
        fine.observe(ended(None, 20.0, "error"), HOSTED, float(second))
    assert ask(stuck, fleet, 3.0).ttft_s == 20.0
    assert ask(fine, fleet, 3.0).ttft_s == 0.5


def test_requests_beyond_the_usual_number_that_waits_spread_the_next_ones() -> None:
    """Each 25 beyond what the window shows (Little's law) add the median once more; the usual number adds nothing."""
    fleet, estimator = FleetView([HOSTED]), history()
    for tick in range(41):  # ten answers begin per second, after two seconds each: twenty wait
        estimator.observe(ended(2.0, 9.0), HOSTED, tick / 10)
    book(fleet, "api", 20, now=4.0)
    assert ask(estimator, fleet, 4.0).ttft_s == pytest.approx(2.0, rel=0.01)
    book(fleet, "api", 25, now=4.0, tag="s")
    crowded = ask(estimator, fleet, 4.0)
    assert crowded.ttft_s == pytest.approx(4.0, rel=0.05)
    assert crowded.wait_s == pytest.approx(crowded.ttft_s - 2.0)


def test_answers_under_way_are_no_queue() -> None:
    """T1: however many streams are being answered, they do not make the next first token later."""
    fleet, estimator = FleetView([HOSTED]), history()
    for second in range(3):
        estimator.observe(ended(0.2, 9.0), HOSTED, float(second))
    book(fleet, "api", 100, now=3.0)
    for number in range(100):
        fleet.first_token_seen(f"r{number}", 3.2)
    assert ask(estimator, fleet, 4.0).ttft_s == 0.2


def test_estimating_changes_nothing() -> None:
    """The same question at the same time has the same answer, however often and in whatever order it is asked."""
    fleet, estimator = FleetView([HOSTED]), history()
    for second in range(10):
        estimator.observe(ended(0.1 * second, 1.0), HOSTED, float(second))
    late, early = ask(estimator, fleet, 500.0), ask(estimator, fleet, 10.0)
    assert (ask(estimator, fleet, 10.0), ask(estimator, fleet, 500.0)) == (early, late)


def test_memory_of_outcomes_is_bounded() -> None:
    """A hundred thousand outcomes leave what the last few dozen said."""
    fleet, estimator = FleetView([HOSTED]), history()
    for number in range(100_000):
        estimator.observe(ended(0.2 if number > 99_900 else 7.0, 1.0), HOSTED, number * 1e-3)
    assert ask(estimator, fleet, 100.0).ttft_s == 0.2


def test_long_prompts_cost_what_the_window_shows() -> None:
    """TTFTs of 0.1 s plus 20 microseconds per token, noisy, with stalls among them: the line is found."""
    fleet, estimator = FleetView([HOSTED]), history()
    for number in range(64):
        tokens = (50, 400, 3000, 12_000)[number % 4]
        ttft_s = (0.1 + 2e-5 * tokens) * (1 + 0.05 * math.sin(number)) + (8.0 if number % 9 == 0 else 0.0)
        estimator.observe(ended(ttft_s, ttft_s + 1.0, prompt_tokens=tokens), HOSTED, float(number))
    assert ask(estimator, fleet, 64.0, tokens=50).ttft_s == pytest.approx(0.101, rel=0.1)
    assert ask(estimator, fleet, 64.0, tokens=12_000).ttft_s == pytest.approx(0.34, rel=0.1)
    assert ask(estimator, fleet, 64.0, tokens=50).ttft_p90_s > 5.0  # one in nine stalls


def test_equal_prompts_give_no_slope() -> None:
    """Where all prompts are about as long, the median is said of every length."""
    fleet, estimator = FleetView([HOSTED]), history()
    for number in range(30):
        estimator.observe(ended(0.2 + 0.01 * (number % 3), 1.0, prompt_tokens=100 + number), HOSTED, float(number))
    assert ask(estimator, fleet, 30.0, tokens=20_000).ttft_s == ask(estimator, fleet, 30.0, tokens=1).ttft_s


def test_an_instance_that_accepts_and_never_answers_is_as_slow_as_its_silence() -> None:
    """T10: nothing has come for nine seconds, so nothing sooner is expected; the first token that comes ends that."""
    fleet, estimator = FleetView([HOSTED]), history()
    book(fleet, "api", 1, now=1.0)
    assert ask(estimator, fleet, 1.5).ttft_s == pytest.approx(0.5, rel=0.1)
    silent = ask(estimator, fleet, 10.0)
    assert (silent.ttft_s, silent.source) == (9.0, "default")
    fleet.first_token_seen("r0", 10.0)
    assert ask(estimator, fleet, 10.0).ttft_s == pytest.approx(0.5, rel=0.1)


def test_one_mute_stream_among_others_condemns_nobody() -> None:
    """While others get first tokens, one that does not is its own affair; unstreamed answers say nothing either."""
    fleet, estimator = FleetView([HOSTED]), history()
    for second in range(3):
        estimator.observe(ended(0.3, 1.0), HOSTED, float(second))
    book(fleet, "api", 2, now=1.0)
    fleet.first_token_seen("r1", 9.8)
    assert ask(estimator, fleet, 10.0).ttft_s < 0.4
    fleet.release("r0", 10.0)
    fleet.book(
        request_id="whole", instance_id="api", prompt_tokens=9, predicted_output_tokens=9.0, max_tokens=None,
        priority=0, now=10.0, is_streamed=False,
    )  # fmt: skip
    assert ask(estimator, fleet, 40.0).ttft_s < 0.4
