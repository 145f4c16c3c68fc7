"""What the residents of an engine still have before them, by hand and against the requests themselves."""

from __future__ import annotations

from engine_builders import COUNT_STEPS, decoding, fresh, limits, state
from headway._core import ReplayedEngine
from headway.types import EngineRequest
from random_states import random_case


def is_decode(request: EngineRequest) -> bool:
    return request.output_tokens > 0 and left(request) == 1


def left(request: EngineRequest) -> int:
    return request.prompt_tokens + request.output_tokens - request.computed_tokens


def end(request: EngineRequest, max_model_len: int) -> int:
    caps = [request.target_output_tokens, max_model_len - request.prompt_tokens]
    return min(caps if request.max_tokens is None else [*caps, request.max_tokens])


def test_an_empty_engine_has_nothing_before_it() -> None:
    """Every sum of an idle engine is zero."""
    work = ReplayedEngine(limits(), COUNT_STEPS).workload()
    assert (work.num_running, work.num_waiting, work.num_prefills, work.num_decodes) == (0, 0, 0, 0)
    assert (work.prefill_tokens, work.prefill_pairs, work.context_tokens, work.decode_tokens) == (0, 0.0, 0, 0)


def test_the_sums_by_hand() -> None:
    """A decode, a prompt half done and one that waits: each counts once, where it belongs."""
    half = EngineRequest(request_id="h", prompt_tokens=50, computed_tokens=30, target_output_tokens=10)
    engine = ReplayedEngine.from_state(
        state(limits(), [decoding("d", 40, 5, 25), half], [fresh("w", 60, 10, max_tokens=7)]), COUNT_STEPS
    )
    work = engine.workload()
    assert (work.num_running, work.num_waiting) == (2, 1)
    assert (work.num_prefills, work.num_decodes) == (2, 1)
    assert work.prefill_tokens == 20 + 60
    assert work.prefill_pairs == (20 * 20 + 2 * 20 * 30) + 60 * 60
    assert work.context_tokens == 44 + 30
    assert work.decode_tokens == (25 - 5) + 10 + 7


def test_the_sums_are_those_of_the_requests_at_every_step() -> None:
    """On random engines, step after step, every sum equals the one over the listed requests."""
    for seed in range(40):
        case = random_case(seed)
        engine = ReplayedEngine.from_state(case.state, COUNT_STEPS)
        for _ in range(30):
            work = engine.workload()
            running, waiting = engine.running, engine.waiting
            residents = [*running, *waiting]
            prefills = [request for request in residents if not is_decode(request)]
            assert (work.num_running, work.num_waiting) == (len(running), len(waiting))
            assert (work.num_prefills, work.num_decodes) == (len(prefills), len(residents) - len(prefills))
            assert work.prefill_tokens == sum(map(left, prefills))
            assert work.prefill_pairs == sum(left(r) * (left(r) + 2 * r.computed_tokens) for r in prefills)
            assert work.context_tokens == sum(request.computed_tokens for request in running)
            rest = [max(end(r, case.state.limits.max_model_len) - r.output_tokens, 0) for r in residents]
            assert work.decode_tokens == sum(rest)
            engine.step()
