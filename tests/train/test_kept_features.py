"""Training takes rows whose prompt was not kept: their features stand for it, and equal prompts are still one."""

from __future__ import annotations

import hashlib

import pytest

from headway.errors import DatasetError
from headway.predict.feature_row import FeatureRow
from headway.predict.features import prompt_features
from headway.predict.prompt import prompt_of_text
from headway.train.dataset import EvaluationRow
from headway.train.material import material_of
from headway.train.table import build_table

TEXTS = ["What is a headway?", "Write a story about a tram.", "What is a headway?"]


def kept(number: int, text: str) -> EvaluationRow:
    return EvaluationRow(prompt_id=f"k{number}", model="m", prompt=text, output_tokens=5 + number, max_tokens=90)


def not_kept(number: int, text: str) -> EvaluationRow:
    features = FeatureRow.of(
        prompt_features(prompt_of_text(text, max_tokens=90)), hashlib.sha256(text.encode()).hexdigest()[:16]
    )
    return EvaluationRow(prompt_id=f"n{number}", model="m", features=features, quality=0.5, task="question",
                         output_tokens=5 + number, max_tokens=90)  # fmt: skip


def test_features_are_those_of_the_prompt_itself() -> None:
    """Row by row, what training sees of a prompt is the same whether its text was kept or not."""
    ours, _ = material_of(build_table([kept(number, text) for number, text in enumerate(TEXTS)]))
    theirs, _ = material_of(build_table([not_kept(number, text) for number, text in enumerate(TEXTS)]))
    assert ours.features.dense.tobytes() == theirs.features.dense.tobytes()
    assert ours.features.hashed.tobytes() == theirs.features.hashed.tobytes()
    assert [one.tolist() for one in ours.features.buckets] == [one.tolist() for one in theirs.features.buckets]


def test_equal_prompts_are_alike_without_their_text() -> None:
    """The same prompt asked twice is one group, so that it is never trained on and tested on at once."""
    material, alike = material_of(build_table([not_kept(number, text) for number, text in enumerate(TEXTS)]))
    assert material.group[0] == material.group[2] != material.group[1]
    assert alike.num_equal == 1


def test_kept_and_not_kept_go_together() -> None:
    """A file of a pool's evaluation and a gateway's feedback make one table; labels of the latter are their own."""
    table = build_table([kept(0, TEXTS[1]), not_kept(1, TEXTS[0])])
    assert table.labels == ("story", "question")
    assert table.num_unlabelled == 1
    other = EvaluationRow(prompt_id="k0", model="n", features=not_kept(0, TEXTS[0]).features, output_tokens=1)
    with pytest.raises(DatasetError, match="two different prompts"):
        build_table([kept(0, TEXTS[0]), other])
