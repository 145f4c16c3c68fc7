"""Finds prompts that are the same or nearly so, so that none of them is trained on and tested on at once.

Equal means equal letters and digits, whatever case, marks or spaces. Nearly equal means that most runs of five words
are shared, estimated by MinHash and confirmed on the runs themselves. Runs that a large part of all prompts share are a
template (an instruction, shown examples) and count for nothing; without that every benchmark prompt would be one group.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.predict.seen import prompt_hash, words_of

RUN_WORDS = 5
NEAR_SHARE = 0.8
#: A run of words in more prompts than this share of all, and than this number, is a template's.
_TEMPLATE_SHARE, _TEMPLATE_MIN = 0.01, 20
_NUM_BANDS, _BAND_ROWS = 16, 4
_PRIME = np.uint64((1 << 61) - 1)
_MAX_WORDS = 4000


class Duplicates(Struct, frozen=True, eq=False):
    """``group`` (P,) numbers prompts so that alike ones share a number. Counts are of prompts beyond the first of each
    group: equal ones, and nearly equal ones."""

    group: NDArray[np.intp]
    num_equal: int
    num_near: int


def find_duplicates(texts: Sequence[str]) -> Duplicates:
    """Groups of equal and nearly equal prompts. Some 0.2 ms per prompt."""
    hashes = [prompt_hash(text) for text in texts]
    parents = list(range(len(texts)))
    first: dict[int, int] = {}
    num_equal = 0
    for index, value in enumerate(hashes):
        known = first.setdefault(value, index)
        if known != index:
            num_equal += 1
            parents[index] = known
    num_near = 0
    for one, other in _near_pairs(texts, sorted(first.values())):
        a, b = _root(parents, one), _root(parents, other)
        if a != b:
            parents[max(a, b)] = min(a, b)
            num_near += 1
    roots = [_root(parents, index) for index in range(len(texts))]
    return Duplicates(np.unique(roots, return_inverse=True)[1].astype(np.intp), num_equal, num_near)


def _root(parents: list[int], index: int) -> int:
    while parents[index] != index:
        parents[index] = parents[parents[index]]
        index = parents[index]
    return index


def _near_pairs(texts: Sequence[str], indices: Sequence[int]) -> list[tuple[int, int]]:
    runs = {index: _runs(texts[index]) for index in indices}
    common = Counter(run for found in runs.values() for run in found)
    most = max(_TEMPLATE_MIN, _TEMPLATE_SHARE * len(indices))
    runs = {index: frozenset(run for run in found if common[run] <= most) for index, found in runs.items()}
    buckets: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    rng = np.random.default_rng(20_240_607)
    factors = rng.integers(1, 1 << 31, (2, _NUM_BANDS * _BAND_ROWS), np.uint64)
    for index, found in runs.items():
        if found:
            signature = _signature(np.fromiter(found, np.uint64, len(found)), factors)
            for band in range(_NUM_BANDS):
                buckets[band, signature[band].tobytes()].append(index)
    # In a large bucket each is only held against its neighbour: alike prompts meet through one another.
    candidates = {pair for members in buckets.values() for pair in pairwise(members)}
    return [(a, b) for a, b in sorted(candidates) if len(runs[a] & runs[b]) >= NEAR_SHARE * len(runs[a] | runs[b])]


def _runs(text: str) -> frozenset[int]:
    words = words_of(text)[:_MAX_WORDS]
    if len(words) < RUN_WORDS:
        return frozenset()
    return frozenset(
        zlib.crc32(" ".join(words[at : at + RUN_WORDS]).encode("utf-8", "surrogatepass"))
        for at in range(len(words) - RUN_WORDS + 1)
    )


def _signature(runs: NDArray[np.uint64], factors: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The MinHash of a set of runs, (bands, rows)."""
    hashed = (runs[:, None] * factors[0] + factors[1]) % _PRIME
    lowest: NDArray[np.uint64] = hashed.min(axis=0).reshape(_NUM_BANDS, _BAND_ROWS)
    return lowest
