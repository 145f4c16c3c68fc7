"""What the tokens of random requests are: texts in pieces, with beginnings in common, and the hashes of their blocks.

A piece is (text, number of tokens of it); no two texts share a token, so equal beginnings are those of equal pieces.
Nothing here knows engines. The worker of ``make conformance`` makes the same tokens for the real scheduler.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from collections.abc import Sequence

from headway.types import EngineRequest


def token_ids(pieces: Sequence[tuple[int, int]]) -> list[int]:
    """The tokens of a request, numbers that no two texts share."""
    return [1000 + (text << 12) + place for text, length in pieces for place in range(length)]


@functools.lru_cache(maxsize=256)
def chained_hashes(pieces: tuple[tuple[int, int], ...], size: int) -> list[int]:
    """64-bit hashes of a text's full blocks of ``size`` tokens, each over all tokens before it."""
    tokens = token_ids(pieces)
    hashes: list[int] = []
    previous = b""
    for start in range(0, len(tokens) - size + 1, size):
        block = b",".join(b"%d" % token for token in tokens[start : start + size])
        previous = hashlib.blake2b(previous + b":" + block, digest_size=8).digest()
        hashes.append(int.from_bytes(previous, "little"))
    return hashes


def random_texts(
    rng: random.Random, requests: Sequence[EngineRequest], max_model_len: int
) -> dict[str, list[tuple[int, int]]]:
    """Beginnings in common of any length: system prompts, system prompts with one of some documents, whole earlier
    conversations, the very same request again, and nothing in common."""
    next_text = itertools.count()
    systems = [(next(next_text), rng.randint(1, max_model_len)) for _ in range(rng.randint(1, 3))]
    documents = [[rng.choice(systems), (next(next_text), rng.randint(1, max_model_len))] for _ in range(3)]
    texts: dict[str, list[tuple[int, int]]] = {}
    for request in requests:
        kind = rng.random()
        start: list[tuple[int, int]] = []
        if kind < 0.3:
            start = [rng.choice(systems)]
        elif kind < 0.6:
            start = rng.choice(documents)
        elif kind < 0.85 and texts:
            start = rng.choice(list(texts.values()))
            if rng.random() < 0.6:
                start = cut(start, rng.randint(1, max_model_len))
        texts[request.request_id] = cut([*start, (next(next_text), max_model_len)], max_model_len)
    return texts


def cut(pieces: Sequence[tuple[int, int]], num_tokens: int) -> list[tuple[int, int]]:
    """The first ``num_tokens`` tokens."""
    kept: list[tuple[int, int]] = []
    for text, length in pieces:
        kept.append((text, min(length, num_tokens)))
        num_tokens -= length
        if num_tokens <= 0:
            break
    return kept
