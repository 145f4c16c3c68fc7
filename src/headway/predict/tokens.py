"""The one way Headway counts prompt tokens without a tokenizer, shared by gateway and simulated engine.

Four UTF-8 bytes are one token. The text counted is what a request carries: message contents, tool calls and tool
definitions, prompts and inputs. A chat template's own tokens are left out, and so are pictures and sound, of which
only the engine knows the size. This file refuses to guess: a body whose prompt has no known shape is a
:class:`~headway.errors.RequestError` naming the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import msgspec

from headway.errors import RequestError

BYTES_PER_TOKEN = 4
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


def count_tokens(text: str) -> int:
    """``max(1, ceil(UTF-8 bytes / 4))``. O(1) for ASCII text, else O(length)."""
    num_bytes = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return max(1, -(-num_bytes // BYTES_PER_TOKEN))


def messages_text(messages: object, *, param: str = "messages") -> str:
    """The text of OpenAI chat messages, one message per line. Pictures and other media add nothing.

    Raises:
        RequestError: no list, an empty one, or a message whose content is neither text nor a list of parts.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"'{param}' must be a non-empty list of messages", param=param)
    if len(messages) == 1 and isinstance(messages[0], dict) and type(messages[0].get("content")) is str:
        return cast(str, messages[0]["content"])  # the common case, without a copy of a long prompt
    return "\n".join(_message_text(message, f"{param}[{index}]") for index, message in enumerate(messages))


def prompt_text(body: Mapping[str, object]) -> str:
    """The prompt of a chat, completions, embeddings or responses body as text; token ids have none.

    Raises:
        RequestError: no prompt in it, or one of a shape that no OpenAI endpoint takes; ``param`` names the field.
    """
    param, prompt = _prompt_field(body)
    if param == "messages":
        return messages_text(prompt)
    items = [prompt] if isinstance(prompt, str) else _prompt_items(param, prompt)
    instructions = body.get("instructions") if param == "input" else None
    return "\n".join(item for item in (instructions, *items) if isinstance(item, str))


def prompt_tokens_of(body: Mapping[str, object]) -> int:
    """Prompt tokens of a chat, completions, embeddings or responses body, at least 1.

    A list of token ids counts its length; several prompts in one body count together, as the engine prefills all of
    them; tool definitions count as the JSON that the chat template shows to the model.

    Raises:
        RequestError: as :func:`prompt_text`.
    """
    param, prompt = _prompt_field(body)
    if param == "messages":
        tokens = count_tokens(messages_text(prompt))
    elif isinstance(prompt, str):
        tokens = count_tokens(prompt)
    else:
        items = _prompt_items(param, prompt)
        tokens = sum(count_tokens(item) if isinstance(item, str) else item for item in items)
    if param == "input" and isinstance(body.get("instructions"), str):
        tokens += count_tokens(cast(str, body["instructions"]))
    tools = body.get("tools")
    if isinstance(tools, list) and tools:
        tokens += -(-len(msgspec.json.encode(tools)) // BYTES_PER_TOKEN)
    return tokens


def _prompt_field(body: Mapping[str, object]) -> tuple[str, object]:
    for param in ("messages", "prompt", "input"):
        if body.get(param) is not None:
            return param, body[param]
    raise RequestError("the body holds neither 'messages' nor 'prompt'", param="messages")


def _prompt_items(param: str, prompt: object) -> list[str | int]:
    """One entry per prompt: its text, or its number of token ids."""
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(f"'{param}' must be text, token ids, or a non-empty list of them", param=param)
    kinds = set(map(type, prompt))
    if kinds == {str}:
        return list(prompt)
    if kinds == {int}:
        return [_num_token_ids(param, prompt)]
    if kinds == {list}:
        return [_num_token_ids(f"{param}[{index}]", ids) for index, ids in enumerate(prompt)]
    if param == "input" and kinds == {dict}:
        return [messages_text(prompt, param=param)]
    raise RequestError(f"'{param}' must hold only texts or only token ids", param=param)


def _num_token_ids(param: str, ids: list[object]) -> int:
    if not ids or set(map(type, ids)) != {int}:
        raise RequestError(f"'{param}' must be a non-empty list of token ids", param=param)
    if min(cast("list[int]", ids)) < 0:
        raise RequestError(f"'{param}' holds a negative token id", param=param)
    return len(ids)


def _message_text(message: object, where: str) -> str:
    if not isinstance(message, dict):
        raise RequestError(f"'{where}' must be an object with 'role' and 'content'", param=where)
    parts = _content_texts(message.get("content"), f"{where}.content")
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        for call in calls:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                parts.extend(value for key in ("name", "arguments") if isinstance(value := function.get(key), str))
    return "\n".join(parts)


def _content_texts(content: object, where: str) -> list[str]:
    if content is None:  # an assistant message that only calls tools
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise RequestError(f"'{where}' must be text or a list of parts", param=where)
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
        elif not isinstance(part, dict):
            raise RequestError(f"'{where}[{index}]' must be an object with 'type'", param=f"{where}[{index}]")
        elif isinstance(kind := part.get("type"), str) and kind in _TEXT_PARTS:
            text = part.get("text")
            if not isinstance(text, str):
                raise RequestError(f"'{where}[{index}].text' must be text", param=f"{where}[{index}].text")
            texts.append(text)
    return texts
