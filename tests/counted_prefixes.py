"""How far a replay from counts is from the blocks themselves: the newcomer's TTFT by both, on random conversations.

``python tests/counted_prefixes.py`` prints the table of ``docs/engine-rules.md``. An engine with a block pool serves
system prompts, conversations that go on, and prompts with nothing in common; every third newcomer is estimated by that
engine itself (exact: it has every block) and by an engine made of its state (counts). It measures what counts cannot
know, not the clock: both sides have the same.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from headway._core import ReplayedEngine
from headway.types import EngineLimits, EngineRequest, StepTime

CLOCK = StepTime.linear(b0=7.49e-3, b1=2.078e-5, b2=5.037e-8, b3=1.033e-9)
BLOCK_SIZE = 16
NUM_REQUESTS = 400

Pieces = list[tuple[int, int]]


class Setting(Struct, frozen=True):
    """An engine's blocks and its arrivals per second."""

    num_blocks: int
    rate_per_s: float


SETTINGS = [Setting(4000, 4.0), Setting(2500, 6.0), Setting(1200, 6.0), Setting(800, 6.0), Setting(600, 4.0)]


class Errors(Struct):
    """Signed relative errors of a newcomer's TTFT: all counts known, sharing unknown, and as if nothing were cached."""

    counted: list[float] = []
    unshared: list[float] = []
    uncached: list[float] = []


def hashes_of(pieces: Pieces) -> list[int]:
    """Hashes of the full blocks of a text of (part, tokens) pieces, each over all before it."""
    tokens = [(part, place) for part, length in pieces for place in range(length)]
    hashes, previous = [], 0
    for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
        previous = hash((previous, *tokens[start : start + BLOCK_SIZE])) & (2**63 - 1)
        hashes.append(previous)
    return hashes


def conversations(rng: random.Random, num_requests: int) -> list[tuple[Pieces, int]]:
    """(prompt, output tokens): two in five go on where an earlier answer ended, others begin with a system prompt."""
    systems = [(part, rng.randint(300, 1500)) for part in range(4)]
    drawn: list[tuple[Pieces, int]] = []
    part = len(systems)
    while len(drawn) < num_requests:
        part += 2
        kind = rng.random()
        if kind < 0.4 and drawn:
            before, answer = rng.choice(drawn[-40:])
            prompt = [*before, (before[-1][0] + 1, answer), (part, rng.randint(20, 300))]
        elif kind < 0.82:
            prompt = [rng.choice(systems), (part, rng.randint(20, 500))]
        else:
            prompt = [(part, rng.randint(50, 1500))]
        if sum(length for _, length in prompt) <= 6000:
            drawn.append((prompt, rng.randint(20, 500)))
    return drawn


def errors_of(setting: Setting, *, async_scheduling: bool, seed: int = 1, num_requests: int = NUM_REQUESTS) -> Errors:
    """Play one engine and estimate every third newcomer, once it is busy."""
    rng = random.Random(seed)
    limits = EngineLimits(
        max_num_batched_tokens=2048,
        max_num_seqs=128,
        max_model_len=8192,
        block_size=BLOCK_SIZE,
        num_blocks=setting.num_blocks,
        prefix_caching=True,
        async_scheduling=async_scheduling,
    )
    engine = ReplayedEngine.with_block_pool(limits, CLOCK)
    errors = Errors()
    for number, (prompt, output) in enumerate(conversations(rng, num_requests)):
        engine.advance(rng.expovariate(setting.rate_per_s))
        hashes = hashes_of([*prompt, (prompt[-1][0] + 1, output)])
        request = EngineRequest(
            request_id=f"r{number}", prompt_tokens=sum(length for _, length in prompt), target_output_tokens=output
        )
        if number > num_requests // 5 and number % 3 == 0:
            compare(engine, request, hashes, errors)
        engine.submit(request, hashes)
    return errors


def compare(engine: ReplayedEngine, request: EngineRequest, hashes: Sequence[int], errors: Errors) -> None:
    """Add one newcomer's errors."""
    exact_s = engine.replay(request, hashes).ttft_s
    state = engine.state()
    cached, shared = engine.look_up(hashes, request.prompt_tokens)
    waiting = {
        "counted": state.waiting,
        "unshared": [msgspec.structs.replace(waiter, shared_blocks=0) for waiter in state.waiting],
        "uncached": [msgspec.structs.replace(waiter, shared_blocks=0, cached_tokens=0) for waiter in state.waiting],
    }
    counts = {"counted": (cached, shared), "unshared": (cached, 0), "uncached": (0, 0)}
    for name, (cached_tokens, shared_blocks) in counts.items():
        counted = ReplayedEngine.from_state(msgspec.structs.replace(state, waiting=waiting[name]), CLOCK)
        ttft_s = counted.first_token(
            request.prompt_tokens, cached_tokens=cached_tokens, shared_blocks=shared_blocks
        ).ttft_s
        getattr(errors, name).append(ttft_s / exact_s - 1)


def mape(errors: Sequence[float]) -> float:
    """Mean absolute error."""
    return statistics.fmean(map(abs, errors))


def main() -> None:
    print("blocks  per s  async  all counts (bias)   sharing unknown   cache unknown")
    for async_scheduling in (False, True):
        for setting in SETTINGS:
            errors = errors_of(setting, async_scheduling=async_scheduling)
            print(
                f"{setting.num_blocks:6d} {setting.rate_per_s:6.0f}  {'yes' if async_scheduling else 'no':5s}"
                f"  {mape(errors.counted):8.1%} ({statistics.fmean(errors.counted):+6.1%})"
                f"  {mape(errors.unshared):14.1%} {mape(errors.uncached):15.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
