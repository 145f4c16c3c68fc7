"""Recompute preemption under both policies, and the order of the priority queue. Numbers are by hand.

Blocks hold ten tokens. A request of 20 prompt tokens and one output holds two full blocks and needs a third for its
next token.
"""

from __future__ import annotations

from typing import Any

from engine_builders import decoding, fresh, limits, state
from headway._core import ReplayedEngine
from headway.types import EngineLimits, EngineRequest, StepTime

CLOCK = StepTime.linear(b0=0.5, b1=0.25, b2=0.0, b3=0.0)


def full(request_id: str, **more: Any) -> EngineRequest:
    return decoding(request_id, 20, 1, **more)


def roomy(request_id: str, **more: Any) -> EngineRequest:
    """Holds two blocks and needs no third one now."""
    return decoding(request_id, 12, 1, **more)


def engine_of(
    engine_limits: EngineLimits, running: list[EngineRequest], waiting: list[EngineRequest]
) -> ReplayedEngine:
    return ReplayedEngine.from_state(state(engine_limits, running, waiting), CLOCK)


def ids(requests: list[EngineRequest]) -> list[str]:
    return [request.request_id for request in requests]


def test_fcfs_preempts_the_last_running_request() -> None:
    """The youngest gives all its blocks, keeps its outputs, forgets what was computed, and heads the queue."""
    engine = engine_of(limits(num_blocks=7), [full("a"), full("b"), full("c")], [fresh("w", 5)])
    batch = engine.step()
    assert (batch.num_scheduled_tokens, batch.preempted, batch.free_blocks) == ({"a": 1, "b": 1}, ["c"], 0)
    assert (ids(engine.running), ids(engine.waiting)) == (["a", "b"], ["c", "w"])
    victim = engine.waiting[0]
    assert (victim.computed_tokens, victim.output_tokens, victim.prompt_tokens) == (0, 1, 20)


def test_nothing_is_admitted_in_a_step_that_preempted() -> None:
    """Free blocks and budget left by a preemption stay unused until the next step."""
    engine = engine_of(limits(num_blocks=8), [full("a"), roomy("b"), decoding("c", 30, 1)], [fresh("w", 5)])
    batch = engine.step()
    assert (batch.num_scheduled_tokens, batch.preempted, batch.free_blocks) == ({"a": 1, "b": 1}, ["c"], 2)
    assert ids(engine.waiting) == ["c", "w"]


def test_several_victims_keep_their_order_in_the_queue() -> None:
    """Victims are taken from the back one by one, so that they wait in the order in which they ran."""
    greedy = fresh("a", 60, computed_tokens=20)
    engine = engine_of(limits(num_blocks=7), [greedy, full("b"), full("c")], [])
    batch = engine.step()
    assert (batch.num_scheduled_tokens, batch.preempted) == ({"a": 40}, ["c", "b"])
    assert ids(engine.waiting) == ["b", "c"]


def test_a_request_that_is_the_victim_itself_ends_the_running_loop() -> None:
    """The last running request that needs a block preempts itself; those before it keep their tokens."""
    engine = engine_of(limits(num_blocks=5), [roomy("a"), full("b")], [])
    batch = engine.step()
    assert (batch.num_scheduled_tokens, batch.preempted, batch.free_blocks) == ({"a": 1}, ["b"], 2)


def test_a_recompute_covers_the_outputs_and_gives_no_first_token() -> None:
    """A preempted request prefills prompt and outputs again, then samples its next token, not its first."""
    engine = engine_of(limits(), [], [fresh("a", 20, target_output_tokens=9, output_tokens=4)])
    batch = engine.step()
    assert (batch.num_scheduled_tokens, batch.first_tokens) == ({"a": 24}, [])
    assert engine.running[0].output_tokens == 5


def test_a_step_that_only_preempts_costs_the_constant_term() -> None:
    """Under priority the first in the list may be the victim: the loop ends and nobody is scheduled."""
    engine_limits = limits(num_blocks=5, policy="priority")
    engine = engine_of(engine_limits, [full("x", priority=5), roomy("y", priority=0)], [])
    batch = engine.step()
    assert (batch.num_scheduled_tokens, batch.preempted, batch.time_s) == ({}, ["x"], 0.5)
    assert engine.step().num_scheduled_tokens == {"y": 1}


def test_priority_preempts_the_largest_priority_then_the_latest_arrival() -> None:
    """Among equal priorities the latest arrival goes, wherever it stands in the running list."""
    engine_limits = limits(num_blocks=7, policy="priority")
    running = [roomy("late", priority=1, arrival_s=9.0), roomy("early", priority=1, arrival_s=3.0)]
    engine = engine_of(engine_limits, [*running, full("a", priority=0, arrival_s=10.0)], [])
    batch = engine.step()
    assert (batch.num_scheduled_tokens, batch.preempted) == ({"early": 1, "a": 1}, ["late"])


def test_a_victim_scheduled_in_this_step_returns_its_tokens_to_the_budget() -> None:
    """With a budget of two, the victim's token goes to the request that stands last."""
    engine_limits = limits(max_num_batched_tokens=2, num_blocks=7, policy="priority")
    running = [roomy("victim", priority=9), full("a", priority=0), roomy("c", priority=0)]
    engine = engine_of(engine_limits, running, [])
    batch = engine.step()
    assert (list(batch.num_scheduled_tokens.items()), batch.preempted) == ([("a", 1), ("c", 1)], ["victim"])


def test_of_equal_victims_the_first_in_the_list_goes() -> None:
    """Equal priority and arrival: the first maximum, as Python's max() picks in vLLM."""
    engine_limits = limits(num_blocks=7, policy="priority")
    running = [roomy("a", arrival_s=1.0), roomy("b", arrival_s=1.0), full("c", priority=-1, arrival_s=0.0)]
    batch = engine_of(engine_limits, running, []).step()
    assert (batch.num_scheduled_tokens, batch.preempted) == ({"b": 1, "c": 1}, ["a"])


def test_without_arrivals_the_last_submitted_is_the_first_victim() -> None:
    """None means after all present, strictly."""
    engine_limits = limits(num_blocks=7, policy="priority")
    batch = engine_of(engine_limits, [roomy("a"), roomy("b"), full("c", priority=-1)], []).step()
    assert (batch.num_scheduled_tokens, batch.preempted) == ({"a": 1, "c": 1}, ["b"])


def test_a_victim_returns_to_its_place_in_the_priority_queue() -> None:
    """Under priority a preempted request does not head the queue but stands where its key puts it."""
    engine_limits = limits(num_blocks=5, policy="priority")
    running = [full("a", priority=0), roomy("victim", priority=2, arrival_s=5.0)]
    waiting = [fresh("before", 5, priority=1, arrival_s=9.0), fresh("after", 5, priority=2, arrival_s=6.0)]
    engine = engine_of(engine_limits, running, waiting)
    assert engine.step().preempted == ["victim"]
    assert ids(engine.waiting) == ["before", "victim", "after"]


def test_the_priority_queue_orders_by_priority_arrival_submission() -> None:
    """Lower is sooner; equal priority and arrival keep the order of submission; None comes after all present."""
    engine = ReplayedEngine(limits(policy="priority"), CLOCK)
    engine.submit(fresh("x", 5, priority=1, arrival_s=0.0))
    engine.submit(fresh("y", 5, priority=0, arrival_s=5.0))
    engine.submit(fresh("z", 5, priority=0, arrival_s=2.0))
    engine.submit(fresh("t", 5, priority=0, arrival_s=2.0))
    engine.submit(fresh("n", 5, priority=0))
    assert ids(engine.waiting) == ["z", "t", "y", "n", "x"]


def test_a_waiting_list_given_under_priority_is_sorted() -> None:
    """The order of a state's waiting list breaks ties only."""
    waiting = [fresh("c", 5, priority=3), fresh("b", 5, priority=1, arrival_s=1.0), fresh("a", 5, priority=0)]
    assert ids(engine_of(limits(policy="priority"), [], waiting).waiting) == ["a", "b", "c"]


def test_a_newcomer_is_sorted_in_by_the_same_rule() -> None:
    """With one slot that frees after three steps, a sooner newcomer runs fourth, a later one after the waiting one."""
    engine_limits = limits(max_num_seqs=1, policy="priority")
    running = [decoding("a", 20, 1, target_output_tokens=4)]
    waiting = [fresh("w", 10, target_output_tokens=5, priority=1, arrival_s=7.0)]
    engine = engine_of(engine_limits, running, waiting)
    assert engine.first_token(10, priority=0).num_steps == 4
    assert engine.first_token(10, priority=2).num_steps == 9
    assert engine.first_token(10, priority=1, arrival_s=6.0).num_steps == 4
    assert engine.first_token(10, priority=1, arrival_s=8.0).num_steps == 9
    assert engine.first_token(10, priority=1).num_steps == 9
