"""The length table: the median of the calibration answers that went further, by prompt bin, and its comparison."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from headway.errors import ConfigError, EngineInputError
from headway.fleet import LengthRule
from headway.lab.arrivals import poisson
from headway.lab.length_table import as_markdown, compare, length_table, main, standard_rules
from headway.lab.workload import Workload, WorkloadSpec, four_task_workload


def calibration(num: int = 400) -> Workload:
    return four_task_workload(poisson(num, 8.0, np.random.default_rng(4)), WorkloadSpec(seed=4))


def target(rule: LengthRule, prompt_tokens: int, output_tokens: int, predicted_tokens: float = 50.0) -> int:
    return rule.target_tokens(predicted_tokens, prompt_tokens, output_tokens, 0)


def test_the_table_gives_the_median_of_the_longer_answers_in_the_prompts_bin() -> None:
    """Once an answer has begun, what counts is which calibration answers of its bin went further; edges included."""
    work = calibration()
    prompt = work.prompt_tokens.copy()
    prompt[:] = 1_000
    prompt[:4] = 128
    lengths = np.full_like(work.true_output_tokens, 700)
    lengths[:4] = np.array([[10], [20], [40], [80]])
    known = msgspec.structs.replace(work, prompt_tokens=prompt, true_output_tokens=lengths)
    rule = length_table(known, models=["qwen3-8b"])
    assert target(rule, 128, 15) == 40
    assert target(rule, 128, 30) == 80
    assert target(rule, 129, 30) == 94  # a bin without answers: what outlives its prediction goes on by 64 tokens
    assert target(rule, 2_048, 30) == 700
    assert target(rule, 128, 0) == 50  # not begun: the prediction


def test_the_table_is_pooled_over_models_or_made_of_the_named_ones() -> None:
    """One rule serves the fleet; a model of which nothing is known is refused by name."""
    work = calibration()
    lengths = work.true_output_tokens.copy()
    lengths[:] = np.array([100, 200, 300])
    known = msgspec.structs.replace(work, true_output_tokens=lengths)
    prompt_tokens = int(work.prompt_tokens[0])
    assert target(length_table(known), prompt_tokens, 1) == 200
    assert target(length_table(known, models=["qwen3-32b"]), prompt_tokens, 1) == 300
    with pytest.raises(ConfigError, match="qwen3-1b"):
        length_table(known, models=["qwen3-1b"])


def test_edges_must_rise() -> None:
    """Bins that overlap are refused."""
    with pytest.raises(EngineInputError, match="edges"):
        length_table(calibration(), edges_tokens=(512, 128))


def test_what_ends_residents_too_soon_costs_utility_and_the_table_does_not() -> None:
    """Plain predictions let residents end that go on; under the table the choices are about those of the default."""
    found = compare(standard_rules(400), rates_per_s=[8.0], snapshot_intervals_ms=[0.0], seeds=[5, 6], num_queries=800)
    by_rule = {one.rule: one for one in found}
    table, plain = by_rule["length table"], by_rule["plain"]
    assert plain.moved > 0.1
    assert table.moved < 0.02
    assert table.gain.value > 0.01
    assert abs(table.over_default.value) < 0.01
    assert plain.gain.value == 0.0


def test_the_comparison_is_a_function_of_its_seeds() -> None:
    """Played twice it gives the same figures, as a table with a row per rule."""
    rules = {"survival": LengthRule("survival"), "plain": LengthRule("plain")}
    first, second = (
        compare(rules, rates_per_s=[8.0], snapshot_intervals_ms=[400.0], seeds=[5], num_queries=100) for _ in range(2)
    )
    assert first == second
    assert len(as_markdown(first).splitlines()) == 2 + len(rules)
    with pytest.raises(ConfigError, match="plain"):
        compare({"survival": LengthRule("survival")})


def test_the_command_prints_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    """The documented command runs, here on few queries."""
    main(["--num-queries", "50"])
    printed = capsys.readouterr().out
    assert printed.count("length table") == 4  # two rates, two ages of what is seen
