"""The limited-processor-sharing queue: at most k requests share a server, the others wait in order.

Its mean wait has a formula (``headway.estimate.queueing``); here stand the exact stationary sum that the formula must
equal for exponential service, and an event simulation that assumes nothing of the kind. Many queues are simulated side
by side, and their known mean workload corrects the estimate, so that a tight interval takes seconds. It refuses to be
an engine: batches, prompts and memory do not exist here.
"""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.errors import ConfigError
from headway.lab.intervals import Interval

Column = NDArray[np.float64]

#: Queues simulated side by side.
NUM_QUEUES = 2_000
_QUEUE_CAPACITY = 2_048


def exact_wait(rho: float, concurrency: int) -> float:
    """Mean wait in mean service times: Σ over n ≥ k of (1 − ρ)ρⁿ·(n − k + 1), exponential arrivals and service.

    A newcomer who finds n ≥ k requests waits for n − k + 1 ends, each after one mean service time. Summed until a term
    no longer counts; 0 ≤ ρ < 1.

    Raises:
        ConfigError: ρ outside [0, 1), or fewer than one request at a time.
    """
    _check(rho, concurrency)
    terms, number = [], concurrency
    while True:
        term = (1.0 - rho) * rho**number * (number - concurrency + 1)
        terms.append(term)
        number += 1
        if term <= 1e-22 * terms[0] or term == 0.0:
            return math.fsum(terms)


class Service(Struct, frozen=True, kw_only=True):
    """Service requirements of mean 1: exponential with mean ``long_mean`` with probability ``long_share``, else
    exponential with the mean that makes it 1 in all. The default is the exponential distribution."""

    long_share: float = 0.0
    long_mean: float = 1.0

    @property
    def short_mean(self) -> float:
        """Mean of the other requests."""
        return (1.0 - self.long_share * self.long_mean) / (1.0 - self.long_share)

    @property
    def second_moment(self) -> float:
        """E[S²]; the squared coefficient of variation is this less 1."""
        return 2.0 * (self.long_share * self.long_mean**2 + (1.0 - self.long_share) * self.short_mean**2)

    def draw(self, rng: np.random.Generator, num: int) -> Column:
        """``num`` requirements."""
        means = np.where(rng.random(num) < self.long_share, self.long_mean, self.short_mean)
        drawn: Column = rng.standard_exponential(num) * means
        return drawn


def simulated_wait(
    rho: float,
    concurrency: int,
    rng: np.random.Generator,
    *,
    num_steps: int,
    service: Service | None = None,
    num_queues: int = NUM_QUEUES,
) -> Interval:
    """Mean wait in mean service times with its 95 % interval, by events: ``num_steps`` in each queue after a warm-up.

    Queues begin as an exponential one stands on average, and warm up for a quarter of the steps. The mean workload that
    arrivals find, ρ·E[S²]/2(1 − ρ) for any work-conserving order, is the control variate.

    Raises:
        ConfigError: ρ outside [0, 1), or fewer than one request at a time.
    """
    _check(rho, concurrency)
    service = Service() if service is None else service
    queues = _Queues(rho, concurrency, rng, service, num_queues)
    for _ in range(num_steps // 4):
        queues.step()
    queues.reset_counts()
    for _ in range(num_steps):
        queues.step()
    arrivals = np.maximum(queues.num_arrivals, 1)
    waits, workloads = queues.sum_wait / arrivals, queues.sum_workload / arrivals
    expected = rho * service.second_moment / (2.0 * (1.0 - rho))
    slope = float(np.cov(waits, workloads)[0, 1] / max(float(workloads.var(ddof=1)), 1e-300))
    corrected = waits - slope * (workloads - expected)
    half = 1.96 * float(corrected.std(ddof=1)) / math.sqrt(num_queues)
    mean = float(corrected.mean())
    return Interval(mean, mean - half, mean + half)


class _Queues:
    """Independent queues in columns. An active request ends when the service that each active one has had, ``served``,
    reaches its ``ends``."""

    def __init__(self, rho: float, k: int, rng: np.random.Generator, service: Service, num: int) -> None:
        self.rho, self.k, self.rng, self.service, self.num = rho, k, rng, service, num
        self.rows = np.arange(num)
        self.served = np.zeros(num)
        self.now = np.zeros(num)
        self.ends = np.full((num, k), np.inf)
        self.num_active = np.zeros(num, np.int64)
        self.queue_s, self.queue_size = np.zeros((num, _QUEUE_CAPACITY)), np.zeros((num, _QUEUE_CAPACITY))
        self.head, self.num_waiting = np.zeros(num, np.int64), np.zeros(num, np.int64)
        self.workload = np.zeros(num)
        present = np.minimum(rng.geometric(1.0 - rho, num) - 1, _QUEUE_CAPACITY // 2)
        for number in range(int(present.max(initial=0))):
            self._join(np.nonzero(present > number)[0])
        self.next_arrival = rng.standard_exponential(num) / rho if rho > 0 else np.full(num, np.inf)
        self.reset_counts()

    def reset_counts(self) -> None:
        """Begin to count anew."""
        self.sum_wait, self.sum_workload = np.zeros(self.num), np.zeros(self.num)
        self.num_arrivals = np.zeros(self.num, np.int64)

    def step(self) -> None:
        """One event in every queue: its next arrival or end."""
        first_end = self.ends.min(axis=1)
        busy = self.num_active > 0
        to_end = np.full(self.num, np.inf)
        np.multiply(first_end - self.served, self.num_active, out=to_end, where=busy)
        to_arrival = self.next_arrival - self.now
        arrives = to_arrival <= to_end
        elapsed = np.where(arrives, to_arrival, to_end)
        self.now += elapsed
        self.served[busy] += elapsed[busy] / self.num_active[busy]
        self.workload[busy] -= elapsed[busy]
        self._end(np.nonzero(~arrives)[0])
        self._arrive(np.nonzero(arrives)[0])

    def _arrive(self, at: NDArray[np.intp]) -> None:
        self.sum_workload[at] += np.maximum(self.workload[at], 0.0)
        self.num_arrivals[at] += 1
        self._join(at)
        self.next_arrival[at] = self.now[at] + self.rng.standard_exponential(len(at)) / self.rho

    def _join(self, at: NDArray[np.intp]) -> None:
        sizes = self.service.draw(self.rng, len(at))
        self.workload[at] += sizes
        starts = self.num_active[at] < self.k
        begin, wait = at[starts], at[~starts]
        self._begin(begin, sizes[starts])
        self.num_active[begin] += 1
        place = (self.head[wait] + self.num_waiting[wait]) % _QUEUE_CAPACITY
        self.queue_s[wait, place], self.queue_size[wait, place] = self.now[wait], sizes[~starts]
        self.num_waiting[wait] += 1
        if len(wait) and int(self.num_waiting[wait].max()) >= _QUEUE_CAPACITY:
            raise ConfigError("the queue grew beyond what is simulated", key="rho")

    def _begin(self, at: NDArray[np.intp], sizes: Column) -> None:
        slot = self.ends[at].argmax(axis=1)  # a free slot's end is infinite
        self.ends[at, slot] = self.served[at] + sizes

    def _end(self, at: NDArray[np.intp]) -> None:
        self.ends[at, self.ends[at].argmin(axis=1)] = np.inf
        waiting = self.num_waiting[at] > 0
        follow, leave = at[waiting], at[~waiting]
        place = self.head[follow]
        self.sum_wait[follow] += self.now[follow] - self.queue_s[follow, place]
        self._begin(follow, self.queue_size[follow, place])
        self.head[follow] = (place + 1) % _QUEUE_CAPACITY
        self.num_waiting[follow] -= 1
        self.num_active[leave] -= 1


def _check(rho: float, concurrency: int) -> None:
    if not 0.0 <= rho < 1.0:
        raise ConfigError(f"must be at least 0 and below 1, not {rho!r}", key="rho")
    if concurrency < 1:
        raise ConfigError(f"must be at least 1, not {concurrency}", key="concurrency")
