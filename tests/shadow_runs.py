"""A simulated engine on a virtual clock, watched by two routers: one by its snapshots, one only by its own dispatches.

Both estimate every query; what the second sees (requests going out, tokens and ends coming back) may be late.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from four_task_mix import MAX_ANSWER_TOKENS, four_task_mix
from headway.engines.simulated import Generation, SimulatedEngine
from headway.fleet import FleetView
from headway.profiles import load_profile, load_truth
from headway.snapshot import wire
from headway.types import EngineRequest, Instance
from published import Published


class ShadowRun(Published):
    """Queries of the four-task mix to one engine at ``load`` of its service rate.

    ``exact`` gives the engine the estimator's own step times, without noise. ``delay_s`` draws how long a request, a
    token or an end is on its way. ``clock_factor`` makes the engine so much slower than the profile says.
    """

    def __init__(
        self,
        name: str = "h100-qwen3-8b",
        *,
        seed: int = 1,
        num_queries: int = 400,
        load: float = 0.7,
        exact: bool = False,
        delay_s: Callable[[np.random.Generator], float] = lambda rng: 0.0,
        clock_factor: float = 1.0,
        cancelled_share: float = 0.0,
    ) -> None:
        profile, truth = load_profile(name), load_truth(name)
        if exact:
            truth = msgspec.structs.replace(
                truth, step_time=profile.step_time, step_noise=0.0, stall_probability=0.0, host_gap_s=(0.0, 0.0)
            )
        if clock_factor != 1.0:
            slower = tuple(value * clock_factor for value in truth.step_time.coefficients)
            truth = msgspec.structs.replace(
                truth, step_time=msgspec.structs.replace(truth.step_time, coefficients=slower)
            )
        self.rng = np.random.default_rng([seed, 7])
        rng = np.random.default_rng(seed)
        task, prompt, answer = four_task_mix(name, num_queries, rng)
        self.prompt, self.answer = prompt.astype(int).tolist(), answer.astype(int).tolist()
        self.predicted = [float(answer[task == kind].mean()) for kind in task]
        rate_per_s = load * profile.calibration.service_rate_per_s / clock_factor
        arrivals_s = (1000 + np.cumsum(rng.exponential(1 / rate_per_s, num_queries))).tolist()
        cancelled = rng.random(num_queries) < cancelled_share
        self.cancel_after = [int(rng.integers(1, 100)) if gone else None for gone in cancelled]
        instance = Instance(
            id="e", model="m", engine="vllm-0.32", limits=profile.limits, step_time=profile.step_time,
            calibration=profile.calibration,
        )  # fmt: skip
        self.shown = FleetView([instance])
        self.shadowed = FleetView([instance], shadowed=["e"])
        self.now_s = 999.0
        self.engine = SimulatedEngine(
            truth, seed=seed, instance_id="e", observer=self, sink=self, clock=lambda: self.now_s
        )
        self.delay_s = delay_s
        self.generations: dict[int, Generation] = {}
        self.by_snapshots = np.full(num_queries, np.nan)
        self.by_shadow = np.full(num_queries, np.nan)
        self.observed = np.full(num_queries, np.nan)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._end_s: float | None = None
        for number, arrival_s in enumerate(arrivals_s):
            self.at(arrival_s, lambda number=number: self._arrive(number))

    # ---- the run

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        """Do something at a time."""
        heapq.heappush(self._events, (time_s, next(self._order), act))

    def run(self) -> None:
        """Play everything."""
        self._end_s = self.engine.begin()
        while self._events or self._end_s is not None:
            if self._events and (self._end_s is None or self._events[0][0] < self._end_s):
                self.now_s, _, act = heapq.heappop(self._events)
                act()
                if self._end_s is None:
                    self._end_s = self.engine.begin()
                continue
            assert self._end_s is not None
            self.now_s = self._end_s
            self.engine.end()
            self._tell_at_once()
            self._end_s = self.engine.begin()

    def errors(self, estimates: NDArray[np.float64]) -> NDArray[np.float64]:
        """Relative errors of the estimates."""
        seen = np.isfinite(self.observed)
        return np.abs(estimates[seen] / self.observed[seen] - 1)

    def _tell_at_once(self) -> None:
        """What takes no time on its way is known before the next batch begins."""
        while self._events and self._events[0][0] <= self.now_s:
            heapq.heappop(self._events)[2]()

    def _arrive(self, number: int) -> None:
        name, now = f"q{number}", self.now_s
        self.shown.observe_snapshot(wire.decode(self.newest), now)
        for fleet, estimates in ((self.shown, self.by_snapshots), (self.shadowed, self.by_shadow)):
            fleet.age(now)
            estimate = fleet.first_tokens([self.prompt[number]], 0)[0][0]
            if estimate is not None:
                estimates[number] = estimate
            fleet.book(
                request_id=name,
                instance_id="e",
                prompt_tokens=self.prompt[number],
                predicted_output_tokens=self.predicted[number],
                max_tokens=MAX_ANSWER_TOKENS,
                priority=0,
                now=now,
            )
        delay_s = self.delay_s(self.rng)
        if delay_s:
            self.at(now + delay_s, lambda: self._submit(number, now))
        else:
            self._submit(number, now)

    def _submit(self, number: int, sent_s: float) -> None:
        generation: Generation

        def progress() -> None:
            self._progress(number, sent_s, generation)

        generation = self.engine.submit(
            EngineRequest(
                request_id=f"chatcmpl-q{number}",
                prompt_tokens=self.prompt[number],
                target_output_tokens=self.answer[number],
                max_tokens=MAX_ANSWER_TOKENS,
            ),
            arrival_s=self.now_s,
            on_progress=progress,
        )
        self.generations[number] = generation

    def _progress(self, number: int, sent_s: float, generation: Generation) -> None:
        num_tokens, ended = generation.num_tokens, generation.finish_reason is not None
        self.at(self.now_s + self.delay_s(self.rng), lambda: self._seen(number, sent_s, num_tokens, ended))

    def _seen(self, number: int, sent_s: float, num_tokens: int, ended: bool) -> None:
        name, now = f"q{number}", self.now_s
        if num_tokens == 1:
            self.observed[number] = now - sent_s
        for fleet in (self.shown, self.shadowed):
            entry = fleet.entry(name)
            if entry is None:
                continue
            if num_tokens:
                entry.num_events, entry.last_event_s = max(num_tokens, entry.num_events), now
                fleet.first_token_seen(name, now)
            if ended:
                fleet.release(name, now, num_tokens)
        limit = self.cancel_after[number]
        if not ended and limit is not None and num_tokens >= limit:
            self.engine.cancel(self.generations[number])
