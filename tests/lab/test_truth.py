"""The truth: what models would answer, the same for every policy and as the sources state it."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from headway.errors import ConfigError
from headway.lab.beta import beta_cdf, beta_of_normal, beta_quantile, normal_cdf, normal_cdf_column
from headway.lab.truth import (
    MODELS,
    PRINTED_TARGET_SLOPE_MS_PER_TOKEN,
    PROMPT_TOKENS,
    TARGET_SLOPE_MS_PER_TOKEN,
    TASKS,
    answer,
    draw_prompts,
    draw_truth,
    draw_ttft_targets,
    ttft_target_s,
)


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


def tasks_in_turn(num: int) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
    return (np.arange(num) % len(TASKS)).astype(np.int8)


@pytest.mark.parametrize("mean", [0.1773, 0.5, 0.9593])
def test_the_table_agrees_with_the_exact_quantile(mean: float) -> None:
    """The tabulated copula gives every quality to 1e-5, also where a Beta piles up at 0 or 1."""
    z = np.linspace(-4.5, 4.5, 301)
    exact = [beta_quantile(normal_cdf(value), 3 * mean, 3 * (1 - mean)) for value in z.tolist()]
    assert np.abs(beta_of_normal(z, 3 * mean, 3 * (1 - mean)) - exact).max() < 1e-5
    assert np.abs(normal_cdf_column(z) - [normal_cdf(value) for value in z.tolist()]).max() < 1e-6


def test_columns_keep_the_distributions_of_single_draws() -> None:
    """Per model and task the columns have the same mean quality, median, spread and share of loops as one by one."""
    num = 4 * 6000
    tasks = tasks_in_turn(num)
    lengths, qualities = draw_truth(4, tasks, tuple(MODELS))
    for column, (model, truth) in enumerate(MODELS.items()):
        for index, task in enumerate(TASKS):
            of_task = tasks == index
            own_lengths, own_qualities = lengths[of_task, column], qualities[of_task, column]
            single = [answer(seed=1, model=model, number=n, task=task, max_tokens=8192) for n in range(1500)]
            assert own_qualities.mean() == pytest.approx(truth.mean_quality[task], abs=0.015)
            assert own_qualities.std() == pytest.approx(np.std([one.quality for one in single]), rel=0.12)
            assert np.median(own_lengths) == pytest.approx(np.median([a.output_tokens for a in single]), rel=0.1)
            assert (own_lengths == 8192).mean() == pytest.approx(truth.loop_probability[task], abs=0.012)
    logs = np.log(lengths[(lengths < 8192).all(axis=1) & (tasks == 0)])
    assert np.corrcoef(logs.T)[0, 1] == pytest.approx(0.7, abs=0.03)
    assert 0.45 < np.corrcoef(qualities[tasks == 0].T)[0, 2] < 0.62


def test_a_longer_draw_begins_with_the_shorter() -> None:
    """More queries, or other models in the pool, change nothing of what was drawn; another seed changes all."""
    few, many = tasks_in_turn(40), tasks_in_turn(90)
    lengths, qualities = draw_truth(2, few, ("qwen3-32b",))
    more_lengths, more_qualities = draw_truth(2, many, tuple(MODELS))
    assert more_lengths[:40, 2].tolist() == lengths[:, 0].tolist()
    assert more_qualities[:40, 2].tolist() == qualities[:, 0].tolist()
    assert draw_prompts(2, many)[:40].tolist() == draw_prompts(2, few).tolist()
    assert not np.array_equal(draw_truth(3, few, ("qwen3-32b",))[1], qualities)


def test_max_tokens_ends_answers() -> None:
    """No answer passes the limit of its request, and those below it stay as they are."""
    tasks = tasks_in_turn(400)
    free, _ = draw_truth(0, tasks, ("qwen3-8b",))
    cut, _ = draw_truth(0, tasks, ("qwen3-8b",), max_tokens=500)
    assert cut.tolist() == np.minimum(free, 500).tolist()


def test_an_unknown_model_has_no_truth() -> None:
    """The error names the model and those that are known."""
    with pytest.raises(ConfigError, match=r"'gpt'.*qwen3-8b"):
        draw_truth(0, tasks_in_turn(4), ("gpt",))


def test_prompts_keep_their_medians_and_bounds() -> None:
    """Each task's prompt lengths have the stated median and leave no bound."""
    tasks = tasks_in_turn(4 * 3000)
    prompts = draw_prompts(0, tasks)
    for index, (median, _, low, high) in enumerate(PROMPT_TOKENS[task] for task in TASKS):
        own = prompts[tasks == index]
        assert np.median(own) == pytest.approx(median, rel=0.04)
        assert low <= own.min() <= own.max() <= high


def test_columns_of_targets_follow_either_slope() -> None:
    """With the default slope a 9,000-token prompt gets about 473 ms, with the printed one 189 ms, never outside."""
    prompts = np.full(2000, 9000, np.int32)
    default = draw_ttft_targets(0, prompts, TARGET_SLOPE_MS_PER_TOKEN)
    printed = draw_ttft_targets(0, prompts, PRINTED_TARGET_SLOPE_MS_PER_TOKEN)
    assert default.mean() == pytest.approx(0.473, abs=0.001)
    assert printed.mean() == pytest.approx(0.1895, abs=0.0005)
    assert (default.min(), default.max()) == (pytest.approx(0.458, abs=0.004), pytest.approx(0.488, abs=0.004))
    extremes = draw_ttft_targets(0, np.array([1, 32768], np.int32), TARGET_SLOPE_MS_PER_TOKEN)
    assert 0.150 <= extremes[0] < 0.165
    assert extremes[1] == 1.120
