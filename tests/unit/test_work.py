"""A query's own work: by hand, alike for one and for many, and the work of the engine that does it."""

from __future__ import annotations

import numpy as np
import pytest

from engine_builders import limits
from four_task_mix import NAMES, four_task_mix
from headway._core import ReplayedEngine, batch_time_s
from headway.estimate.work import own_work
from headway.profiles import load_profile, load_truth
from headway.types import EngineRequest, StepTime

LIMITS = limits(num_blocks=1001, block_size=10, max_num_seqs=50, max_num_batched_tokens=2000)
LINEAR = StepTime.linear(b0=0.01, b1=1e-4, b2=1e-6, b3=1e-8, b_seq=1e-5)
KNEE = StepTime.knee(b0=0.01, b1_below=1e-5, b1_above=1e-4, knee=500, b2=1e-6, b3=1e-8)
SIX_TERM = StepTime.six_term(b0=0.01, bp=1e-4, bpp=1e-8, bd=2e-4, bs=1e-6, bss=0.0)


def test_the_linear_form_by_hand() -> None:
    """Prefill 0.1 + 0.005005, 100 decodes at 1.1e-4 + 1e-6·1050, and 100·0.01·1050/10000 of the constant."""
    work = own_work(LINEAR, LIMITS)
    assert work.seconds(1000.0, 100.0) == pytest.approx(0.1 + 0.005005 + 0.011 + 0.105 + 0.105)


def test_a_short_query_pays_for_its_slot() -> None:
    """Where the slots bind before the blocks, a decode pays one in max_num_seqs of the step's constant."""
    work = own_work(LINEAR, LIMITS)
    context, prefill_s = 60.0, 10 * 1e-4 + 1e-8 * 55
    assert work.seconds(10.0, 100.0) == pytest.approx(prefill_s + 100 * (1.1e-4 + 1e-6 * context) + 100 * 0.01 / 50)


def test_the_six_term_form_by_hand() -> None:
    """Each chunk of at most the token budget is squared alone."""
    work = own_work(SIX_TERM, LIMITS)
    assert work.prefill_s(4500.0) == pytest.approx(0.45 + 1e-8 * (2000**2 + 2000**2 + 500**2))
    assert work.seconds(1000.0, 100.0) == pytest.approx(0.1 + 0.01 + 100 * (2e-4 + 1e-6 * 1050) + 0.105)


@pytest.mark.parametrize("step_time", [LINEAR, KNEE, SIX_TERM])
@pytest.mark.parametrize("prompt_tokens", [1, 499, 501, 2000])
def test_alone_is_the_time_of_the_batch(step_time: StepTime, prompt_tokens: int) -> None:
    """A prompt of one chunk on an idle engine takes exactly the time of that batch, but for a constant per request."""
    alone_s = own_work(step_time, LIMITS).alone_s(float(prompt_tokens))
    per_request_s = step_time.named().get("b_seq", 0.0)
    assert alone_s + per_request_s == pytest.approx(batch_time_s(step_time, [(prompt_tokens, 0, False)]), rel=1e-12)


def test_columns_are_queries() -> None:
    """A column of queries gets the same seconds as its queries one by one."""
    rng = np.random.default_rng(0)
    prompts, outputs = rng.uniform(1, 5000, 50), rng.uniform(1, 900, 50)
    for step_time in (LINEAR, KNEE, SIX_TERM):
        work = own_work(step_time, LIMITS)
        one_by_one = [work.seconds(p, o) for p, o in zip(prompts.tolist(), outputs.tolist(), strict=True)]
        assert work.seconds(prompts, outputs).tolist() == one_by_one
        alone = [work.alone_s(p) for p in prompts.tolist()]
        assert work.alone_s(prompts).tolist() == alone


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("truth", [False, True])
def test_a_full_engine_works_as_fast_as_stated(name: str, truth: bool) -> None:
    """An engine that never runs dry ends the four-task mix at one query per mean work, within 12 %."""
    profile = load_truth(name) if truth else load_profile(name)
    _, prompts, outputs = four_task_mix(name, 1500, np.random.default_rng(3))
    engine = ReplayedEngine(profile.limits, profile.step_time)
    for number, (prompt, output) in enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True)):
        request_id, target = str(number), max(1, round(output))
        engine.submit(EngineRequest(request_id=request_id, prompt_tokens=round(prompt), target_output_tokens=target))
    busy_s = 0.0
    while engine.num_waiting:  # the end, where the engine runs dry, is no saturation
        busy_s += engine.step().time_s
    ended = np.array([str(number) not in engine for number in range(len(prompts))])
    work_s = own_work(profile.step_time, profile.limits).seconds(prompts, outputs)
    # What is still inside is about half done.
    assert work_s[ended].sum() + 0.5 * work_s[~ended].sum() == pytest.approx(busy_s, rel=0.12)
