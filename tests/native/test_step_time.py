"""Duration of a token batch under each form of the clock, against the formulas written out."""

from __future__ import annotations

import pytest

from engine_builders import decoding, fresh, limits, state
from headway._core import ReplayedEngine, batch_time_s
from headway.types import StepTime
from random_states import random_case
from reference_scheduler import batch_time

# Two decodes over contexts of 24 and 100, a prefill chunk of 60 over 30, and one of 15 over nothing.
CHUNKS = [(1, 24, True), (1, 100, True), (60, 30, False), (15, 0, False)]
PAIRS = 60 * 30 + 60 * 61 / 2 + 15 * 16 / 2
LINEAR = StepTime.linear(b0=1e-3, b1=2e-5, b2=3e-7, b3=5e-9, b_seq=7e-6)
KNEE = StepTime.knee(b0=1e-3, b1_below=1e-5, b1_above=9e-5, knee=50.0, b2=3e-7, b3=5e-9, b_seq=7e-6)
SIX_TERM = StepTime.six_term(b0=1e-3, bp=2e-5, bpp=3e-8, bd=4e-5, bs=5e-7, bss=6e-9)
EXPECTED = {
    "linear": 1e-3 + 2e-5 * 77 + 3e-7 * 124 + 5e-9 * PAIRS + 7e-6 * 4,
    "knee": 1e-3 + 1e-5 * 50 + 9e-5 * 27 + 3e-7 * 124 + 5e-9 * PAIRS + 7e-6 * 4,
    "six_term": 1e-3
    + 2e-5 * 75
    + 3e-8 * (60**2 + 15**2)
    + 4e-5 * 2
    + 5e-7 * (24 + 100 + 30)
    + 6e-9 * (24**2 + 100**2 + 30**2),
}


@pytest.mark.parametrize("step_time", [LINEAR, KNEE, SIX_TERM], ids=lambda step_time: step_time.form)
def test_a_batch_costs_what_its_formula_says(step_time: StepTime) -> None:
    """Every feature of a mixed batch is weighted by its coefficient, contexts as before the batch."""
    assert batch_time_s(step_time, CHUNKS) == pytest.approx(EXPECTED[step_time.form], rel=1e-12)
    assert batch_time(step_time, CHUNKS) == pytest.approx(EXPECTED[step_time.form], rel=1e-12)


@pytest.mark.parametrize("step_time", [LINEAR, KNEE, SIX_TERM], ids=lambda step_time: step_time.form)
def test_a_step_of_an_engine_costs_the_same_batch(step_time: StepTime) -> None:
    """An engine in a state that forms this batch reports its duration."""
    running = [decoding("a", 20, 5), decoding("b", 100, 1), fresh("c", 90, computed_tokens=30)]
    engine = ReplayedEngine.from_state(state(limits(), running, [fresh("d", 15)]), step_time)
    batch = engine.step()
    assert batch.num_scheduled_tokens == {"a": 1, "b": 1, "c": 60, "d": 15}
    assert batch.time_s == pytest.approx(EXPECTED[step_time.form], rel=1e-12)


@pytest.mark.parametrize(
    ("prompt", "computed", "output", "is_decode"),
    [
        (20, 23, 4, True),  # an ordinary decode, or the last token of a recompute
        (20, 19, 0, False),  # the last token of a prompt: nothing was sampled yet
        (1, 0, 0, False),  # a prompt of one token
    ],
)
def test_one_token_is_a_decode_only_at_the_end_of_a_request_with_output(
    prompt: int, computed: int, output: int, is_decode: bool
) -> None:
    """A chunk of one token counts as decode iff it is the newest token of a request that has produced output."""
    request = fresh("a", prompt, 100, computed_tokens=computed, output_tokens=output)
    clock = StepTime.six_term(b0=0.0, bp=1.0, bpp=0.0, bd=100.0, bs=0.0, bss=0.0)
    engine = ReplayedEngine.from_state(state(limits(), [request]), clock)
    assert engine.step().time_s == (100.0 if is_decode else 1.0)


def test_one_token_of_a_prompt_cut_by_the_threshold_is_prefill() -> None:
    """Chunks of one token in the middle of a recompute are prefill although the request has output."""
    clock = StepTime.six_term(b0=0.0, bp=1.0, bpp=0.0, bd=100.0, bs=0.0, bss=0.0)
    request = fresh("a", 20, 100, computed_tokens=10, output_tokens=4)
    short = limits(long_prefill_token_threshold=1)
    engine = ReplayedEngine.from_state(state(short, [request, decoding("b", 20, 1)]), clock)
    assert engine.step().time_s == 101.0


def test_random_batches_cost_the_same_in_the_core_and_in_the_reference() -> None:
    """Whatever batch a state forms, both clocks agree to 1e-12."""
    for seed in range(300):
        case = random_case(seed)
        chunks = [(n % 50 + 1, 13 * n % 7001, n % 50 == 0) for n in range(seed, 3 * seed, 7)]
        assert batch_time_s(case.step_time, chunks) == pytest.approx(batch_time(case.step_time, chunks), rel=1e-12)


def test_contexts_of_a_million_tokens_do_not_overflow() -> None:
    """Squares of contexts and query-key pairs stay right far beyond today's context lengths."""
    long = limits(
        max_num_batched_tokens=2_000_000,
        max_num_seqs=1000,
        max_model_len=2_000_000,
        block_size=1000,
        num_blocks=3_000_000,
    )
    running = [decoding(f"r{i}", 1_500_000, 1) for i in range(999)]
    chunks = [(1, 1_500_000, True)] * 999 + [(900_000, 0, False)]
    for step_time in (LINEAR, SIX_TERM):
        engine = ReplayedEngine.from_state(state(long, running, [fresh("n", 900_000)]), step_time)
        assert engine.first_token(5).ttft_s > engine.step().time_s
        engine = ReplayedEngine.from_state(state(long, running, [fresh("n", 900_000)]), step_time)
        assert engine.step().time_s == pytest.approx(batch_time(step_time, chunks), rel=1e-12)
