"""When queries arrive: Poisson, bursts that switch between two rates, a trace's shape, a rate that shifts.

All draw from an injected generator and return times in seconds, sorted, from 0 on. A rate that changes is played by
stretching a Poisson process of rate 1, which is exact; so one generator gives the same pattern at every rate, and runs
at two rates can be compared in pairs. It refuses to know what arrives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway.errors import ConfigError, DatasetError

Column = NDArray[np.float64]

#: Switching rates as published: a fifth of the time in the high state, correlation time 2 s.
HIGH_SHARE, CORRELATION_S = 0.2, 2.0


def poisson(num: int, rate_per_s: float, rng: np.random.Generator) -> Column:
    """``num`` arrivals of a Poisson process.

    Raises:
        ConfigError: fewer than one arrival, or a rate that is not positive.
    """
    _require(num, rate_per_s=rate_per_s)
    return np.cumsum(rng.standard_exponential(num)) / rate_per_s


def mmpp2(
    num: int,
    mean_rate_per_s: float,
    ratio: float,
    rng: np.random.Generator,
    *,
    high_share: float = HIGH_SHARE,
    correlation_s: float = CORRELATION_S,
) -> Column:
    """``num`` arrivals of a Markov-modulated Poisson process of two rates (see :func:`switching_rates`).

    Raises:
        ConfigError: as for :func:`switching_rates`, or fewer than one arrival.
    """
    _require(num, mean_rate_per_s=mean_rate_per_s)
    work = np.cumsum(rng.standard_exponential(num))
    durations_s, rates_per_s = switching_rates(
        mean_rate_per_s, ratio, float(work[-1]), rng, high_share=high_share, correlation_s=correlation_s
    )
    return _stretch(work, durations_s, rates_per_s)


def switching_rates(
    mean_rate_per_s: float,
    ratio: float,
    num_expected: float,
    rng: np.random.Generator,
    *,
    high_share: float = HIGH_SHARE,
    correlation_s: float = CORRELATION_S,
) -> tuple[Column, Column]:
    """Durations and rates of stays that alternate until ``num_expected`` arrivals are to be expected.

    The low rate is ``mean/((1 − p) + p·ratio)``, the high one ``ratio`` times that, p the share of time in the high
    state. Stays are exponential with rates p/τ into the high state and (1 − p)/τ out of it; the first state is drawn
    from the shares.

    Raises:
        ConfigError: a rate or time that is not positive, a ratio below 1, or a share outside (0, 1).
    """
    _require(1, mean_rate_per_s=mean_rate_per_s, correlation_s=correlation_s)
    if not 1.0 <= ratio < math.inf:
        raise ConfigError(f"must be at least 1 and finite, not {ratio!r}", key="arrivals.ratio")
    if not 0.0 < high_share < 1.0:
        raise ConfigError(f"must lie between 0 and 1, not {high_share!r}", key="arrivals.high_share")
    low = mean_rate_per_s / ((1.0 - high_share) + high_share * ratio)
    rates = np.array([low, ratio * low])
    mean_stays_s = correlation_s / np.array([high_share, 1.0 - high_share])
    first = int(rng.random() < high_share)
    per_pair = float((rates * mean_stays_s).sum())
    stays_s: list[Column] = []
    missing = num_expected
    while missing > 0.0:
        num_pairs = int(1.1 * missing / per_pair) + 16
        states = (first + np.arange(2 * num_pairs)) % 2
        stays_s.append(rng.standard_exponential(2 * num_pairs) * mean_stays_s[states])
        missing -= float((stays_s[-1] * rates[states]).sum())
    durations_s = np.concatenate(stays_s)
    return durations_s, rates[(first + np.arange(len(durations_s))) % 2]


def rate_shift(num: int, phases: Sequence[tuple[float, float]], rng: np.random.Generator) -> Column:
    """``num`` Poisson arrivals at a rate that shifts: ``phases`` are (start_s, rate_per_s), the last one goes on.

    Raises:
        ConfigError: no phase, a first one that does not start at 0, starts that do not rise, or a rate not positive.
    """
    starts_s = [start_s for start_s, _ in phases]
    if not phases or starts_s[0] != 0.0:
        raise ConfigError("the first phase must start at 0", key="arrivals.phases[0]")
    for index, (start_s, rate_per_s) in enumerate(phases):
        key = f"arrivals.phases[{index}]"
        if not math.isfinite(start_s) or (index > 0 and start_s <= starts_s[index - 1]):
            raise ConfigError(f"must start after the phase before, not at {start_s!r}", key=key)
        if not 0.0 < rate_per_s < math.inf:
            raise ConfigError(f"rate_per_s must be positive, not {rate_per_s!r}", key=key)
    _require(num)
    work = np.cumsum(rng.standard_exponential(num))
    rates_per_s = np.array([rate_per_s for _, rate_per_s in phases])
    last_s = float(work[-1]) / rates_per_s[-1]
    return _stretch(work, np.append(np.diff(starts_s), last_s), rates_per_s)


def trace_shape(trace_s: Sequence[float] | Column, num: int, seconds: float, rng: np.random.Generator) -> Column:
    """``num`` arrivals with the gaps of a stretch of the trace, scaled so that the last comes at ``seconds``.

    The stretch begins at a random place; a trace that is too short is taken from its beginning and repeated.

    Raises:
        DatasetError: the stretch has no shape, all of its times are equal.
    """
    gaps_s = np.diff(np.asarray(trace_s, dtype=np.float64))
    return scaled(gaps_s[stretch(len(gaps_s), num, rng)], seconds)


def stretch(length: int, num: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """``num`` consecutive indices into ``length`` rows from a random place; where rows are few, from 0 and around."""
    start = int(rng.integers(length - num + 1)) if length > num else 0
    return np.arange(start, start + num) % length


def scaled(gaps_s: Column, seconds: float) -> Column:
    """Arrival times with these gaps, scaled so that the last comes at ``seconds``.

    Raises:
        DatasetError: all gaps are 0.
    """
    total_s = float(gaps_s.sum())
    if total_s <= 0.0:
        raise DatasetError(f"{len(gaps_s)} arrivals in a row share one time stamp: no shape at this scale")
    return np.cumsum(gaps_s) * (seconds / total_s)


def _stretch(work: Column, durations_s: Column, rates_per_s: Column) -> Column:
    """Where the integral of a stepwise constant rate reaches each of ``work`` (arrivals of a process of rate 1)."""
    ends = np.concatenate(([0.0], np.cumsum(durations_s * rates_per_s)))
    ends_s = np.concatenate(([0.0], np.cumsum(durations_s)))
    return np.interp(work, ends, ends_s)


def _require(num: int, **positive: float) -> None:
    if num < 1:
        raise ConfigError(f"needs at least one arrival, not {num}", key="arrivals.num_queries")
    for name, value in positive.items():
        if not 0.0 < value < math.inf:
            raise ConfigError(f"must be positive and finite, not {value!r}", key=f"arrivals.{name}")
