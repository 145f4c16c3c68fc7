"""The overhead histogram: one time per decision, drawn with its median in words."""

from __future__ import annotations

from headway.lab.drawing import style
from headway.lab.overhead import decision_times_s, draw
from headway.lab.pool import qwen3_pool


def test_every_decision_is_timed_and_drawn() -> None:
    """As many times as queries, all above zero, and a picture that says their median."""
    times_s = decision_times_s(qwen3_pool(), policy="priced_bear", num_queries=50)
    assert len(times_s) == 50
    assert min(times_s) > 0
    with style():
        drawing = draw({"3 instances": times_s}, "priced_bear")
    assert "median" in drawing.alt
    assert "under priced_bear" in drawing.caption
