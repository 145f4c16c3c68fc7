"""Drives the real vLLM scheduler through workloads from standard input; one record per workload on standard output.

Runs inside the conformance environment (torch and vLLM, no Headway): plain JSON lines in and out keep the two sides
apart. No model is loaded: a directory with a ``config.json`` satisfies the configuration, and the "model runner" gives
one token to every request whose tokens are all computed. It judges nothing; the caller compares.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm import __version__
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

STOP_TOKEN = 7
TINY_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


class Recording(Scheduler):
    """The real scheduler; it only notes whom it preempts, because ``SchedulerOutput`` holds an unordered set."""

    preempted_in_order: list[str]

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self.preempted_in_order.append(request.request_id)
        super()._preempt_request(request, *args, **kwargs)


class RecordingAsync(Recording, AsyncScheduler):
    """The same for the asynchronous one."""


def build_scheduler(model: ModelConfig, limits: dict[str, Any]) -> Recording:
    """A scheduler under these limits, with one full-attention group."""
    model.max_model_len = limits["max_model_len"]
    scheduler_config = SchedulerConfig(
        max_num_seqs=limits["max_num_seqs"],
        max_num_batched_tokens=limits["max_num_batched_tokens"],
        max_model_len=limits["max_model_len"],
        long_prefill_token_threshold=limits["long_prefill_token_threshold"],
        enable_chunked_prefill=limits["chunked_prefill"],
        policy=limits["policy"],
        watermark=limits["watermark"],
        scheduler_reserve_full_isl=limits["reserve_full_isl"],
        is_encoder_decoder=False,
        async_scheduling=False,
    )
    cache_config = CacheConfig(block_size=limits["block_size"], enable_prefix_caching=limits["prefix_caching"])
    config = VllmConfig(
        model_config=model,
        scheduler_config=scheduler_config,
        cache_config=cache_config,
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
    )
    cache_config.num_gpu_blocks = limits["num_blocks"]
    # vLLM switches this off for CPUs. Of the scheduler it needs only the other class.
    scheduler_config.async_scheduling = limits["async_scheduling"]
    check_unchanged(config, limits)
    spec = FullAttentionSpec(block_size=limits["block_size"], num_kv_heads=1, head_size=1, dtype=torch.float32)
    scheduler = (RecordingAsync if limits["async_scheduling"] else Recording)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(limits["num_blocks"], [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=limits["block_size"],
    )
    scheduler.preempted_in_order = []
    return scheduler


def check_unchanged(config: VllmConfig, limits: dict[str, Any]) -> None:
    """vLLM adjusts some settings on some platforms; a run under other limits than asked for would prove nothing."""
    scheduler = config.scheduler_config
    seen = {
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_model_len": config.model_config.max_model_len,
        "block_size": config.cache_config.block_size,
        "num_blocks": config.cache_config.num_gpu_blocks,
        "long_prefill_token_threshold": scheduler.long_prefill_token_threshold,
        "chunked_prefill": scheduler.enable_chunked_prefill,
        "policy": scheduler.policy,
        "watermark": scheduler.watermark,
        "reserve_full_isl": scheduler.scheduler_reserve_full_isl,
        "async_scheduling": scheduler.async_scheduling,
        "prefix_caching": config.cache_config.enable_prefix_caching,
    }
    if seen != limits:
        raise SystemExit(f"vLLM changed the limits: asked for {limits}, got {seen}")


def token_ids(workload: dict[str, Any], request_id: str) -> list[int]:
    """The tokens of a request, prompt and answer (see ``random_texts.token_ids``)."""
    pieces = workload["texts"].get(request_id) or [(0, workload["limits"]["max_model_len"])]
    return [1000 + (text << 12) + place for text, length in pieces for place in range(length)]


def build_request(request: dict[str, Any], tokens: list[int], limits: dict[str, Any]) -> Request:
    """vLLM's request. Without ``max_tokens`` the answer may fill the context, as vLLM's front end sets it."""
    prompt_tokens = request["prompt_tokens"]
    params = SamplingParams(
        max_tokens=request.get("max_tokens") or limits["max_model_len"] - prompt_tokens, stop_token_ids=[STOP_TOKEN]
    )
    hasher = get_request_block_hasher(limits["block_size"], sha256) if limits["prefix_caching"] else None
    return Request(
        request_id=request["request_id"],
        prompt_token_ids=tokens[:prompt_tokens],
        sampling_params=params,
        pooling_params=None,
        arrival_time=request["arrival_s"],
        priority=request["priority"],
        block_hasher=hasher,
    )


def sample(
    scheduler: Scheduler, output: SchedulerOutput, targets: dict[str, int], tokens: dict[str, list[int]]
) -> ModelRunnerOutput:
    """One token for every request whose tokens are all computed with this batch; the stop token at its target length.

    A placeholder stands for each output of an asynchronous scheduler that is not known, the one of this batch included.
    """
    request_ids = list(output.num_scheduled_tokens)
    sampled: list[list[int]] = []
    for request_id in request_ids:
        request = scheduler.requests[request_id]
        if request.is_prefill_chunk:
            sampled.append([])
        else:
            length = request.num_output_tokens + max(request.num_output_placeholders, 1)
            # A token past the context is sampled only where it will be thrown away.
            place = min(request.num_prompt_tokens + length, len(tokens[request_id])) - 1
            sampled.append([STOP_TOKEN if length >= targets[request_id] else tokens[request_id][place]])
    index = {request_id: place for place, request_id in enumerate(request_ids)}
    return ModelRunnerOutput(req_ids=request_ids, req_id_to_index=index, sampled_token_ids=sampled)


def run(model: ModelConfig, workload: dict[str, Any]) -> dict[str, Any]:
    """The record of one workload: a row per step (see ``recorded_runs.Row``)."""
    limits = workload["limits"]
    scheduler = build_scheduler(model, limits)
    requests = {request["request_id"]: request for _, request in workload["submissions"]}
    targets = {request_id: request["target_output_tokens"] for request_id, request in requests.items()}
    tokens = {request_id: token_ids(workload, request_id) for request_id in requests}
    submissions, cancels = list(workload["submissions"]), list(workload["cancels"])
    waits: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []  # batches whose outcome is not applied
    rows: list[list[Any]] = []
    for step in range(workload["num_steps"]):
        while submissions and submissions[0][0] <= step:
            request = submissions.pop(0)[1]
            scheduler.add_request(build_request(request, tokens[request["request_id"]], limits))
        while cancels and cancels[0][0] <= step:
            scheduler.finish_requests(cancels.pop(0)[1], RequestStatus.FINISHED_ABORTED)
        scheduler.preempted_in_order.clear()
        output = scheduler.schedule()
        free_blocks = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        waits.append((output, sample(scheduler, output, targets, tokens)))
        # vLLM's engine schedules a batch while the one before it runs, where it schedules asynchronously.
        result = scheduler.update_from_output(*waits.pop(0)) if len(waits) > limits["async_scheduling"] else {}
        outputs = result[0].outputs if result else []
        rows.append(
            [
                list(output.num_scheduled_tokens.items()),
                list(scheduler.preempted_in_order),
                free_blocks,
                [one.request_id for one in outputs if one.finish_reason is not None],
                [request.request_id for request in scheduler.running],
                [request.request_id for request in scheduler.waiting],
            ]
        )
        is_idle = not output.num_scheduled_tokens and not outputs and not scheduler.preempted_in_order
        if is_idle and not submissions and not cancels:
            break  # finished or stalled: every further step would be the same
    return {"seed": workload["seed"], "vllm": __version__, "rows": rows}


def main() -> None:
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(TINY_MODEL))
        model = ModelConfig(model=directory, skip_tokenizer_init=True, max_model_len=4096, dtype="bfloat16", seed=0)
        # vLLM's own messages go to standard error; standard output carries records only.
        for line in sys.stdin:
            print(json.dumps(run(model, json.loads(line)), separators=(",", ":")), flush=True)


if __name__ == "__main__":
    main()
