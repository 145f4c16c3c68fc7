"""Published evaluation sets as rows, from a directory that holds them (``HEADWAY_DATA``), with their traps removed.

LLMRouter's nine models, a subset of RouterBench, AlpacaEval's scored pool, and RouteLLM's two models. What is left out
and why stands in each set's notes, which its model card repeats. Nothing of them is part of the package.
"""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from headway.config.lines import read_lines
from headway.errors import DatasetError
from headway.train.dataset import EvaluationRow
from headway.train.table import EvaluationTable, ModelFacts, build_table, parameters_in_name

_Row = TypeVar("_Row")

#: AlpacaEval entries that are no models, or whose score is no measurement: attacks on the judge, and the reference.
_NO_MODELS = frozenset({"NullModel", "gpt4_gamed", "gpt4_1106_preview"})
#: The family of AlpacaEval's pool that is routed over, priced by size for want of prices.
_ALPACA_ROUTED = (
    "FuseChat-Llama-3.2-1B-Instruct",
    "FuseChat-Llama-3.2-3B-Instruct",
    "FuseChat-Qwen-2.5-7B-Instruct",
    "FuseChat-Gemma-2-9B-Instruct",
)
_USD_PER_1M_PER_BILLION = 0.02
#: USD per million tokens as RouteLLM's authors state them.
_ROUTELLM = {"mixtral": ("mixtral-8x7b-instruct", 0.24), "gpt4": ("gpt-4-1106-preview", 24.7)}


class PublishedSet(Struct, frozen=True, kw_only=True):
    """One set: its rows from a directory, what is known of its models, and what a reader should know of both."""

    name: str
    title: str
    notes: tuple[str, ...]
    rows: Callable[[Path], Iterator[EvaluationRow]]
    facts: Callable[[Path], Mapping[str, ModelFacts]]

    def table(self, directory: Path) -> EvaluationTable:
        """The set as a table.

        Raises:
            DatasetError: a file is missing or malformed.
        """
        return build_table(self.rows(directory), facts=self.facts(directory), sources=(self.title,))


def data_directory() -> Path:
    """Where the published sets lie: ``HEADWAY_DATA/evals``.

    Raises:
        DatasetError: the variable is not set, or names no such directory.
    """
    given = os.environ.get("HEADWAY_DATA")
    if not given:
        raise DatasetError("set HEADWAY_DATA to the directory that holds evals/")
    path = Path(given) / "evals"
    if not path.is_dir():
        raise DatasetError("is no directory", path=str(path))
    return path


class _LlmRouterPrompt(Struct):
    id: str
    task: str
    prompt: str
    prompt_tokens: int
    scores: dict[str, float]


class _RouterBenchPrompt(Struct):
    sample_id: str
    task: str
    prompt: str
    prompt_tokens: int


class _AlpacaPrompt(Struct):
    prompt_id: int
    dataset: str
    prompt: str
    prompt_tokens: int


class _RouteLlmPrompt(Struct):
    task: str
    prompt: str
    prompt_tokens: int
    mixtral_correct: float
    gpt4_correct: float
    mixtral_output_tokens: int | None = None
    gpt4_output_tokens: int | None = None


def _llmrouter(directory: Path) -> Iterator[EvaluationRow]:
    for one in _objects(directory / "llmrouter_9models.jsonl.gz", _LlmRouterPrompt):
        for model, score in one.scores.items():
            yield EvaluationRow(
                prompt_id=one.id,
                model=model,
                prompt=one.prompt,
                prompt_tokens=one.prompt_tokens,
                quality=score,
                task=one.task,
            )


def _llmrouter_facts(directory: Path) -> dict[str, ModelFacts]:
    class Entry(Struct):
        size: str
        input_price: float
        output_price: float

    path = directory / "llmrouter_model_prices.json"
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=dict[str, Entry])
    except (OSError, msgspec.MsgspecError) as error:
        raise DatasetError(str(error), path=str(path)) from error
    return {
        name: ModelFacts(
            name=name,
            parameters=parameters_in_name(entry.size),
            input_per_1m_usd=entry.input_price,
            output_per_1m_usd=entry.output_price,
        )
        for name, entry in entries.items()
    }


def _routerbench(directory: Path) -> Iterator[EvaluationRow]:
    prompts = {
        one.sample_id: one for one in _objects(directory / "routerbench_subset_prompts.jsonl.gz", _RouterBenchPrompt)
    }
    seen: set[tuple[str, str]] = set()
    for row in _csv(directory / "routerbench_subset_scores.csv.gz"):
        key = (row["sample_id"], row["model"])
        if row["score"] and key not in seen:  # samples that are in both splits have a second, empty row
            seen.add(key)
            one = prompts[row["sample_id"]]
            yield EvaluationRow(
                prompt_id=one.sample_id,
                model=row["model"],
                prompt=one.prompt,
                prompt_tokens=one.prompt_tokens,
                output_tokens=int(float(row["output_tokens"])) if row["output_tokens"] else None,
                cost_usd=float(row["cost_usd"]) if row["cost_usd"] else None,
                quality=float(row["score"]),
                task=one.task,
            )


def _routerbench_facts(directory: Path) -> dict[str, ModelFacts]:
    """Prices by least squares from the cost of each answer and its tokens."""
    tokens: dict[str, list[tuple[int, int]]] = defaultdict(list)
    costs: dict[str, list[float]] = defaultdict(list)
    for row in _routerbench(directory):
        if None not in (row.cost_usd, row.output_tokens, row.prompt_tokens):
            tokens[row.model].append((row.prompt_tokens or 0, row.output_tokens or 0))
            costs[row.model].append(row.cost_usd or 0.0)
    facts = {}
    for name, counts in tokens.items():
        prices = np.linalg.lstsq(np.array(counts, np.float64), np.array(costs[name]) * 1e6, rcond=None)[0]
        input_usd, output_usd = (round(max(0.0, float(price)), 4) for price in prices)
        facts[name] = ModelFacts(
            name=name,
            parameters=parameters_in_name(name),
            input_per_1m_usd=input_usd,
            output_per_1m_usd=output_usd,
        )
    return facts


def _alpaca(directory: Path) -> Iterator[EvaluationRow]:
    prompts = {one.prompt_id: one for one in _objects(directory / "alpaca_eval_prompts.jsonl.gz", _AlpacaPrompt)}
    for row in _csv(directory / "alpaca_eval_scored.csv.gz"):
        if row["model"] not in _NO_MODELS and int(row["output_tokens"]) > 0:
            one = prompts[int(row["prompt_id"])]
            yield EvaluationRow(
                prompt_id=row["prompt_id"],
                model=row["model"],
                prompt=one.prompt,
                prompt_tokens=one.prompt_tokens,
                output_tokens=int(row["output_tokens"]),
                quality=min(1.0, max(0.0, float(row["win_prob_vs_gpt4_1106"]))),
                task=one.dataset,
            )


def _alpaca_facts(directory: Path) -> dict[str, ModelFacts]:
    facts = {}
    for name in _ALPACA_ROUTED:
        parameters = parameters_in_name(name) or 0.0
        price = _USD_PER_1M_PER_BILLION * parameters / 1e9
        facts[name] = ModelFacts(name=name, parameters=parameters, input_per_1m_usd=price, output_per_1m_usd=price)
    return facts


def _routellm(directory: Path) -> Iterator[EvaluationRow]:
    for number, one in enumerate(_objects(directory / "routellm_mmlu_gsm8k.jsonl.gz", _RouteLlmPrompt)):
        scores = {"mixtral": one.mixtral_correct, "gpt4": one.gpt4_correct}
        lengths = {"mixtral": one.mixtral_output_tokens, "gpt4": one.gpt4_output_tokens}
        for short, (model, _) in _ROUTELLM.items():
            yield EvaluationRow(
                prompt_id=str(number),
                model=model,
                prompt=one.prompt,
                prompt_tokens=one.prompt_tokens,
                output_tokens=lengths[short],
                quality=scores[short],
                task=one.task,
            )


def _routellm_facts(directory: Path) -> dict[str, ModelFacts]:
    return {
        name: ModelFacts(
            name=name, parameters=parameters_in_name(name), input_per_1m_usd=price, output_per_1m_usd=price
        )
        for name, price in _ROUTELLM.values()
    }


PUBLISHED: dict[str, PublishedSet] = {
    one.name: one
    for one in (
        PublishedSet(
            name="llmrouter-9",
            title="LLMRouter, nine models",
            notes=(
                "119 prompts stand in both of the set's own splits; here equal prompts share a fold.",
                "No output tokens: nothing is said of lengths, and cost counts the prompt only.",
            ),
            rows=_llmrouter,
            facts=_llmrouter_facts,
        ),
        PublishedSet(
            name="routerbench",
            title="RouterBench, subset (ARC, MBPP, WinoGrande), eleven models",
            notes=(
                "14 samples are in both splits and have empty rows, which are left out.",
                "Most answers are one or two tokens long. Prices are recovered from each answer's cost.",
            ),
            rows=_routerbench,
            facts=_routerbench_facts,
        ),
        PublishedSet(
            name="alpaca-eval",
            title="AlpacaEval, scored pool",
            notes=(
                "Left out: NullModel and gpt4_gamed (attacks on the judge), gpt4_1106_preview (the reference), and "
                "empty answers.",
                f"Quality is the win probability against gpt4_1106_preview. Routed over: {', '.join(_ALPACA_ROUTED)}, "
                f"for want of prices at {_USD_PER_1M_PER_BILLION} USD per million tokens and billion parameters.",
            ),
            rows=_alpaca,
            facts=_alpaca_facts,
        ),
        PublishedSet(
            name="routellm",
            title="RouteLLM, MMLU and GSM8K, two models",
            notes=(
                "15,361 rows hold 15,256 distinct prompts; equal prompts share a fold.",
                "Output tokens are known for GSM8K only; elsewhere cost counts the prompt, and a prompt whose nearest "
                "neighbours are of MMLU has none to tell lengths by, so that rival is not measured on lengths.",
            ),
            rows=_routellm,
            facts=_routellm_facts,
        ),
    )
}


def _objects(path: Path, kind: type[_Row]) -> Iterator[_Row]:
    decoder = msgspec.json.Decoder(kind)
    for number, line in read_lines(path):
        try:
            yield decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise DatasetError(str(error), path=str(path), line=number) from error


def _csv(path: Path) -> Iterator[dict[str, str]]:
    return csv.DictReader(line for _, line in read_lines(path))
