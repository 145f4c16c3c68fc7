"""``headway engine``: a simulated engine that an OpenAI client, and a router, can talk to."""

from __future__ import annotations

import math
from pathlib import Path

from headway.errors import ConfigError


def engine(
    *,
    profile: str,
    model: str,
    port: int = 8000,
    host: str = "127.0.0.1",
    shared_memory: str | None = None,
    zeromq: str | None = None,
    step_log: Path | None = None,
    prefix_caching: bool = False,
    seed: int = 0,
    time_scale: float = 1.0,
) -> int:
    """Serve a simulated engine: the real scheduler's rules on a published step time, with filler text for answers.

    The answer's length is what the header ``x-headway-sim-output-tokens`` says (a number, or ``model=number`` items),
    else drawn from the seed and the request id (lognormal, median 200 tokens, log standard deviation 0.7); always
    within ``max_tokens`` and the context, and exactly ``max_tokens`` under ``ignore_eos``.

    Parameters
    ----------
    profile
        Name of a shipped truth profile (as h100-qwen3-8b), or the path of one.
    model
        The model name it serves.
    port
        Where to listen; 0 takes a free port. The first line printed says which.
    host
        The address to listen on.
    shared_memory
        Segment in /dev/shm that receives a snapshot after every step.
    zeromq
        Address such as tcp://10.0.0.5:7101 where routers on other hosts subscribe to the same snapshots. The host may
        be * (every interface), the port 0 (a free one); a second line says which. Neither encrypted nor authenticated.
    step_log
        File that receives one JSON line per step, for ``headway calibrate``; what was there is replaced.
    prefix_caching
        Keep the blocks of prompts, so that a prompt that begins like an earlier one has less to prefill. Text is
        compared by its bytes, four to a token.
    seed
        Seeds step noise, stalls, drawn answer lengths and generated request ids.
    time_scale
        Wall seconds per simulated second: above 1 for machines too slow to follow the engine. Snapshots then carry
        wall times, so a router needs a profile whose step times are multiplied by the same number.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"must be between 0 and 65535, not {port}", key="--port")
    if not (math.isfinite(time_scale) and time_scale > 0):
        raise ConfigError(f"must be finite and above 0, not {time_scale}", key="--time-scale")
    if seed < 0:
        raise ConfigError(f"must be at least 0, not {seed}", key="--seed")
    if not model:
        raise ConfigError("must not be empty", key="--model")
    from msgspec.structs import replace

    from headway.profiles import load_truth

    truth = load_truth(profile)
    if prefix_caching:
        truth = replace(truth, limits=replace(truth.limits, prefix_caching=True))
    from headway.engines.process import EngineOptions, serve

    options = EngineOptions(
        truth=truth,
        model=model,
        host=host,
        port=port,
        segment=shared_memory,
        zeromq=zeromq,
        step_log=step_log,
        seed=seed,
        time_scale=time_scale,
    )
    serve(options)
    return 0
