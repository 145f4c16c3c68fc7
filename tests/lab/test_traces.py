"""Traces: what is read, what is dropped and counted, and what a malformed one says."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from headway.errors import DatasetError
from headway.lab.traces import load_arrivals, load_trace

DATA = Path(os.environ.get("HEADWAY_DATA", Path(__file__).parents[2].parent / "shared" / "data")) / "traces"
HEADER = "arrival_s,prompt_tokens,output_tokens\n"


def _write(path: Path, text: str) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def test_arrivals_come_back_sorted(tmp_path: Path) -> None:
    """The column arrival_s is read wherever it stands, and arrivals come back in order."""
    path = _write(tmp_path / "t.csv.gz", "tokens,arrival_s\n5,2.5\n\n7,0\n9,1e1\n")
    assert load_arrivals(path) == [0.0, 2.5, 10.0]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("tokens\n5\n", 1, "column 'arrival_s'"),
        ("", 1, "column 'arrival_s'"),
        ("arrival_s\n0\nsoon\n", 3, "must be a number"),
        ("tokens,arrival_s\n5,1\n5\n", 3, "must be a number"),
        ("arrival_s\n0\ninf\n", 3, "must be finite"),
        ("arrival_s\n0\n1\n-2\n", 4, "at least 0, not -2"),
        ("arrival_s\n3\n3\n", None, "two different"),
    ],
)
def test_malformed_arrivals_are_named(tmp_path: Path, text: str, line: int | None, message: str) -> None:
    """A trace without arrivals, or with one that is no time, raises a DatasetError with path and line."""
    path = _write(tmp_path / "t.csv", text)
    with pytest.raises(DatasetError, match=message) as caught:
        load_arrivals(path)
    assert (caught.value.path, caught.value.line) == (str(path), line)


def test_rows_keep_their_lengths_in_order_of_arrival(tmp_path: Path) -> None:
    """Rows are sorted by arrival with their lengths, and the first one arrives at 0."""
    trace = load_trace(_write(tmp_path / "t.csv", HEADER + "9,30,3\n5,10,1\n7,20,2\n"))
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == [0.0, 2.0, 4.0]
    assert trace.prompt_tokens.tolist() == [10, 20, 30]
    assert trace.output_tokens.tolist() == [1, 2, 3]
    assert trace.tick_s is None


def test_unusable_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    """Rows without tokens on either side, or longer than the context together, are left out and counted apart."""
    text = HEADER + "0,0,5\n1,5,0\n2,90,11\n3,90,10\n4,1,1\n"
    trace = load_trace(_write(tmp_path / "t.csv", text), context_tokens=100)
    assert trace.prompt_tokens.tolist() == [90, 1]
    assert (trace.num_dropped_empty, trace.num_dropped_long) == (2, 1)


def test_lengths_without_times_are_a_trace(tmp_path: Path) -> None:
    """A file of lengths alone has no arrivals."""
    trace = load_trace(_write(tmp_path / "t.csv", "prompt_tokens,output_tokens\n5,6\n"))
    assert trace.arrival_s is None


def test_coarse_stamps_are_spread_over_their_tick(tmp_path: Path) -> None:
    """Where most rows share a stamp each is moved at random within the tick, alike for one seed, and order follows."""
    text = HEADER + "".join(f"{3 * (n // 10)},{n + 1},1\n" for n in range(100))
    path = _write(tmp_path / "t.csv", text)
    trace, again, other = load_trace(path), load_trace(path), load_trace(path, seed=1)
    assert trace.arrival_s is not None
    assert again.arrival_s is not None
    assert other.arrival_s is not None
    assert trace.tick_s == 3.0
    assert trace.arrival_s.tolist() == again.arrival_s.tolist() != other.arrival_s.tolist()
    assert (np.diff(trace.arrival_s) > 0).all()
    original = 3.0 * ((trace.prompt_tokens - 1) // 10)
    shift = trace.arrival_s - original
    assert shift.max() - shift.min() < 3.0


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("arrival_s,prompt_tokens\n0,1\n", 1, "column 'output_tokens'"),
        ("", 1, "column 'prompt_tokens'"),
        (HEADER, None, "no usable row"),
        (HEADER + "0,0,0\n", None, r"no usable row \(1 without tokens"),
        (HEADER + "0,5,5\n-1,5,5\n", 3, "'arrival_s' must be finite and at least 0, not -1"),
        (HEADER + "0,5,nan\n", 2, "'output_tokens' must be finite"),
        (HEADER + "0,-5,5\n", 2, "'prompt_tokens' must be finite and at least 0"),
        (HEADER + "0,5.5,5\n", 2, "'prompt_tokens' must be a whole number"),
        (HEADER + "0,9e9,5\n", 2, "'prompt_tokens' must be a whole number"),
        (HEADER + "0,5\n", 2, "'output_tokens' must be a number"),
    ],
)
def test_a_malformed_trace_is_named(tmp_path: Path, text: str, line: int | None, message: str) -> None:
    """An empty trace, a negative time or a length that is none raises a DatasetError naming file, line and column."""
    path = _write(tmp_path / "t.csv", text)
    with pytest.raises(DatasetError, match=message) as caught:
        load_trace(path)
    assert (caught.value.path, caught.value.line) == (str(path), line)


@pytest.mark.parametrize(
    ("name", "num_rows", "num_empty", "num_long", "tick_s"),
    [
        ("azure_llm_2023_conv.csv.gz", 19366, 0, 0, None),
        ("mooncake_conversation.csv.gz", 12031, 0, 846, 3.0),
        ("aibrix_8min_up_and_down.csv.gz", 2026, 2, 0, None),
        ("sharegpt_val_10k_lengths.csv.gz", 10000, 0, 0, None),
    ],
)
def test_public_traces_read(name: str, num_rows: int, num_empty: int, num_long: int, tick_s: float | None) -> None:
    """The traces that people compare on are read with their known traps counted."""
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"traces are not here: set HEADWAY_DATA to the directory that holds traces/{name}")
    trace = load_trace(path)
    assert (trace.num_dropped_empty, trace.num_dropped_long) == (num_empty, num_long)
    assert len(trace.prompt_tokens) == num_rows - num_empty - num_long
    assert trace.tick_s == (None if tick_s is None else pytest.approx(tick_s, abs=0.01))
