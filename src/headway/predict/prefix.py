"""Names for the blocks of a prompt, so that a prompt which begins like an earlier one is known again.

An engine's prefix cache names each full block of tokens by a hash of the block and of all before it. Here the same is
done to the token stream that :mod:`headway.predict.tokens` counts: token ids as they are, text as its UTF-8 bytes, four
of them to a token. Where that count is corrected per model, blocks of bytes stand for proportionally more or fewer
tokens. A chat template's own tokens, pictures and what an engine itself wrote are not in it, so a hit can be missed but
is hardly ever made up. This file refuses to keep text: only the hashes leave it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from hashlib import blake2b

import msgspec

from headway.predict.tokens import BYTES_PER_TOKEN, prompt_text

#: Of a longer prompt only so many blocks are named: 131,072 tokens in blocks of 16.
MAX_BLOCKS = 8192


def prefix_blocks(body: Mapping[str, object], block_tokens: int) -> tuple[int, ...]:
    """A 64-bit hash per full block of ``block_tokens`` counted tokens, each over all bytes up to the block's end.

    ``body`` is a chat, completions, embeddings or responses body that :func:`headway.predict.tokens.prompt_tokens_of`
    accepts. Empty for bodies with several prompts, which an engine takes apart. About 1 µs per block.
    """
    stream = _stream(body)
    size = block_tokens * BYTES_PER_TOKEN
    running = blake2b(digest_size=8)
    names: list[int] = []
    for start in range(0, min(len(stream) // size, MAX_BLOCKS) * size, size):
        running.update(stream[start : start + size])
        names.append(int.from_bytes(running.copy().digest(), "little"))
    return tuple(names)


def _stream(body: Mapping[str, object]) -> bytes:
    """The counted tokens as bytes: tool definitions, which chat templates put first, then the prompt."""
    if body.get("messages") is None:
        prompt = body.get("prompt") if body.get("prompt") is not None else body.get("input")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]  # one prompt, in a list of its own
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return array("I", [token & 0xFFFFFFFF for token in prompt]).tobytes()
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], dict):
            return b""
    text = prompt_text(body).encode("utf-8", "surrogatepass")
    tools = body.get("tools")
    if not isinstance(tools, list) or not tools:
        return text
    shown = msgspec.json.encode(tools)
    return shown + b" " * (-len(shown) % BYTES_PER_TOKEN) + text
