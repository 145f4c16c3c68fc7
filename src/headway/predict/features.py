"""A prompt as numbers, for training and serving alike: counts, marks of what is asked for, and hashed words.

Only the standard library and numpy are used. At most ``READ_END_CHARS`` of either end of a text are read, in linear
time, so any text behaves: empty, in any script, a megabyte, or bytes that are no language. It refuses to look at the
answer, the load or the clock, and to change silently: a change here must raise ``FEATURES_VERSION``, which every
artifact names.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.predict.prompt import Prompt, both_ends

#: Names the code of this file. An artifact trained with another version is refused when it is loaded.
FEATURES_VERSION = 1

READ_END_CHARS = 2048
#: Size of the signed hash space that is reduced by principal components (the papers' 512).
NUM_HASHED = 512
#: Size of the hash space of words and pairs of words, in which the linear text scores live.
NUM_BUCKETS = 8192
_BUCKET_SHIFT = np.uint32(32 - 13)
_PAIR_FACTOR = np.uint32(0x9E3779B1)

#: Words of up to 24 bytes (any byte beyond ASCII is part of one), or a single mark.
_TOKEN = re.compile(rb"[a-z0-9\x80-\xff]{1,24}|[^\sa-z0-9\x80-\xff]")
_LONGEST_WORD = 24
_SPACES = b" \t\n\v\f\r"
#: Bytes of lowered text that are no mark, and each mark between spaces.
_NO_MARKS = bytes(range(97, 123)) + b"0123456789" + bytes(range(128, 256)) + _SPACES
_PARTED = [(bytes([byte]), b" %c " % byte) for byte in range(256)]
#: With more kinds of marks than this a text is parted by the expression itself.
_MAX_KINDS_OF_MARKS = 16
#: Stands for each byte by its class: digit, upper case, lower case, space, foreign (beyond ASCII), or mark.
_CLASSES = bytes(
    b"d"[0] if byte in b"0123456789"
    else b"U"[0] if 65 <= byte <= 90
    else b"l"[0] if 97 <= byte <= 122
    else b" "[0] if byte in _SPACES
    else b"f"[0] if byte >= 128
    else b"."[0]
    for byte in range(256)
)  # fmt: skip
_FOREIGN_SENTENCE_ENDS = tuple(end.encode() for end in "。！？")
#: A line that begins as the choices of a question do.
_CHOICE = re.compile(rb"\n(?:[ab1][).]|\(a)")
#: Tokens meant by one of a requested unit of text; None for items of a list.
_UNIT_TOKENS: dict[bytes, float | None] = {
    **dict.fromkeys((b"word", b"words"), 1.3),
    **dict.fromkeys((b"sentence", b"sentences"), 25.0),
    **dict.fromkeys((b"line", b"lines"), 12.0),
    **dict.fromkeys((b"paragraph", b"paragraphs"), 110.0),
    **dict.fromkeys((b"page", b"pages"), 550.0),
    **dict.fromkeys(
        b"bullets points items examples ideas tips ways reasons steps questions names facts titles".split(), None
    ),
}
_UNITS = frozenset(_UNIT_TOKENS)
_MAX_REQUESTED = 1e6
_NUMBERS = {
    word: float(number) for number, word in enumerate(b"one two three four five six seven eight nine ten".split(), 1)
}

#: Marks of what is asked for: the feature's name and the words or phrases any of which sets it to 1.
_WORD_MARKS: dict[str, frozenset[bytes]] = {
    name: frozenset(words.encode().split())
    for name, words in {
        "short": "briefly brief concise short shortly succinct succinctly quick quickly tldr summary",
        "long": "detailed detail thorough thoroughly essay extensive elaborate lengthy report blog",
        "list": "list lists enumerate bullet bullets bulleted items top",
        "summarise": "summarize summarise summary summarization summarizing tldr condense",
        "explain": "explain explanation describe elaborate discuss why understand meaning",
        "story": "story poem tale fable novel lyrics haiku song joke fiction screenplay dialogue plot wp",
        "letter": "email letter essay speech blog post article advertisement resume tweet memo review",
        "translate": "translate translation french spanish german chinese japanese italian russian",
        "code": "code function python javascript java sql html css program script algorithm regex api class bug",
        "math": "calculate compute solve equation integral derivative probability percent sum total average",
        "classify": "classify classification category categorize sentiment positive negative label identify detect",
        "rewrite": "rewrite rephrase paraphrase edit correct grammar improve convert fix",
        "compare": "compare contrast difference differences versus vs better similarities",
        "advise": "recommend suggest advice should best tips ideas plan recipe help",
        "asks_what": "what which",
        "asks_who": "who whom whose when where",
        "asks_how": "how",
        "asks_why": "why",
        "answer_only": "answer answers only choice option options following",
        "you": "you your",
        "i": "i my me we our",
    }.items()
}
#: As above, by phrases. Each stands behind one of its own words, so that most texts need not be searched for it.
_PHRASE_MARKS: dict[str, tuple[tuple[bytes, bytes], ...]] = {
    name: tuple((max(_TOKEN.findall(phrase.encode()), key=len), phrase.encode()) for phrase in phrases)
    for name, phrases in {
        "one_sentence": ("one sentence", "single sentence", "a sentence", "one word", "single word", "one line"),
        "no_explanation": ("without explanation", "no explanation", "without any explanation", "only the", "yes or no"),
        "step_by_step": ("step by step", "step-by-step", "chain of thought", "show your work", "reasoning"),
        "passage": ("passage", "context:", "according to the", "the following text", "article:", "document:"),
        "examples_shown": ("\nq:", "\nquestion:", "\nanswer:", "\noutput:", "\nexample", "\na:"),
        "as_role": ("act as", "you are a", "imagine you", "pretend"),
        "code_syntax": ("```", "def ", "#include", "();", "public class", "select ", "</", "assert ", "return "),
        "math_syntax": ("\\frac", "\\(", "$", "^2", " = ", "sqrt", "\\le"),
        "format": ("json", "xml", "csv", "markdown", "table", "html"),
    }.items()
}
_COUNTS = (
    "log_chars",
    "log_tokens",
    "log_sentences",
    "log_lines",
    "chars_per_token",
    "tokens_per_sentence",
    "distinct_share",
    "digit_share",
    "upper_share",
    "foreign_share",
    "mark_share",
    "num_questions",
    "ends_with_question",
    "num_choices",
    "requested_tokens",
    "requested_items",
    "log_turns",
    "log_system_chars",
    "log_max_tokens",
)

#: The dense features in order.
FEATURE_NAMES: tuple[str, ...] = (*_COUNTS, *_WORD_MARKS, *_PHRASE_MARKS)
NUM_FEATURES = len(FEATURE_NAMES)
_NONE_SET = (0.0,) * (len(_WORD_MARKS) + len(_PHRASE_MARKS))
#: Which features a word sets, and which it sets where the text holds a phrase.
_SET_BY: dict[bytes, list[int]] = {}
_SET_BY_PHRASE: dict[bytes, list[tuple[int, bytes]]] = {}
for _name, _marking in _WORD_MARKS.items():
    for _word in _marking:
        _SET_BY.setdefault(_word, []).append(FEATURE_NAMES.index(_name))
for _name, _pairs in _PHRASE_MARKS.items():
    for _word, _phrase in _pairs:
        _SET_BY_PHRASE.setdefault(_word, []).append((FEATURE_NAMES.index(_name), _phrase))
#: What stands for a missing ``max_tokens``: trees take NaN as missing.
MISSING = math.nan


class PromptFeatures(Struct, frozen=True, eq=False):
    """One prompt as numbers.

    ``dense`` has shape (``NUM_FEATURES``,); ``hashed`` is (``NUM_HASHED``,), signed counts over their number;
    ``buckets`` are the distinct hash buckets of words and pairs of words, rising, each below ``NUM_BUCKETS``.
    """

    dense: NDArray[np.float64]
    hashed: NDArray[np.float64]
    buckets: NDArray[np.int64]


def prompt_features(prompt: Prompt) -> PromptFeatures:
    """The features of ``prompt``. O(min(length, 2 · READ_END_CHARS))."""
    text = both_ends(prompt.text, READ_END_CHARS)
    lowered = text.lower().encode("utf-8", "surrogatepass")
    tokens = _tokens(lowered)
    hashes = np.fromiter(map(zlib.crc32, tokens), np.uint32, len(tokens))
    return PromptFeatures(_dense(prompt, text, lowered, tokens), _hashed(hashes), _buckets(hashes))


def _tokens(lowered: bytes) -> list[bytes]:
    """What the expression finds, faster: marks are set apart by spaces, and the rest is parted at spaces."""
    kinds = set(lowered.translate(None, _NO_MARKS))
    if len(kinds) > _MAX_KINDS_OF_MARKS:
        return _TOKEN.findall(lowered)
    parted = lowered
    for kind in kinds:
        parted = parted.replace(*_PARTED[kind])
    tokens = parted.split()
    return tokens if not tokens or max(map(len, tokens)) <= _LONGEST_WORD else _TOKEN.findall(lowered)


def _hashed(hashes: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Signed counts of the hashed tokens, divided by the number of tokens."""
    if not len(hashes):
        return np.zeros(NUM_HASHED)
    signs = 1.0 - 2.0 * (hashes >> np.uint32(31))
    counts = np.bincount(hashes & np.uint32(NUM_HASHED - 1), weights=signs, minlength=NUM_HASHED)
    return np.asarray(counts, np.float64) / len(hashes)


def _buckets(hashes: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Distinct buckets of the tokens and of each two neighbours."""
    pairs = (hashes[:-1] * _PAIR_FACTOR) ^ hashes[1:]
    both = (np.concatenate((hashes, pairs)) * _PAIR_FACTOR >> _BUCKET_SHIFT).astype(np.int64)
    both.sort()
    distinct: NDArray[np.int64] = both[np.concatenate((_FIRST[: len(both)], both[1:] != both[:-1]))]
    return distinct


_FIRST = np.ones(1, np.bool_)


def _dense(prompt: Prompt, text: str, lowered: bytes, tokens: Sequence[bytes]) -> NDArray[np.float64]:
    encoded = text.encode("utf-8", "surrogatepass")
    num_chars, num_tokens, num_bytes = max(1, len(text)), len(tokens), max(1, len(encoded))
    words = set(tokens)
    count = encoded.translate(_CLASSES).count
    foreign = 0 if len(encoded) == len(text) else count(b"f")
    num_lines, num_questions = encoded.count(b"\n"), encoded.count(b"?")
    num_sentences = 1 + encoded.count(b". ")
    if num_lines:
        num_sentences += encoded.count(b".\n")
    if num_questions:
        num_sentences += encoded.count(b"? ")
    if b"!" in encoded:
        num_sentences += encoded.count(b"! ")
    if foreign:
        num_sentences += sum(map(encoded.count, _FOREIGN_SENTENCE_ENDS))
    requested_tokens, requested_items = _requested(tokens, words & _UNITS)
    counts = (
        math.log1p(prompt.num_chars),
        math.log1p(num_tokens),
        math.log(num_sentences),
        math.log1p(num_lines),
        num_chars / max(1, num_tokens),
        num_tokens / num_sentences,
        len(words) / max(1, num_tokens),
        count(b"d") / num_bytes,
        count(b"U") / num_bytes,
        foreign / num_bytes,
        count(b".") / num_bytes,
        math.log1p(num_questions),
        float(text.rstrip(" \t\r\n\"'”’)").endswith(("?", "？"))),
        math.log1p(len(_CHOICE.findall(lowered))) if num_lines else 0.0,
        requested_tokens,
        requested_items,
        math.log(prompt.num_turns),
        math.log1p(prompt.system_chars),
        MISSING if prompt.max_tokens is None else math.log1p(prompt.max_tokens),
    )
    values = [*counts, *_NONE_SET]
    for word in words & _SET_BY.keys():
        for at in _SET_BY[word]:
            values[at] = 1.0
    for word in words & _SET_BY_PHRASE.keys():
        for at, phrase in _SET_BY_PHRASE[word]:
            if phrase in lowered:
                values[at] = 1.0
    return np.array(values, np.float64)


def _requested(tokens: Sequence[bytes], units: Iterable[bytes]) -> tuple[float, float]:
    """Logarithms of the tokens and of the list items that the text asks for ("500 words", "three tips"); 0 for none."""
    asked_tokens = asked_items = 0.0
    for unit in units:
        per_unit = _UNIT_TOKENS[unit]
        for at in _places(tokens, unit):
            for before in tokens[max(0, at - 3) : at]:  # "200 short words"; "five-sentence" has its mark between
                number = _NUMBERS.get(before) or (float(before) if before.isdigit() else 0.0)
                if per_unit is None:
                    asked_items = max(asked_items, min(number, _MAX_REQUESTED))
                else:
                    asked_tokens = max(asked_tokens, min(number, _MAX_REQUESTED) * per_unit)
    return math.log1p(asked_tokens), math.log1p(asked_items)


def _places(tokens: Sequence[bytes], token: bytes) -> Iterator[int]:
    at = -1
    for _ in range(tokens.count(token)):
        at = tokens.index(token, at + 1)
        yield at
