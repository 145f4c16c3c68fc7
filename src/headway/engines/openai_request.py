"""Reads an OpenAI chat or completions body as a simulated engine needs it: counts and switches, no text.

Prompt tokens come from the one function that the gateway counts with, so that both sides agree. Sampling and output
format parameters are accepted and have no effect, for the answer is filler text; parameters that would change the
shape of the answer (several choices, log probabilities, echo) are refused by name, like everything malformed.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct

from headway.errors import RequestError
from headway.predict.prefix import prefix_blocks
from headway.predict.tokens import prompt_tokens_of

#: Whole answer in tokens, for tests and demos: a number, or ``model=number`` items separated by commas.
OUTPUT_TOKENS_HEADER: Final = "x-headway-sim-output-tokens"

# Without that header the answer's length is drawn: lognormal, of this median and log standard deviation.
DRAWN_MEDIAN_TOKENS: Final = 200
DRAWN_LOG_SD: Final = 0.7
DRAWN_MAX_TOKENS: Final = 8192

_MAX_PROMPTS = 1024


class CompletionRequest(Struct, frozen=True, kw_only=True):
    """One request body. ``prompt_tokens`` has an entry per prompt, each of which becomes a request of the engine.

    ``max_tokens`` None means up to the context's end. ``prefix_blocks`` names the blocks of each prompt, where that was
    asked for.
    """

    chat: bool
    prompt_tokens: list[int]
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    stream: bool
    include_usage: bool
    priority: int
    prefix_blocks: list[tuple[int, ...]] = []


class _StreamOptions(Struct):
    include_usage: bool | None = None


class _Fields(Struct):
    """The fields that matter here, as they come."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    priority: int | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None


def parse(
    data: bytes, *, chat: bool, model: str, max_model_len: int, block_tokens: int | None = None
) -> CompletionRequest:
    """The request in ``data``; with its prompts' blocks of ``block_tokens`` named, where that is given.

    Raises:
        RequestError: no JSON object, a wrong or unsupported value, another model (404), or too long for the context.
    """
    try:
        body = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    try:
        fields = msgspec.convert(body, _Fields)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        raise RequestError(f"{message} for '{where[1:-1]}'", param=where[1:-1] or None) from error
    if fields.model is not None and fields.model != model:
        raise RequestError(f"The model `{fields.model}` does not exist.", status=404, param="model")
    _refuse_unsupported(fields)
    max_tokens, limit_name = fields.max_tokens, "max_tokens"
    if chat and fields.max_completion_tokens is not None:
        max_tokens, limit_name = fields.max_completion_tokens, "max_completion_tokens"
    if max_tokens is not None and max_tokens < 1:
        raise RequestError(f"{limit_name} must be at least 1, got {max_tokens}.", param=limit_name)
    prompt_tokens = _prompt_tokens(body, chat=chat)
    for count in prompt_tokens:
        _require_room(count, max_tokens, max_model_len, limit_name)
    options = fields.stream_options
    return CompletionRequest(
        chat=chat,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        min_tokens=_min_tokens(fields.min_tokens, max_tokens),
        ignore_eos=bool(fields.ignore_eos),
        stream=bool(fields.stream),
        include_usage=options is not None and bool(options.include_usage),
        priority=_priority(fields.priority),
        prefix_blocks=[] if block_tokens is None else _prefix_blocks(body, block_tokens, chat=chat),
    )


def answer_tokens(request: CompletionRequest, request_id: str, *, header: str | None, model: str, seed: int) -> int:
    """How long the answer would be without any limit: as the header says, else drawn from (seed, request id).

    Raises:
        RequestError: the header is no positive number.
    """
    if request.ignore_eos:
        return request.max_tokens or 2**31 - 1
    stated = None if header is None else _stated_tokens(header, model)
    if stated is None:
        rng = np.random.default_rng([seed, zlib.crc32(request_id.encode())])
        drawn = DRAWN_MEDIAN_TOKENS * math.exp(DRAWN_LOG_SD * rng.standard_normal())
        stated = round(min(max(drawn, 1.0), DRAWN_MAX_TOKENS))
    return max(stated, request.min_tokens)


def _refuse_unsupported(fields: _Fields) -> None:
    for name in ("n", "best_of"):
        if getattr(fields, name) not in (None, 1):
            raise RequestError(f"a simulated engine gives one answer per prompt: '{name}' must be 1", param=name)
    if fields.echo:
        raise RequestError("a simulated engine cannot echo the prompt", param="echo")
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        value = getattr(fields, name)
        # false asks for none; for completions 0 asks for those of the chosen tokens
        if value is not None and value is not False and not (name == "top_logprobs" and value == 0):
            raise RequestError("a simulated engine has no log probabilities", param=name)


def _prompt_tokens(body: Mapping[str, object], *, chat: bool) -> list[int]:
    param = "messages" if chat else "prompt"
    if body.get(param) is None:
        raise RequestError(f"'{param}' is missing", param=param)
    if chat:
        return [prompt_tokens_of(body)]
    prompt = body["prompt"]
    if not isinstance(prompt, list) or not prompt or type(prompt[0]) is int:
        return [prompt_tokens_of({"prompt": prompt})]
    if len(prompt) > _MAX_PROMPTS:
        raise RequestError(f"'prompt' holds {len(prompt)} prompts, at most {_MAX_PROMPTS} are taken", param="prompt")
    prompt_tokens_of({"prompt": prompt})  # names the first wrong item by its place in the list
    return [prompt_tokens_of({"prompt": item}) for item in prompt]


def _prefix_blocks(body: Mapping[str, object], block_tokens: int, *, chat: bool) -> list[tuple[int, ...]]:
    """The names of each prompt's blocks, in the order of its tokens' counts."""
    prompt = body.get("prompt")
    if chat or not isinstance(prompt, list) or type(prompt[0]) is int:
        return [prefix_blocks(body, block_tokens)]
    return [prefix_blocks({"prompt": item}, block_tokens) for item in prompt]


def _require_room(prompt_tokens: int, max_tokens: int | None, max_model_len: int, limit_name: str) -> None:
    limit = f"This model's maximum context length is {max_model_len} tokens."
    if prompt_tokens >= max_model_len:
        raise RequestError(
            f"{limit} Your prompt has {prompt_tokens} tokens, which leaves no room for an answer.", param="input_tokens"
        )
    if max_tokens is not None and prompt_tokens + max_tokens > max_model_len:
        raise RequestError(
            f"{limit} Your prompt has {prompt_tokens} tokens and you asked for {max_tokens} more.", param=limit_name
        )


def _min_tokens(min_tokens: int | None, max_tokens: int | None) -> int:
    if min_tokens is None:
        return 0
    if min_tokens < 0:
        raise RequestError(f"min_tokens must be at least 0, got {min_tokens}.", param="min_tokens")
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens must be at most max_tokens ({max_tokens}), got {min_tokens}.", param="min_tokens"
        )
    return min_tokens


def _priority(priority: int | None) -> int:
    if priority is not None and abs(priority) >= 2**31:
        raise RequestError(f"priority must lie within ±{2**31 - 1}, got {priority}.", param="priority")
    return priority or 0


def _stated_tokens(header: str, model: str) -> int | None:
    """The number that ``header`` states for ``model``; None when it only speaks of other models."""
    for item in header.split(","):
        name, equals, number = item.strip().rpartition("=")
        if equals and name != model:
            continue
        if not (number.isascii() and number.isdigit()) or not 1 <= int(number) < 2**31:
            raise RequestError(f"'{number}' is no number of tokens", param=OUTPUT_TOKENS_HEADER)
        return int(number)
    return None
