"""Endpoints that collecting and judging ask in tests: a fake upstream's, and a judge that follows a script."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from headway.testing import FakeUpstream, Received, Reply
from headway.train.caller import Persistence
from headway.train.endpoints import Endpoint
from headway.types import ModelCard

#: No pause before another attempt that a test would have to wait for.
PERSISTENT = Persistence(attempts=3, timeout_s=5.0, patience_s=5.0, first_pause_s=0.001)

#: One USD per thousand tokens, in and out.
CARD = ModelCard(name="m", input_per_1m_usd=1000.0, output_per_1m_usd=1000.0)


def endpoint(upstream: FakeUpstream, *, id: str = "a", model: str = "m", api_key: str | None = None) -> Endpoint:
    """The upstream as an endpoint."""
    return Endpoint(id=id, model=model, api_base=upstream.url, api_key=api_key, card=CARD)


def said(text: str, *, prompt_tokens: int = 10, output_tokens: int = 2) -> Reply:
    """A whole answer with this text."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}
    return Reply(body=json.dumps({"choices": [choice], "usage": usage}).encode())


def case_of(received: Received) -> dict[str, object]:
    """What a judge was shown."""
    messages = received.json["messages"]
    assert isinstance(messages, list)
    case = json.loads(messages[1]["content"])
    assert isinstance(case, dict)
    return case


def verdict(received: Received, score: Callable[[str], float]) -> str:
    """A verdict on the case in ``received``; ``score`` turns an answer's text into 0 to 10."""
    answers = case_of(received)["answers"]
    assert isinstance(answers, Mapping)
    return json.dumps({"scores": {letter: score(text) for letter, text in answers.items()}})
