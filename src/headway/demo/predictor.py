"""A trained artifact for the demo's pool, and evaluation rows to train one on.

The artifact is loaded here before any process starts, so that a wrong one is named at once. Rows hold what each model
would answer to the demo's queries, which is the demo's truth: an artifact must be played on another seed than the one
it was trained on, and this file refuses to let it meet its own prompts' answers unsaid.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from headway.config.artifact_file import errors_of_artifact
from headway.demo.pool import POOL
from headway.demo.workload import MAX_TOKENS, Workload
from headway.errors import ArtifactError
from headway.lab.pool import QWEN3_CARDS
from headway.predict.artifact import decode_artifact
from headway.predict.learned import LearnedPredictor
from headway.predict.seen import prompt_hash, seen_prompts
from headway.train.dataset import EvaluationRow, write_rows

_NAMES = tuple(model.name for model in POOL)


class TrainedPredictor(Struct, frozen=True, kw_only=True):
    """An artifact that can be served for the pool. ``num_seen`` queries of the workload have a prompt that the artifact
    was trained on; ``cold_models`` are those of the pool that it does not know."""

    path: Path
    description: str
    cold_models: tuple[str, ...]
    num_seen: int


def load_trained(path: Path, workload: Workload) -> TrainedPredictor:
    """The artifact at ``path``, tried on this machine.

    Raises:
        ArtifactError: it cannot be read or served, or knows none of the pool's models; names the file.
    """
    with errors_of_artifact(path):
        artifact = decode_artifact(path.read_bytes())
        cold = LearnedPredictor(artifact, {name: QWEN3_CARDS[name] for name in _NAMES}).cold_models
    if len(cold) == len(_NAMES):
        trained = ", ".join(model.name for model in artifact.models)
        raise ArtifactError(f"knows none of {', '.join(_NAMES)}, only {trained}", path=str(path))
    seen = seen_prompts(artifact)
    num_seen = sum(prompt_hash(query.prompt) in seen for query in workload.queries)
    served = (
        artifact.serves_quality
        if artifact.serves_quality == artifact.serves_length
        else f"{artifact.serves_quality}, lengths by {artifact.serves_length}"
    )
    lines = [
        f"Predictions by {path.name} ({artifact.data.num_rows:,} rows, generation {artifact.generation}): {served}."
    ]
    if cold:
        lines.append(f"It does not know {', '.join(cold)}: predicted from what it knows of the others, and the card.")
    if num_seen:
        lines.append(f"It was trained on the prompts of {num_seen} of these queries.")
    return TrainedPredictor(path=path, description="\n".join(lines), cold_models=cold, num_seen=num_seen)


def write_answers(workload: Workload, path: Path) -> int:
    """Write what every model would answer to every query, as ``headway train`` takes it; returns how many rows.

    Raises:
        DatasetError: the file cannot be written.
    """
    return write_rows(path, answer_rows(workload))


def answer_rows(workload: Workload) -> Iterator[EvaluationRow]:
    """What every model of the pool would answer to every query, as evaluation rows."""
    for query in workload.queries:
        for model in POOL:
            answer = query.answers[model.name]
            yield EvaluationRow(
                prompt_id=f"{workload.summary.seed}-{query.number}",
                model=model.name,
                prompt=query.prompt,
                prompt_tokens=query.prompt_tokens,
                output_tokens=answer.output_tokens,
                cost_usd=model.price.cost_usd(query.prompt_tokens, answer.output_tokens),
                quality=answer.quality,
                judge="the demo's truth",
                task=query.task,
                max_tokens=MAX_TOKENS,
            )
