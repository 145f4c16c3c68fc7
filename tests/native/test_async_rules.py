"""Asynchronous scheduling, rule by rule and by hand: what is known when, who keeps what, and what a newcomer waits for.

The clock counts steps unless a test says otherwise, so a time is a number of batches.
"""

from __future__ import annotations

import msgspec
import pytest

from engine_builders import COUNT_STEPS, fresh, limits, state
from headway._core import ReplayedEngine
from headway.errors import EngineInputError
from headway.types import EngineLimits, EngineRequest, EngineState, StepTime

ASYNC = limits(async_scheduling=True)
COUNT_TOKENS = StepTime.linear(b0=0.0, b1=1.0, b2=0.0, b3=0.0)


def engine_of(
    running: list[EngineRequest],
    waiting: list[EngineRequest] | None = None,
    *,
    under: EngineLimits = ASYNC,
    residual_s: float = 0.0,
    clock: StepTime = COUNT_STEPS,
) -> ReplayedEngine:
    return ReplayedEngine.from_state(state(under, running, waiting or (), residual_s=residual_s), clock)


def in_newest(request_id: str, prompt: int, output: int, target: int = 500, **more: object) -> EngineRequest:
    """A decode whose next output comes with the batch that is scheduled already."""
    request = EngineRequest(
        request_id=request_id,
        prompt_tokens=prompt,
        computed_tokens=prompt + output,
        output_tokens=output,
        scheduled_tokens=1,
        target_output_tokens=target,
    )
    return msgspec.structs.replace(request, **more)


def test_a_first_token_shows_with_the_step_after_the_one_that_scheduled_it() -> None:
    """The batch of step one gives the first output; step two schedules the second one before it is known."""
    engine = engine_of([], [fresh("a", 20)])
    first, second = engine.step(), engine.step()
    assert (first.num_scheduled_tokens, first.first_tokens) == ({"a": 20}, [])
    assert (second.num_scheduled_tokens, second.first_tokens) == ({"a": 1}, ["a"])
    (request,) = engine.running
    assert (request.output_tokens, request.computed_tokens, request.scheduled_tokens) == (1, 21, 1)


def test_a_newcomer_waits_for_the_batch_in_flight_and_the_one_scheduled_behind_it() -> None:
    """0.25 s until the scheduled batch of one token starts, 1 s for it, then the newcomer's own of 30 and a decode."""
    engine = engine_of([in_newest("a", 20, 5)], residual_s=0.25, clock=COUNT_TOKENS)
    answer = engine.first_token(30)
    assert (answer.wait_s, answer.ttft_s, answer.num_steps) == (1.25, 32.25, 1)


def test_on_an_idle_engine_nothing_is_ahead_of_a_newcomer() -> None:
    """Its batch starts at once, as without asynchronous scheduling."""
    answer = engine_of([]).first_token(30)
    assert (answer.wait_s, answer.ttft_s, answer.num_steps) == (0.0, 1.0, 1)


def test_an_end_by_max_tokens_is_foreseen() -> None:
    """The request is passed over while its last output is on its way, and holds seat and blocks until that is there."""
    under = limits(async_scheduling=True, max_num_seqs=1)
    engine = engine_of([in_newest("a", 20, 5, max_tokens=6)], [fresh("b", 10)], under=under)
    before = engine.free_blocks
    step = engine.step()
    assert (step.num_scheduled_tokens, step.finished, step.free_blocks) == ({}, ["a"], before)
    assert engine.free_blocks == before + 3
    assert engine.step().num_scheduled_tokens == {"b": 10}


def test_an_end_by_the_length_of_the_model_is_foreseen_too() -> None:
    """A request that fills the context with the output on its way gets no further step."""
    engine = engine_of([in_newest("a", 990, 9)])
    step = engine.step()
    assert (step.num_scheduled_tokens, step.finished) == ({}, ["a"])


def test_an_end_by_a_stop_token_costs_a_step_in_vain() -> None:
    """Nobody knows yet that the output on its way is the last, so one more is scheduled, and its batch runs."""
    engine = engine_of([in_newest("a", 20, 5, 6)], clock=COUNT_TOKENS)
    step = engine.step()
    assert (step.num_scheduled_tokens, step.finished) == ({"a": 1}, ["a"])
    assert engine.running == []
    assert engine.state().departed == ((1, 25, True),)
    assert engine.first_token(30).wait_s == 1.0  # the batch in vain still runs


def test_the_step_in_vain_takes_blocks_and_preempts_like_any_other() -> None:
    """The last free block goes to a request that is over, and the one behind it is preempted for nothing."""
    under = limits(async_scheduling=True, num_blocks=7)
    running = [in_newest("a", 25, 5, 6), in_newest("b", 25, 5)]  # three full blocks each, six in all
    step = engine_of(running, under=under).step()
    assert (step.num_scheduled_tokens, step.preempted, step.finished) == ({"a": 1}, ["b"], ["a"])


def test_a_preempted_request_still_gets_the_output_that_is_on_its_way() -> None:
    """It waits without blocks, and the update after its preemption adds what its last batch gave."""
    under = limits(async_scheduling=True, num_blocks=7)
    engine = engine_of([in_newest("a", 25, 5), in_newest("b", 25, 5)], under=under)
    assert engine.step().preempted == ["b"]
    (request,) = engine.waiting
    assert (request.output_tokens, request.computed_tokens, request.num_blocks) == (6, 0, 0)


def test_a_request_may_end_after_its_preemption() -> None:
    """Where the output on its way is the last, it leaves the queue it was just put into."""
    under = limits(async_scheduling=True, num_blocks=7)
    engine = engine_of([in_newest("a", 25, 5), in_newest("b", 25, 5, 6)], under=under)
    step = engine.step()
    assert (step.preempted, step.finished) == (["b"], ["b"])
    assert engine.waiting == []
    assert engine.free_blocks == 6 - 4


def test_a_place_passed_over_by_a_request_that_is_over_goes_to_the_next_in_the_batch() -> None:
    """Without chunked prefill a prompt that just did not fit does, once a request behind its limit needs no token."""
    under = limits(async_scheduling=True, chunked_prefill=False, max_model_len=100)
    engine = engine_of([in_newest("a", 20, 5, max_tokens=7), in_newest("b", 20, 5)], [fresh("c", 99)], under=under)
    assert engine.step().num_scheduled_tokens == {"a": 1, "b": 1}
    assert engine.step().num_scheduled_tokens == {"b": 1, "c": 99}


def test_time_passes_batch_by_batch() -> None:
    """An idle engine schedules two batches at once; after half a second the first is half done, and one waits."""
    engine = engine_of([], [fresh("a", 20)])
    assert engine.advance(0.5) == 2
    assert engine.residual_s == 0.5
    assert engine.advance(1.0) == 1
    (request,) = engine.running
    assert (engine.residual_s, request.output_tokens, request.scheduled_tokens) == (0.5, 2, 1)


def test_starting_a_batch_schedules_the_next_without_later_comers() -> None:
    """What comes after a batch has started is first seen when the one behind it starts."""
    engine = engine_of([in_newest("a", 20, 5)], clock=COUNT_TOKENS)
    engine.start_batch()
    assert engine.residual_s == 1.0
    engine.start_batch()  # it has started
    assert engine.residual_s == 1.0
    assert engine.first_token(30).ttft_s == 1.0 + 1.0 + 31.0
    idle = engine_of([])
    idle.start_batch()
    assert (idle.residual_s, idle.state()) == (0.0, engine_of([]).state())


def test_a_cancelled_request_leaves_its_share_of_the_batch_behind() -> None:
    """Its blocks are free at once, but the batch that holds it has been sent and takes its time."""
    engine = engine_of([in_newest("a", 20, 5), in_newest("b", 20, 5)], clock=COUNT_TOKENS)
    assert engine.cancel("b")
    assert engine.free_blocks == 1000 - 3
    assert engine.first_token(30).wait_s == 2.0
    assert engine.step().num_scheduled_tokens == {"a": 1}
    assert engine.step().finished == []


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: engine_of([in_newest("a", 20, 5)], under=limits()), "scheduled_tokens"),
        (lambda: engine_of([], [in_newest("a", 20, 5)]), "scheduled_tokens"),
        (lambda: engine_of([in_newest("a", 20, 5, scheduled_tokens=26)]), "scheduled_tokens"),
        (lambda: engine_of([]).submit(in_newest("a", 20, 5)), "scheduled_tokens"),
        (lambda: engine_of([]).replay(in_newest("a", 20, 0)), "scheduled_tokens"),
        (lambda: fresh("a", 20, computed_tokens=20), "computed_tokens"),
        (lambda: in_newest("a", 20, 5, computed_tokens=26), "computed_tokens"),
        (lambda: in_newest("a", 20, 5, scheduled_tokens=-1), "scheduled_tokens"),
    ],
)
def test_shares_that_cannot_be_are_refused(make: object, field: str) -> None:
    """A share of a batch belongs to a running request of an asynchronous engine, and is part of what is computed."""
    assert callable(make)
    with pytest.raises(EngineInputError, match=field):
        make()


def test_departed_chunks_belong_to_asynchronous_engines() -> None:
    """Without a batch scheduled ahead nothing can run in vain."""
    with pytest.raises(EngineInputError, match="departed"):
        ReplayedEngine.from_state(
            EngineState(limits=limits(), running=(), waiting=(), departed=((1, 25, True),)), COUNT_STEPS
        )
