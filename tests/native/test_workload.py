"""What the residents of an engine still have before them, by hand and against the requests themselves."""

from __future__ import annotations

import engine_builders
from engine_builders import COUNT_STEPS, decoding, fresh, state
from headway._core import ReplayedEngine
from headway.types import EngineLimits, EngineRequest
from random_states import cache_hit, random_case


def done(request: EngineRequest, limits: EngineLimits) -> int:
    return request.computed_tokens or cache_hit(request, limits)


def given(request: EngineRequest) -> int:
    """Outputs, that of a batch not yet applied included."""
    comes = request.scheduled_tokens > 0 and request.computed_tokens == request.prompt_tokens + request.output_tokens
    return request.output_tokens + comes


def left(request: EngineRequest, limits: EngineLimits) -> int:
    return request.prompt_tokens + given(request) - done(request, limits)


def is_decode(request: EngineRequest, limits: EngineLimits) -> bool:
    return given(request) > 0 and left(request, limits) == 1


def end(request: EngineRequest, max_model_len: int) -> int:
    caps = [request.target_output_tokens, max_model_len - request.prompt_tokens]
    return min(caps if request.max_tokens is None else [*caps, request.max_tokens])


def test_an_empty_engine_has_nothing_before_it() -> None:
    """Every sum of an idle engine is zero."""
    work = ReplayedEngine(engine_builders.limits(), COUNT_STEPS).workload()
    assert (work.num_running, work.num_waiting, work.num_prefills, work.num_decodes) == (0, 0, 0, 0)
    assert (work.prefill_tokens, work.prefill_pairs, work.context_tokens, work.decode_tokens) == (0, 0.0, 0, 0)


def test_the_sums_by_hand() -> None:
    """A decode, a prompt half done and one that waits: each counts once, where it belongs."""
    half = EngineRequest(request_id="h", prompt_tokens=50, computed_tokens=30, target_output_tokens=10)
    engine = ReplayedEngine.from_state(
        state(engine_builders.limits(), [decoding("d", 40, 5, 25), half], [fresh("w", 60, 10, max_tokens=7)]),
        COUNT_STEPS,
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
        limits = case.state.limits
        engine = ReplayedEngine.from_state(case.state, COUNT_STEPS)
        for _ in range(30):
            work = engine.workload()
            running, waiting = engine.running, engine.waiting
            residents = [*running, *waiting]
            prefills = [request for request in residents if not is_decode(request, limits)]
            assert (work.num_running, work.num_waiting) == (len(running), len(waiting))
            is_over = [given(r) > r.output_tokens and given(r) >= end(r, limits.max_model_len) for r in residents]
            assert (work.num_prefills, work.num_decodes) == (
                len(prefills),
                len(residents) - len(prefills) - sum(is_over),
            )
            rest = [(left(request, limits), done(request, limits)) for request in prefills]
            assert work.prefill_tokens == sum(tokens for tokens, _ in rest)
            assert work.prefill_pairs == sum(tokens * (tokens + 2 * before) for tokens, before in rest)
            assert work.context_tokens == sum(request.computed_tokens for request in running)
            outputs = [max(end(r, limits.max_model_len) - given(r), 0) for r in residents]
            assert work.decode_tokens == sum(outputs)
            engine.step()
