"""What a vLLM scheduler was told: its limits by our names, and what it runs that the replay was not held against.

Both travel in every snapshot, so that a router sees an engine unlike its profile, an unknown version or a feature that
no rule covers, and says so in ``/instances``. Nothing is taken for granted: what a version does not have is unknown,
not off. It refuses to judge what a feature does to an estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from headway.engines.vllm_state import CHECKED_VERSIONS
from headway.types import EngineLimits


def read_limits(scheduler: Any) -> EngineLimits:
    """The limits that shape this scheduler's batches.

    Raises:
        AttributeError: this vLLM keeps a limit elsewhere.
        EngineInputError: a limit that the replay cannot hold.
    """
    config = scheduler.scheduler_config
    return EngineLimits(
        # The budget of a step is the smaller of the two; they differ only where one was set apart.
        max_num_batched_tokens=min(scheduler.max_num_scheduled_tokens, config.max_num_batched_tokens),
        max_num_seqs=scheduler.max_num_active_reqs,
        max_model_len=scheduler.max_model_len,
        block_size=scheduler.block_size,
        num_blocks=scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        chunked_prefill=config.enable_chunked_prefill,
        policy=scheduler.policy.value,
        watermark=float(config.watermark),
        reserve_full_isl=scheduler.scheduler_reserve_full_isl,
        **_newer_limits(scheduler),
    )


def _newer_limits(scheduler: Any) -> dict[str, bool]:
    found = {
        "async_scheduling": bool(scheduler.scheduler_config.async_scheduling),
        "prefix_caching": bool(scheduler.kv_cache_manager.enable_caching),
    }
    return {name: value for name, value in found.items() if name in EngineLimits.__struct_fields__}


def _kinds_of_cache(scheduler: Any) -> bool:
    groups = scheduler.kv_cache_config.kv_cache_groups
    return len(groups) != 1 or type(groups[0].kv_cache_spec).__name__ != "FullAttentionSpec"


def _is_sharded(scheduler: Any) -> bool:
    return bool(scheduler.dcp_world_size > 1 or scheduler.pcp_world_size > 1)


#: What changes token batches and has no rule in the replay, and how to tell that it is on.
_FEATURES: Final[dict[str, Callable[[Any], bool]]] = {
    "speculative decoding": lambda scheduler: scheduler.num_spec_tokens > 0,
    "a KV connector": lambda scheduler: scheduler.connector is not None,
    "an encoder connector": lambda scheduler: scheduler.ec_connector is not None,
    "LoRA adapters": lambda scheduler: scheduler.lora_config is not None,
    "multimodal inputs": lambda scheduler: scheduler.max_num_encoder_input_tokens > 0,
    "an encoder-decoder model": lambda scheduler: bool(scheduler.is_encoder_decoder),
    "a model that samples no tokens": lambda scheduler: scheduler.num_sampled_tokens_per_step != 1,
    "a KV cache other than one of full attention": _kinds_of_cache,
    "context parallelism": _is_sharded,
    "pipeline parallelism": lambda scheduler: bool(scheduler.use_pp),
    "data parallelism": lambda scheduler: scheduler.parallel_config.data_parallel_size > 1,
    "an adaptive long_prefill_token_threshold": lambda scheduler: bool(scheduler.adaptive_long_prefill_threshold),
}


def unchecked(scheduler: Any, version: str, *, is_async_class: bool) -> list[str]:
    """In words, what of this engine no comparison with the real scheduler ever covered; empty for a plain one."""
    found = []
    if version not in CHECKED_VERSIONS:
        found.append(f"vLLM {version} (only on {', '.join(CHECKED_VERSIONS)})")
    is_async = bool(scheduler.scheduler_config.async_scheduling)
    if is_async != is_async_class:
        wanted = "AsyncPublishingScheduler" if is_async else "PublishingScheduler"
        found.append(f"async_scheduling {'on' if is_async else 'off'} with the other scheduler class (use {wanted})")
    for name, is_on in _FEATURES.items():
        try:
            if is_on(scheduler):
                found.append(name)
        except AttributeError:
            found.append(f"{name} (this vLLM does not tell)")
    return found
