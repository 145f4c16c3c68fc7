"""How far two judges agree on the same answers: who is better, who is best, and by how much.

Prompts are the unit: intervals come from resampling whole prompts, since the answers to one prompt were scored
together. It compares what both have scored and refuses to fill gaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.errors import DatasetError
from headway.train.dataset import EvaluationRow

#: Scores closer than this are equal: a tie.
_TIE = 1e-9
_CHUNK = 256

Scores = dict[str, dict[str, float]]
Column = NDArray[np.float64]


class Agreement(Struct, frozen=True):
    """A figure with its 95 % bootstrap interval over prompts; all None where nothing could be compared."""

    value: float | None
    low: float | None = None
    high: float | None = None


class AgreementReport(Struct, frozen=True, kw_only=True):
    """Two judges side by side.

    ``pairwise`` is the share of pairs of answers that both put in the same order, a tie being an order of its own;
    ``pairwise_decided`` is that share among pairs where neither sees a tie. ``top_choice`` is the probability that
    both name the same best answer when each draws one of its best. ``pearson`` and ``spearman`` correlate all scores,
    ``within_prompt`` correlates scores less their prompt's mean. ``mean_difference`` is the first judge's mean score
    less the second's. Scores are in [0, 1].
    """

    num_prompts: int
    num_answers: int
    num_pairs: int
    num_pairs_decided: int
    num_only_first: int
    num_only_second: int
    pairwise: Agreement
    pairwise_decided: Agreement
    top_choice: Agreement
    pearson: Agreement
    spearman: Agreement
    within_prompt: Agreement
    mean_difference: Agreement


def agreement(
    first: Sequence[EvaluationRow], second: Sequence[EvaluationRow], *, num_resamples: int = 2000, seed: int = 0
) -> AgreementReport:
    """The agreement of two judged files on the answers that both scored.

    Raises:
        DatasetError: no answer was scored in both, or one that was reads differently in the two.
    """
    ours, theirs = _scores(first), _scores(second)
    _check_same_answers(first, second, ours, theirs)
    shared = {name: [m for m in ours[name] if m in theirs.get(name, {})] for name in ours}
    shared = {name: models for name, models in shared.items() if models}
    if not shared:
        raise DatasetError("the two files have no scored answer in common")
    table = _PromptTable(shared, ours, theirs)
    num_answers = sum(map(len, shared.values()))
    rng = np.random.default_rng(seed)
    figures = table.figures(np.ones((1, len(shared))))
    resampled = [
        table.figures(rng.multinomial(len(shared), np.full(len(shared), 1.0 / len(shared)), size).astype(np.float64))
        for size in _chunks(num_resamples)
    ]
    found = {}
    for name, values in figures.items():
        value = float(values[0])
        spread = np.concatenate([one[name] for one in resampled]) if resampled else np.empty(0)
        spread = spread[np.isfinite(spread)]
        if not np.isfinite(value):
            found[name] = Agreement(None)
        elif len(shared) < 2 or not len(spread):
            found[name] = Agreement(value)
        else:
            found[name] = Agreement(value, *np.quantile(spread, [0.025, 0.975]).tolist())
    return AgreementReport(
        num_prompts=len(shared),
        num_answers=num_answers,
        num_pairs=int(table.num_pairs.sum()),
        num_pairs_decided=int(table.num_decided.sum()),
        num_only_first=sum(map(len, ours.values())) - num_answers,
        num_only_second=sum(map(len, theirs.values())) - num_answers,
        **found,
    )


class _PromptTable:
    """Sums per prompt, from which each figure of any weighting of the prompts follows."""

    def __init__(self, shared: Mapping[str, Sequence[str]], ours: Scores, theirs: Scores) -> None:
        pairs = [_pair_counts([(ours[name][m], theirs[name][m]) for m in models]) for name, models in shared.items()]
        self.num_pairs, self.num_same, self.num_decided, self.num_decided_same = np.array(pairs, np.float64).T
        self.num_compared = (np.array([len(models) for models in shared.values()]) > 1).astype(np.float64)
        self.top = np.array([_top_choice(ours[name], theirs[name], models) for name, models in shared.items()])
        prompt = np.repeat(np.arange(len(shared)), [len(models) for models in shared.values()])
        a = np.array([ours[name][m] for name, models in shared.items() for m in models])
        b = np.array([theirs[name][m] for name, models in shared.items() for m in models])
        self.difference = np.bincount(prompt, a - b)
        self.num_answers = np.bincount(prompt).astype(np.float64)
        self.raw = _moments(prompt, a, b)
        self.ranked = _moments(prompt, _ranks(a), _ranks(b))
        counts = np.bincount(prompt)
        self.centred = _moments(
            prompt, a - (np.bincount(prompt, a) / counts)[prompt], b - (np.bincount(prompt, b) / counts)[prompt]
        )

    def figures(self, weights: NDArray[np.float64]) -> dict[str, Column]:
        """Each figure for each row of ``weights``, shape (resamples, prompts); NaN where it has no meaning."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return {
                "pairwise": (weights @ self.num_same) / (weights @ self.num_pairs),
                "pairwise_decided": (weights @ self.num_decided_same) / (weights @ self.num_decided),
                "top_choice": (weights @ (self.top * self.num_compared)) / (weights @ self.num_compared),
                "pearson": _correlation(weights @ self.raw),
                "spearman": _correlation(weights @ self.ranked),
                "within_prompt": _correlation(weights @ self.centred),
                "mean_difference": (weights @ self.difference) / (weights @ self.num_answers),
            }


def _scores(rows: Sequence[EvaluationRow]) -> Scores:
    found: Scores = {}
    for row in rows:
        if row.quality is not None and row.status == "ok":
            found.setdefault(row.prompt_id, {})[row.model] = row.quality
    return found


def _check_same_answers(
    first: Sequence[EvaluationRow], second: Sequence[EvaluationRow], ours: Scores, theirs: Scores
) -> None:
    answers = {(row.prompt_id, row.model): row.response for row in first if row.model in ours.get(row.prompt_id, {})}
    for row in second:
        key = (row.prompt_id, row.model)
        if row.model in theirs.get(row.prompt_id, {}) and key in answers and answers[key] != row.response:
            raise DatasetError(f"the two files hold unlike answers of {row.model!r} to prompt {row.prompt_id!r}")


def _pair_counts(scores: Sequence[tuple[float, float]]) -> tuple[int, int, int, int]:
    """Pairs, pairs in the same order, pairs without a tie, and those of them in the same order."""
    num_pairs = num_same = num_decided = num_decided_same = 0
    for place, (a, b) in enumerate(scores):
        for other_a, other_b in scores[:place]:
            ours, theirs = _order(a, other_a), _order(b, other_b)
            num_pairs += 1
            num_same += ours == theirs
            if ours and theirs:
                num_decided += 1
                num_decided_same += ours == theirs
    return num_pairs, num_same, num_decided, num_decided_same


def _order(a: float, b: float) -> int:
    return 0 if abs(a - b) <= _TIE else (1 if a > b else -1)


def _top_choice(ours: Mapping[str, float], theirs: Mapping[str, float], models: Sequence[str]) -> float:
    best_a, best_b = max(ours[m] for m in models), max(theirs[m] for m in models)
    tops_a = {m for m in models if ours[m] >= best_a - _TIE}
    tops_b = {m for m in models if theirs[m] >= best_b - _TIE}
    return len(tops_a & tops_b) / (len(tops_a) * len(tops_b))


def _moments(prompt: NDArray[np.intp], a: Column, b: Column) -> NDArray[np.float64]:
    """Per prompt: count, sums of a, b, a², b², a·b. Taken around the means of all, which costs no digits."""
    a, b = a - a.mean(), b - b.mean()
    count = np.bincount(prompt).astype(np.float64)
    return np.stack([count, *(np.bincount(prompt, column) for column in (a, b, a * a, b * b, a * b))], axis=1)


def _correlation(sums: NDArray[np.float64]) -> Column:
    """Pearson's correlation from sums of shape (resamples, 6); NaN where either side does not vary."""
    count, a, b, aa, bb, ab = sums.T
    spread_a, spread_b = aa / count - (a / count) ** 2, bb / count - (b / count) ** 2
    varies = (spread_a > 1e-15) & (spread_b > 1e-15)
    correlation = (ab / count - a * b / count**2) / np.sqrt(np.where(varies, spread_a * spread_b, np.nan))
    return np.asarray(np.clip(correlation, -1.0, 1.0), np.float64)


def _ranks(values: Column) -> Column:
    """Ranks from 0, equal values sharing their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts + 1) / 2.0)[inverse], np.float64)


def _chunks(total: int) -> list[int]:
    return [_CHUNK] * (total // _CHUNK) + ([total % _CHUNK] if total % _CHUNK else [])
