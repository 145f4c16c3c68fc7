"""What a replay from counts makes of a prefix cache, against the replay that has every block."""

from __future__ import annotations

import pytest

from counted_prefixes import SETTINGS, errors_of, mape


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_while_blocks_are_ample_counts_are_exact(async_scheduling: bool) -> None:
    """Nothing is evicted on the way, so the counts of now are those of the admission."""
    errors = errors_of(SETTINGS[0], async_scheduling=async_scheduling, num_requests=200)
    assert max(map(abs, errors.counted)) < 1e-9
    assert mape(errors.uncached) > 0.3


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_where_blocks_are_short_sharing_is_what_has_to_be_known(async_scheduling: bool) -> None:
    """With blocks counted that residents hold, errors are a fraction of those without."""
    errors = errors_of(SETTINGS[3], async_scheduling=async_scheduling, num_requests=200)
    assert mape(errors.counted) < 0.5 * mape(errors.unshared) <= mape(errors.uncached)
