"""How long a decision takes over sixteen busy engines: the gateway's own object, snapshots in shared memory.

Between decisions every engine publishes a new snapshot, so that none is answered from what was replayed before: the
worst that a gateway sees. It measures CPU time of ``Gateway.decide`` in this process, reading the snapshots included.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

import numpy as np

from headway.config import Config
from headway.gateway.state import Gateway
from headway.profiles import load_profile
from headway.snapshot.shared_memory import SharedMemoryWriter
from headway.testing import pool, snapshot, waiting_request
from headway.types import Query, SnapshotRequest

NUM_INSTANCES: Final = 16
_PROFILE: Final = "h100-qwen3-8b"


def decision_p99_ms(num_decisions: int = 400, *, num_running: int = 16, num_waiting: int = 4) -> float:
    """The 99 % quantile of the CPU time of a decision, in ms, over engines of so many requests each."""
    rng = np.random.default_rng(0)
    limits = load_profile(_PROFILE).limits
    with ExitStack() as stack:
        segments = [f"headway-bench-{os.getpid()}-{number}" for number in range(NUM_INSTANCES)]
        writers = [SharedMemoryWriter(segment) for segment in segments]
        for writer in writers:
            stack.callback(writer.close)
        gateway = Gateway(_config(segments))
        stack.callback(gateway.feeds.close)
        times_s = []
        for turn in range(num_decisions):
            now = time.monotonic()
            for number, writer in enumerate(writers):
                requests = _requests(rng, num_running, num_waiting)
                writer.publish(
                    snapshot(
                        running=requests[:num_running],
                        waiting=requests[num_running:],
                        sequence=turn + 1,
                        limits=limits,
                        instance_id=f"i{number}",
                        engine_s=now,
                    )
                )
            query = Query(id=f"q{turn}", arrival_s=now, prompt_text="", prompt_tokens={"m": 800}, ttft_target_s=0.8)
            started_s = time.thread_time()
            gateway.decide(query, query.id)
            times_s.append(time.thread_time() - started_s)
    times_s.sort()
    return 1e3 * times_s[int(0.99 * len(times_s))]


def _config(segments: Sequence[str]) -> Config:
    instances: list[dict[str, object]] = [
        {
            "id": f"i{number}", "model": "m", "api_base": "http://127.0.0.1:9/v1", "engine": "vllm-0.32",
            "profile": _PROFILE, "snapshots": {"shared_memory": segment},
        }
        for number, segment in enumerate(segments)
    ]  # fmt: skip
    return pool([{"name": "m"}], instances)


def _requests(rng: np.random.Generator, num_running: int, num_waiting: int) -> list[SnapshotRequest]:
    """Decoding requests of 100 to 2,000 prompt tokens with 1 to 300 tokens out, then waiting ones."""
    prompts = rng.integers(100, 2001, num_running + num_waiting).tolist()
    outputs = rng.integers(1, 301, num_running).tolist()
    running = [
        SnapshotRequest(
            f"r{number}", prompt, prompt + output - 1, output, -(-(prompt + output - 1) // 16), 1024, 0, 0.0, 0
        )
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=False))
    ]
    return running + [waiting_request(f"w{number}", prompt) for number, prompt in enumerate(prompts[num_running:])]
