"""Features of a prompt as plain values for a file: what is kept of a prompt that must not be kept itself.

They are those of ``predict.features`` and name its version. They tell roughly which words a prompt holds, through
hashes, so they are no secret-keeping: they refuse to hold the text, not every trace of it.
"""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from headway.predict.features import FEATURES_VERSION, NUM_BUCKETS, NUM_FEATURES, NUM_HASHED, PromptFeatures

_Hashed = Annotated[int, Meta(ge=0, lt=NUM_HASHED)]
_Bucket = Annotated[int, Meta(ge=0, lt=NUM_BUCKETS)]


class FeatureRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt's features. ``dense`` has null for a missing value; ``hashed`` pairs each index that is not 0 with its
    value; ``buckets`` rise. ``prompt_sha256`` is the start of the prompt's hash, equal for equal prompts.

    Raises:
        ValueError: of another version of the features, or not as many as it has.
    """

    version: int
    prompt_sha256: str
    dense: list[float | None]
    hashed: list[tuple[_Hashed, float]]
    buckets: list[_Bucket]

    def __post_init__(self) -> None:
        if self.version != FEATURES_VERSION:
            raise ValueError(f"features of version {self.version}, and this build has {FEATURES_VERSION}")
        if len(self.dense) != NUM_FEATURES:
            raise ValueError(f"{len(self.dense)} dense features, and there are {NUM_FEATURES}")

    @classmethod
    def of(cls, features: PromptFeatures, prompt_sha256: str) -> FeatureRow:
        """The row of ``features``."""
        places = np.flatnonzero(features.hashed)
        return cls(
            version=FEATURES_VERSION,
            prompt_sha256=prompt_sha256,
            dense=[None if math.isnan(value) else value for value in features.dense.tolist()],
            hashed=list(zip(places.tolist(), features.hashed[places].tolist(), strict=True)),
            buckets=features.buckets.tolist(),
        )

    def features(self) -> PromptFeatures:
        """The features again, bit for bit."""
        hashed = np.zeros(NUM_HASHED)
        for place, value in self.hashed:
            hashed[place] = value
        dense = np.array([math.nan if value is None else value for value in self.dense], np.float64)
        return PromptFeatures(dense, hashed, np.array(self.buckets, np.int64))
