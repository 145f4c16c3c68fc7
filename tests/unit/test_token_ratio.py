"""Counted prompt tokens, corrected by what upstreams report."""

from __future__ import annotations

import pytest

from headway.gateway.token_ratio import TokenRatio


def test_counting_is_right_before_any_report() -> None:
    """Without reports the count stands, and no error is claimed."""
    ratio = TokenRatio(["m"])
    assert (ratio.tokens("m", 700), ratio.error("m")) == (700, 0.0)


def test_reports_move_the_count_slowly() -> None:
    """One report moves it a little, a hundred bring it home; the error says how far off recent counts were."""
    ratio = TokenRatio(["m", "n"])
    ratio.observe("m", 1000, 1300)
    assert 1.0 < ratio.ratio("m") < 1.15
    assert ratio.error("m") == pytest.approx(300 / 1300)
    for _ in range(300):
        ratio.observe("m", 1000, 1300)
    assert ratio.ratio("m") == pytest.approx(1.3, rel=0.01)
    assert ratio.error("m") < 0.02
    assert ratio.ratio("n") == 1.0


@pytest.mark.parametrize("reported", [0, -5, 1, 249, 4001, 10**9])
def test_broken_reports_teach_nothing(reported: int) -> None:
    """A report that no language explains is ignored."""
    ratio = TokenRatio(["m"])
    ratio.observe("m", 1000, reported)
    assert (ratio.ratio("m"), ratio.error("m")) == (1.0, 0.0)


def test_counts_stay_in_range() -> None:
    """The corrected count is at least 1 and fits the core's counters."""
    ratio = TokenRatio(["m"])
    for _ in range(500):
        ratio.observe("m", 1000, 260)
    assert ratio.tokens("m", 1) == 1
    for _ in range(2000):
        ratio.observe("m", 1000, 3900)
    assert ratio.tokens("m", 2**31 - 1) == 2**31 - 1
