"""Collecting over real sockets: every pair of prompt and model is accounted for, and none is paid for twice."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import pytest

from headway.errors import ConfigError, DatasetError
from headway.testing import FakeUpstream, Received, Reply
from headway.train.collect import CollectOptions, CollectSummary, collect
from headway.train.dataset import EvaluationRow, read_rows
from headway.train.endpoints import Endpoint
from headway.train.prompts import PromptRow
from outside_endpoints import PERSISTENT, endpoint, said

PROMPTS = [PromptRow(prompt_id=f"p{i}", prompt=f"Question {i}?", task="qa", reference=str(i)) for i in range(8)]


async def run(
    endpoints: dict[str, list[Endpoint]], out: Path, prompts: list[PromptRow] = PROMPTS, **rest: object
) -> CollectSummary:
    options = CollectOptions(persistence=PERSISTENT, **rest)  # type: ignore[arg-type]
    return await collect(prompts, endpoints, out, options)


def asked(upstream: FakeUpstream) -> Counter[str]:
    """How often each prompt reached an upstream."""
    return Counter(one.json["messages"][0]["content"] for one in upstream.requests)  # type: ignore[index]


async def test_a_row_holds_everything_that_was_learned(tmp_path: Path) -> None:
    """Prompt and its data, answer, tokens, cost, times and limit, as the dataset's own reader has them."""
    out = tmp_path / "rows.jsonl"
    reply = Reply(num_tokens=3, prompt_tokens=5, first_token_s=0.005)
    async with FakeUpstream(reply) as upstream:
        prompts = [*PROMPTS[:1], PromptRow(prompt_id="m", messages=[{"role": "user", "content": "Hm?"}], max_tokens=7)]
        summary = await run({"m": [endpoint(upstream)]}, out, prompts, max_tokens=20, extra={"temperature": 0})
    one, two = sorted(read_rows(out), key=lambda row: row.prompt_id)
    assert (one.prompt_id, one.messages, one.max_tokens) == ("m", [{"role": "user", "content": "Hm?"}], 7)
    assert two.ttft_s is not None
    assert two.latency_s is not None
    assert 0.005 <= two.ttft_s <= two.latency_s
    assert two == EvaluationRow(
        prompt_id="p0", model="m", prompt="Question 0?", response="tok tok tok ", prompt_tokens=5, output_tokens=3,
        cost_usd=0.008, task="qa", reference="0", max_tokens=20, ttft_s=two.ttft_s, latency_s=two.latency_s,
    )  # fmt: skip
    assert summary.complete
    assert summary.total_cost_usd == pytest.approx(0.016)
    assert upstream.requests[0].json["temperature"] == 0


async def test_what_is_stored_is_not_asked_again(tmp_path: Path) -> None:
    """A second run asks only for what is new: a further prompt, a further model."""
    out = tmp_path / "rows.jsonl"
    async with FakeUpstream(said("a")) as first, FakeUpstream(said("b")) as second:
        await run({"m": [endpoint(first)]}, out, PROMPTS[:3])
        pool = {"m": [endpoint(first)], "n": [endpoint(second, id="b", model="n")]}
        summary = await run(pool, out, PROMPTS[:4])
    assert asked(first) == Counter(f"Question {i}?" for i in range(4))
    assert asked(second) == Counter(f"Question {i}?" for i in range(4))
    assert (summary.models["m"].num_kept, summary.models["m"].num_stored) == (3, 1)
    assert summary.complete
    assert len(list(read_rows(out))) == 8


async def test_failures_are_rows_with_reasons_and_are_asked_again(tmp_path: Path) -> None:
    """A broken stream is a row with its reason and cost; the next run asks for it, and the file's costs add up."""
    out = tmp_path / "rows.jsonl"

    def script(received: Received) -> Reply:
        return Reply(num_tokens=2, dies="after_tokens") if "Question 2" in str(received.json) else said("fine")

    async with FakeUpstream(script) as upstream:
        summary = await run({"m": [endpoint(upstream)]}, out)
        one = summary.models["m"]
        assert (one.num_stored, one.num_failed, one.failures) == (7, 1, {"broken_off": 1})
        assert not summary.complete
        failed = next(row for row in read_rows(out) if row.status != "ok")
        assert (failed.prompt_id, failed.status, failed.response) == ("p2", "interrupted", "tok tok ")
        assert failed.error is not None
        assert failed.error.startswith("broken_off: ")
        assert failed.cost_usd == pytest.approx(3 * 0.005)
        upstream.script = said("fine")
        again = await run({"m": [endpoint(upstream)]}, out)
    assert again.complete
    assert (again.models["m"].num_kept, again.models["m"].num_stored) == (7, 1)
    rows = list(read_rows(out))
    assert Counter(row.prompt_id for row in rows if row.status == "ok") == Counter(one.prompt_id for one in PROMPTS)
    assert sum(row.cost_usd or 0.0 for row in rows) == pytest.approx(again.total_cost_usd)


async def test_attempts_charged_before_an_answer_have_a_row(tmp_path: Path) -> None:
    """The answer's cost stays its own, and the file still tells everything that was paid."""
    out = tmp_path / "rows.jsonl"
    async with FakeUpstream([Reply(num_tokens=2, dies="after_tokens"), said("fine")]) as upstream:
        summary = await run({"m": [endpoint(upstream)]}, out, PROMPTS[:1])
    wasted, kept = read_rows(out)
    assert (wasted.status, wasted.response, wasted.cost_usd) == ("error", None, pytest.approx(0.005))
    assert (kept.status, kept.cost_usd) == ("ok", pytest.approx(0.012))
    assert summary.total_cost_usd == pytest.approx(0.017)


async def test_refusals_are_final_until_asked_again(tmp_path: Path) -> None:
    """A prompt that an endpoint turns down for good is not put to it with every run, unless that is wanted."""
    out = tmp_path / "rows.jsonl"
    refusal = Reply(status=400, body=b'{"error": {"message": "context length exceeded"}}')
    async with FakeUpstream(refusal) as upstream:
        pool = {"m": [endpoint(upstream)]}
        assert (await run(pool, out, PROMPTS[:2])).models["m"].num_refused == 2
        assert (await run(pool, out, PROMPTS[:2])).models["m"].num_refused == 2
        assert len(upstream.requests) == 2
        upstream.script = said("after all")
        assert (await run(pool, out, PROMPTS[:2], again=True)).complete


async def test_the_budget_holds_over_all_runs(tmp_path: Path) -> None:
    """Requests stop while what is in flight may still use the budget up, and a resumed run has only what is left."""
    out = tmp_path / "rows.jsonl"
    most_usd = (2 * 3 + 64 + 10) * 1e-3
    async with FakeUpstream(said("x", prompt_tokens=10, output_tokens=10)) as upstream:
        pool = {"m": [endpoint(upstream)]}
        first = await run(pool, out, max_tokens=10, budget_usd=most_usd + 0.05)
        assert first.stopped_by == "budget"
        assert 0.0 < first.total_cost_usd <= most_usd + 0.05
        assert first.models["m"].num_stored == 3  # the fourth may cost 0.08, and 0.07 are left
        assert first.models["m"].num_not_asked == 5
        second = await run(pool, out, max_tokens=10, budget_usd=most_usd + 0.05)
        assert (second.models["m"].num_stored, second.cost_usd) == (0, 0.0)
        third = await run(pool, out, max_tokens=10, budget_usd=1.0)
    assert third.complete
    assert len(upstream.requests) == len(PROMPTS)


async def test_a_dead_endpoint_is_given_up_and_the_others_go_on(tmp_path: Path) -> None:
    """Three failures to connect in a row end one endpoint's part; what it was not asked is said."""
    async with FakeUpstream(said("x")) as alive, FakeUpstream() as gone:
        dead = endpoint(gone, id="dead", model="n")
        await gone.stop()
        summary = await run({"m": [endpoint(alive)], "n": [dead]}, tmp_path / "rows.jsonl", concurrency=1)
    assert summary.models["m"].num_stored == len(PROMPTS)
    one = summary.models["n"]
    assert (one.num_failed, one.num_not_asked, one.failures) == (3, 5, {"unreachable": 3})
    assert "cannot be reached" in one.given_up["dead"]


async def test_a_wrong_key_ends_at_the_first_answer(tmp_path: Path) -> None:
    """What is wrong with the endpoint itself is not tried with every prompt."""
    async with FakeUpstream(Reply(status=401, body=b"{}")) as upstream:
        summary = await run({"m": [endpoint(upstream)]}, tmp_path / "rows.jsonl", concurrency=1)
    assert (summary.models["m"].num_failed, summary.models["m"].num_not_asked) == (1, 7)
    assert len(upstream.requests) == 1


async def test_a_model_with_several_instances_uses_them_all(tmp_path: Path) -> None:
    """The prompts of one model are shared by its instances; one that is given up leaves its share to the other."""
    async with FakeUpstream(said("x")) as one, FakeUpstream(Reply(status=403, body=b"{}")) as other:
        pool = {"m": [endpoint(one), endpoint(other, id="b")]}
        summary = await run(pool, tmp_path / "rows.jsonl", concurrency=1)
    assert len(other.requests) == 1
    assert (summary.models["m"].num_stored, summary.models["m"].num_failed) == (7, 1)


async def test_concurrency_and_rate_hold_per_endpoint(tmp_path: Path) -> None:
    """Never more requests open than allowed, never two nearer than the rate."""
    open_at_once = []

    def script(received: Received) -> Reply:
        open_at_once.append(upstream.num_open)
        return Reply(num_tokens=1, first_token_s=0.03)

    async with FakeUpstream(script) as upstream:
        await run({"m": [endpoint(upstream)]}, tmp_path / "a.jsonl", concurrency=3)
        assert max(open_at_once) == 3
    async with FakeUpstream(said("x")) as upstream:
        started_s = time.monotonic()
        await run({"m": [endpoint(upstream)]}, tmp_path / "b.jsonl", per_s=100.0)
    assert upstream.requests[-1].arrived_s - started_s >= 0.07


async def test_models_advance_side_by_side(tmp_path: Path) -> None:
    """A fast model stays within sight of the slowest, so that a run cut short holds whole prompts."""
    prompts = [PromptRow(prompt_id=f"p{i}", prompt=f"{i}") for i in range(200)]
    async with FakeUpstream(said("x")) as fast, FakeUpstream(Reply(hangs="before_headers")) as stuck:
        pool = {"m": [endpoint(fast)], "n": [endpoint(stuck, id="b", model="n")]}
        options = CollectOptions(persistence=PERSISTENT, concurrency=2)
        task = asyncio.create_task(collect(prompts, pool, tmp_path / "rows.jsonl", options))
        while len(fast.requests) < 66 or len(stuck.requests) < 2:  # noqa: ASYNC110 - the servers have no event for it
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert len(fast.requests) <= 2 + 64 + 2
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert {row.model for row in read_rows(tmp_path / "rows.jsonl")} == {"m"}


async def test_another_prompt_under_the_same_id_is_refused(tmp_path: Path) -> None:
    """Answers to one text must not be taken for answers to another."""
    out = tmp_path / "rows.jsonl"
    async with FakeUpstream(said("x")) as upstream:
        await run({"m": [endpoint(upstream)]}, out, PROMPTS[:1])
        with pytest.raises(DatasetError, match="'p0' stands for another prompt"):
            await run({"m": [endpoint(upstream)]}, out, [PromptRow(prompt_id="p0", prompt="Something else")])
    assert len(upstream.requests) == 1


async def test_answers_without_usage_are_counted(tmp_path: Path) -> None:
    """Where an endpoint reports no tokens none are made up; the cost is an estimate, and the account says so."""
    body = b'{"choices": [{"message": {"content": "12345678"}}]}'
    async with FakeUpstream(Reply(body=body)) as upstream:
        summary = await run({"m": [endpoint(upstream)]}, tmp_path / "r.jsonl", PROMPTS[:1])
    (row,) = read_rows(tmp_path / "r.jsonl")
    assert (row.prompt_tokens, row.output_tokens) == (None, None)
    assert row.cost_usd == pytest.approx((3 + 2) * 1e-3)
    assert summary.models["m"].num_without_usage == 1


def test_impossible_options_are_named() -> None:
    """A count below one is a mistake of the command line."""
    with pytest.raises(ConfigError, match="--concurrency"):
        CollectOptions(concurrency=0)
    with pytest.raises(ConfigError, match="--max-tokens"):
        CollectOptions(max_tokens=0)
