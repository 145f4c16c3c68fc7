"""The figure of the LPS formula: marks from a simulation, lines from the formula, equal bytes every time."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.estimate.queueing import lps_wait_s
from headway.lab.lps import Service
from headway.lab.lps_figure import LOADS, VARIABLE, draw, picture, points, write


def test_the_figure_is_the_same_bytes_each_time(tmp_path: Path) -> None:
    """Two writings give equal PNG and SVG files, with words on the axes."""
    first, second = (write(picture(num_steps=80, num_queues=40), tmp_path / name) for name in ("a", "b"))
    assert [path.name for path in first] == ["lps.png", "lps.svg"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert first[0].read_bytes().startswith(b"\x89PNG")


def test_marks_are_simulated_and_lines_are_the_formula() -> None:
    """Every load is simulated on its own, and stands beside the formula with the service's variability factor."""
    found = points(VARIABLE, num_steps=400, num_queues=60)
    assert [(one.concurrency, one.rho) for one in found] == [(k, rho) for k, rhos in LOADS.items() for rho in rhos]
    factor = VARIABLE.second_moment / 2.0
    assert all(one.formula == lps_wait_s(one.rho, 1.0, one.concurrency, factor) for one in found)
    one_at_a_time = [one for one in found if one.concurrency == 1 and one.rho <= 0.5]
    assert all(one.observed.value == pytest.approx(one.formula, rel=0.5) for one in one_at_a_time)
    assert found != points(VARIABLE, seed=1, num_steps=400, num_queues=60)


def test_the_words_say_how_far_off_the_formula_is() -> None:
    """Whoever does not see the figure reads the range of its error for each kind of service."""
    few = points(Service(), num_steps=150, num_queues=60)
    drawing = draw(few, few)
    assert "exponential service: formula over simulation less 1 is" in drawing.alt
    assert [axes.get_xlabel() for axes in drawing.figure.axes] == ["load ρ (arrival rate ÷ service rate)"] * 2
    assert drawing.figure.axes[0].get_ylim() == drawing.figure.axes[1].get_ylim()
    assert "mean wait" in drawing.figure.axes[0].get_ylabel()
