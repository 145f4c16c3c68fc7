"""A minute of the soak: everything goes wrong, and no answer is wrong. ``make soak`` runs half an hour of it."""

from __future__ import annotations

import sys

import pytest

from headway.bench.soak import Soak, busy_gauges, memory_growth
from headway.errors import HeadwayError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches memory by Linux's /proc")


async def test_a_minute_of_mixed_load_with_kills_and_reloads() -> None:
    """Every answer equals what its engine sent, and with nobody asking every gauge is at zero."""
    report = await Soak(minutes=1.0, seed=0).run()
    assert report["wrong"] == []
    requests, disturbances = report["requests"], report["disturbances"]
    assert isinstance(requests, dict)
    assert isinstance(disturbances, dict)
    assert requests["compared whole"] > 100
    assert requests["compared in part"] > 10
    assert disturbances["engine killed"] > 0
    assert disturbances["reload"] > 0


def test_gauges_of_work_under_way_are_found() -> None:
    """A gauge above zero is named with its labels; one at zero and other metrics are not."""
    text = 'headway_inflight{instance="a"} 0.0\nheadway_inflight{instance="b"} 2.0\nheadway_inflight_total 7\n'
    assert busy_gauges(text + "headway_requests_inflight 0.0\n") == ['headway_inflight{instance="b"} 2.0']


def test_memory_that_comes_and_goes_is_no_growth() -> None:
    """Growth is between the medians of the last two quarters; too few samples are an error."""
    steady = [(float(at), 100.0 + (at % 2)) for at in range(100)]
    assert abs(memory_growth(steady)) < 0.02
    assert memory_growth([(float(at), 100.0 + at) for at in range(100)]) > 0.1
    with pytest.raises(HeadwayError, match="too short"):
        memory_growth([(0.0, 1.0)])
