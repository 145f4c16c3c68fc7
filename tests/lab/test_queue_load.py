"""Loads of the central queue: arrivals, lengths, predictions, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headway.errors import ConfigError, DatasetError
from headway.lab.queue_load import Lengths, queue_load, trace_lengths
from queue_loads import LENGTHS, load_of, small_load


def test_one_seed_keeps_its_pattern_at_every_rate() -> None:
    """Arrivals of a seed at twice the rate are the same ones in half the time, with the same lengths."""
    slow, fast = (small_load(rate=rate, whole_periods=False) for rate in (0.2, 0.4))
    assert slow.arrivals == pytest.approx(2 * fast.arrivals)
    assert (slow.output_tokens == fast.output_tokens).all()
    assert not np.array_equal(slow.arrivals, small_load(rate=0.2, seed=1, whole_periods=False).arrivals)


def test_the_abstract_clock_gets_whole_periods() -> None:
    """Arrivals move to the beginning of the next period, in order."""
    load = small_load()
    assert (load.arrivals == np.floor(load.arrivals)).all()
    assert (np.diff(load.arrivals) >= 0).all()


def test_a_rate_shift_changes_the_rate_from_then_on() -> None:
    """Before the shift arrivals are those without it; after it they come at the other rate."""
    steady, shifted = small_load(4000, 0.4), small_load(4000, 0.4, rate_after=0.8, shift_at=5000.0)
    before = steady.arrivals <= 5000
    assert (shifted.arrivals[before] == steady.arrivals[before]).all()
    after = shifted.arrivals[~before]
    assert len(after) / (after[-1] - 5000.0) == pytest.approx(0.8, rel=0.08)


def test_predictions_are_within_their_error() -> None:
    """Predicted lengths are true ones times a factor within the error, at least 1; without error they are true."""
    load = small_load(2000, length_error=0.2)
    assert (np.abs(load.predicted_tokens - load.output_tokens) <= 0.2 * load.output_tokens + 0.5).all()
    assert load.predicted_tokens.min() >= 1
    assert not np.array_equal(load.predicted_tokens, load.output_tokens)
    assert np.array_equal(small_load().predicted_tokens, small_load().output_tokens)


def test_a_split_keeps_the_totals() -> None:
    """Totals divided 1:4 and 4:1 between prompt and output leave at least a token on either side."""
    for prompt, output in ((1, 4), (4, 1)):
        split = LENGTHS.split(prompt, output)
        assert (split.prompt_tokens + split.output_tokens == LENGTHS.prompt_tokens + LENGTHS.output_tokens).all()
        share = split.output_tokens.sum() / (split.prompt_tokens + split.output_tokens).sum()
        assert share == pytest.approx(output / 5, abs=0.01)
    assert Lengths(np.array([1]), np.array([1])).split(99, 1).output_tokens.tolist() == [1]


def test_loads_are_shares_of_what_there_is() -> None:
    """ρ of the slots is output tokens over slot-periods, that of the memory footprints over token-periods."""
    load = load_of((0, 10, 4), (100, 20, 2))
    assert load.slot_load(3) == pytest.approx(6 / 300)
    assert load.memory_load(50) == pytest.approx((11 + 12 + 13 + 14 + 21 + 22) / (100 * 50))


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"num_requests": 0}, "num_requests"),
        ({"rate": 0.0}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"rate_after": -1.0}, "rate_after"),
        ({"length_error": 1.0}, "length_error"),
    ],
)
def test_impossible_loads_are_refused(fields: dict[str, float], key: str) -> None:
    """No request, a rate that is none and an error that leaves no length name their key."""
    with pytest.raises(ConfigError) as caught:
        queue_load(LENGTHS, **{"num_requests": 5, "rate": 1.0, "seed": 0, **fields})  # type: ignore[arg-type]
    assert caught.value.key == key


def test_lengths_come_from_a_trace(tmp_path: Path) -> None:
    """Pairs beyond the context are left out; a file that is not there is an error that names it."""
    path = tmp_path / "t.csv"
    path.write_text("prompt_tokens,output_tokens\n10,5\n4000,97\n30,6\n")
    found = trace_lengths(path)
    assert (found.prompt_tokens.tolist(), found.output_tokens.tolist()) == ([10, 30], [5, 6])
    with pytest.raises(DatasetError, match=r"none\.csv"):
        trace_lengths(tmp_path / "none.csv")
