"""The task type of a prompt by plain rules, so that a pool can tell its models apart before anything was trained.

A type says how long an answer tends to be and how much a larger model helps; a model card may hold a prior for each.
Only the head and the tail of a prompt are read, where instructions and questions stand, so a long document costs no
more than a short one (< 20 µs). The rules know English prompts; what matches none of them is ``instruct``. They refuse
to be clever: no weights, no training data, one screen.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

TaskType = Literal["summarise", "question", "story", "code", "math", "instruct"]
TASK_TYPES: tuple[TaskType, ...] = get_args(TaskType)

_HEAD_CHARS = 240
_TAIL_CHARS = 240
#: From here on a prompt is a document with an instruction; only a question at its very end asks for a short answer.
_DOCUMENT_CHARS = 10_000

#: r/WritingPrompts marks its posts so, at the start of a line: [WP], [ EU ], {PI}, WP:
_STORY_TAG = re.compile(
    r"\n[ \t]*(?:wp ?:|[\[({] ?(?:wp|ff|mp|ip|cw|eu|ot|tt|pi|rf|cs|cc|sp|pm|nano|modpost)\b[^\])}\n]{0,24}[\])}])"
)
_STORY_VERB = re.compile(r"\b(?:write|tell|compose|create|generate|continue|craft|finish|invent)\b[^.?!\n]{0,60}$")
_STORY_NOUNS = ("story", "stories", " tale", "fable", "novel", "fairytale")
_SUMMARY_WORDS = ("summar", "tl;dr", "tldr", "key takeaways", "main takeaways", "main points of the following")
_ASKED_OF_CONTEXT = ("answer the question", "answer the following question", "use the passages", "using the passages")
_CODE_SYNTAX = ("```", "#include", "def ", "();", "public class", "import java", "select *", "</", "fn main", "func ")
_CODE_LANGUAGES = frozenset(
    {"python", "javascript", "typescript", "java", "c++", "c#", "rust", "golang", "php", "bash"}
)
_CODE_FORMATS = frozenset({"sql", "mysql", "html", "css", "regex", "json", "xml", "numpy", "pandas", "api"})
_CODE_THINGS = frozenset({"code", "function", "program", "script", "algorithm", "snippet", "query", "class", "bug"})
_CODE_NOUNS = _CODE_LANGUAGES | _CODE_FORMATS | _CODE_THINGS
_CODE_MAKING = frozenset({"write", "implement", "create", "generate", "rewrite", "construct", "develop", "design"})
_CODE_VERBS = _CODE_MAKING | {"debug", "fix", "refactor", "optimize", "edit", "convert"}
_MATH_WORDS = frozenset({"calculate", "compute", "equation", "integral", "derivative", "polynomial", "numeric"})
_SOLVE_WORDS = frozenset({"solve", "evaluate", "simplify", "multiply"})
_DIGITS = tuple("0123456789")
_TO_SPACES = str.maketrans(dict.fromkeys('!"$%&()*,-./:;<=>?@[\\]^_`{|}~', " "))
#: A prompt that begins so is a question even without its question mark.
_FACT_WORDS = ("who ", "whose ", "whom ", "which ", "when ", "where ", "what ")
#: A question that begins so asks for an explanation or an opinion, which is as long as any instruction's answer.
_EXPLAIN = re.compile(
    r"(?:why|how (?!many|much|old|long|far|tall|big|large|high|fast|often)|what (?:would|do you|should|could|can)\b"
    r"|what (?:are|is|were) (?:(?:some|the|a) )*(?:of the )?(?:main |major |key |basic |most \w+ |best |different )?"
    r"(?:benefit|difference|advantage|disadvantage|way|effect|feature|consequence|risk|use\b|uses\b|purpose|function|idea"
    r"|characteristic|definition|similarit|sign|technique|tip|step|reason|cause|role|concept|contribution|challenge)"
    r"|can (?:you|i)\b|could you|would you|is it (?:possible|safe|true|better)|in what ways|what does [^?]* mean)"
)


def task_type(prompt: str) -> TaskType:
    """The type of ``prompt``; ``instruct`` where no rule matches. Case does not matter."""
    head = prompt[:_HEAD_CHARS].lower()
    tail = prompt[-_TAIL_CHARS:].lower() if len(prompt) > _HEAD_CHARS else head
    if _STORY_TAG.search("\n" + head) or "writing prompt" in head:
        return "story"
    end = tail.rstrip().removesuffix("answer:").rstrip(" \t\r\n\"'”’)")
    if "question:" in tail or _any_in(_ASKED_OF_CONTEXT, head):
        return "question"
    if _any_in(_SUMMARY_WORDS, head) or _any_in(_SUMMARY_WORDS, tail):
        return "summarise"
    if len(prompt) >= _DOCUMENT_CHARS:
        return "question" if end.endswith("?") else "summarise"
    if any(noun in head and _STORY_VERB.search(head, 0, head.index(noun)) for noun in _STORY_NOUNS):
        return "story"
    words = frozenset(head.translate(_TO_SPACES).split())
    if _any_in(_CODE_SYNTAX, head) or not (words.isdisjoint(_CODE_VERBS) or words.isdisjoint(_CODE_NOUNS)):
        return "code"
    if not words.isdisjoint(_MATH_WORDS) or (not words.isdisjoint(_SOLVE_WORDS) and _any_in(_DIGITS, head)):
        return "math"
    start = head.lstrip()
    if (end.endswith("?") or start.startswith(_FACT_WORDS)) and not _EXPLAIN.match(start):
        return "question"
    return "instruct"


def _any_in(needles: tuple[str, ...], text: str) -> bool:
    return any(map(text.__contains__, needles))
