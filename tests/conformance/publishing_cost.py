"""What publishing costs an engine: CPU time per step of vLLM's real scheduler, bare and with each thing switched on.

``python tests/conformance/publishing_cost.py`` runs itself inside the conformance environment. Schedulers with the same
queue take turns in random order; told is the lower decile of each, which other processes disturb least, and what it is
above that of the bare one: for steps right behind another of the same engine and, as *cold*, for steps that find the
cache filled by the others. The model is not run. 64 requests decode and 195 wait throughout, and nobody ends.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

NUM_RUNNING, NUM_WAITING = 64, 195
CONSECUTIVE = 3  # steps of one engine before the next has its turn
LIMITS = {
    "max_num_batched_tokens": 2048, "max_num_seqs": NUM_RUNNING, "max_model_len": 8192, "block_size": 16,
    "num_blocks": 16384, "long_prefill_token_threshold": 0, "chunked_prefill": True, "policy": "fcfs", "watermark": 0.0,
    "reserve_full_isl": True, "async_scheduling": False, "prefix_caching": False,
}  # fmt: skip


def outside(arguments: list[str]) -> int:
    """Run this file in the environment that has the scheduler."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from conformance.environment import clean_environment, ensure_environment, environment_directory, headway_path

    python = ensure_environment()
    with tempfile.TemporaryDirectory() as directory:
        variables = clean_environment(environment_directory()) | {"PYTHONPATH": str(headway_path(Path(directory)))}
        return subprocess.run([str(python), __file__, "--inside", *arguments], check=False, env=variables).returncode


class Engine:
    """A scheduler with a full queue, and what a step of it took."""

    def __init__(self, model: Any, name: str, scheduler_class: type, settings: dict[str, str]) -> None:
        import worker

        for variable in [variable for variable in os.environ if variable.startswith("HEADWAY_")]:
            del os.environ[variable]
        os.environ.update(settings)
        with patch.object(worker, "Recording", scheduler_class):
            self.scheduler = worker.build_scheduler(model, LIMITS)
        self.name = name
        self.times_us: list[float] = []
        for number in range(NUM_RUNNING + NUM_WAITING):
            self.scheduler.add_request(long_request(number))

    def step(self) -> None:
        """One step; every request of the batch whose prompt is done gets a token, nobody ends."""
        from vllm.v1.outputs import ModelRunnerOutput

        started_ns = time.thread_time_ns()
        output = self.scheduler.schedule()
        lasted_ns = time.thread_time_ns() - started_ns
        ids = list(output.num_scheduled_tokens)
        tokens = [[] if self.scheduler.requests[request_id].is_prefill_chunk else [5] for request_id in ids]
        places = {request_id: place for place, request_id in enumerate(ids)}
        sampled = ModelRunnerOutput(req_ids=ids, req_id_to_index=places, sampled_token_ids=tokens)
        started_ns = time.thread_time_ns()
        self.scheduler.update_from_output(output, sampled)
        self.times_us.append((lasted_ns + time.thread_time_ns() - started_ns) / 1e3)

    def decile_us(self, place: int) -> float:
        """The lower decile of what the steps at one place of each turn took."""
        times_us = sorted(self.times_us[place::CONSECUTIVE])
        return round(times_us[len(times_us) // 10], 1)


def long_request(number: int) -> Any:
    """A request of vLLM's that outlives the measurement, with an id as long as vLLM's own."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request(
        request_id=f"chatcmpl-{number:032x}-{number:08x}",
        prompt_token_ids=[5] * 256,
        sampling_params=SamplingParams(max_tokens=7000, ignore_eos=True),
        pooling_params=None,
        arrival_time=1.7e9 + number,
    )


def inside(num_steps: int) -> dict[str, dict[str, float]]:
    """Microseconds per step by what is switched on, and what it adds to a step of the bare scheduler."""
    import worker
    from vllm.config import ModelConfig
    from vllm.v1.core.sched.scheduler import Scheduler

    from headway.engines.vllm import PublishingScheduler

    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(worker.TINY_MODEL))
        model = ModelConfig(model=directory, skip_tokenizer_init=True, max_model_len=8192, dtype="bfloat16", seed=0)
        memory = {"HEADWAY_SNAPSHOT_SHARED_MEMORY": f"headway-cost-{os.getpid()}"}
        zeromq = {"HEADWAY_SNAPSHOT_ZEROMQ": "tcp://127.0.0.1:0"}
        log = {"HEADWAY_STEP_LOG": f"{directory}/steps"}
        named = {"HEADWAY_STEP_LOG": f"{directory}/named", "HEADWAY_STEP_LOG_REQUESTS": "1"}
        engines = [
            Engine(model, "first", Scheduler, {}),
            Engine(model, "bare", Scheduler, {}),
            Engine(model, "nothing set", PublishingScheduler, {}),
            Engine(model, "shared memory", PublishingScheduler, memory),
            Engine(model, "ZeroMQ", PublishingScheduler, zeromq),
            Engine(model, "step log", PublishingScheduler, log),
            Engine(model, "step log with requests", PublishingScheduler, named),
            Engine(model, "bare again", Scheduler, {}),
        ]
        for _ in range(30):
            for engine in engines:
                engine.step()
        gc.collect()
        gc.freeze()  # as vLLM's engine does once it has started
        for engine in engines:
            assert len(engine.scheduler.running) == NUM_RUNNING
            assert len(engine.scheduler.waiting) == NUM_WAITING
            engine.times_us.clear()
        order, random = list(engines), Random(0)
        for _ in range(num_steps):
            random.shuffle(order)
            for engine in order:
                for _ in range(CONSECUTIVE):
                    engine.step()
        for engine in engines:
            engine.scheduler.shutdown()
    bare = engines[1]
    return {
        engine.name: {
            "step_us": engine.decile_us(CONSECUTIVE - 1),
            "added_us": round(engine.decile_us(CONSECUTIVE - 1) - bare.decile_us(CONSECUTIVE - 1), 1),
            "added_cold_us": round(engine.decile_us(0) - bare.decile_us(0), 1),
        }
        for engine in engines
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help=f"turns of {CONSECUTIVE} steps (default 400)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        return outside(sys.argv[1:])
    found = inside(options.steps)
    if options.json:
        print(json.dumps(found))
        return 0
    print(f"CPU microseconds per step, {NUM_RUNNING} running and {NUM_WAITING} waiting, {options.steps} turns each")
    print(f"  {'':<24}{'a step':>12}{'added':>12}{'added, cold':>12}")
    for name, figures in found.items():
        print(f"  {name:<24}" + "".join(f"{figures[column]:12.1f}" for column in figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
