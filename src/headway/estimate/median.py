"""The median of values that are in order already: the standard library's would sort them again for every answer."""

from __future__ import annotations

from collections.abc import Sequence


def median_of_sorted(ordered: Sequence[float]) -> float:
    """The median of at least one value, the smallest first."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
