"""The native block pool against the plain one, on random workloads with prefixes in common.

Both kinds of scheduling, evictions, preemptions and cancels; a failure names the seed
(``random_states.random_workload``). The recordings hold the same two to the real scheduler.
"""

from __future__ import annotations

from itertools import islice

import pytest

from headway._core import ReplayedEngine
from headway.types import EngineRequest
from random_states import KINDS, Workload, block_hashes, random_workload
from recorded_runs import native_engine, reference_engine, run_rows

CACHING_KINDS = [kind for kind in KINDS if "prefix" in kind]
NUM_WORKLOADS, NUM_STEPS = 120, 120


@pytest.mark.parametrize("kind", CACHING_KINDS)
def test_native_and_plain_pools_do_the_same(kind: str) -> None:
    """Every step agrees: batches, victims, free blocks, ends and queues."""
    for seed in range(NUM_WORKLOADS):
        workload = random_workload(seed, max_steps=NUM_STEPS, **KINDS[kind])
        native = run_rows(native_engine(workload.limits), workload)
        plain = run_rows(reference_engine(workload.limits), workload)
        for step, (row, expected) in enumerate(islice(zip(native, plain, strict=True), NUM_STEPS)):
            assert row == expected, f"{kind}, seed {seed}, step {step}"


def resident_blocks(engine: ReplayedEngine) -> int:
    """Blocks in use, each counted once."""
    return sum((request.num_blocks or 0) - request.shared_blocks for request in engine.running)


def check_step(engine: ReplayedEngine, workload: Workload, request: EngineRequest | None) -> None:
    """Blocks add up after a step, and what a look-up promises is what an admission finds."""
    found = {waiter.request_id: waiter.cached_tokens for waiter in engine.waiting}
    head = engine.waiting[0].request_id if engine.waiting else None
    batch = engine.step()
    assert engine.free_blocks + resident_blocks(engine) == workload.limits.num_blocks - 1
    if head in batch.num_scheduled_tokens and not batch.finished:
        assert batch.cached_tokens.get(head, 0) <= workload.limits.max_model_len
        assert head is not None
        assert batch.cached_tokens.get(head, 0) >= found[head]  # one that ran in this very step may have cached more
    if request is not None:
        tokens, shared_blocks = engine.look_up(block_hashes(workload, request), request.prompt_tokens)
        assert 0 <= shared_blocks * workload.limits.block_size <= tokens < request.prompt_tokens


@pytest.mark.parametrize("kind", CACHING_KINDS)
def test_blocks_of_a_pool_add_up(kind: str) -> None:
    """Free blocks and those in use are all there are, whoever shares them; sharing never exceeds what was found."""
    for seed in range(40):
        workload = random_workload(seed, **KINDS[kind])
        engine = native_engine(workload.limits)
        submissions = list(workload.submissions)
        for step in range(80):
            while submissions and submissions[0][0] <= step:
                request = submissions.pop(0)[1]
                engine.submit(request, block_hashes(workload, request))
            check_step(engine, workload, submissions[0][1] if submissions else None)


@pytest.mark.parametrize("kind", CACHING_KINDS)
def test_time_passes_for_an_engine_with_a_pool_as_step_by_step(kind: str) -> None:
    """``advance`` on a clone leads where as many single steps lead."""
    for seed in range(40):
        workload = random_workload(seed, **KINDS[kind])
        engine = native_engine(workload.limits)
        for _, request in workload.submissions[:12]:
            engine.submit(request, block_hashes(workload, request))
        clone = engine.clone()
        num_steps = clone.advance(17.5)
        for _ in range(num_steps):
            engine.step()
        assert clone.state().running == engine.state().running, seed
        assert clone.state().waiting == engine.state().waiting, seed
        assert clone.free_blocks == engine.free_blocks, seed
