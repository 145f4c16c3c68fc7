"""A real vLLM with the publishing scheduler: it answers as ever, shows its queue, and its log makes a profile.

One small model with random weights, four seats and no prefix cache, so that a handful of requests makes a queue and the
native mirror can be asked for every batch. `make e2e` runs this.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
import tomllib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from packaging.requirements import Requirement

from headway.calibrate.result import calibrate_log
from headway.engines.vllm_state import CHECKED_VERSIONS
from headway.snapshot.shared_memory import SharedMemoryReader, segment_path
from headway.snapshot.zeromq import ZeroMQSubscriber
from headway.testing import segment_name
from headway.types import Snapshot
from real_engine.mirror import read_run, repeated
from real_vllm import RealVllm, free_port
from real_vllm_environment import ensure_model, ensure_python, missing

REASON = missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

NUM_SEATS = 4
ARGUMENTS = (f"--max-num-seqs={NUM_SEATS}", "--no-enable-prefix-caching", "--block-size=32")


class Running(RealVllm):
    """The server, and where it publishes."""

    segment: str
    zeromq: str
    step_log: Path


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("vllm")
    segment, zeromq, step_log = segment_name(), f"tcp://127.0.0.1:{free_port()}", directory / "steps.jsonl"
    settings = {
        "HEADWAY_INSTANCE": "real-a",
        "HEADWAY_SNAPSHOT_SHARED_MEMORY": segment,
        "HEADWAY_SNAPSHOT_ZEROMQ": zeromq,
        "HEADWAY_STEP_LOG": str(step_log),
        "HEADWAY_STEP_LOG_REQUESTS": "1",
    }
    server = Running(
        model=ensure_model("256x4"), directory=directory, core=1, environment=settings, arguments=ARGUMENTS
    )
    server.segment, server.zeromq, server.step_log = segment, zeromq, step_log
    try:
        with server:
            yield server
    finally:
        segment_path(segment).unlink(missing_ok=True)  # vLLM ends its engine by force


@asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


async def complete(session: aiohttp.ClientSession, vllm: Running, name: str, words: int, max_tokens: int) -> int:
    """Ask for an answer of exactly so many tokens; returns how many came."""
    body = {
        "model": "model", "messages": [{"role": "user", "content": "one two " * words}], "max_tokens": max_tokens,
        "ignore_eos": True, "temperature": 0.0,
    }  # fmt: skip
    async with session.post(f"{vllm.url}/chat/completions", json=body, headers={"x-request-id": name}) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return int(answer["usage"]["completion_tokens"])


async def watch(reader: SharedMemoryReader, seen: list[Snapshot]) -> None:
    """Collect every snapshot that a poll every millisecond meets."""
    while True:
        shown = reader.poll()
        if shown is not None:
            seen.append(shown)
        await asyncio.sleep(0.001)


async def until_idle(reader: SharedMemoryReader) -> Snapshot:
    """The newest snapshot once the engine has nothing left."""
    deadline_s, newest = time.monotonic() + 30, None
    while time.monotonic() < deadline_s:
        newest = reader.poll() or newest
        if newest is not None and not newest.running and not newest.waiting and newest.batch_start_s is None:
            return newest
        await asyncio.sleep(0.01)
    raise AssertionError(f"never idle, last seen {newest}")


async def test_an_engine_that_just_started_shows_itself(vllm: Running) -> None:
    """Limits as they were asked for, the checked version, all blocks free, nothing that was never checked."""
    reader = SharedMemoryReader(vllm.segment)
    shown = await until_idle(reader)
    reader.close()
    assert (shown.instance_id, shown.engine_version) == ("real-a", f"vllm-{CHECKED_VERSIONS[-1]}")
    assert shown.unchecked == []
    limits = shown.limits
    assert (limits.max_num_seqs, limits.block_size, limits.max_model_len) == (NUM_SEATS, 32, 4096)
    assert (limits.async_scheduling, limits.prefix_caching, limits.policy) == (False, False, "fcfs")
    assert shown.free_blocks == limits.num_blocks - 1


async def test_a_loaded_engine_answers_and_shows_its_queue(vllm: Running) -> None:
    """Twenty requests on four seats: answers of the right length, and on the way who runs, who waits, in what order."""
    reader, subscriber = SharedMemoryReader(vllm.segment), ZeroMQSubscriber(vllm.zeromq)
    seen: list[Snapshot] = []
    watching = asyncio.create_task(watch(reader, seen))
    async with client() as session:
        lengths = await asyncio.gather(
            *(complete(session, vllm, f"load-{number}", 10 + 9 * number, 20 + number) for number in range(20))
        )
    assert lengths == [20 + number for number in range(20)]
    await asyncio.sleep(0.1)
    watching.cancel()
    last = seen[-1]
    assert (last.running, last.waiting, last.free_blocks) == ([], [], last.limits.num_blocks - 1)
    assert max(len(shown.waiting) for shown in seen) >= 8
    assert {len(shown.running) for shown in seen} >= {0, NUM_SEATS}
    for shown in seen:
        arrivals = [request.arrival_s for request in (*shown.running, *shown.waiting)]
        assert arrivals == sorted(arrivals)
        assert all(0 <= shown.engine_s - arrival_s < 60 for arrival_s in arrivals)
        held = sum(request.num_blocks for request in shown.running)
        assert shown.free_blocks == shown.limits.num_blocks - 1 - held
        for request in shown.running:
            assert request.request_id.startswith("chatcmpl-load-")
            assert request.computed_tokens <= request.prompt_tokens + request.output_tokens
    deadline_s, over_network = time.monotonic() + 10, None
    while over_network != last and time.monotonic() < deadline_s:  # what a sleeping reader's buffers held comes first
        over_network = subscriber.poll() or over_network
        await asyncio.sleep(0.05)
    assert over_network == last
    subscriber.close()
    reader.close()


async def test_a_client_that_hangs_up_is_gone_from_the_engine(vllm: Running) -> None:
    """Of two long answers one is cancelled: soon only the other is shown."""
    reader = SharedMemoryReader(vllm.segment)
    async with client() as session:
        leaving = asyncio.create_task(complete(session, vllm, "leaves", 5, 2500))
        staying = asyncio.create_task(complete(session, vllm, "stays", 5, 800))
        deadline_s, names = time.monotonic() + 60, [""]
        while len(names) != 2 and time.monotonic() < deadline_s:
            shown = reader.poll()
            names = names if shown is None else [request.request_id for request in shown.running]
            await asyncio.sleep(0.001)
        assert len(names) == 2
        leaving.cancel()
        while len(names) != 1 and time.monotonic() < deadline_s:
            shown = reader.poll()
            names = names if shown is None else [request.request_id for request in shown.running]
            await asyncio.sleep(0.001)
        assert [name.rpartition("-")[0] for name in names] == ["chatcmpl-stays"]
        assert await staying == 800
    await until_idle(reader)
    reader.close()


async def test_its_log_repeats_the_run_and_makes_a_profile(vllm: Running) -> None:
    """Every batch of the real engine comes out of the native mirror, and ``headway calibrate`` fits the log."""
    async with client() as session:
        for concurrency in (1, 2, 4, 8):
            for round_ in range(6):
                await asyncio.gather(
                    *(complete(session, vllm, f"fit-{round_}", 3 ** (round_ % 6) + n, 10) for n in range(concurrency))
                )
    reader = SharedMemoryReader(vllm.segment)
    await until_idle(reader)
    reader.close()
    run = read_run(vllm.step_log)
    assert len(run.batches) > 200
    assert {len(batch.scheduled) for batch in run.batches} >= set(range(1, NUM_SEATS + 1))
    assert repeated(run).first_difference is None
    # How well it fits is told by the experiment on an idle machine; here it must only fit at all.
    result = calibrate_log(vllm.step_log, name="real", max_error=100.0)
    assert result.profile is not None
    assert result.profile.engine_version == f"vllm-{CHECKED_VERSIONS[-1]}"
    assert result.profile.limits == run.limits
    assert result.figures.calibration.prefill_tokens_per_s > 100


def test_headway_and_vllm_go_together() -> None:
    """What stands in the environment satisfies both; vLLM misses only the four packages that were left out."""
    python = str(ensure_python())
    left_out = {"torchvision", "torchaudio", "torchcodec", "triton"}
    checked = subprocess.run([python, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    complaints = [line for line in checked.stdout.splitlines() if line and "No broken" not in line]
    assert all(line.split("requires ")[1].split(",")[0] in left_out for line in complaints), complaints
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(text) for text in project["dependencies"]]
    program = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    names = [requirement.name for requirement in wanted]
    there = json.loads(subprocess.run([python, "-c", program, *names], capture_output=True, check=True).stdout)
    assert [str(one) for one in wanted if there[one.name] not in one.specifier] == []
