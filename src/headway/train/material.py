"""What training works on: the features of every prompt beside what each model made of it, and which prompts are alike.

Made once from a table; folds take rows of it. It refuses to hold text, so that nothing downstream can read more of a
prompt than serving will.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headway.train.duplicates import Duplicates, find_duplicates
from headway.train.table import EvaluationTable, FeatureTable, Floats


class Material:
    """P prompts, M models, L task labels. Matrices are (P, M) with NaN where unknown; ``label`` (P,) indexes
    ``label_names``; ``group`` (P,) numbers groups of alike prompts; ``models`` (M, 3) is what trees know of each model.
    """

    def __init__(
        self,
        *,
        features: FeatureTable,
        quality: Floats,
        tokens: Floats,
        label: NDArray[np.intp],
        label_names: tuple[str, ...],
        group: NDArray[np.intp],
        models: Floats,
    ) -> None:
        self.features, self.quality, self.tokens = features, quality, tokens
        self.label, self.label_names, self.group, self.models = label, label_names, group, models

    @property
    def num_prompts(self) -> int:
        """P."""
        return len(self.quality)

    @property
    def num_models(self) -> int:
        """M."""
        return len(self.models)

    @cached_property
    def log_tokens(self) -> Floats:
        """log1p of the output tokens, (P, M)."""
        return np.log1p(self.tokens)

    @cached_property
    def targets(self) -> Floats:
        """What the linear stage predicts, (P, 2M + L): quality, log tokens, and 1 for the prompt's own label."""
        labels = np.eye(len(self.label_names))[self.label]
        return np.concatenate([self.quality, self.log_tokens, labels], axis=1)

    def take(self, prompts: NDArray[np.intp]) -> Material:
        """These prompts only."""
        return Material(
            features=self.features.take(prompts),
            quality=self.quality[prompts],
            tokens=self.tokens[prompts],
            label=self.label[prompts],
            label_names=self.label_names,
            group=self.group[prompts],
            models=self.models,
        )


def material_of(table: EvaluationTable) -> tuple[Material, Duplicates]:
    """The material of a table, and what was found to be alike in it."""
    alike = find_duplicates(table.texts)
    names, label = np.unique(np.array(table.labels, dtype=object).astype(str), return_inverse=True)
    facts = [
        (
            float(index),
            np.nan if model.parameters is None else float(np.log(model.parameters)),
            np.nan if model.context_tokens is None else float(np.log(model.context_tokens)),
        )
        for index, model in enumerate(table.models)
    ]
    material = Material(
        features=table.features,
        quality=table.quality,
        tokens=table.output_tokens,
        label=label.astype(np.intp),
        label_names=tuple(map(str, names)),
        group=alike.group,
        models=np.array(facts, np.float64),
    )
    return material, alike
