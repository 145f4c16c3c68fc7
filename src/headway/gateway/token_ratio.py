"""Corrects counted prompt tokens by what upstreams report, per model, so that no tokenizer is needed to route well.

Counting bytes misses chat templates and languages; the ratio of reported to counted tokens, over recent traffic and
weighted by length, makes up for most of it. It is bounded, moves slowly, and its error is exported. It refuses to
believe a single report.
"""

from __future__ import annotations

from collections.abc import Iterable

from headway.types import MAX_COUNT

#: Reported ÷ counted beyond these is a broken report, or a prompt so short that its chat template is most of it.
BOUNDS = (0.25, 4.0)
#: Weight that one more report leaves to all reports before it: the last 50 count most.
_KEEP = 0.98
#: Counted tokens that stand for "counting is right" before anything was reported.
_PRIOR_TOKENS = 2000.0


class TokenRatio:
    """Reported ÷ counted prompt tokens of each model."""

    def __init__(self, models: Iterable[str]) -> None:
        self._sums = {model: [_PRIOR_TOKENS, _PRIOR_TOKENS] for model in models}
        self._errors: dict[str, float] = {}

    def add(self, models: Iterable[str]) -> None:
        """Know these models too; what was learned of others stays."""
        for model in models:
            self._sums.setdefault(model, [_PRIOR_TOKENS, _PRIOR_TOKENS])

    def ratio(self, model: str) -> float:
        """What to multiply counted tokens by."""
        reported, counted = self._sums[model]
        return reported / counted

    def error(self, model: str) -> float:
        """Mean relative error of recent corrected counts; 0 before the first report."""
        return self._errors.get(model, 0.0)

    def tokens(self, model: str, num_counted: int) -> int:
        """The corrected count, at least 1."""
        return min(max(1, round(num_counted * self.ratio(model))), MAX_COUNT)

    def observe(self, model: str, num_counted: int, num_reported: int) -> None:
        """Take in one report; one that no language explains is a broken report and teaches nothing."""
        if not BOUNDS[0] * num_counted <= num_reported <= BOUNDS[1] * num_counted:
            return
        error = abs(self.tokens(model, num_counted) - num_reported) / num_reported
        known = self._errors.get(model)
        self._errors[model] = error if known is None else _KEEP * known + (1 - _KEEP) * error
        sums = self._sums[model]
        sums[0] = _KEEP * sums[0] + num_reported
        sums[1] = _KEEP * sums[1] + num_counted
