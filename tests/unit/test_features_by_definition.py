"""The features are computed the quick way; here they are held, bit for bit, to the plain way that defines them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from headway.predict import features as quick
from headway.predict.features import FEATURE_NAMES, prompt_features
from headway.predict.prompt import both_ends, prompt_of_text

ALPHABETS = {
    "prose": "abc 012.,!?\n",
    "bytes": "".join(map(chr, range(256))),
    "foreign": "日本語。！？ a\n",
    "marks": "`{}()[]#$^=\\/ *-+<>'\"~|&%@a1 \x00\x1f\x85\xa0",
    "long words": "A" * 30 + "b \ud800😀",
    "choices": "\n\n\nab1)(.",
    "words": "",
}
TEXT = (
    "write a list of three tips in 200 words one sentence only the code def return you are why? step by step "
    "passage: $2 !important ``` json.\n yes or no ends. \nq: \na: \n(a \n1. best-of-five abcdefghijklmnopqrstuvwxyz"
)
WORDS = TEXT.split(" ")


def texts(kind: str, num: int) -> list[str]:
    rng = random.Random(kind)
    sizes = (0, 1, 5, 60, 800, 6000)
    if kind == "words":
        return [" ".join(rng.choices(WORDS, k=rng.choice(sizes) // 8)) for _ in range(num)]
    return ["".join(rng.choices(ALPHABETS[kind], k=rng.choice(sizes))) for _ in range(num)]


def plain_tokens(lowered: bytes) -> list[bytes]:
    return quick._TOKEN.findall(lowered)


def plain_marks(words: set[bytes], lowered: bytes) -> list[float]:
    by_word = [float(not words.isdisjoint(marks)) for marks in quick._WORD_MARKS.values()]
    by_phrase = [
        float(any(word in words and phrase in lowered for word, phrase in marks))
        for marks in quick._PHRASE_MARKS.values()
    ]
    return by_word + by_phrase


@pytest.mark.parametrize("kind", ALPHABETS)
def test_the_quick_way_is_the_plain_way(kind: str) -> None:
    """Tokens, marks, shares of characters, sentences and choices are those of their definitions, on any text."""
    shares = {
        "digit_share": lambda byte: 48 <= byte <= 57,
        "upper_share": lambda byte: 65 <= byte <= 90,
        "foreign_share": lambda byte: byte >= 128,
        "mark_share": lambda byte: byte < 128 and not chr(byte).isalnum() and byte not in b" \t\n\v\f\r",
    }
    for text in texts(kind, 60):
        found = dict(zip(FEATURE_NAMES, prompt_features(prompt_of_text(text)).dense.tolist(), strict=True))
        read = both_ends(text, quick.READ_END_CHARS)
        encoded, lowered = (one.encode("utf-8", "surrogatepass") for one in (read, read.lower()))
        tokens = plain_tokens(lowered)
        assert quick._tokens(lowered) == tokens
        names = [*quick._WORD_MARKS, *quick._PHRASE_MARKS]
        assert [found[name] for name in names] == plain_marks(set(tokens), lowered)
        for name, holds in shares.items():
            assert found[name] == sum(map(holds, encoded)) / max(1, len(encoded))
        ends = [b". ", b".\n", b"? ", b"! ", *(mark.encode() for mark in "。！？")]
        assert found["log_sentences"] == pytest.approx(np.log(1 + sum(map(encoded.count, ends))), abs=1e-15)
        choices = (b"\na)", b"\nb)", b"\na.", b"\nb.", b"\n(a", b"\n1.", b"\n1)")
        assert found["num_choices"] == pytest.approx(np.log1p(sum(map(lowered.count, choices))), abs=1e-15)
