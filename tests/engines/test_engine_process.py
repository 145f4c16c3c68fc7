"""``headway engine`` as a process: what it publishes, how it ends, and what it refuses to start on."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable
from http.client import HTTPResponse, IncompleteRead
from itertools import pairwise

import pytest

from headway.predict.tokens import count_tokens
from headway.profiles import PROFILE_DIRECTORY, load_truth
from headway.snapshot.shared_memory import SharedMemoryReader, segment_path
from headway.types import Snapshot
from served_engines import MODEL, EngineProcess

PROMPT = "one two three four five six seven eight nine ten. " * 30


def post(url: str, body: dict[str, object], request_id: str) -> HTTPResponse:
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps({"messages": [{"role": "user", "content": PROMPT}], **body}).encode(),
        headers={"x-request-id": request_id},
    )
    response: HTTPResponse = urllib.request.urlopen(request, timeout=20)
    return response


def poll_until(reader: SharedMemoryReader, condition: Callable[[Snapshot], bool]) -> list[Snapshot]:
    """Every new snapshot up to the first for which ``condition`` holds."""
    seen = []
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        snapshot = reader.poll()
        if snapshot is None:
            threading.Event().wait(0.0005)
            continue
        seen.append(snapshot)
        if condition(snapshot):
            return seen
    raise AssertionError(f"not seen among {len(seen)} snapshots")


def test_another_process_reads_every_state_of_a_request(start_engine: Callable[..., EngineProcess]) -> None:
    """Through shared memory: a prompt, its decodes one token at a time, then an empty engine, and no segment."""
    engine = start_engine("--seed", "3")
    reader = SharedMemoryReader(engine.segment, instance_id="h100-a")
    poll_until(reader, lambda snapshot: not snapshot.running)
    before_s = time.monotonic()
    with post(engine.url, {"max_tokens": 40, "ignore_eos": True, "stream": True}, "abc") as response:
        assert response.readline().startswith(b"data: ")
        seen = poll_until(reader, lambda snapshot: not snapshot.running)
        assert response.read().endswith(b"data: [DONE]\n\n")
    after_s = time.monotonic()
    reader.close()

    truth = load_truth("h100-qwen3-8b")
    assert {snapshot.instance_id for snapshot in seen} == {"h100-a"}
    assert {snapshot.engine_version for snapshot in seen} == {truth.engine_version}
    assert all(snapshot.limits == truth.limits for snapshot in seen)
    assert all(early.sequence < late.sequence for early, late in pairwise(seen))
    busy = [snapshot for snapshot in seen if snapshot.running]
    assert len(busy) > 3
    for snapshot in busy:
        (request,) = snapshot.running
        assert request.request_id == "chatcmpl-abc"
        assert request.prompt_tokens == count_tokens(PROMPT)
        assert request.computed_tokens == request.prompt_tokens + request.output_tokens
        assert request.max_tokens == 40
        assert request.num_blocks == -(-request.computed_tokens // 16)
        assert snapshot.free_blocks == truth.limits.num_blocks - 1 - request.num_blocks
        assert snapshot.batch_start_s is not None
        assert before_s <= request.arrival_s <= snapshot.batch_start_s <= after_s
    assert seen[-1].free_blocks == truth.limits.num_blocks - 1
    assert seen[-1].batch_start_s is None

    assert engine.end() == (0, "")
    assert not segment_path(engine.segment).exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_engine_cleanly_amid_an_answer(
    start_engine: Callable[..., EngineProcess], number: signal.Signals
) -> None:
    """Exit code 0, nothing on stderr, no segment, and the answer under way is visibly unfinished."""
    engine = start_engine()
    with post(engine.url, {"max_tokens": 100_000, "ignore_eos": True, "stream": True}, "abc") as response:
        assert response.readline().startswith(b"data: ")
        assert engine.end(number) == (0, "")
        with pytest.raises(IncompleteRead):
            response.read()
    assert not segment_path(engine.segment).exists()


def test_two_engines_of_one_seed_and_order_answer_alike(start_engine: Callable[..., EngineProcess]) -> None:
    """The same seed gives the same ids, lengths and engine figures; another seed gives others."""
    answers = []
    for seed in ("5", "5", "6"):
        engine = start_engine("--seed", seed, "--time-scale", "0.1")
        answers.append([json.load(post(engine.url, {"max_tokens": 50}, "")) for _ in range(2)])
        engine.end()
    figures = [
        [(one["id"], one["usage"], round(one["x_headway_engine"]["ttft_s"], 6)) for one in pair] for pair in answers
    ]
    assert figures[0] == figures[1]
    assert all(one != other for one, other in zip(figures[0], figures[2], strict=True))


def run_engine(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headway", "engine", "--model", MODEL, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--profile", "h100-qwen3-9b"], "did you mean 'h100-qwen3-8b'"),
        (["--profile", str(PROFILE_DIRECTORY / "h100-qwen3-8b.yaml")], "needs a truth profile"),
        (["--profile", "h100-qwen3-8b", "--port", "70000"], "--port: must be between 0 and 65535"),
        (["--profile", "h100-qwen3-8b", "--time-scale", "0"], "--time-scale: must be finite and above 0"),
        (["--profile", "h100-qwen3-8b", "--seed", "-1"], "--seed: must be at least 0"),
        (["--profile", "h100-qwen3-8b", "--shared-memory", "a/b"], "shared_memory: must be"),
        (["--profile", "h100-qwen3-8b", "--zeromq", "ipc:///tmp/x"], "zeromq: must be tcp://HOST:PORT"),
        (["--profile", "h100-qwen3-8b", "--host", "no such host"], "host: "),
    ],
)
def test_a_wrong_option_ends_with_exit_code_2(options: list[str], message: str) -> None:
    """Usage errors are one line on stderr that names the option."""
    ended = run_engine(*options)
    assert ended.returncode == 2, ended.stderr
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""


def test_an_address_or_segment_in_use_ends_with_exit_code_1(start_engine: Callable[..., EngineProcess]) -> None:
    """An engine that cannot have its port or its segment says so and disturbs nobody."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = run_engine("--profile", "h100-qwen3-8b", "--port", str(taken.getsockname()[1]))
        assert (ended.returncode, "cannot listen" in ended.stderr) == (1, True), ended.stderr
    engine = start_engine()
    ended = run_engine("--profile", "h100-qwen3-8b", "--port", "0", "--shared-memory", engine.segment)
    assert (ended.returncode, "in use by a running engine" in ended.stderr) == (1, True), ended.stderr
    assert segment_path(engine.segment).exists()
    assert engine.end() == (0, "")


BROKEN_ENGINE = """
import sys
from headway.engines import process
from headway.engines.simulated import SimulatedEngine
from headway.profiles import load_truth

def broken(self):
    raise ArithmeticError("no next step")

SimulatedEngine.begin = broken
process.serve(process.EngineOptions(
    truth=load_truth("h100-qwen3-8b"), model="m", host="127.0.0.1", port=0, segment=sys.argv[1], seed=0, time_scale=1.0
))
"""


def test_an_engine_whose_steps_fail_does_not_serve_on() -> None:
    """When the step loop breaks, the process ends with an error and takes its segment along."""
    segment = f"headway-test-{uuid.uuid4().hex}"
    command = [sys.executable, "-c", BROKEN_ENGINE, segment]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "no next step" in ended.stderr
    assert not segment_path(segment).exists()
