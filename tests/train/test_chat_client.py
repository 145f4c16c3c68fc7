"""One request to an outside endpoint, over real sockets: whatever happens comes back as a reply with a reason."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import pairwise

import pytest

from headway.testing import FakeUpstream, Received, Reply
from headway.train.caller import Answered, Caller
from headway.train.chat_client import Reply as Answer
from headway.train.chat_client import client_session, send
from headway.train.endpoints import Ask, Endpoint
from headway.train.limits import Budget, Pacer
from outside_endpoints import CARD, PERSISTENT, endpoint, said

ASK = Ask(messages=[{"role": "user", "content": "hello"}], max_tokens=50, stream=True)


async def sent(upstream: FakeUpstream, ask: Ask = ASK, *, timeout_s: float = 5.0) -> Answer:
    where = endpoint(upstream)
    async with client_session() as session:
        return await send(session, where, where.body(ask), timeout_s=timeout_s)


async def called(upstream: FakeUpstream, ask: Ask = ASK, budget: Budget | None = None) -> Answered | None:
    async with client_session() as session:
        caller = Caller(
            session,
            endpoint(upstream),
            pacer=Pacer(),
            budget=budget or Budget(None),
            persistence=PERSISTENT,
        )
        return await caller.call(ask)


def stream(*events: object, end: str = "data: [DONE]\n\n") -> Reply:
    data = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + end
    return Reply(chunks=(data.encode(),))


async def test_a_stream_gives_text_tokens_and_times() -> None:
    """The text is put together, usage is asked for and read, and the first token is timed before the last."""
    async with FakeUpstream(Reply(num_tokens=4, first_token_s=0.02, interval_s=0.01)) as upstream:
        reply = await sent(upstream)
    assert (reply.status, reply.text, reply.output_tokens) == ("ok", "tok tok tok tok ", 4)
    assert reply.ttft_s is not None
    assert 0.02 <= reply.ttft_s < reply.latency_s
    assert upstream.requests[0].json["stream_options"] == {"include_usage": True}
    assert upstream.requests[0].json["max_tokens"] == 50


async def test_a_whole_answer_is_read_too() -> None:
    """Without streaming there is no first token to time."""
    ask = Ask(messages=ASK.messages, max_tokens=50)
    async with FakeUpstream(said("fine", prompt_tokens=7)) as upstream:
        reply = await sent(upstream, ask)
    assert (reply.status, reply.text, reply.prompt_tokens, reply.ttft_s) == ("ok", "fine", 7, None)


async def test_reasoning_starts_the_clock_and_stays_out_of_the_text() -> None:
    """A reasoning delta is the first token; what is judged is the answer."""
    events = (
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"reasoning_content": "hm"}}]},
        {"choices": [{"delta": {"content": "yes"}, "finish_reason": "stop"}]},
    )
    async with FakeUpstream(stream(*events, end="")) as upstream:
        reply = await sent(upstream)
    assert (reply.status, reply.text) == ("ok", "yes")
    assert reply.ttft_s is not None


async def test_events_are_read_however_they_are_cut() -> None:
    """Chunks cut anywhere, CRLF, comments and a character in two pieces give the same text."""
    text = ': hi\r\n\r\ndata: {"choices":[{"delta":{"content":"Zürich "}}]}\r\n\r\n'
    text += 'data: {"choices":[{"delta":{"content":"ja"},"finish_reason":"stop"}]}\r\n\r\ndata: [DONE]\r\n\r\n'
    data = text.encode()
    for size in (1, 7, 1000):
        chunks = tuple(data[i : i + size] for i in range(0, len(data), size))
        async with FakeUpstream(Reply(chunks=chunks)) as upstream:
            assert (await sent(upstream)).text == "Zürich ja"


@pytest.mark.parametrize(
    ("reply", "status", "reason"),
    [
        (Reply(dies="before_headers"), "error", "broken_off"),
        (Reply(dies="after_headers"), "error", "broken_off"),
        (Reply(num_tokens=3, dies="after_tokens"), "interrupted", "broken_off"),
        (Reply(hangs="before_headers"), "timeout", "timeout"),
        (Reply(hangs="after_headers"), "timeout", "timeout"),
        (stream({"choices": [{"delta": {"content": "half"}}]}, end=""), "interrupted", "broken_off"),
        (stream({"error": {"message": "out of memory"}}), "error", "reported_error"),
        (Reply(chunks=(b"data: {nonsense\n\n",)), "error", "malformed"),
        (Reply(body=b'{"choices": []}'), "error", "malformed"),
        (Reply(body=b'{"choices": [{"message": {"content": 5}}]}'), "error", "malformed"),
        (Reply(body=b"\xff\xfe"), "error", "malformed"),
        (Reply(status=500, body=b"oops"), "error", "http_500"),
        (Reply(status=302, body=b"", headers={"location": "http://127.0.0.1:9/"}), "error", "http_302"),
        (Reply(status=400, body=b'{"error": {"message": "too long"}}'), "rejected", "http_400"),
        (Reply(status=422, body=b'{"detail": []}'), "rejected", "http_422"),
    ],
)
async def test_each_failure_has_a_status_and_a_reason(reply: Reply, status: str, reason: str) -> None:
    """Nothing is raised: a failure is a reply that says what it was."""
    async with FakeUpstream(reply) as upstream:
        answer = await sent(upstream, timeout_s=0.3)
    assert (answer.status, answer.reason) == (status, reason)
    assert answer.error
    assert not answer.unusable


async def test_an_endpoint_that_is_not_there_is_unreachable() -> None:
    """Nothing was sent, so nothing can have been charged."""
    async with FakeUpstream() as upstream:
        where = endpoint(upstream)
    async with client_session() as session:
        answer = await send(session, where, where.body(ASK), timeout_s=2.0)
    assert (answer.status, answer.reason, answer.billed) == ("error", "unreachable", False)


async def test_a_refused_key_is_final_and_shown_nowhere() -> None:
    """401 means that no other request fares better; an endpoint that repeats the key does not get it into a file."""
    body = b'{"error": {"message": "Incorrect API key: sk-secret", "code": "invalid_api_key"}}'
    async with FakeUpstream(Reply(status=401, body=body)) as upstream:
        where = endpoint(upstream, api_key="sk-secret")
        async with client_session() as session:
            answer = await send(session, where, where.body(ASK), timeout_s=2.0)
    assert answer.unusable
    assert "sk-secret" not in answer.error
    assert "***" in answer.error
    assert upstream.requests[0].headers["authorization"] == "Bearer sk-secret"


@pytest.mark.parametrize(
    ("headers", "least_s", "most_s"),
    [
        ({"retry-after": "2"}, 2.0, 2.0),
        ({"retry-after": "9", "retry-after-ms": "250"}, 0.25, 0.25),
        ({"retry-after": "in an hour"}, 3000.0, 3600.0),
    ],
)
async def test_when_to_come_again_is_read(headers: dict[str, str], least_s: float, most_s: float) -> None:
    """Seconds, milliseconds or a date."""
    if headers["retry-after"] == "in an hour":  # from now, not from when the tests were collected
        headers = {"retry-after": format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)}
    async with FakeUpstream(Reply(status=429, body=b"{}", headers=headers)) as upstream:
        answer = await sent(upstream)
    assert answer.busy
    assert answer.retry_after_s is not None
    assert least_s <= answer.retry_after_s <= most_s


async def test_back_pressure_is_waited_out_and_costs_no_attempt() -> None:
    """Five times 429 with a date to come again, and the sixth request is answered though three attempts are allowed."""
    busy = Reply(status=429, body=b"{}", headers={"retry-after-ms": "20"})
    async with FakeUpstream([busy] * 5 + [said("at last")]) as upstream:
        answered = await called(upstream)
    assert answered is not None
    assert answered.reply.text == "at last"
    times = [one.arrived_s for one in upstream.requests]
    assert all(later - sooner >= 0.02 for sooner, later in pairwise(times))


async def test_a_wait_beyond_all_patience_is_not_begun() -> None:
    """An endpoint that says "in an hour" is a failure now."""
    async with FakeUpstream(Reply(status=429, body=b"{}", headers={"retry-after": "3600"})) as upstream:
        answered = await called(upstream)
    assert answered is not None
    assert answered.reply.reason == "http_429"
    assert len(upstream.requests) == 1


async def test_passing_failures_are_tried_again_and_paid_for() -> None:
    """A stream that broke may have been charged: what was seen of it is counted, the answer after it separately."""
    async with FakeUpstream([Reply(num_tokens=3, dies="after_tokens"), said("ok")]) as upstream:
        budget = Budget(None)
        answered = await called(upstream, budget=budget)
    assert answered is not None
    assert answered.reply.text == "ok"
    assert answered.cost_usd == pytest.approx(0.012)  # 10 + 2 tokens
    assert answered.wasted_usd == pytest.approx(0.005)  # "hello" counts 2, "tok tok tok " 3
    assert budget.spent_usd == pytest.approx(0.017)


async def test_attempts_end() -> None:
    """An endpoint that only fails is asked so often and no more."""
    async with FakeUpstream(Reply(status=503, body=b"")) as upstream:
        answered = await called(upstream)
    assert answered is not None
    assert answered.reply.reason == "http_503"
    assert len(upstream.requests) == PERSISTENT.attempts


async def test_fields_that_an_endpoint_turns_down_are_left_out() -> None:
    """Each refusal that names a field costs one request, once; the next request has learned."""

    def script(received: Received) -> Reply:
        fields = received.json
        for name, words in (
            ("stream_options", "Unknown parameter: stream_options"),
            ("max_tokens", "'max_tokens' is not supported, use 'max_completion_tokens'"),
            ("response_format", "response_format.type is wrong"),
        ):
            if name in fields:
                return Reply(status=400, body=json.dumps({"error": {"message": words}}).encode())
        return said("fine")

    ask = Ask(messages=ASK.messages, max_tokens=9, stream=True, schema={"type": "object"}, extra={"top_p": 0.5})
    async with FakeUpstream(script) as upstream, client_session() as session:
        where = endpoint(upstream)
        caller = Caller(session, where, pacer=Pacer(), budget=Budget(None), persistence=PERSISTENT)
        for _ in range(2):
            answered = await caller.call(ask)
            assert answered is not None
            assert answered.reply.status == "ok"
    assert len(upstream.requests) == 6
    last = upstream.requests[-1].json
    assert (last["max_completion_tokens"], last["top_p"]) == (9, 0.5)


async def test_no_request_is_sent_that_may_exceed_the_budget() -> None:
    """The most a request can cost must fit, not what it is likely to cost."""
    async with FakeUpstream(said("x")) as upstream:
        most_usd = endpoint(upstream).most_usd(ASK)
        assert await called(upstream, budget=Budget(most_usd * 0.99)) is None
        assert upstream.requests == []
        assert await called(upstream, budget=Budget(most_usd)) is not None


async def test_the_most_a_request_can_cost_is_an_upper_bound() -> None:
    """Prompt at twice its count and room for a template, and the whole of the longest answer."""
    where = Endpoint(id="a", model="m", api_base="http://127.0.0.1:9/v1", api_key=None, card=CARD)
    assert where.most_usd(ASK) == pytest.approx((2 * 2 + 64 + 50) * 1e-3)


async def test_a_cancelled_request_is_gone_upstream() -> None:
    """Ctrl-C stops what is in flight: nobody pays for tokens that no one reads."""
    async with FakeUpstream(Reply(num_tokens=1000, interval_s=0.01)) as upstream:
        task = asyncio.create_task(called(upstream))
        while not upstream.num_open:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for _ in range(200):
            if upstream.requests[0].disconnected_s is not None:
                break
            await asyncio.sleep(0.005)
        assert upstream.requests[0].disconnected_s is not None
