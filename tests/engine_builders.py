"""Short ways to write limits, requests and states in tests of the core; every value has a roomy default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headway.types import EngineLimits, EngineRequest, EngineState, StepTime

ROOMY = EngineLimits(max_num_batched_tokens=100, max_num_seqs=64, max_model_len=1000, block_size=10, num_blocks=1001)
#: A clock that makes time the number of steps.
COUNT_STEPS = StepTime.linear(b0=1.0, b1=0.0, b2=0.0, b3=0.0)


def limits(**changes: object) -> EngineLimits:
    """Budget 100, 64 sequences, length 1,000, 1,000 usable blocks of 10 tokens, fcfs, but for ``changes``."""
    return msgspec.structs.replace(ROOMY, **changes)


def fresh(request_id: str, prompt_tokens: int, target_output_tokens: int = 10, **more: Any) -> EngineRequest:
    """A request nothing was computed of."""
    return EngineRequest(
        request_id=request_id,
        prompt_tokens=prompt_tokens,
        target_output_tokens=target_output_tokens,
        **more,
    )


def decoding(
    request_id: str, prompt_tokens: int, output_tokens: int, target_output_tokens: int = 500, **more: Any
) -> EngineRequest:
    """A running request whose every token but the newest is computed."""
    return EngineRequest(
        request_id=request_id,
        prompt_tokens=prompt_tokens,
        computed_tokens=prompt_tokens + output_tokens - 1,
        output_tokens=output_tokens,
        target_output_tokens=target_output_tokens,
        **more,
    )


def state(
    limits: EngineLimits,
    running: Sequence[EngineRequest] = (),
    waiting: Sequence[EngineRequest] = (),
    *,
    residual_s: float = 0.0,
    free_blocks: int | None = None,
) -> EngineState:
    """An engine between steps."""
    return EngineState(
        limits=limits,
        running=tuple(running),
        waiting=tuple(waiting),
        residual_s=residual_s,
        free_blocks=free_blocks,
    )
