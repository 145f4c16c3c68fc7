"""Judging over real sockets: a judge that misbehaves in every way leaves no row unaccounted for."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from headway.errors import ConfigError, DatasetError
from headway.testing import FakeUpstream, Received, Reply
from headway.train.dataset import EvaluationRow, read_rows, write_rows
from headway.train.judge import JudgeOptions, JudgeSummary, judge
from headway.train.judge_calls import JudgeCall
from outside_endpoints import PERSISTENT, case_of, endpoint, said, verdict

MODELS = ("small", "medium", "large")


def rows_of(*prompt_ids: str) -> list[EvaluationRow]:
    """Three answers per prompt, each saying which model gave it, and one row of an attempt that failed."""
    rows = [
        EvaluationRow(
            prompt_id=name, model=model, prompt=f"Question {name}?", response=f"{model} {name}", reference=f"ref {name}"
        )
        for name in prompt_ids
        for model in MODELS
    ]
    failed = EvaluationRow(prompt_id=prompt_ids[0], model="tiny", prompt=f"Question {prompt_ids[0]}?",
                           reference=f"ref {prompt_ids[0]}", status="timeout", error="timeout: too slow")  # fmt: skip
    return [*rows, failed]


def score(text: str) -> float:
    """What a sound judge thinks of an answer in these tests."""
    return {"small": 2.0, "medium": 6.0, "large": 9.5}[text.split(maxsplit=1)[0]]


def sound(received: Received) -> Reply:
    return said(verdict(received, score))


async def run(upstream: FakeUpstream, rows: list[EvaluationRow], out: Path, **rest: object) -> JudgeSummary:
    options = JudgeOptions(persistence=PERSISTENT, **rest)  # type: ignore[arg-type]
    return await judge(rows, [endpoint(upstream, model="judge-1")], out, options)


def calls_in(out: Path) -> list[JudgeCall]:
    lines = out.with_name(out.name + ".calls").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=JudgeCall) for line in lines[1:]]


async def test_every_answer_gets_its_own_score_though_names_are_hidden(tmp_path: Path) -> None:
    """Scores find their way back through the shuffled letters; rows keep everything else, and no model is named."""
    rows, out = rows_of("p", "q", "r"), tmp_path / "judged.jsonl"
    async with FakeUpstream(sound) as upstream:
        summary = await run(upstream, rows, out)
    judged = list(read_rows(out))
    assert [(row.quality, row.judge) for row in judged[:3]] == [(0.2, "judge-1"), (0.6, "judge-1"), (0.95, "judge-1")]
    assert judged[-1] == rows[-1]
    assert [row.response for row in judged] == [row.response for row in rows]
    assert len(upstream.requests) == 3
    orders = {tuple(case_of(one)["answers"].values()) for one in upstream.requests}  # type: ignore[attr-defined]
    assert len({tuple(text.split()[0] for text in order) for order in orders}) > 1
    assert upstream.requests[0].json["response_format"]["type"] == "json_schema"  # type: ignore[index]
    assert summary.complete
    assert (summary.num_rows, summary.num_rows_judged, summary.num_unanswered) == (10, 9, 1)
    assert summary.cost_usd == pytest.approx(3 * 0.012)


async def test_a_judge_that_misbehaves_leaves_every_row_accounted_for(tmp_path: Path) -> None:
    """Bad JSON, half answers, too few, too many and impossible scores, 429, timeouts, broken connections: what can be
    put right by asking again is; the rest is a failure with a name, and its rows are there without a score."""
    ids = ["fence", "bad_json", "half", "too_few", "too_many", "range", "busy", "slow", "cut", "never", "refused"]
    rows, out = rows_of(*ids), tmp_path / "judged.jsonl"
    seen: Counter[str] = Counter()

    def script(received: Received) -> Reply:
        name = str(case_of(received)["request"]).removeprefix("Question ").removesuffix("?")
        seen[name] += 1
        text = verdict(received, score)
        if name == "fence":
            return said(f"Sure:\n```json\n{text}\n```")
        if name == "never":
            return said("I cannot judge this.")
        if name == "refused":
            return Reply(status=400, body=b'{"error": {"message": "content policy"}}')
        if seen[name] > 1:
            return said(text)
        letters = list(json.loads(text)["scores"])
        return {
            "bad_json": said("{'scores': oops"),
            "half": said(text[: len(text) // 2]),
            "too_few": said(json.dumps({"scores": dict.fromkeys(letters[:2], 5)})),
            "too_many": said(json.dumps({"scores": dict.fromkeys([*letters, "Z"], 5)})),
            "range": said(json.dumps({"scores": dict.fromkeys(letters, 55)})),
            "busy": Reply(status=429, body=b"{}", headers={"retry-after-ms": "10"}),
            "slow": Reply(hangs="before_headers"),
            "cut": Reply(dies="before_headers"),
        }[name]

    async with FakeUpstream(script) as upstream:
        options = JudgeOptions(persistence=structs.replace(PERSISTENT, timeout_s=1.5), verdicts=3, concurrency=len(ids))
        summary = await judge(rows, [endpoint(upstream, model="judge-1")], out, options)
    judged = {(row.prompt_id, row.model): row.quality for row in read_rows(out)}
    assert len(judged) == len(rows)
    for name in ids:
        expected = [None] * 3 if name in {"never", "refused"} else [0.2, 0.6, 0.95]
        assert [judged[name, model] for model in MODELS] == expected, name
    assert (summary.num_judged, summary.num_failed, summary.num_not_asked) == (9, 2, 0)
    assert summary.failures == {"unreadable": 1, "http_400": 1}
    assert seen["never"] == 3
    assert seen["refused"] == 1
    failed = {call.prompt_id: call for call in calls_in(out) if call.scores is None}
    assert failed["never"].retriable
    assert failed["never"].reply == "I cannot judge this."
    assert failed["never"].cost_usd == pytest.approx(3 * 0.012)
    assert not failed["refused"].retriable
    assert "content policy" in failed["refused"].error
    complaints = [one.json["messages"][2] for one in upstream.requests if len(one.json["messages"]) > 2]  # type: ignore[arg-type,index]
    assert any("no score for" in one["content"] for one in complaints)


async def test_a_second_run_asks_only_what_is_open(tmp_path: Path) -> None:
    """Judged prompts are kept, failures that may pass are asked again, refusals are not."""
    rows, out = rows_of("p", "broken", "refused"), tmp_path / "judged.jsonl"

    def script(received: Received) -> Reply:
        request = str(case_of(received)["request"])
        if "refused" in request:
            return Reply(status=400, body=b"{}")
        return Reply(dies="before_headers") if "broken" in request and not mended else sound(received)

    async with FakeUpstream(script) as upstream:
        mended = False
        first = await run(upstream, rows, out)
        assert (first.num_judged, first.num_failed) == (1, 2)
        num_first, mended = len(upstream.requests), True
        second = await run(upstream, rows, out)
        assert (second.num_kept, second.num_judged, second.num_failed) == (1, 1, 1)
        assert len(upstream.requests) == num_first + 1
        more = [*rows, EvaluationRow(prompt_id="p", model="medium2", prompt="Question p?", response="medium x",
                                     reference="ref p")]  # fmt: skip
        third = await run(upstream, more, out)
    assert (third.num_kept, third.num_judged) == (1, 1)  # a new candidate: that prompt is judged anew, all together
    assert sum(row.quality is not None for row in read_rows(out)) == 7


async def test_the_budget_is_kept_and_counts_unreadable_replies(tmp_path: Path) -> None:
    """Every reply costs, also one that cannot be read; what is left undone is said and asked by the next run."""
    rows, out = rows_of("p", "q", "r"), tmp_path / "judged.jsonl"
    async with FakeUpstream(said("no verdict", prompt_tokens=100, output_tokens=10)) as upstream:
        summary = await run(upstream, rows, out, concurrency=1, budget_usd=1.5, room_tokens=10)
        assert summary.stopped_by == "budget"
        assert 0.0 < summary.total_cost_usd <= 1.5
        assert summary.num_rows == len(rows)
        upstream.script = sound
        done = await run(upstream, rows, out, concurrency=1, budget_usd=100.0, room_tokens=10)
    assert done.complete
    assert done.total_cost_usd == pytest.approx(sum(call.cost_usd for call in calls_in(out)))
    assert done.total_cost_usd > done.cost_usd


async def test_an_unusable_judge_ends_the_run(tmp_path: Path) -> None:
    """A wrong key is found once, not once per prompt; the rows are written all the same."""
    rows, out = rows_of(*map(str, range(20))), tmp_path / "judged.jsonl"
    async with FakeUpstream(Reply(status=401, body=b"{}")) as upstream:
        summary = await run(upstream, rows, out, concurrency=2)
    assert len(upstream.requests) <= 2
    assert summary.stopped_by == "endpoint"
    assert "401" in summary.given_up
    assert summary.num_failed + summary.num_not_asked == 20
    assert len(list(read_rows(out))) == len(rows)


async def test_judges_are_not_mixed_in_one_journal(tmp_path: Path) -> None:
    """Another seed or judge needs another output: scores of one file have one origin."""
    rows, out = rows_of("p"), tmp_path / "judged.jsonl"
    async with FakeUpstream(sound) as upstream:
        await run(upstream, rows, out, seed=1)
        with pytest.raises(ConfigError, match="begun with seed 1"):
            await run(upstream, rows, out, seed=2)
        options = JudgeOptions(seed=1)
        with pytest.raises(ConfigError, match="begun with judge judge-1"):
            await judge(rows, [endpoint(upstream, model="judge-2")], out, options)
        (tmp_path / "judged.jsonl.calls").write_text("[]\n")
        with pytest.raises(DatasetError, match="no journal of judge calls"):
            await run(upstream, rows, out, seed=1)


async def test_scores_of_another_judge_do_not_survive(tmp_path: Path) -> None:
    """An answer that this judge did not score has no score, whatever stood there before."""
    rows = [EvaluationRow(prompt_id="p", model="m", prompt="x", response="y", quality=0.5, judge="old")]
    async with FakeUpstream(said("nonsense")) as upstream:
        await run(upstream, rows, tmp_path / "judged.jsonl")
    (row,) = read_rows(tmp_path / "judged.jsonl")
    assert (row.quality, row.judge) == (None, None)


async def test_rows_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    """One prompt id means one prompt and one reference."""
    rows = rows_of("p")
    async with FakeUpstream(sound) as upstream:
        for change, words in (
            ({"prompt": "Other?"}, "reads differently"),
            ({"reference": "x"}, "different references"),
        ):
            with pytest.raises(DatasetError, match=words):
                await run(upstream, [rows[0], structs.replace(rows[1], **change)], tmp_path / "j.jsonl")
        with pytest.raises(DatasetError, match="no whole answer"):
            await run(upstream, rows[-1:], tmp_path / "j.jsonl")


async def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """kill -9 while prompts are judged, then the same command: no prompt that was paid for is put to the judge again,
    and the output holds every row with its score."""
    rows, source, out = rows_of(*map(str, range(30))), tmp_path / "rows.jsonl", tmp_path / "judged.jsonl"
    write_rows(source, rows)
    command = [sys.executable, "-m", "headway", "judge", str(source), "--out", str(out), "--json",
               "--judge-model", "judge-1", "--concurrency", "2", "--price-in", "1"]  # fmt: skip

    def script(received: Received) -> Reply:
        answer = sound(received)
        return structs.replace(answer, delay_s=0.02)

    async with FakeUpstream(script) as upstream:
        command += ["--judge", upstream.url]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
        journal = out.with_name(out.name + ".calls")
        deadline_s = time.monotonic() + 60
        while not journal.exists() or journal.read_bytes().count(b"\n") < 8:
            assert process.returncode is None
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        await process.wait()
        kept = {call.prompt_id for call in calls_in(out)}
        num_before = len(upstream.requests)
        assert 7 <= len(kept) < 30
        assert not out.exists()
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        stdout, stderr = await process.communicate()
        asked_again = {str(case_of(one)["request"])[9:-1] for one in upstream.requests[num_before:]}
    assert (process.returncode, stderr) == (0, b"")
    summary = json.loads(stdout)
    assert (summary["num_kept"], summary["num_judged"]) == (len(kept), 30 - len(kept))
    assert asked_again.isdisjoint(kept)
    assert [row.quality for row in read_rows(out)][:-1] == [0.2, 0.6, 0.95] * 30
    assert summary["total_cost_usd"] == pytest.approx(30 * 10e-6)
