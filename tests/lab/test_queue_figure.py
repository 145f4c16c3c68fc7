"""The figure of prices over time, and the bench of routing periods."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headway.cli.bench_prices import prices
from headway.errors import ConfigError
from headway.lab.acceptance.settings import FULL, QUICK
from headway.lab.queue_cost import routing_times_ms
from headway.lab.queue_figure import PANELS, draw, picture, price_series
from headway.lab.queue_tuning import CASES, LOADS, SEEDS, table
from headway.policy.bid_control import BidSettings
from queue_loads import LENGTHS


def test_series_are_of_the_time_in_which_requests_come() -> None:
    """A series has a row per time and a column per device, charges of at least 0, and ends with the arrivals."""
    series = price_series(PANELS[0], LENGTHS, num_periods=2000)
    assert series.slots.shape == series.tokens.shape == (len(series.time), 4)
    assert min(series.slots.min(), series.tokens.min()) >= 0.0
    assert 0.0 < series.time[-1] < 2500.0


def test_the_figure_says_in_words_what_it_shows(tmp_path: Path) -> None:
    """Panels, caption and the words for those who do not see it come from the series; a trace file is what it reads."""
    pytest.importorskip("matplotlib", reason="figures need the extra 'lab'")
    drawing = draw({PANELS[2]: price_series(PANELS[2], LENGTHS, num_periods=1500)})
    assert "rate .1: mean charge 0.000 for slots, 0.000 for memory" in drawing.alt
    path = tmp_path / "t.csv"
    rows = zip(LENGTHS.prompt_tokens.tolist(), LENGTHS.output_tokens.tolist(), strict=True)
    path.write_text("prompt_tokens,output_tokens\n" + "".join(f"{p},{o}\n" for p, o in rows))
    assert len(picture(path, num_periods=400).figure.axes) == 2 * len(PANELS)


def test_each_routing_period_is_timed() -> None:
    """The bench gives one positive CPU time per period after its warm-up."""
    times_ms = routing_times_ms(2, num_periods=10, seed=1, settings=BidSettings(history="ahead"))
    assert len(times_ms) == 10
    assert np.min(times_ms) > 0.0


def test_the_bench_prints_medians(capsys: pytest.CaptureFixture[str]) -> None:
    """``headway bench prices`` times both sizes of a pool and both kinds of columns."""
    assert prices(periods=3, json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"period_4", "period_64", "ahead_4", "ahead_64"}
    assert all(0.0 < one["p10_ms"] <= one["median_ms"] <= one["p90_ms"] for one in found.values())
    assert prices(periods=3) == 0
    assert "devices" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="periods"):
        prices(periods=0)


def test_settings_are_compared_on_seeds_of_their_own() -> None:
    """The table of choices has a row per setting, and its seeds are those of no published row."""
    assert not set(SEEDS) & {*FULL.seeds, *QUICK.seeds}
    cases = {name: CASES[name] for name in ("no prices", "ahead")}
    lines = table(LOADS[2], LENGTHS, cases, seeds=(77,), num_requests=60).splitlines()
    assert [line.split(" | ")[0] for line in lines[4:]] == ["| no prices", "| ahead"]
    assert 0.0 < float(lines[-1].split(" | ")[6].rstrip(" |")) < 1.0
