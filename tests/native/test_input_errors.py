"""Impossible input raises an EngineInputError (a ValueError) that names the field; nothing crashes, nothing changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine_builders import COUNT_STEPS, decoding, fresh, limits, state
from headway import replay
from headway._core import EngineGroup, ReplayedEngine
from headway.errors import EngineInputError
from headway.types import EngineLimits, EngineRequest, EngineState, StepTime


def refused(make: Callable[[], object], field: str) -> None:
    """Expect an EngineInputError about this field, also as a ValueError whose text starts with it."""
    with pytest.raises(ValueError) as caught:
        make()
    assert isinstance(caught.value, EngineInputError)
    assert caught.value.field == field
    assert str(caught.value).startswith(field)


COUNTS = ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "block_size", "num_blocks")


@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 2**31, 2**70, 1.5, True, None, "16", math.nan])
def test_a_limit_must_be_a_positive_32_bit_integer(field: str, value: object) -> None:
    """Zero, negative, too large, fractional and wrongly typed limits are refused by name."""
    refused(lambda: limits(**{field: value}), field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_blocks", 1),  # nothing would be left beside the null block
        ("long_prefill_token_threshold", -1),
        ("watermark", -0.1),
        ("watermark", 1.0),
        ("watermark", math.nan),
        ("watermark", math.inf),
        ("watermark", "0.1"),
        ("chunked_prefill", 1),
        ("reserve_full_isl", None),
        ("policy", "lifo"),
        ("policy", None),
    ],
)
def test_every_other_limit_is_checked_too(field: str, value: object) -> None:
    """Each setting refuses what no engine accepts."""
    refused(lambda: limits(**{field: value}), field)


def test_without_chunked_prefill_the_budget_must_reach_the_model_length() -> None:
    """A prompt longer than the budget could never run."""
    refused(lambda: limits(chunked_prefill=False, max_num_batched_tokens=999), "max_num_batched_tokens")
    assert limits(chunked_prefill=False, max_num_batched_tokens=1000).chunked_prefill is False


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e-9, "1", None, True])
def test_coefficients_must_be_finite_and_not_negative(value: object) -> None:
    """NaN, infinite, negative and wrongly typed coefficients are refused by name, in every form."""
    linear = {"b0": 1.0, "b1": 0.0, "b2": 0.0, "b3": 0.0, "b_seq": 0.0}
    knee = {"b0": 1.0, "b1_below": 0.0, "b1_above": 0.0, "knee": 1.0, "b2": 0.0, "b3": 0.0, "b_seq": 0.0}
    six_term = {"b0": 1.0, "bp": 0.0, "bpp": 0.0, "bd": 0.0, "bs": 0.0, "bss": 0.0}
    for make, good in ((StepTime.linear, linear), (StepTime.knee, knee), (StepTime.six_term, six_term)):
        for name in good:
            refused(lambda make=make, bad=good | {name: value}: make(**bad), name)  # type: ignore[misc]


def test_an_unknown_form_or_a_missing_coefficient_is_refused() -> None:
    """A clock must be of a known form and complete."""
    refused(lambda: StepTime("cubic", (1.0,)), "form")  # type: ignore[arg-type]
    refused(lambda: StepTime("linear", (1.0, 2.0)), "coefficients")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_tokens", 0),
        ("prompt_tokens", -5),
        ("prompt_tokens", 2**31),
        ("prompt_tokens", 3.0),
        ("computed_tokens", -1),
        ("computed_tokens", 50),  # all of prompt and output: the newest token is never computed between steps
        ("output_tokens", -1),
        ("target_output_tokens", 0),
        ("target_output_tokens", -3),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("num_blocks", -1),
        ("priority", 2**31),
        ("priority", 0.5),
        ("arrival_s", math.nan),
        ("arrival_s", math.inf),
        ("arrival_s", "now"),
    ],
)
def test_a_request_with_an_impossible_value_is_refused(field: str, value: object) -> None:
    """Negative and wrongly typed counts, and more computed than there is, are refused by name."""
    good = {"request_id": "a", "prompt_tokens": 50, "target_output_tokens": 10}
    refused(lambda: EngineRequest(**(good | {field: value})), field)  # type: ignore[arg-type]


TIGHT = limits(num_blocks=6)  # fifty tokens

IMPOSSIBLE = [
    (limits(), fresh("x", 1000), "prompt_tokens"),  # max_model_len - 1 is 999
    (TIGHT, fresh("x", 51), "prompt_tokens"),
    (limits(), fresh("x", 900, output_tokens=100), "output_tokens"),
    (TIGHT, fresh("x", 40, num_blocks=6), "num_blocks"),
    (limits(), fresh("x", 90, computed_tokens=50, num_blocks=4), "num_blocks"),
]


@pytest.mark.parametrize(("engine_limits", "request_", "field"), IMPOSSIBLE)
def test_a_request_that_the_limits_forbid_is_refused_everywhere(
    engine_limits: EngineLimits, request_: EngineRequest, field: str
) -> None:
    """Too long, never fitting, holding more or less than possible: in a running or waiting list, and submitted."""
    refused(lambda: ReplayedEngine.from_state(state(engine_limits, [request_]), COUNT_STEPS), field)
    refused(lambda: ReplayedEngine.from_state(state(engine_limits, [], [request_]), COUNT_STEPS), field)
    engine = ReplayedEngine(engine_limits, COUNT_STEPS)
    refused(lambda: engine.submit(request_), field)
    assert engine.state() == ReplayedEngine(engine_limits, COUNT_STEPS).state()
    if request_.output_tokens == 0:
        refused(lambda: replay(state(engine_limits), request_, COUNT_STEPS), field)


def test_the_longest_possible_prompt_is_accepted() -> None:
    """max_model_len − 1 tokens run, and so does a prompt that fills every block."""
    assert replay(state(limits()), fresh("x", 999), COUNT_STEPS).num_steps == 10
    assert replay(state(TIGHT), fresh("x", 50), COUNT_STEPS).num_steps == 1


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_first_token_refuses_what_a_request_refuses(policy: str) -> None:
    """A question checks prompt, priority and arrival; the bare ttft_s of an impossible prompt is infinite."""
    engine = ReplayedEngine(limits(policy=policy, num_blocks=91), COUNT_STEPS)
    for prompt in (0, -1, 1000, 901, 2**40):
        refused(lambda prompt=prompt: engine.first_token(prompt), "prompt_tokens")  # type: ignore[misc]
        assert engine.ttft_s(prompt) == math.inf
    refused(lambda: engine.first_token(10, arrival_s=math.nan), "arrival_s")
    refused(lambda: engine.first_token(10, arrival_s=math.inf), "arrival_s")
    refused(lambda: engine.first_token(10, priority=2**40), "priority")


def test_a_duplicate_id_is_refused() -> None:
    """One id, one request: within a state, on submission, and for a newcomer."""
    twice = [decoding("a", 20, 1), decoding("a", 20, 1)]
    refused(lambda: ReplayedEngine.from_state(state(limits(), twice), COUNT_STEPS), "request_id")
    refused(lambda: ReplayedEngine.from_state(state(limits(), twice[:1], [fresh("a", 5)]), COUNT_STEPS), "request_id")
    engine = ReplayedEngine(limits(), COUNT_STEPS)
    engine.submit(fresh("a", 5))
    refused(lambda: engine.submit(fresh("a", 6)), "request_id")
    assert engine.waiting[0].prompt_tokens == 5
    refused(lambda: replay(state(limits(), twice[:1]), fresh("a", 5), COUNT_STEPS), "request_id")


def test_an_id_stays_taken_while_its_request_lives() -> None:
    """Cancelling, resubmitting and ending others never makes the engine forget a live id."""
    engine = ReplayedEngine(limits(), COUNT_STEPS)
    for name, target in (("a", 3), ("b", 3), ("c", 3), ("z", 50)):
        engine.submit(fresh(name, 10, target))
    engine.cancel("a")
    engine.cancel("b")
    engine.submit(fresh("a", 10, 30))
    while "c" in engine:
        engine.step()
    assert "a" in engine
    refused(lambda: engine.submit(fresh("a", 10)), "request_id")
    assert engine.cancel("a")
    assert [request.request_id for request in engine.running] == ["z"]


def test_a_request_id_must_be_a_string() -> None:
    """Anything else as an id is refused by name."""
    engine = ReplayedEngine(limits(), COUNT_STEPS)
    refused(lambda: engine.submit(fresh(5, 10)), "request_id")  # type: ignore[arg-type]


def test_more_blocks_held_than_exist_are_refused() -> None:
    """Requests that each fit may still hold more blocks together than the engine has."""
    both = [decoding("a", 30, 1), decoding("b", 30, 1)]
    refused(lambda: ReplayedEngine.from_state(state(TIGHT, both), COUNT_STEPS), "num_blocks")
    engine = ReplayedEngine.from_state(state(TIGHT, both[:1]), COUNT_STEPS)
    refused(lambda: engine.submit(fresh("c", 40, computed_tokens=25)), "num_blocks")


def test_free_and_held_blocks_may_not_exceed_what_exists() -> None:
    """free_blocks beside what requests hold is at most num_blocks − 1."""
    held = [decoding("a", 30, 1)]
    refused(lambda: ReplayedEngine.from_state(state(TIGHT, held, free_blocks=3), COUNT_STEPS), "free_blocks")
    assert ReplayedEngine.from_state(state(TIGHT, held, free_blocks=2), COUNT_STEPS).free_blocks == 2


def test_more_running_than_max_num_seqs_is_refused() -> None:
    """A running list is never longer than the engine allows."""
    running = [decoding(f"r{index}", 5, 1) for index in range(3)]
    refused(lambda: ReplayedEngine.from_state(state(limits(max_num_seqs=2), running), COUNT_STEPS), "running")


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "1"])
def test_a_residual_must_be_a_finite_time(value: object) -> None:
    """The batch in flight ends at some time from now."""
    refused(lambda: EngineState(limits=limits(), running=[], waiting=[], residual_s=value), "residual_s")  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_time_passes_forwards_and_finitely(seconds: float) -> None:
    """advance takes a finite time of at least 0 s."""
    refused(lambda: ReplayedEngine(limits(), COUNT_STEPS).advance(seconds), "seconds")


def test_a_load_that_fails_leaves_the_engine_as_it_was() -> None:
    """A state is taken over whole or not at all."""
    engine = ReplayedEngine.from_state(state(limits(), [decoding("a", 20, 1)]), COUNT_STEPS)
    before = engine.state()
    refused(lambda: engine.load(state(limits(), [decoding("b", 20, 1)], [fresh("c", 1000)])), "prompt_tokens")
    assert engine.state() == before


def test_objects_of_another_kind_are_type_errors() -> None:
    """What is no limits, clock, state or request at all is refused without a crash."""
    engine = ReplayedEngine(limits(), COUNT_STEPS)
    junks: tuple[Any, ...] = (None, 5, "text", {})
    for junk in junks:
        for call in (
            lambda junk=junk: ReplayedEngine(junk, COUNT_STEPS),
            lambda junk=junk: ReplayedEngine(limits(), junk),
            lambda junk=junk: ReplayedEngine.from_state(junk, COUNT_STEPS),
            lambda junk=junk: engine.submit(junk),
            lambda junk=junk: engine.load(junk),
            lambda junk=junk: EngineGroup([junk]),
        ):
            with pytest.raises((TypeError, AttributeError, ValueError)):
                call()
    assert engine.state() == ReplayedEngine(limits(), COUNT_STEPS).state()


def test_a_group_refuses_arrays_it_could_not_fill() -> None:
    """Wrong lengths are input errors; wrong types and strides are type errors, never a silently unfilled result."""
    group = EngineGroup([ReplayedEngine(limits(), COUNT_STEPS)] * 2)
    good, times = np.array([5, 6]), np.zeros(2)
    with pytest.raises(EngineInputError):
        group.first_tokens(np.array([5]), times, np.zeros(2))
    with pytest.raises(EngineInputError):
        group.first_tokens(good, np.zeros(3), np.zeros(2))
    for bad in (np.zeros(2, dtype=np.float32), np.zeros(4)[::2]):
        with pytest.raises(TypeError):
            group.first_tokens(good, bad, times)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            group.first_tokens(good, times, bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        group.first_tokens(np.array([5.0, 6.0]), times, np.zeros(2))
    group.first_tokens(good, times, np.zeros(2))
    assert list(times) == [1.0, 1.0]


def test_an_empty_group_answers_nothing() -> None:
    """No engines, no rows."""
    EngineGroup([]).first_tokens(np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0))
