"""One small artifact, trained once for all tests that need a real one: the demo's truth of 64 queries."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from headway.demo.predictor import answer_rows
from headway.demo.workload import Workload, WorkloadSpec, build_workload
from headway.predict.artifact import Artifact
from headway.train.build import build_artifact, cross_validated_card
from headway.train.settings import Settings
from headway.train.table import build_table

SEED = 7


def workload(seed: int, seconds: float = 8.0) -> Workload:
    """Generated prompts of the demo, eight per second."""
    return build_workload(WorkloadSpec(qps=8.0, seconds=seconds, seed=seed))


@functools.cache
def trained() -> Artifact:
    """The artifact of the rows of :data:`SEED`, of a few trees."""
    pytest.importorskip("lightgbm", reason="needs the extra 'learned'")
    settings, table = Settings(num_folds=3, max_trees=6), build_table(answer_rows(workload(SEED)))
    card, material, calibration = cross_validated_card(table, settings, title="t", command="c")
    return build_artifact(table, card, material, calibration, settings=settings)


def renamed(names: Mapping[str, str]) -> Artifact:
    """The artifact with other names for some of its models."""
    artifact = trained()
    models = tuple(replace(model, name=names.get(model.name, model.name)) for model in artifact.models)
    return replace(artifact, models=models)
