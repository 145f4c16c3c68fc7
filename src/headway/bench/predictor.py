"""What predictions cost on the request's path, asked in a process of its own: ``python -m headway.bench.predictor``.

Features, quality, mean and 90 % length and cost of each model of a pool, for prompts of 800 characters of which none
comes twice, so that no memory of an earlier forecast answers. The artifact comes on the standard input, one JSON object
goes out.

:func:`training_artifact` makes one where none is given, of written prompts whose answers follow a made-up and crooked
rule, so that the trees grow to the size of those on real answers. How good it is means nothing; every head serves.
"""

from __future__ import annotations

import gc
import math
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from headway.demo.prompt_text import write_prompt
from headway.lab.truth import TASKS
from headway.predict.artifact import Artifact, decode_artifact
from headway.predict.features import prompt_features
from headway.predict.learned import LearnedPredictor
from headway.predict.prompt import prompt_of_query
from headway.predict.tokens import count_tokens
from headway.predict.trees import Trees
from headway.train.dataset import EvaluationRow
from headway.train.settings import Settings
from headway.types import ModelCard, Query

NUM_PROMPT_CHARS = 800
#: The models of :func:`training_artifact`, and billions of their parameters.
MODELS: dict[str, float] = {f"written-{size:g}b": size for size in (0.6, 1.7, 4, 8, 14, 22, 32, 70, 235)}
_TRAINING_PROMPTS = 1_000
_QUERIES_PER_ROUND = 20


class Cost(Struct, frozen=True, kw_only=True):
    """Median over rounds of CPU microseconds per query, of everything and of its features alone, and the largest
    resident memory of the process in MB."""

    us: float
    features_us: float
    peak_rss_mb: float


def measure(artifact: Artifact, models: Sequence[str], *, rounds: int, seed: int = 0) -> Cost:
    """What a query costs on a pool of ``models``.

    Raises:
        ArtifactError: the artifact cannot be served here.
    """
    cards = {name: ModelCard(name=name, input_per_1m_usd=0.1, output_per_1m_usd=0.4) for name in models}
    predictor, rng = LearnedPredictor(artifact, cards), np.random.default_rng((seed, 1))
    queries = [_query(str(number), rng, models) for number in range(_QUERIES_PER_ROUND * (rounds + 1))]
    gc.freeze()  # as the gateway does once it has started
    gc.set_threshold(20_000, 20, 20)
    whole_us, features_us = [], []
    for first in range(0, len(queries), _QUERIES_PER_ROUND):
        asked = queries[first : first + _QUERIES_PER_ROUND]
        started_s = time.process_time()
        for query in asked:
            predictor.predict(query)
        between_s = time.process_time()
        for query in asked:
            prompt_features(prompt_of_query(query))
        ended_s = time.process_time()
        whole_us.append((between_s - started_s) / len(asked) * 1e6)
        features_us.append((ended_s - between_s) / len(asked) * 1e6)
    return Cost(
        us=statistics.median(whole_us[1:]),  # the first round warms up
        features_us=statistics.median(features_us[1:]),
        peak_rss_mb=_peak_rss_mb(),
    )


def _peak_rss_mb() -> float:
    """Of this program alone: ``getrusage`` also counts what its parent held when it was started."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) / 1024.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0


def num_trees(artifact: Artifact) -> int:
    """Trees that a forecast asks, all heads together; 0 where a simple predictor serves."""
    texts = []
    if artifact.quality is not None and artifact.serves_quality == "learned":
        texts.append(artifact.quality.trees)
    if artifact.length is not None and artifact.serves_length == "learned":
        texts += [artifact.length.mean, artifact.length.p90]
    return sum(Trees(text).num_iterations for text in texts)


def training_artifact(num_prompts: int = _TRAINING_PROMPTS, settings: Settings | None = None) -> Artifact:
    """An artifact of :data:`MODELS`, with the settings of ``headway train`` but for three folds: they only calibrate.

    Some 20 s for the default number of prompts.
    """
    from headway.train.build import build_artifact, cross_validated_card, with_self_tests
    from headway.train.settings import Settings
    from headway.train.table import build_table

    settings = settings or Settings(num_folds=3)
    table = build_table(_rows(num_prompts, settings.seed), sources=("written",))
    card, material, calibration = cross_validated_card(table, settings, title="written", command="bench predict")
    artifact = build_artifact(table, card, material, calibration, settings=settings)
    return with_self_tests(replace(artifact, serves_quality="learned", serves_length="learned"))


def _rows(num_prompts: int, seed: int) -> Iterator[EvaluationRow]:
    """Answers whose worth and length bend with the prompt's length, words and the model's size, and some chance."""
    rng = np.random.default_rng((seed, 0))
    for number in range(num_prompts):
        text = _written(rng, int(rng.integers(60, 3 * NUM_PROMPT_CHARS)))
        asked = prompt_features(prompt_of_query(_of_text(str(number), text, ()))).dense
        bent = np.sin(3.0 * np.nan_to_num(asked[:12])) + np.square(np.nan_to_num(asked[12:24])) % 1.7
        hard, long = float(bent[::2].sum()) / 4.0, float(bent[1::2].sum()) / 4.0
        for model, size in MODELS.items():
            skill = math.log(size + 1.0) - 2.5 * abs(math.sin(hard + math.log(size)))
            quality = 1.0 / (1.0 + math.exp(hard - skill - 1.5 * float(rng.standard_normal())))
            tokens = math.exp(4.5 + long + 0.1 * math.log(size) * hard + 0.8 * float(rng.standard_normal()))
            yield EvaluationRow(
                prompt_id=str(number),
                model=model,
                prompt=text,
                quality=quality,
                output_tokens=min(8192, max(1, round(tokens))),
            )


def _written(rng: np.random.Generator, num_chars: int) -> str:
    """Text of ``num_chars`` characters, of one of the demo's kinds first; no two are alike."""
    text = write_prompt(TASKS[int(rng.integers(len(TASKS)))], num_chars // 4, rng)
    while len(text) < num_chars:
        text += f" ({rng.integers(1 << 30):08x}) {write_prompt('alpaca', num_chars // 8, rng)}"
    return text[:num_chars]


def _query(name: str, rng: np.random.Generator, models: Sequence[str]) -> Query:
    return _of_text(name, _written(rng, NUM_PROMPT_CHARS), models)


def _of_text(name: str, text: str, models: Sequence[str]) -> Query:
    return Query(id=name, arrival_s=0.0, prompt_text=text, prompt_tokens=dict.fromkeys(models, count_tokens(text)))


if __name__ == "__main__":
    _artifact = decode_artifact(sys.stdin.buffer.read())
    _models = [model.name for model in _artifact.models][: int(sys.argv[1])]
    sys.stdout.write(msgspec.json.encode(measure(_artifact, _models, rounds=int(sys.argv[2]))).decode() + "\n")
