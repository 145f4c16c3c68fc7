"""The acceptance rows A1 and A1b: their shape, their arithmetic, and the real table where it is at hand."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headway._core import batch_time_s
from headway.calibrate.acceptance import COMPOSED_TIMES, composed_step_error, composed_times, simulated_step_error
from headway.errors import DatasetError
from headway.types import StepTime

DATA = Path(os.environ.get("HEADWAY_DATA") or Path(__file__).parents[3] / "shared" / "data")

COLUMNS = "model,kind,n_prefills,prefill_len,n_decodes,decode_ctx,tokens,sum_decode_ctx,prefill_attn_tok2,kernel_ms"
CLOCK = StepTime.knee(b0=7e-3, b1_below=1e-5, b1_above=3e-5, knee=300, b2=5e-8, b3=1e-9)


def table(data: Path, *rows: str) -> Path:
    path = data / COMPOSED_TIMES
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress("\n".join([COLUMNS, *rows]).encode()))
    return path


def composed_row(num_prefills: int, prefill_len: int, num_decodes: int, context: int) -> str:
    chunks = [(prefill_len, 0, False)] * num_prefills + [(1, context, True)] * num_decodes
    return f"m,any,{num_prefills},{prefill_len},{num_decodes},{context},0,0,0,{batch_time_s(CLOCK, chunks) * 1e3!r}"


def test_simulated_step_errors_are_rows_with_intervals() -> None:
    """A1 gives a judged row and two reported ones per form, the same for the same seeds."""
    rows = simulated_step_error(["h100-qwen3-0.6b"], seeds=(1, 2), num_queries=120)
    assert [row.id for row in rows] == [
        f"A1-h100-qwen3-0.6b-{form}{suffix}"
        for form in ("linear", "knee", "six_term")
        for suffix in ("", "-prefill", "-noiseless")
    ]
    for row in rows:
        assert row.ci95 is not None
        low, high = row.ci95
        assert low <= row.value <= high
        reported = row.id.endswith(("-prefill", "-noiseless"))
        assert (row.threshold, row.passed) == ((None, None) if reported else (0.05, row.value <= 0.05))
        assert row.passed is not False
    assert "noise 3%" in rows[0].setting
    assert set(msgspec.to_builtins(rows[0])) == {"id", "claim", "setting", "value", "ci95", "threshold", "pass"}
    assert rows == simulated_step_error(["h100-qwen3-0.6b"], seeds=(1, 2), num_queries=120)


def test_composed_batches_have_the_features_of_their_rows(tmp_path: Path) -> None:
    """A row is so many equal prefills from nothing and so many equal decodes, timed in milliseconds."""
    steps = composed_times(table(tmp_path, "m,mixed,2,100,3,50,203,150,10000,12.5"))["m"]
    columns = {name: steps.column(name)[0] for name in ("requests", "tokens", "decode_context", "prefill_pairs")}  # type: ignore[arg-type]
    assert columns == {"requests": 5, "tokens": 203, "decode_context": 150, "prefill_pairs": 2 * 100 * 101 / 2}
    assert steps.time_s[0] == 0.0125


def test_the_form_of_the_batches_is_the_best(tmp_path: Path) -> None:
    """On batches of a knee clock the knee form wins with no error, and the others are reported without a verdict."""
    rng = np.random.default_rng(1)
    draws = zip(
        rng.integers(0, 4, 300),
        rng.integers(1, 2000, 300),
        rng.integers(1, 99, 300),
        rng.integers(1, 4000, 300),
        strict=True,
    )
    table(tmp_path, *(composed_row(*map(int, draw)) for draw in draws))
    rows = {row.id: row for row in composed_step_error(tmp_path, seeds=(1, 2, 3))}
    assert list(rows) == ["A1b-m-linear", "A1b-m-knee", "A1b-m-six_term", "A1b-m-best"]
    assert rows["A1b-m-best"].value == rows["A1b-m-knee"].value == pytest.approx(0.0, abs=1e-6)
    assert rows["A1b-m-best"].passed
    assert "(knee)" in rows["A1b-m-best"].claim
    assert rows["A1b-m-linear"].value > 0.01
    assert rows["A1b-m-linear"].passed is None


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    """An interval needs at least two values."""
    table(tmp_path, *(composed_row(n % 3, 10 + n, 1 + n % 50, 7 * n) for n in range(120)))
    assert {row.ci95 for row in composed_step_error(tmp_path, seeds=(1,))} == {None}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("m,decode,0,0,1,50,1,50,0,nan", "kernel_ms: must be finite and above 0"),
        ("m,decode,0,0,1,50,1,50,0,0", "kernel_ms: must be finite and above 0"),
        ("m,decode,0,0,one,50,1,50,0,1", "n_decodes"),
        ("m,decode", "n_prefills"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path: Path, row: str, message: str) -> None:
    """A time that no batch takes and a count that is none are reported with file and line."""
    path = table(tmp_path, "m,decode,0,0,1,50,1,50,0,1.5", row)
    with pytest.raises(DatasetError, match=message) as caught:
        composed_step_error(tmp_path)
    assert (caught.value.path, caught.value.line) == (str(path), 3)


def test_an_absent_table_is_named(tmp_path: Path) -> None:
    """A data directory without the table is refused by the table's path."""
    with pytest.raises(DatasetError, match=r"h100_composed_iteration_times\.csv\.gz: cannot be read"):
        composed_step_error(tmp_path)


@pytest.mark.skipif(not (DATA / COMPOSED_TIMES).exists(), reason=f"needs {DATA / COMPOSED_TIMES} (set HEADWAY_DATA)")
def test_the_best_form_fits_composed_h100_batches() -> None:
    """A1b: for every model the best form, always the knee, predicts the other half to 5 %."""
    best = [row for row in composed_step_error(DATA, seeds=(1, 2)) if row.id.endswith("-best")]
    assert len(best) == 6
    for row in best:
        assert row.passed, row
        assert "(knee)" in row.claim
