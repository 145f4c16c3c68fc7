"""The whole white-box loop without sockets: a simulated engine's snapshots, over the wire, into a fleet's estimates."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from four_task_mix import MAX_ANSWER_TOKENS, NAMES, four_task_mix
from headway.engines.simulated import Generation, SimulatedEngine
from headway.fleet import FleetView
from headway.profiles import load_profile, load_truth
from headway.snapshot import wire
from headway.types import EngineRequest, Instance
from published import Published

NUM_QUERIES = 1500
LOAD = 0.7  # of the profile's service rate


class Route(Published):
    """Queries of the four-task mix to one engine, each estimated on arrival as a router would, then sent."""

    def __init__(self, name: str, seed: int) -> None:
        self.profile = load_profile(name)
        rng = np.random.default_rng(seed)
        task, prompt, answer = four_task_mix(name, NUM_QUERIES, rng)
        self.prompt, self.answer = prompt.astype(int).tolist(), answer.astype(int).tolist()
        self.predicted = [float(answer[task == kind].mean()) for kind in task]
        rate_per_s = LOAD * self.profile.calibration.service_rate_per_s
        self.arrivals_s = (1000 + np.cumsum(rng.exponential(1 / rate_per_s, NUM_QUERIES))).tolist()
        self.now_s = 999.0
        self.generations: list[Generation] = []
        self.open: dict[str, Generation] = {}
        profile = self.profile
        instance = Instance(
            id="e", model="m", engine="vllm-0.32", limits=profile.limits, step_time=profile.step_time,
            calibration=profile.calibration,
        )  # fmt: skip
        self.fleet = FleetView([instance])
        self.engine = SimulatedEngine(
            load_truth(name), seed=seed, instance_id="e", observer=self, sink=self, clock=lambda: self.now_s
        )

    def arrive(self, number: int) -> float:
        """Estimate and send the query of that number; the estimated TTFT."""
        fleet, request_id = self.fleet, f"q{number}"
        fleet.observe_snapshot(wire.decode(self.newest), self.now_s)
        fleet.age(self.now_s)
        (estimate,), _ = fleet.first_tokens([self.prompt[number]], 0)
        assert estimate is not None
        fleet.book(
            request_id=request_id,
            instance_id="e",
            prompt_tokens=self.prompt[number],
            predicted_output_tokens=self.predicted[number],
            max_tokens=MAX_ANSWER_TOKENS,
            priority=0,
            now=self.now_s,
        )
        request = EngineRequest(
            request_id=f"chatcmpl-{request_id}",
            prompt_tokens=self.prompt[number],
            target_output_tokens=self.answer[number],
            max_tokens=MAX_ANSWER_TOKENS,
        )
        generation = self.engine.submit(request, arrival_s=self.now_s, on_progress=lambda: None)
        self.generations.append(generation)
        self.open[request_id] = generation
        return estimate

    def ratios(self) -> NDArray[np.float64]:
        """Observed over estimated TTFT of every query."""
        estimates: list[float] = []
        end_s = self.engine.begin()
        while len(estimates) < NUM_QUERIES or end_s is not None:
            arrival_s = self.arrivals_s[len(estimates)] if len(estimates) < NUM_QUERIES else np.inf
            if end_s is None or arrival_s < end_s:
                self.now_s = arrival_s
                estimates.append(self.arrive(len(estimates)))
                end_s = end_s if end_s is not None else self.engine.begin()
                continue
            self.now_s = end_s
            self.engine.end()
            for request_id in [key for key, generation in self.open.items() if generation.finish_reason]:
                del self.open[request_id]
                self.fleet.release(request_id, self.now_s)
            end_s = self.engine.begin()
        observed = [generation.ttft_s or np.nan for generation in self.generations]
        return np.array(observed) / np.array(estimates)


@pytest.mark.parametrize("name", NAMES)
def test_replayed_estimates_meet_the_engine_clock(name: str) -> None:
    """At 70 % load the median estimate is right to 3 %, the mean error below 8 %, and p90 as the profile says."""
    route = Route(name, seed=1)
    ratios = route.ratios()
    assert np.median(ratios) == pytest.approx(1.0, abs=0.03)
    assert np.abs(1 / ratios - 1).mean() < 0.08
    assert np.quantile(ratios, 0.9) == pytest.approx(route.profile.calibration.ttft_ratio_p90, abs=0.03)
    assert not route.engine.view.running
