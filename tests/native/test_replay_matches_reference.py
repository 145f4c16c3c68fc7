"""The event-skipping core against the iteration-by-iteration reference, on 10,000 random states.

The states are rich: many residents, half-done prefills, preempted waiters, tight blocks, both policies, thresholds,
chunking off, blocks held in excess. A failure names the seed; ``random_states.random_case(seed)`` is the state.
"""

from __future__ import annotations

import random

import pytest

from headway._core import ReplayedEngine
from headway.types import EngineRequest
from random_states import Case, blocks_for, random_case, random_server_case
from reference_scheduler import reference_replay
from replay_comparison import first_token, replay_difference, replay_differences, same_replay

NUM_CASES, NUM_PARTS = 10_000, 10
NUM_CHANGED_CASES = 1_500


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_native_replay_equals_the_reference(part: int) -> None:
    """Total TTFT and wait to 1e-9 relative, the number of steps exactly; asked twice, from the cache as well."""
    size = NUM_CASES // NUM_PARTS
    differences, num_never = replay_differences(part * size, size)
    assert differences == []
    assert num_never < size // 10  # nearly all newcomers really run


def test_states_of_server_size_replay_as_the_reference() -> None:
    """Hundreds of decodes with hundreds waiting, ample or short of blocks, give the same first tokens."""
    for seed in range(30):
        case = random_server_case(seed)
        expected = reference_replay(case.state, case.newcomer, case.step_time)
        assert replay_difference(case, expected) is None


def check_against_state(engine: ReplayedEngine, case: Case, story: list[str]) -> None:
    """The possibly cached answer equals that of a fresh engine and of the reference on the present state."""
    now = engine.state()
    cached = first_token(engine, case)
    uncached = first_token(ReplayedEngine.from_state(now, case.step_time), case)
    expected = (uncached.ttft_s, uncached.wait_s, uncached.num_steps)
    assert same_replay(cached, expected), f"seed {case.seed}, {story}: cached {cached}, fresh {uncached}"
    expected = reference_replay(now, case.newcomer, case.step_time)
    assert same_replay(cached, expected), f"seed {case.seed}, {story}: native {cached}, reference {expected}"


def submit_another(engine: ReplayedEngine, case: Case, rng: random.Random, name: str) -> str:
    """Queue one more request that the limits allow; returns what was done."""
    limits = case.state.limits
    room = min(limits.max_model_len - 1, (limits.num_blocks - 1) * limits.block_size)
    prompt = min(rng.choice([1, 20, 300]), room)
    target = rng.randint(1, 40)
    # Not longer than the cache can hold, as in the random states.
    target = max(1, min(target, (limits.num_blocks - 1) * limits.block_size - prompt))
    assert blocks_for(prompt, limits.block_size) < limits.num_blocks
    priority = rng.randint(-2, 2)
    cached = rng.choice([0, prompt // 2, prompt])
    engine.submit(
        EngineRequest(
            request_id=name,
            prompt_tokens=prompt,
            target_output_tokens=target,
            priority=priority,
            cached_tokens=cached,
            shared_blocks=rng.choice([0, 2]) if limits.prefix_caching else 0,
        )
    )
    return f"submit {prompt} tokens, {cached} cached, target {target}, priority {priority}"


def change(engine: ReplayedEngine, case: Case, rng: random.Random, name: str) -> str:
    """Let something happen to the engine; returns what."""
    kind = rng.choice(["submit", "submit", "step", "advance", "advance", "cancel"])
    if kind == "submit":
        return submit_another(engine, case, rng, name)
    if kind == "step":
        engine.step()
        return "step"
    if kind == "advance":
        seconds = rng.choice([0.0, 1e-4, 3e-3, 0.05, 0.4])
        return f"advance {seconds}: {engine.advance(seconds)} steps"
    present = [request.request_id for request in [*engine.running, *engine.waiting]]
    if not present:
        return "nothing to cancel"
    victim = rng.choice(present)
    assert engine.cancel(victim)
    return f"cancel {victim}"


@pytest.mark.parametrize("part", range(5))
def test_the_cached_answer_survives_every_change(part: int) -> None:
    """After submit, step, advance, cancel and clone the answer equals a fresh replay of the present state."""
    size = NUM_CHANGED_CASES // 5
    for seed in range(part * size, (part + 1) * size):
        case = random_case(seed, ties=False)
        rng = random.Random(f"changes {seed}")
        engine = ReplayedEngine.from_state(case.state, case.step_time)
        story: list[str] = []
        for number in range(4):
            first_token(engine, case)  # so that there is something cached to go stale
            story.append(change(engine, case, rng, f"more{number}"))
            if rng.random() < 0.3:
                engine = engine.clone()
                story.append("clone")
            check_against_state(engine, case, story)
