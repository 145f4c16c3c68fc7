"""References of a scenario: played beside its policies, the best of each found, and every policy held against them."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.lab.reference_margins import best_run, reference_runs
from headway.lab.reference_runs import reference_policies
from headway.lab.references import hull_at
from headway.lab.report import page
from headway.lab.runs import Results, load_results, plan, run
from headway.lab.scenario import REFERENCES, parse_scenario
from headway.lab.tables import compare, reference_table, utility_table
from headway.lab.unit import Record

TEXT = """\
name: references
num_queries: 400
seeds: [0, 1, 2]
rates_per_s: [6, 9]
policies:
  - {policy: bear, options: {fallback: least_work}}
  - {policy: latency_agnostic, label: by label, sees: task_label}
  - {policy: latency_agnostic, label: dear, sees: truth}
  - round_robin
"""
MODELS = ("qwen3-0.6b", "qwen3-8b", "qwen3-32b")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    out = tmp_path_factory.mktemp("references")
    run(parse_scenario(TEXT), out, jobs=1)
    return load_results(out)


def utility(record: Record) -> float:
    assert record.score is not None
    return record.score.on_time_utility


def test_every_pair_is_mixed_and_split() -> None:
    """Three models make three pairs; every run of a reference has a label of its own, and one model makes none."""
    rows = reference_policies(REFERENCES, MODELS)
    count = {name: sum(one == name for one, _ in rows) for name in REFERENCES}
    assert count == {"task_label": 1, "random_mix": 3 + 3 * 3, "two_model": 3 * 3}
    assert len({(name, row.name) for name, row in rows}) == len(rows)
    assert reference_policies(REFERENCES, MODELS[:1]) == []
    assert reference_policies([], MODELS) == []


def test_a_scenario_may_leave_them_out() -> None:
    """``references: []`` plays none; an unknown or repeated one is an error at its place."""
    settled, _ = plan(parse_scenario(TEXT + "references: []\n"))
    assert len(settled.units) == 3 * 2 * 4
    whole, _ = plan(parse_scenario(TEXT))
    assert len(whole.units) == 3 * 2 * (4 + 22)
    for text, message in (
        ("references: [task_label, task_label]\n", r":10:\d+: references\[1\]: task_label stands twice"),
        ("references: [task_lable]\n", r":10:\d+: references\[0\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_scenario(TEXT + text)


def test_runs_are_what_they_are_called(results: Results) -> None:
    """A mixture sends its share, a threshold the share that gains most, and the task label is that policy's own run."""
    runs = reference_runs(results, 9.0)
    mixed = runs["random_mix"]["75% qwen3-0.6b, 25% qwen3-32b"][0].score
    split = runs["two_model"]["qwen3-0.6b, qwen3-32b for the 25% that gain most"][0].score
    assert mixed is not None
    assert split is not None
    assert set(mixed.shares) == {"h100-0.6b", "h100-8b", "h100-32b"}
    assert mixed.shares["h100-32b"] == pytest.approx(0.25, abs=0.06)
    assert split.shares["h100-32b"] == pytest.approx(0.25, abs=0.01)
    assert mixed.shares["h100-8b"] == split.shares["h100-8b"] == 0.0
    alone = runs["random_mix"]["qwen3-8b alone"][0].score
    assert alone is not None
    assert alone.shares["h100-8b"] == 1.0
    label = runs["task_label"]["best model by task label"]
    assert [utility(one) for one in label.values()] == [utility(one) for one in results.of("by label", 9.0).values()]


def test_every_policy_is_held_against_each(results: Results) -> None:
    """Differences are to the best run, or to the hull at the policy's own cost; ahead is ahead of all of them."""
    comparison = compare(results)
    assert len(comparison.margins) == 4 * 2
    for margin in comparison.margins:
        ours, runs = results.of(margin.policy, margin.rate_per_s), reference_runs(results, margin.rate_per_s)
        best = runs["two_model"][best_run(runs["two_model"])]
        assert margin.less["two_model"].value == pytest.approx(
            sum(utility(ours[seed]) - utility(best[seed]) for seed in ours) / 3
        )
        hulls = []
        for seed, mine in ours.items():
            points = [by_seed[seed].score for by_seed in runs["random_mix"].values()]
            costs = [(one.mean_cost_usd or 0.0, one.on_time_utility) for one in points if one is not None]
            assert mine.score is not None
            hulls.append(utility(mine) - hull_at(costs, mine.score.mean_cost_usd or 0.0))
        assert margin.less["random_mix"].value == pytest.approx(sum(hulls) / 3)
        lows = [one.low for one in margin.less.values()]
        assert margin.beats_all is all(low is not None and low > 0.0 for low in lows)
        assert margin.less[margin.nearest].value == min(one.value for one in margin.less.values())
    ahead = {margin.policy: margin.beats_all for margin in comparison.margins if margin.rate_per_s == 9.0}
    assert ahead["bear"]
    assert not ahead["by label"]
    assert not ahead["round_robin"]


def test_tables_and_page_show_them(results: Results) -> None:
    """The references stand below every OnTimeUtility, never marked as the best, and the page has the verdict."""
    comparison = compare(results)
    shown = utility_table(comparison)
    names = [f"reference {name}" for name in ("task_label", "random_mix, best of 12", "two_model, best of 9")]
    assert [row[0] for row in shown.rows[-3:]] == names
    assert set(names) <= set(shown.unranked)
    table = reference_table(comparison)
    assert table is not None
    assert table.rows[0][0] == "bear"
    assert table.rows[0][-1] == "2 of 2"
    text = page(results, comparison, [])
    assert "Against what costs nothing" in text
    assert "reference two_model, best of 9" in text


def test_without_references_no_table_is_shown(tmp_path: Path) -> None:
    """A scenario that leaves them out has neither rows nor table of them."""
    run(parse_scenario(TEXT.replace("num_queries: 400", "num_queries: 30") + "references: []\n"), tmp_path, jobs=1)
    comparison = compare(load_results(tmp_path))
    assert comparison.margins == comparison.references == []
    assert reference_table(comparison) is None
    assert [row[0] for row in utility_table(comparison).rows] == ["bear", "by label", "dear", "round_robin"]
