"""What a predictor may read of a request: the same few things when it is trained and when it serves.

Of a long text only both ends are kept, where instructions and questions stand, so that no prompt costs more than a
long one does. It refuses to hold anything that is not known before the query is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from headway.predict.tokens import messages_text
from headway.types import Query

#: Of a long prompt the router keeps this many characters of either end.
KEPT_END_CHARS = 8192


class Prompt(Struct, frozen=True):
    """A prompt as predictors see it.

    ``text`` is the text of all messages, of a long one both ends. ``num_chars`` counts all of it, ``system_chars`` the
    characters of system and developer messages. ``num_turns`` counts the user's messages, at least 1. ``max_tokens`` is
    the request's own limit on the answer.
    """

    text: str
    num_chars: int
    num_turns: int = 1
    system_chars: int = 0
    max_tokens: int | None = None


def both_ends(text: str, end_chars: int = KEPT_END_CHARS) -> str:
    """``text``, or its first and last ``end_chars`` characters where it is longer than both together."""
    return text if len(text) <= 2 * end_chars else text[:end_chars] + text[-end_chars:]


def prompt_of_text(text: str, *, max_tokens: int | None = None) -> Prompt:
    """The prompt of a request that is one text."""
    return Prompt(both_ends(text), len(text), max_tokens=max_tokens)


def prompt_of_messages(messages: Sequence[object], *, max_tokens: int | None = None) -> Prompt:
    """The prompt of OpenAI chat messages.

    Raises:
        RequestError: messages of a shape that no chat endpoint takes.
    """
    text = messages_text(messages)
    num_turns, system_chars = conversation(messages)
    return Prompt(both_ends(text), len(text), num_turns, system_chars, max_tokens)


def prompt_of_query(query: Query) -> Prompt:
    """The prompt that the router was asked about."""
    num_chars = len(query.prompt_text) if query.prompt_chars is None else query.prompt_chars
    return Prompt(query.prompt_text, num_chars, query.num_turns, query.system_chars, query.max_tokens)


def conversation(messages: object) -> tuple[int, int]:
    """How many messages are the user's (at least 1), and how many characters are the system's."""
    num_turns = system_chars = 0
    for message in messages if isinstance(messages, list) else ():
        role = message.get("role") if isinstance(message, dict) else None
        if role == "user":
            num_turns += 1
        elif role in ("system", "developer"):
            system_chars += len(messages_text([message]))
    return max(1, num_turns), system_chars
