"""The demo's truth: what models would answer, the same for every policy and as the sources state it."""

from __future__ import annotations

import math
import statistics

import pytest

from headway.demo.truth import MODELS, TASKS, answer, beta_cdf, beta_quantile, normal_cdf, ttft_target_s


def test_equal_arguments_draw_equal_answers() -> None:
    """The same seed, model and query number give the same length and quality, another number gives others."""
    first, again, other = (
        answer(seed=3, model="qwen3-8b", number=number, task="alpaca", max_tokens=1024) for number in (7, 7, 8)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize(("a", "b"), [(2, 3), (1, 1), (4, 2)])
def test_beta_cdf_equals_its_closed_form(a: int, b: int) -> None:
    """For whole a and b the incomplete beta function is a binomial tail."""
    for x in (0.0, 0.05, 0.3, 0.5, 0.9, 1.0):
        n = a + b - 1
        tail = sum(math.comb(n, k) * x**k * (1 - x) ** (n - k) for k in range(a, n + 1))
        assert beta_cdf(x, a, b) == pytest.approx(tail, abs=1e-12)


@pytest.mark.parametrize("mean", [0.1773, 0.5, 0.9593])
def test_beta_quantile_inverts_the_cdf(mean: float) -> None:
    """A quantile's probability is the one that was asked for, in the skewed shapes that qualities have too."""
    a, b = 3 * mean, 3 * (1 - mean)
    for probability in (0.01, 0.2, 0.5, 0.9):
        quantile = beta_quantile(probability, a, b)
        assert beta_cdf(quantile - 2e-9, a, b) <= probability <= beta_cdf(quantile + 2e-9, a, b)
    assert beta_quantile(normal_cdf(-8.0), a, b) < 0.01


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("task", TASKS)
def test_qualities_keep_the_published_means(model: str, task: str) -> None:
    """Each model's mean quality on each task is the published one, and every quality lies in [0, 1]."""
    draws = [answer(seed=1, model=model, number=n, task=task, max_tokens=1024).quality for n in range(600)]  # type: ignore[arg-type]
    assert all(0.0 <= quality <= 1.0 for quality in draws)
    assert statistics.fmean(draws) == pytest.approx(MODELS[model].mean_quality[task], abs=0.04)  # type: ignore[index]


def test_lengths_keep_their_median_and_cap() -> None:
    """Half of the answers are longer than k times the task's median, and none passes max_tokens."""
    draws = [
        answer(seed=0, model="qwen3-8b", number=n, task="alpaca", max_tokens=1024).output_tokens for n in range(1500)
    ]
    assert statistics.median(draws) == pytest.approx(0.9 * 160, rel=0.1)
    assert max(draws) == 1024
    assert min(draws) >= 1


def test_looping_models_run_to_the_cap() -> None:
    """Without a tight max_tokens about 8 % of the small model's stories never end by themselves."""
    draws = [
        answer(seed=0, model="qwen3-0.6b", number=n, task="writing_prompts", max_tokens=10**6).output_tokens
        for n in range(1500)
    ]
    assert sum(tokens == 8192 for tokens in draws) / len(draws) == pytest.approx(0.08, abs=0.025)


def test_models_agree_on_what_is_long_and_hard() -> None:
    """Lengths and qualities of two models on one query move together, as difficulty is shared."""
    small, large = (
        [answer(seed=0, model=model, number=n, task="alpaca", max_tokens=4096) for n in range(600)]
        for model in ("qwen3-0.6b", "qwen3-32b")
    )
    logs = ([math.log(a.output_tokens) for a in small], [math.log(a.output_tokens) for a in large])
    assert 0.5 < statistics.correlation(*logs) < 0.85
    assert statistics.correlation([a.quality for a in small], [a.quality for a in large]) > 0.35


def test_targets_follow_the_prompt_and_stay_in_bounds() -> None:
    """A short prompt gets about 155 ms, one of 9,000 tokens about 470 ms, and nothing leaves 150 to 1,120 ms."""
    short = [ttft_target_s(seed=0, number=n, prompt_tokens=40) for n in range(300)]
    assert statistics.fmean(short) == pytest.approx(0.1594, abs=0.001)
    assert min(short) >= 0.150
    assert ttft_target_s(seed=0, number=0, prompt_tokens=9000) == pytest.approx(0.473, rel=0.025)
    assert ttft_target_s(seed=0, number=0, prompt_tokens=32768) == 1.120
