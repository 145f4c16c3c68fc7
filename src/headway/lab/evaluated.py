"""Queries of a lab from evaluation rows: real prompts, what each model really made of them, and an artifact's word.

The rows are those that ``headway train`` takes. A row's quality and tokens are the truth, which no router sees; what a
router sees is what the artifact says of the prompt, or of its task label alone. Prompts that the artifact was trained
on are left out and counted, as are those that not every model answered; it refuses to play where none is left.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from headway.config.artifact_file import errors_of_artifact
from headway.config.lines import decode_lines
from headway.errors import ArtifactError, ConfigError, DatasetError, RequestError
from headway.lab.beta import Column
from headway.lab.truth import PROMPT_CAP_TOKENS, draw_ttft_targets, stream
from headway.lab.workload import Workload, WorkloadSpec
from headway.predict.artifact import Artifact, decode_artifact
from headway.predict.forecast import Forecaster
from headway.predict.prompt import Prompt, prompt_of_messages, prompt_of_text
from headway.predict.seen import prompt_hash, seen_prompts
from headway.predict.tasks import task_type
from headway.predict.tokens import count_tokens, messages_text
from headway.types import OutcomeStatus

_MAX_TASKS = 127


class _Row(Struct, kw_only=True):
    """What the lab reads of a row of ``headway train``; the rest is passed over."""

    prompt_id: str
    model: str
    prompt: str | None = None
    messages: list[dict[str, object]] | None = None
    prompt_tokens: Annotated[int, Meta(ge=0)] | None = None
    output_tokens: Annotated[int, Meta(ge=0)] | None = None
    quality: Annotated[float, Meta(ge=0, le=1)] | None = None
    task: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    status: OutcomeStatus = "ok"

    @property
    def text(self) -> str:
        """The prompt, as training hashes it; empty where only its features were kept."""
        return self.prompt or (messages_text(self.messages) if self.messages else "")


class _Asked(Struct):
    """One prompt, as its first row has it, and the answers by model."""

    row: _Row
    answers: dict[str, _Row]


class HeldOut(Struct, frozen=True, eq=False, kw_only=True):
    """P prompts on M models, in the order of the file. Matrices are (P, M); ``said`` is the artifact's (quality, mean
    tokens, median tokens), ``label`` the same by task label alone."""

    task: NDArray[np.int8]
    task_names: tuple[str, ...]
    prompt_tokens: NDArray[np.int32]
    quality: Column
    output_tokens: NDArray[np.int32]
    said: tuple[Column, Column, Column]
    label: tuple[Column, Column, Column]
    note: str


@functools.lru_cache(maxsize=4)
def held_out(rows: str, artifact: str, models: tuple[str, ...]) -> HeldOut:
    """What the file at ``rows`` holds of prompts that the artifact has not seen, for ``models`` by their names there.

    Some 0.5 ms per prompt.

    Raises:
        ArtifactError: the artifact cannot be read or served, or does not know one of ``models``.
        DatasetError: a row is wrong, or no prompt is left; names file and, for a row, line.
    """
    with errors_of_artifact(Path(artifact)):
        trained = decode_artifact(Path(artifact).read_bytes())
        known = [model.name for model in trained.models]
        for model in models:
            if model not in known:
                raise ArtifactError(f"does not know model {model!r}; it knows {', '.join(known)}")
        asked, note = _unseen(Path(rows), trained, models)
        chosen = [known.index(model) for model in models]
        by_label = replace(trained, serves_quality="task_label", serves_length="task_label")
        prompts = [_prompt(one.row) for one in asked]
        said, label = _said(trained, chosen, prompts), _said(by_label, chosen, prompts)
    tasks = [one.row.task or task_type(one.row.text) for one in asked]
    names = tuple(dict.fromkeys(tasks))
    if len(names) > _MAX_TASKS:
        raise DatasetError(f"names {len(names)} tasks, and a workload has {_MAX_TASKS} at most", path=rows)
    return HeldOut(
        task=np.array([names.index(task) for task in tasks], np.int8),
        task_names=names,
        prompt_tokens=np.array([_prompt_tokens(one) for one in asked], np.int32),
        quality=np.array([[one.answers[model].quality for model in models] for one in asked], np.float64),
        output_tokens=np.array([[one.answers[model].output_tokens for model in models] for one in asked], np.int32),
        said=said,
        label=label,
        note=note,
    )


def evaluated_workload(prompts: HeldOut, arrival_s: Column, spec: WorkloadSpec) -> Workload:
    """A query for each arrival: the prompts in a random order of ``spec.seed``, over and over where there are fewer.

    ``spec.predictor`` chooses who speaks: R² of 1 is the truth, of 0 the task label, any other the artifact.

    Raises:
        DatasetError: as :class:`Workload`.
    """
    num = len(arrival_s)
    rng, size = stream(spec.seed, "evaluated"), len(prompts.task)
    order = np.concatenate([rng.permutation(size) for _ in range(-(-num // size))])[:num]
    predictor, most = spec.predictor, spec.max_tokens
    true_tokens = np.minimum(prompts.output_tokens[order], most)
    at = 1 if predictor.length == "mean" else 2
    qualities = {1.0: prompts.quality, 0.0: prompts.label[0]}
    lengths = {1.0: prompts.output_tokens.astype(np.float64), 0.0: prompts.label[at]}
    return Workload(
        arrival_s=arrival_s,
        task=prompts.task[order],
        task_names=prompts.task_names,
        models=spec.models,
        prompt_tokens=prompts.prompt_tokens[order],
        ttft_target_s=draw_ttft_targets(spec.seed, prompts.prompt_tokens[order], spec.target_slope_ms_per_token),
        true_output_tokens=true_tokens,
        true_quality=prompts.quality[order],
        predicted_output_tokens=np.minimum(lengths.get(predictor.length_log_r2, prompts.said[at])[order], most),
        predicted_quality=qualities.get(predictor.quality_r2, prompts.said[0])[order],
        max_tokens=most,
        lambda_per_musd=spec.lambda_per_musd,
        note=prompts.note,
    )


def stand_ins(models: Sequence[str], names: dict[str, str]) -> tuple[str, ...]:
    """What the rows call each of the pool's ``models``.

    Raises:
        ConfigError: ``names`` holds a model that the pool does not serve.
    """
    for name in names:
        if name not in models:
            raise ConfigError(
                f"the pool serves no {name!r}, only {', '.join(models)}", key=f"workload.rows.models.{name}"
            )
    return tuple(names.get(model, model) for model in models)


def _unseen(path: Path, artifact: Artifact, models: Sequence[str]) -> tuple[list[_Asked], str]:
    """Prompts with an answer of every model that the artifact was not trained on, and what was left out."""
    asked: dict[str, _Asked] = {}
    for number, row in decode_lines(path, msgspec.json.Decoder(_Row)):
        one = asked.setdefault(row.prompt_id, _Asked(row, {}))
        try:
            if row.text != one.row.text:
                what = f"prompt id {row.prompt_id!r} stands for two different prompts"
                raise DatasetError(what, path=str(path), line=number)
        except RequestError as error:
            raise DatasetError(str(error), path=str(path), line=number) from error
        if row.status == "ok" and row.quality is not None and row.output_tokens:
            if row.model in one.answers:
                what = f"prompt {row.prompt_id!r} already has an answer of {row.model!r}"
                raise DatasetError(what, path=str(path), line=number)
            one.answers[row.model] = row
    whole = [one for one in asked.values() if one.row.text and all(model in one.answers for model in models)]
    whole = [one for one in whole if _prompt_tokens(one) <= PROMPT_CAP_TOKENS]
    seen = seen_prompts(artifact)
    unseen = [one for one in whole if prompt_hash(one.row.text) not in seen]
    num_seen, num_lacking = len(whole) - len(unseen), len(asked) - len(whole)
    note = f"{len(unseen):,} prompts; left out: {num_seen:,} of the training, {num_lacking:,} without text or answers"
    if not unseen:
        raise DatasetError(f"holds nothing to play that the artifact was not trained on ({note})", path=str(path))
    return unseen, note


def _said(artifact: Artifact, chosen: Sequence[int], prompts: Sequence[Prompt]) -> tuple[Column, Column, Column]:
    """Quality, mean tokens and median tokens, (P, M) each.

    Raises:
        ArtifactError: it knows no quality or no length of one of them.
    """
    mean, median = Forecaster(artifact, chosen), Forecaster(artifact, chosen, median=True)
    found = np.empty((3, len(prompts), len(chosen)))
    for at, prompt in enumerate(prompts):
        reading = mean.read(prompt)
        usual, middle = mean.forecast_of(reading), median.forecast_of(reading)
        found[:, at] = usual.quality, usual.output_tokens, middle.output_tokens
    if np.isnan(found).any():
        lacking = np.flatnonzero(np.isnan(found).any(axis=(0, 1))).tolist()
        names = ", ".join(artifact.models[chosen[at]].name for at in lacking)
        raise ArtifactError(f"was told no quality or no length of {names}")
    return found[0], found[1], found[2]


def _prompt(row: _Row) -> Prompt:
    if row.prompt is None and row.messages is not None:
        return prompt_of_messages(row.messages, max_tokens=row.max_tokens)
    return prompt_of_text(row.text, max_tokens=row.max_tokens)


def _prompt_tokens(one: _Asked) -> int:
    """As the models counted them on average, else by their bytes."""
    counted = [row.prompt_tokens for row in one.answers.values() if row.prompt_tokens]
    return round(sum(counted) / len(counted)) if counted else count_tokens(one.row.text)
