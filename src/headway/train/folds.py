"""Splits of prompts into folds, whole groups at a time, so that alike prompts never face each other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.errors import DatasetError


def grouped_folds(group: NDArray[np.intp], num_folds: int, seed: int) -> list[NDArray[np.intp]]:
    """The prompts of each fold, rising. Groups are shuffled by ``seed``, then each goes to the smallest fold so far.

    Raises:
        DatasetError: fewer groups than folds.
    """
    names, inverse, sizes = np.unique(group, return_inverse=True, return_counts=True)
    if len(names) < num_folds:
        raise DatasetError(f"holds {len(names)} unlike prompts, too few for {num_folds} folds")
    order = np.random.default_rng((seed, num_folds)).permutation(len(names))
    fold_of = np.empty(len(names), np.intp)
    filled = np.zeros(num_folds, np.int64)
    for index in order[np.argsort(-sizes[order], kind="stable")]:
        fold = int(np.argmin(filled))
        fold_of[index] = fold
        filled[fold] += sizes[index]
    return [np.flatnonzero(fold_of[inverse] == fold) for fold in range(num_folds)]
