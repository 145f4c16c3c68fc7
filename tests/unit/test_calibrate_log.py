"""The step log: what an engine writes is what a calibration reads, and a wrong line is refused where it is wrong."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from headway.calibrate.read_log import read_step_log
from headway.engines.simulated import step_log_header
from headway.engines.step_log import StepLogWriter, batch_features, logged_step
from headway.errors import ConfigError, DatasetError
from headway.profiles import load_truth

TRUTH = load_truth("h100-qwen3-8b")
HEADER = msgspec.json.encode(step_log_header(TRUTH)).decode()
CHUNKS = [[1, 500, True], [200, 300, False], [1, 0, False]]
SUMS: dict[str, object] = msgspec.structs.asdict(batch_features([(1, 500, True), (200, 300, False), (1, 0, False)]))


def written(tmp_path: Path, *lines: object, header: str = HEADER) -> Path:
    path = tmp_path / "steps.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join([header, *texts]) + "\n")
    return path


def line(start_s: float = 0.0, time_s: float = 0.01, **others: object) -> dict[str, object]:
    return {"start_s": start_s, "time_s": time_s, **others}


def test_chunks_and_sums_say_the_same(tmp_path: Path) -> None:
    """A step given as chunks and one given as their sums are the same step."""
    log = read_step_log(written(tmp_path, line(0.0, chunks=CHUNKS), line(0.5, **SUMS)))
    assert len(log.steps) == 2
    assert log.steps.features[0].tolist() == log.steps.features[1].tolist()
    assert {name: log.steps.column(name)[0] for name in ("requests", "tokens", "prefill_pairs", "context_squares")} == {
        "requests": 3.0,
        "tokens": 202.0,
        "prefill_pairs": 200 * 300 + 200 * 201 / 2 + 1,
        "context_squares": 500.0**2 + 300.0**2,
    }
    assert log.steps.start_s.tolist() == [0.0, 0.5]
    assert log.steps.outputs is None
    assert log.steps.finished is None


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    """Every step a writer took comes back, with the header and the hash of the file."""
    path = tmp_path / "steps.jsonl"
    writer = StepLogWriter(path, step_log_header(TRUTH))
    prefill = SimpleNamespace(prompt_tokens=100, output_tokens=0, computed_tokens=100, scheduled_tokens=100)
    part = SimpleNamespace(prompt_tokens=900, output_tokens=0, computed_tokens=400, scheduled_tokens=300)
    decode = SimpleNamespace(prompt_tokens=50, output_tokens=7, computed_tokens=57, scheduled_tokens=1)
    recompute = SimpleNamespace(prompt_tokens=50, output_tokens=7, computed_tokens=1, scheduled_tokens=1)
    steps = [
        logged_step([prefill, decode], start_s=0.0, time_s=0.02, num_finished=1),
        logged_step([part, recompute], start_s=0.02, time_s=0.03, num_finished=0),
    ]
    for step in steps:
        writer.write(step)
    writer.close()
    writer.close()
    log = read_step_log(path)
    assert log.header == step_log_header(TRUTH)
    assert log.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert log.steps.time_s.tolist() == [0.02, 0.03]
    assert log.steps.outputs is not None
    assert log.steps.outputs.tolist() == [2.0, 0.0]
    assert log.steps.finished is not None
    assert log.steps.finished.tolist() == [1.0, 0.0]
    assert log.steps.column("decodes").tolist() == [1.0, 0.0]
    assert log.steps.column("decode_context").tolist() == [56.0, 0.0]
    assert log.steps.column("prefill_tokens").tolist() == [100.0, 301.0]
    assert log.steps.column("context").tolist() == [56.0, 100.0]


def test_a_gzipped_log_is_read(tmp_path: Path) -> None:
    """A log that was compressed for keeping needs no unpacking."""
    path = tmp_path / "steps.jsonl.gz"
    path.write_bytes(gzip.compress(f"{HEADER}\n{json.dumps(line(chunks=CHUNKS))}\n".encode()))
    assert len(read_step_log(path).steps) == 1


def test_batches_without_a_request_are_dropped_and_counted(tmp_path: Path) -> None:
    """A step that only preempted says nothing of kernels; neither it nor a blank line is a row."""
    log = read_step_log(written(tmp_path, line(0.0, chunks=[]), "", line(1.0, chunks=CHUNKS)))
    assert (len(log.steps), log.num_empty) == (1, 1)


GOOD = line(chunks=CHUNKS)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"start_s": 0, "time_s": NaN, "chunks": []}', "time_s: must be finite, not nan"),
        ('{"start_s": Infinity, "time_s": 1, "chunks": []}', "start_s: must be finite, not inf"),
        ('{"start_s": 0, "time_s": 1e999, "chunks": []}', "time_s: must be finite, not inf"),
        (line(2.0, -0.01, chunks=CHUNKS), "time_s: must be finite and above 0, not -0.01"),
        (line(2.0, 0.0, chunks=CHUNKS), "time_s: must be finite and above 0, not 0.0"),
        (line(-1.0, chunks=CHUNKS), "start_s: must not fall, but -1.0 comes after 0.0"),
        (line(2.0, chunks=CHUNKS, gpu="H100"), "unknown field `gpu`"),
        (line(2.0, time_ms=3, chunks=CHUNKS), "unknown field `time_ms`"),
        ({"start_s": 2.0, "chunks": CHUNKS}, "missing required field `time_s`"),
        (line(2.0), "requests: is missing; a step has chunks, or all of requests, tokens"),
        (line(2.0, **{**SUMS, "chunks": CHUNKS}), "requests: stands beside chunks"),
        (line(2.0, chunks=[[0, 5, False]]), "Expected `int` >= 1"),
        (line(2.0, chunks=[[1, -5, True]]), "Expected `int` >= 0"),
        (line(2.0, chunks=[[1, 5]]), "Expected `array` of length 3"),
        (line(2.0, chunks=[[2, 5, True]]), "chunks[0]: a decode has 1 token, not 2"),
        (line(2.0, chunks=[[1.5, 5, True]]), "Expected `int`, got `float`"),
        (line(2.0, **{**SUMS, "tokens": 203}), "tokens: must be prefill_tokens + decodes, 202, not 203"),
        (line(2.0, **{**SUMS, "requests": 1}), "requests: 1 with 1 decodes and 201 prefill tokens"),
        (line(2.0, **{**SUMS, "requests": 300}), "requests: 300 with 1 decodes and 201 prefill tokens"),
        (line(2.0, **{**SUMS, "decode_context": 900}), "context: 800 with decode_context 900"),
        (line(2.0, **{**SUMS, "prefill_pairs": 5}), "prefill_pairs: 5 with 201 prefill tokens"),
        (line(2.0, **{**SUMS, "chunk_squares": 1e9}), "chunk_squares: 1000000000 is no sum of squares"),
        (line(2.0, **{**SUMS, "context_squares": 3.0}), "context_squares: 3 is no sum of squares of 800 tokens"),
        (line(2.0, chunks=[[40_000, 0, False]]), "tokens: 40000 is beyond max_num_batched_tokens, 32768"),
        (line(2.0, chunks=[[1, 5, True]] * 513), "requests: 513 is beyond max_num_seqs, 512"),
        (line(2.0, chunks=CHUNKS, num_outputs=2), "num_outputs: must stand in every line or in none"),
        ('{"start_s": 2', "truncated"),
        ("step 17: 0.01 s", "malformed"),
        ("[1, 2]", "Expected `object`, got `array`"),
        (HEADER, "unknown field"),
    ],
)
def test_a_wrong_line_is_refused_with_path_and_line(tmp_path: Path, bad: object, message: str) -> None:
    """Every mistake in a line is reported with the file, the line, and the key where one is to blame."""
    path = written(tmp_path, GOOD, bad)
    with pytest.raises(DatasetError) as caught:
        read_step_log(path)
    assert (caught.value.path, caught.value.line) == (str(path), 3)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("outputs", "finished", "message"),
    [(4, 0, "num_outputs: 4 from 3 requests"), (1, 2, "num_finished: 2 with 1 outputs")],
)
def test_impossible_outputs_are_refused(tmp_path: Path, outputs: int, finished: int, message: str) -> None:
    """A step gives at most one token per request, and ends no more requests than it gave tokens."""
    path = written(tmp_path, line(chunks=CHUNKS, num_outputs=outputs, num_finished=finished))
    with pytest.raises(DatasetError, match=message):
        read_step_log(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"step_log":1', '"step_log":2', "step_log"),
        ('"step_log":1,', "", "step_log"),
        ('"max_num_seqs"', '"max_seqs"', "max_seqs"),
        ('"max_num_seqs":512', '"max_num_seqs":0', "max_num_seqs: must be at least 1"),
        ('"model":"Qwen/Qwen3-8B"', '"model":" "', "model: must be printable text"),
        ('"model":"Qwen/Qwen3-8B"', '"model":"a\\u0007b"', "model: must be printable text"),
        ('"hardware"', '"gpu"', "gpu"),
        (HEADER, "", "is empty|the first line must be"),
        (HEADER, json.dumps(GOOD), "the first line must be the step log's header"),
    ],
)
def test_a_wrong_header_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    """The first line says what the steps are of; a wrong key or an impossible limit in it is named."""
    assert old in HEADER
    path = written(tmp_path, GOOD, header=HEADER.replace(old, new))
    with pytest.raises(DatasetError, match=message) as caught:
        read_step_log(path)
    assert caught.value.path == str(path)
    assert caught.value.line in (1, 2)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\x1f\x8b not gzip", b"\xff\xfe\x00"])
def test_files_that_are_no_log_are_refused(tmp_path: Path, content: bytes) -> None:
    """An empty file and binary rubbish end in an error with the path, also under a gzip name."""
    for name in ("steps.jsonl", "steps.jsonl.gz"):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(DatasetError, match=name):
            read_step_log(path)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    """A path that leads nowhere is named."""
    with pytest.raises(DatasetError, match=r"none\.jsonl: cannot be read"):
        read_step_log(tmp_path / "none.jsonl")


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """An engine does not start to serve when its log has no place."""
    with pytest.raises(ConfigError, match="--step-log: cannot be written"):
        StepLogWriter(tmp_path / "absent" / "steps.jsonl", step_log_header(TRUTH))


def test_the_features_are_exact_for_long_contexts() -> None:
    """Squares of the longest contexts in the largest batch are sums of integers, without rounding."""
    features = batch_features([(1, 131_071, True)] * 1024)
    assert int(features.context_squares) == 1024 * 131_071**2
    assert features.decode_context == 1024 * 131_071


def test_selecting_steps_keeps_their_columns_together(tmp_path: Path) -> None:
    """A selection by slice, mask or index takes every column of the same steps."""
    lines = [line(float(n), chunks=[[1, n, True]], num_outputs=1, num_finished=0) for n in range(6)]
    steps = read_step_log(written(tmp_path, *lines)).steps
    selections: Sequence[tuple[object, list[float]]] = [
        (slice(2, 4), [2.0, 3.0]),
        (steps.start_s > 3, [4.0, 5.0]),
        (np.array([5, 0]), [5.0, 0.0]),
    ]
    for rows, expected in selections:
        chosen = steps.select(rows)  # type: ignore[arg-type]
        assert chosen.start_s.tolist() == chosen.column("context").tolist() == expected
        assert chosen.outputs is not None
        assert len(chosen.outputs) == len(chosen) == len(expected)
