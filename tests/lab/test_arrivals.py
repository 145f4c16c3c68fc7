"""Arrival processes: their rates, their burstiness by formula, and one seed one pattern."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from headway.errors import ConfigError, DatasetError
from headway.lab.arrivals import Column, mmpp2, poisson, rate_shift, switching_rates, trace_shape

Process = Callable[[np.random.Generator], Column]
PROCESSES: dict[str, Process] = {
    "poisson": lambda rng: poisson(2000, 8.0, rng),
    "mmpp2": lambda rng: mmpp2(2000, 7.0, 3.0, rng),
    "rate_shift": lambda rng: rate_shift(2000, [(0.0, 4.0), (60.0, 6.0)], rng),
    "trace_shape": lambda rng: trace_shape(np.arange(5000.0) ** 1.1, 2000, 250.0, rng),
}


def dispersion(arrival_s: Column, window_s: float) -> float:
    """Variance over mean of the counts in windows."""
    counts = np.bincount((arrival_s // window_s).astype(int))[:-1]
    return float(counts.var() / counts.mean())


@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)
def test_one_seed_one_pattern(process: Process) -> None:
    """Equal generators give equal bytes, sorted from 0 on; another seed gives another pattern."""
    first, again, other = (process(np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert first.tobytes() == again.tobytes() != other.tobytes()
    assert len(first) == 2000
    assert first[0] >= 0
    assert (np.diff(first) >= 0).all()


def test_poisson_has_its_rate_and_unit_variation() -> None:
    """Gaps average 1/rate with a coefficient of variation of 1, and rates share one pattern."""
    arrival_s = poisson(40_000, 8.0, np.random.default_rng(0))
    gaps_s = np.diff(arrival_s)
    assert gaps_s.mean() == pytest.approx(1 / 8, rel=0.02)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1.0, abs=0.02)
    half = poisson(40_000, 4.0, np.random.default_rng(0))
    assert half == pytest.approx(2 * arrival_s)


@pytest.mark.parametrize(
    ("mean", "ratio", "low"), [(6, 3, 4.29), (7, 3, 5.0), (8, 3, 5.71), (6, 6, 3.0), (7, 6, 3.5), (8, 6, 4.0)]
)
def test_switching_rates_are_the_published_ones(mean: float, ratio: float, low: float) -> None:
    """Low and high rate are as printed; a fifth of the time is high, in stays of 2.5 s on average, low ones of 10 s."""
    durations_s, rates_per_s = switching_rates(mean, ratio, 60_000.0, np.random.default_rng(1))
    slow, fast = sorted(set(rates_per_s.tolist()))
    assert slow == pytest.approx(low, abs=0.005)
    assert fast == pytest.approx(ratio * slow)
    high = rates_per_s == fast
    assert durations_s[high].sum() / durations_s.sum() == pytest.approx(0.2, abs=0.02)
    assert durations_s[high].mean() == pytest.approx(2.5, rel=0.1)
    assert durations_s[~high].mean() == pytest.approx(10.0, rel=0.1)
    assert (high[1:] != high[:-1]).all()


def test_the_first_state_is_drawn_from_the_shares() -> None:
    """A fifth of the runs begin in the high state."""
    firsts = [switching_rates(6.0, 6.0, 1.0, np.random.default_rng(seed))[1][0] for seed in range(400)]
    assert np.mean(np.array(firsts) > 10) == pytest.approx(0.2, abs=0.06)


@pytest.mark.parametrize("ratio", [3.0, 6.0])
def test_bursts_keep_mean_rate_and_dispersion(ratio: float) -> None:
    """The long-run rate is the mean, and counts vary as theory says of such a process in windows of 20 s."""
    mean, window_s, tau_s = 7.0, 20.0, 2.0
    arrival_s = mmpp2(300_000, mean, ratio, np.random.default_rng(5))
    assert len(arrival_s) / arrival_s[-1] == pytest.approx(mean, rel=0.03)
    low = mean / (0.8 + 0.2 * ratio)
    variance = 0.2 * 0.8 * (ratio * low - low) ** 2
    correction = 1 - tau_s / window_s * (1 - math.exp(-window_s / tau_s))
    assert dispersion(arrival_s, window_s) == pytest.approx(1 + 2 * variance * tau_s / mean * correction, rel=0.08)
    gaps_s = np.diff(arrival_s)
    assert gaps_s.std() / gaps_s.mean() > 1.1


def test_equal_rates_are_poisson() -> None:
    """With a ratio of 1 nothing switches."""
    arrival_s = mmpp2(60_000, 8.0, 1.0, np.random.default_rng(2))
    assert dispersion(arrival_s, 10.0) == pytest.approx(1.0, abs=0.12)


def test_a_shift_changes_the_rate_where_it_says() -> None:
    """Each phase has its own rate, and the last one goes on."""
    arrival_s = rate_shift(20_000, [(0.0, 4.0), (1000.0, 6.0), (2000.0, 2.0)], np.random.default_rng(0))
    assert (arrival_s < 1000).sum() / 1000 == pytest.approx(4.0, rel=0.08)
    assert ((arrival_s >= 1000) & (arrival_s < 2000)).sum() / 1000 == pytest.approx(6.0, rel=0.08)
    late = arrival_s[arrival_s >= 2000]
    assert len(late) / (late[-1] - 2000) == pytest.approx(2.0, rel=0.08)


def test_a_trace_gives_the_shape_only() -> None:
    """Gaps keep their proportions, and the last query arrives at the end of the time."""
    trace = [100.0, 101.0, 101.0, 104.0]
    arrivals = trace_shape(trace, 3, 8.0, np.random.default_rng(0))
    assert arrivals.tolist() == pytest.approx([2.0, 2.0, 8.0])


def test_a_short_trace_repeats() -> None:
    """More queries than the trace has gaps take it again from its beginning."""
    arrivals = trace_shape([0.0, 1.0, 4.0], 4, 8.0, np.random.default_rng(0))
    assert arrivals.tolist() == pytest.approx([1.0, 4.0, 5.0, 8.0])


def test_a_stretch_without_shape_is_refused() -> None:
    """A stretch of a trace whose times are all equal cannot be scaled, and says so."""
    with pytest.raises(DatasetError, match="one time stamp"):
        trace_shape([0.0, 0.0, 0.0], 1, 8.0, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("process", "key"),
    [
        (lambda rng: poisson(0, 8.0, rng), "num_queries"),
        (lambda rng: poisson(5, 0.0, rng), "rate_per_s"),
        (lambda rng: poisson(5, math.nan, rng), "rate_per_s"),
        (lambda rng: mmpp2(5, -1.0, 3.0, rng), "mean_rate_per_s"),
        (lambda rng: mmpp2(5, 8.0, 0.5, rng), "ratio"),
        (lambda rng: mmpp2(5, 8.0, 3.0, rng, high_share=1.0), "high_share"),
        (lambda rng: mmpp2(5, 8.0, 3.0, rng, correlation_s=0.0), "correlation_s"),
        (lambda rng: rate_shift(5, [], rng), r"phases\[0\]"),
        (lambda rng: rate_shift(5, [(1.0, 4.0)], rng), r"phases\[0\]"),
        (lambda rng: rate_shift(5, [(0.0, 4.0), (0.0, 5.0)], rng), r"phases\[1\]"),
        (lambda rng: rate_shift(5, [(0.0, 4.0), (9.0, math.inf)], rng), r"phases\[1\]"),
    ],
)
def test_impossible_processes_are_refused(process: Process, key: str) -> None:
    """A rate, share or time that no process has raises a ConfigError naming its key."""
    with pytest.raises(ConfigError, match=rf"arrivals\.{key}"):
        process(np.random.default_rng(0))
