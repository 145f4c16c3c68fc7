"""Random token batches as a calibration sees them, for tests of the fits."""

from __future__ import annotations

import numpy as np

from headway.calibrate.step_table import StepTable, feature_matrix, predict_s
from headway.engines.step_log import Chunk, batch_features
from headway.types import StepTime


def random_batch(rng: np.random.Generator) -> list[Chunk]:
    """A batch of decodes, prefill chunks or both; sizes and contexts over several powers of ten."""
    kind = rng.integers(0, 3)
    num_decodes = int(np.exp(rng.uniform(0, 5))) if kind != 1 else 0
    num_prefills = int(rng.integers(1, 5)) if kind != 0 else 0
    decodes: list[Chunk] = [(1, int(np.exp(rng.uniform(0, 10))), True) for _ in range(num_decodes)]
    prefills: list[Chunk] = [
        (int(np.exp(rng.uniform(1, 8))), int(rng.integers(0, 2) * np.exp(rng.uniform(0, 9))), False)
        for _ in range(num_prefills)
    ]
    return decodes + prefills


def random_steps(step_time: StepTime, num_steps: int, seed: int, noise: float = 0.0) -> StepTable:
    """Steps one after another, each lasting what ``step_time`` says, times lognormal noise."""
    rng = np.random.default_rng(seed)
    features = feature_matrix(batch_features(random_batch(rng)) for _ in range(num_steps))
    blank = np.zeros(num_steps)
    time_s = predict_s(step_time, StepTable(blank, blank, features)) * np.exp(noise * rng.standard_normal(num_steps))
    return StepTable(np.cumsum(time_s) - time_s, time_s, features)
