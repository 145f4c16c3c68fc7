"""English prompts of four kinds, written from a seed: so that the demo needs no data set to be real about text.

Each kind has the form by which people and rules know it (an instruction, passages before a question, a government
report to summarise, a ``[ WP ]`` story prompt) and the token count that was asked for. It refuses to be literature:
sentences come from a small grammar, only their form and length matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from headway.lab.truth import Task
from headway.predict.tokens import BYTES_PER_TOKEN, count_tokens

_SLOT = re.compile(r"\{(\w+)\}")

#: Choices for each slot of a template, parted by bars.
_WORDS: dict[str, list[str]] = {
    slot: choices.split("|")
    for slot, choices in {
        "agency": (
            "the Department of Transportation|the Department of Agriculture|the Coast Guard|the Forest Service|"
            "the Department of Veterans Affairs|the Department of Energy|the Environmental Protection Agency|"
            "the Federal Emergency Management Agency|the Office of Personnel Management|the Census Bureau"
        ),
        "programme": (
            "the loan guarantee program|the bridge inspection program|the rural broadband grants|"
            "the disability claims backlog initiative|the fleet replacement plan|the flood insurance program|"
            "the watershed restoration fund|the workforce training account|the port security grants"
        ),
        "finding": (
            "had not documented how it set its cost estimates|"
            "could not show that the funds reached eligible areas|met four of its six performance goals|"
            "relied on data that its own auditors had questioned|reduced the average processing time by a third|"
            "did not consistently follow leading practices|"
            "had filled fewer than half of the positions that it had planned|"
            "lacked a schedule for the remaining work"
        ),
        "reason": (
            "because field offices used unlike definitions|after Congress changed the formula|"
            "because contractors reported late|in part because the guidance was never issued|"
            "as staff moved to emergency work|although earlier reports had recommended a remedy|"
            "because the systems of the two offices do not exchange records"
        ),
        "year": "2009|2011|2012|2014|2015|2016|2018|2019|2021",
        "amount": "$3.1 million|$48 million|$212 million|$640 million|$1.4 billion|$5.9 billion",
        "share": "11 percent|23 percent|37 percent|about half|61 percent|roughly three quarters",
        "person": (
            "Anna Lindqvist|Robert Hale|Maria Castellanos|Edward Okafor|Sophie Brandt|James Whitlock|"
            "Leila Haddad|Thomas Verne|Grace Abernathy|Daniel Kowalski"
        ),
        "work": (
            "The Salt Road|Winter Harbor|A Measure of Silence|The Glass Orchard|Northern Lines|The Last Ferry|"
            "Paper Lanterns|Stone and River"
        ),
        "kind": "a film|a novel|a studio album|a stage play|a documentary|a television series",
        "town": "Port Ellery|Marlow Falls|Kingsbridge|Santa Rosalia|Altenburg|Dunmore|Eastleigh",
        "role": "a footballer|an architect|a composer|a botanist|a screenwriter|a racing driver",
        "topic": (
            "renewable energy|the water cycle|a balanced breakfast|remote work|machine learning|"
            "the printing press|urban gardening|healthy sleep|public libraries|saving money|the human heart|"
            "clear writing"
        ),
        "audience": "a ten-year-old|a new colleague|a busy manager|first-year students|a general reader",
        "hero": (
            "a retired lighthouse keeper|the last dragon|a bored immortal|your reflection|a failed wizard|"
            "an elevator repairman|the ghost of a clockmaker|a child who cannot lie"
        ),
        "event": (
            "wakes up in a city where nobody ages|receives letters from the future|"
            "must choose who remembers the war|finds a door that was not there yesterday|"
            "is hired to guard an empty room|learns the price of the sea|"
            "discovers that every dream is being recorded|is the only one who noticed that the moon is gone"
        ),
        "twist": (
            "Nobody else seems to mind|The dead have started to vote|It has happened before|"
            "You have one hour left|They were right all along|The answer is in the music|Only the cat knows why|"
            "Tell it from the villain's side"
        ),
    }.items()
}
_ALPACA = (
    "Explain {topic} to {audience}.",
    "Give three tips about {topic}.",
    "Describe {topic} in your own words.",
    "Write a short paragraph about {topic} for {audience}.",
    "List the main advantages of {topic}.",
    "Suggest a title for an article on {topic}.",
    "Compare {topic} with {topic}.",
    "Rewrite the following text so that {audience} can follow it.",
    "Name five facts about {topic}.",
)
_ALPACA_SHORT = ("Define {topic}.", "Explain {topic}.")
_ALPACA_MORE = (
    "Keep the tone friendly and avoid technical terms.",
    "Use one example from daily life.",
    "Mention {topic} as well.",
    "The answer is meant for {audience}.",
    "Do not use more than a few short sentences.",
    "Say what is often misunderstood about {topic}.",
    "In {year} a survey found that {share} of the readers had never heard of {topic}.",
)
_REPORT = (
    "In {year}, {agency} {finding} {reason}.",
    "According to officials, {programme} {finding}, and {share} of the {amount} was obligated.",
    "Between {year} and {year}, spending on {programme} rose to {amount}, {reason}.",
    "{agency} oversees {programme}, which received {amount} in fiscal year {year}.",
    "We reviewed a sample of cases and found that {agency} {finding} in {share} of them.",
    "The act of {year} requires {agency} to report on {programme} every two years, but the office {finding}.",
    "Stakeholders told us that {programme} was delayed {reason}; {agency} disagreed in part.",
    "As of {year}, {agency} had spent {share} of its appropriation on {programme}.",
)
_HEADINGS = (
    "Background",
    "Scope and Methodology",
    "Results",
    "Oversight and Funding",
    "Agency Comments",
    "Related Work",
)
_PASSAGE = (
    "{work} is {kind} of {year} by {person}, who also wrote {work}.",
    "{person} was {role} born in {town} in {year}.",
    "It was first shown in {town} and won an award in {year}.",
    "{person} played the lead together with {person}.",
    "The town of {town} was founded by {person}, and {share} of its people work in the port.",
    "After {year} the family of {person} moved to {town}, where {work} was written.",
    "Critics compared it with {work}, {kind} that {person} had made in {year}.",
)
_QUESTION = (
    "In which town was the person born who wrote {work}?",
    "Which came first, {work} or {work}?",
    "Who played the lead in {work}, {kind} by {person}?",
    "Were {person} and {person} both born in {town}?",
)
_STORY = (
    "{hero} {event}.",
    "{twist}.",
    "Years later {hero} {event}.",
    "In {town}, {hero} {event}, and {hero} watches.",
)


def write_prompt(task: Task, num_tokens: int, rng: np.random.Generator) -> str:
    """A prompt of ``task`` that counts ``num_tokens`` or slightly fewer by :func:`count_tokens` (never more than asked,
    but for the few words that give a task its form)."""
    return _WRITERS[task](num_tokens, rng)


def _alpaca(num_tokens: int, rng: np.random.Generator) -> str:
    opening = _sentence(_ALPACA, rng)
    if count_tokens(opening) > num_tokens:
        opening = _sentence(_ALPACA_SHORT, rng)
    return _text(num_tokens, rng, opening=opening, templates=_ALPACA_MORE)


def _writing_prompt(num_tokens: int, rng: np.random.Generator) -> str:
    return _text(num_tokens, rng, opening="[ WP ] " + _sentence(_STORY[:1], rng), templates=_STORY)


def _gov_report(num_tokens: int, rng: np.random.Generator) -> str:
    opening = "Please summarize the following government report in a few paragraphs.\n\nIntroduction\n\n"
    return _text(num_tokens, rng, opening=opening + _sentence(_REPORT, rng), templates=_REPORT, headings=_HEADINGS)


def _hotpotqa(num_tokens: int, rng: np.random.Generator) -> str:
    question = "\n\nQuestion: " + _sentence(_QUESTION, rng) + "\nAnswer:"
    opening = "Answer the question using the passages below.\n\nPassage 1: " + _sentence(_PASSAGE, rng)
    passages = _text(
        num_tokens - count_tokens(question), rng, opening=opening, templates=_PASSAGE, headings=("Passage",)
    )
    return passages + question


_WRITERS: dict[Task, Callable[[int, np.random.Generator], str]] = {
    "alpaca": _alpaca,
    "hotpotqa": _hotpotqa,
    "gov_report": _gov_report,
    "writing_prompts": _writing_prompt,
}


def _text(
    num_tokens: int,
    rng: np.random.Generator,
    *,
    opening: str,
    templates: tuple[str, ...],
    headings: tuple[str, ...] = (),
) -> str:
    """``opening`` and sentences after it, in paragraphs under numbered headings where given, cut to ``num_tokens``."""
    num_bytes = num_tokens * BYTES_PER_TOKEN
    parts, length, sentences, section = [opening], len(opening), 0, 1
    while length < num_bytes:
        sentences += 1
        part = " " + _sentence(templates, rng)
        if headings and sentences % 7 == 0:
            section += 1
            heading = headings[(section - 2) % len(headings)]
            part = f"\n\n{heading} {section}:{part}"
        parts.append(part)
        length += len(part)
    return _cut("".join(parts), num_bytes, keep=len(opening))


def _cut(text: str, num_bytes: int, *, keep: int) -> str:
    """``text`` cut at the last word that ends within ``num_bytes``, but never inside its first ``keep`` characters."""
    if len(text) <= max(num_bytes, keep):
        return text
    if num_bytes <= keep:
        return text[:keep]
    cut = text.rfind(" ", keep, num_bytes)
    return text[:keep] if cut < 0 else text[:cut].rstrip(" ,;:") + "."


def _sentence(templates: tuple[str, ...], rng: np.random.Generator) -> str:
    """One sentence from a template, its slots filled, its first letter a capital."""
    template = templates[int(rng.integers(len(templates)))]
    filled = _SLOT.sub(lambda match: _WORDS[match[1]][int(rng.integers(len(_WORDS[match[1]])))], template)
    return filled[0].upper() + filled[1:]
