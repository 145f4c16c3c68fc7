"""One test per rule of token-batch formation: running first, admission, chunks, blocks, ends. Numbers are by hand."""

from __future__ import annotations

import pytest

from engine_builders import COUNT_STEPS, decoding, fresh, limits, state
from headway._core import ReplayedEngine
from headway.types import EngineLimits, EngineRequest


def engine_of(
    engine_limits: EngineLimits, running: list[EngineRequest] | None = None, waiting: list[EngineRequest] | None = None
) -> ReplayedEngine:
    return ReplayedEngine.from_state(state(engine_limits, running or [], waiting or []), COUNT_STEPS)


def half_prefilled(request_id: str, prompt_tokens: int, computed_tokens: int) -> EngineRequest:
    return fresh(request_id, prompt_tokens, computed_tokens=computed_tokens)


def ids(requests: list[EngineRequest]) -> list[str]:
    return [request.request_id for request in requests]


def test_running_requests_are_scheduled_in_list_order_before_any_waiting_one() -> None:
    """A decode and a half-done prefill are served first, the newcomer gets what is left of the budget."""
    engine = engine_of(limits(), [decoding("a", 20, 5), half_prefilled("b", 90, 30)], [fresh("c", 50)])
    assert list(engine.step().num_scheduled_tokens.items()) == [("a", 1), ("b", 60), ("c", 39)]
    assert ids(engine.running) == ["a", "b", "c"]


def test_a_spent_budget_leaves_later_running_requests_in_place() -> None:
    """A prefill that takes the whole budget makes the decode behind it wait one step, without losing its place."""
    engine = engine_of(limits(), [half_prefilled("a", 150, 10), decoding("b", 20, 5)])
    assert engine.step().num_scheduled_tokens == {"a": 100}
    assert ids(engine.running) == ["a", "b"]
    assert engine.step().num_scheduled_tokens == {"a": 40, "b": 1}


def test_only_the_head_of_the_queue_is_tried() -> None:
    """A head that does not fit the free blocks is not overtaken by a small request behind it."""
    engine = engine_of(limits(num_blocks=31), [decoding("a", 150, 1)], [fresh("big", 200), fresh("small", 5)])
    assert engine.step().num_scheduled_tokens == {"a": 1}
    assert ids(engine.waiting) == ["big", "small"]


def test_max_num_seqs_bounds_the_running_list() -> None:
    """No request is admitted beyond max_num_seqs, whatever budget and blocks are left."""
    engine = engine_of(limits(max_num_seqs=2), [decoding("a", 20, 1)], [fresh("b", 5), fresh("c", 5)])
    assert engine.step().num_scheduled_tokens == {"a": 1, "b": 5}
    assert ids(engine.waiting) == ["c"]


def test_the_long_prefill_threshold_caps_running_and_waiting_chunks() -> None:
    """With company, neither a running nor a waiting prefill gets more than the threshold in one step."""
    engine = engine_of(limits(long_prefill_token_threshold=20), [half_prefilled("a", 90, 10)], [fresh("b", 50)])
    assert engine.step().num_scheduled_tokens == {"a": 20, "b": 20}


def test_the_long_prefill_threshold_is_ignored_for_a_lone_request() -> None:
    """A request that is alone in the engine starves nobody and takes the whole budget."""
    engine = engine_of(limits(long_prefill_token_threshold=20), waiting=[fresh("a", 90)])
    assert engine.step().num_scheduled_tokens == {"a": 90}


def test_chunked_prefill_splits_a_prompt_at_the_budget() -> None:
    """With chunking, the second prompt is cut where the budget ends."""
    engine = engine_of(limits(max_num_batched_tokens=1000), waiting=[fresh("a", 600), fresh("b", 500), fresh("c", 10)])
    assert engine.step().num_scheduled_tokens == {"a": 600, "b": 400}


def test_without_chunked_prefill_a_prompt_beyond_the_budget_stops_admission() -> None:
    """Without chunking, the second prompt waits for a whole budget and the small one behind it waits with it."""
    off = limits(max_num_batched_tokens=1000, chunked_prefill=False)
    engine = engine_of(off, waiting=[fresh("a", 600), fresh("b", 500), fresh("c", 10)])
    assert engine.step().num_scheduled_tokens == {"a": 600}
    assert engine.step().num_scheduled_tokens == {"a": 1, "b": 500, "c": 10}


def test_without_chunked_prefill_the_threshold_still_cuts_prompts() -> None:
    """The threshold applies before the question whether a prompt fits the budget, as in vLLM."""
    off = limits(max_num_batched_tokens=1000, chunked_prefill=False, long_prefill_token_threshold=100)
    engine = engine_of(off, waiting=[fresh("a", 600), fresh("b", 950), fresh("c", 10)])
    assert engine.step().num_scheduled_tokens == {"a": 100, "b": 100, "c": 10}


def test_free_blocks_are_reported_before_ended_requests_free_theirs() -> None:
    """A request that ends in this very step still holds its blocks in the batch, and no longer in the engine."""
    engine = engine_of(limits(), waiting=[fresh("a", 15, target_output_tokens=1)])
    batch = engine.step()
    assert (batch.free_blocks, batch.finished, batch.first_tokens) == (998, ["a"], ["a"])
    assert engine.free_blocks == 1000


def test_blocks_of_ended_requests_serve_the_next_step_only() -> None:
    """A head that needs the blocks of a request ending now is admitted one step later."""
    engine = engine_of(limits(num_blocks=4), [decoding("a", 15, 1, target_output_tokens=2)], [fresh("b", 25)])
    assert engine.step().num_scheduled_tokens == {"a": 1}
    assert engine.step().num_scheduled_tokens == {"b": 25}


def test_the_null_block_is_never_free() -> None:
    """An engine of three blocks holds twenty tokens in blocks of ten."""
    engine = engine_of(limits(num_blocks=3), waiting=[fresh("a", 20, target_output_tokens=1)])
    assert engine.step().free_blocks == 0


def test_a_chunk_takes_a_block_only_when_the_last_one_is_full() -> None:
    """A decode takes its next block in the step that computes the first token of that block."""
    engine = engine_of(limits(), [decoding("a", 9, 1)])
    assert [engine.step().free_blocks for _ in range(3)] == [999, 998, 998]


def test_blocks_held_in_excess_are_used_up_first() -> None:
    """A request that holds five blocks of ten takes no further one before its fifty-first token."""
    engine = engine_of(limits(), [decoding("a", 45, 1, num_blocks=5)])
    assert [engine.step().free_blocks for _ in range(6)] == [995, 995, 995, 995, 995, 994]


def test_a_waiting_request_goes_on_from_its_computed_tokens() -> None:
    """A waiting request that holds two blocks of computed tokens is given only the rest."""
    engine = engine_of(limits(), waiting=[half_prefilled("a", 50, 20)])
    batch = engine.step()
    assert (batch.num_scheduled_tokens, batch.free_blocks) == ({"a": 30}, 995)


@pytest.mark.parametrize(("reserve_full_isl", "expected"), [(True, {"a": 1}), (False, {"a": 1, "b": 99})])
def test_reserve_full_isl_wants_blocks_for_the_whole_request(reserve_full_isl: bool, expected: dict[str, int]) -> None:
    """With the reserve, a chunked prompt is admitted only when all of it fits; without, when its first chunk does."""
    engine_limits = limits(num_blocks=31, reserve_full_isl=reserve_full_isl)
    engine = engine_of(engine_limits, [decoding("a", 150, 1)], [fresh("b", 180)])
    assert engine.step().num_scheduled_tokens == expected


@pytest.mark.parametrize(("prompt", "expected"), [(890, {"a": 1, "b": 890}), (891, {"a": 1})])
def test_the_watermark_keeps_blocks_free_while_something_runs(prompt: int, expected: dict[str, int]) -> None:
    """int(0.1 x 101) = 10 blocks stay free beside a running request that holds one of the hundred."""
    engine_limits = limits(max_num_batched_tokens=1000, num_blocks=101, watermark=0.1)
    engine = engine_of(engine_limits, [decoding("a", 5, 1)], [fresh("b", prompt)])
    assert engine.step().num_scheduled_tokens == expected


def test_the_watermark_is_ignored_while_nothing_runs() -> None:
    """An idle engine gives a prompt every block."""
    engine_limits = limits(max_num_batched_tokens=1000, num_blocks=101, watermark=0.1)
    assert engine_of(engine_limits, waiting=[fresh("a", 999)]).step().free_blocks == 0


def test_the_watermark_also_holds_back_a_first_chunk() -> None:
    """Without the reserve, the first chunk and the watermark must be free together."""
    engine_limits = limits(num_blocks=21, watermark=0.5, reserve_full_isl=False)
    engine = engine_of(engine_limits, [decoding("a", 5, 1)], [fresh("b", 150)])
    # 19 blocks are free, the watermark is 10, the first chunk of 99 tokens wants 10.
    assert engine.step().num_scheduled_tokens == {"a": 1}


def test_the_first_token_comes_out_of_the_step_with_the_last_prompt_chunk() -> None:
    """A prompt of two chunks has its first token after the second, and its second token one step later."""
    engine = engine_of(limits(), waiting=[fresh("a", 150, target_output_tokens=2)])
    batches = [engine.step() for _ in range(3)]
    assert [batch.first_tokens for batch in batches] == [[], ["a"], []]
    assert [batch.finished for batch in batches] == [[], [], ["a"]]


@pytest.mark.parametrize(
    ("request_", "num_outputs"),
    [
        (fresh("a", 15, target_output_tokens=4), 4),
        (fresh("a", 15, target_output_tokens=9, max_tokens=3), 3),
        (fresh("a", 15, target_output_tokens=2, max_tokens=30), 2),
        (fresh("a", 15, target_output_tokens=900), 5),
    ],
)
def test_a_request_ends_at_target_or_max_tokens_or_model_length(request_: EngineRequest, num_outputs: int) -> None:
    """Whichever of the three is smallest ends it; prompt and output together never pass max_model_len (20 here)."""
    engine = engine_of(limits(max_model_len=20), waiting=[request_])
    num_steps = 1
    while engine.step().finished != ["a"]:
        num_steps += 1
    assert num_steps == num_outputs


def test_a_resident_that_outlived_its_target_takes_one_more_token() -> None:
    """The end is checked after a token was appended, so an overdue request still has one step."""
    engine = engine_of(limits(), [decoding("a", 20, 7, target_output_tokens=5)])
    batch = engine.step()
    assert (batch.num_scheduled_tokens, batch.finished) == ({"a": 1}, ["a"])


def test_an_idle_engine_steps_emptily_and_at_no_cost() -> None:
    """With nothing to do a step is an empty batch of 0 s."""
    batch = ReplayedEngine(limits(), COUNT_STEPS).step()
    assert (batch.num_scheduled_tokens, batch.preempted, batch.time_s, batch.free_blocks) == ({}, [], 0.0, 1000)


def test_a_stalled_engine_steps_emptily_and_at_no_cost() -> None:
    """A head that cannot be admitted while nothing runs leaves an empty batch of 0 s, for ever."""
    engine = ReplayedEngine.from_state(state(limits(), [], [fresh("a", 50)], free_blocks=4), COUNT_STEPS)
    for _ in range(3):
        batch = engine.step()
        assert (batch.num_scheduled_tokens, batch.time_s) == ({}, 0.0)
    assert ids(engine.waiting) == ["a"]


def test_submitted_requests_queue_at_once_whatever_their_arrival() -> None:
    """Under fcfs the order of submission decides; arrival_s and priority do not."""
    engine = ReplayedEngine(limits(max_num_seqs=1), COUNT_STEPS)
    engine.submit(fresh("a", 10, arrival_s=100.0, priority=5))
    engine.submit(fresh("b", 10, arrival_s=0.0, priority=-5))
    assert ids(engine.waiting) == ["a", "b"]
    assert engine.step().num_scheduled_tokens == {"a": 10}


def test_cancel_frees_the_blocks_of_a_running_request() -> None:
    """A cancelled request leaves its list and its blocks are free at once; an unknown id changes nothing."""
    engine = engine_of(limits(), [decoding("a", 25, 1), decoding("b", 25, 1)], [fresh("c", 5)])
    assert engine.cancel("a")
    assert (ids(engine.running), engine.free_blocks) == (["b"], 997)
    assert engine.cancel("c")
    assert engine.waiting == []
    assert not engine.cancel("a")
    assert "b" in engine
    assert "c" not in engine


def test_an_ended_id_may_come_back() -> None:
    """After a request ended or was cancelled its id is free again."""
    engine = ReplayedEngine(limits(), COUNT_STEPS)
    engine.submit(fresh("a", 10, target_output_tokens=1))
    assert engine.step().finished == ["a"]
    engine.submit(fresh("a", 10))
    assert engine.cancel("a")
    engine.submit(fresh("a", 20))
    assert engine.step().num_scheduled_tokens == {"a": 20}


def test_remaining_prefill_counts_running_and_waiting_requests() -> None:
    """What is still to prefill: the rest of a half-done prompt, a whole new one, and a preempted one's outputs too."""
    engine = engine_of(limits(), [half_prefilled("a", 90, 30)], [fresh("b", 50), fresh("c", 20, output_tokens=4)])
    assert engine.remaining_prefill_tokens == 60 + 50 + 24
    assert (engine.num_running, engine.num_waiting) == (1, 2)
