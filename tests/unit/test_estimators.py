"""The estimators that need no replay: queueing and prefill throughput."""

from __future__ import annotations

import math

import pytest

from headway.estimate.prefill_throughput import PrefillThroughputEstimator
from headway.estimate.queueing import QueueingEstimator, lps_wait_s
from headway.estimate.registry import make_estimator
from headway.fleet import FleetView, Gauges
from headway.types import (
    Calibration,
    EngineLimits,
    Estimate,
    Instance,
    Outcome,
    Query,
    Snapshot,
    SnapshotRequest,
    StepTime,
)

LIMITS = EngineLimits(
    max_num_batched_tokens=8192, max_num_seqs=256, max_model_len=32768, block_size=16, num_blocks=20000
)
STEP_TIME = StepTime.linear(b0=7.49e-3, b1=2.078e-5, b2=5.037e-8, b3=1.033e-9)
CALIBRATION = Calibration(
    prefill_tokens_per_s=33_000.0, decode_step_s=0.008, service_rate_per_s=2.0, concurrency=25, ttft_ratio_p90=1.25
)
QUERY = Query(id="q", arrival_s=0.0, prompt_text="", prompt_tokens={"m": 3300})
HOSTED = Instance(id="api", model="m")


def replayed(name: str = "gpu") -> Instance:
    return Instance(id=name, model="m", engine="vllm-0.32", limits=LIMITS, step_time=STEP_TIME, calibration=CALIBRATION)


def snapshot(*waiting_tokens: int, at_s: float = 0.0, name: str = "gpu", sequence: int = 1) -> Snapshot:
    waiting = [
        SnapshotRequest(f"w{index}", tokens, 0, 0, 0, 500, 0, at_s, 0) for index, tokens in enumerate(waiting_tokens)
    ]
    return Snapshot(
        instance_id=name,
        engine_version="vllm-0.32.0",
        engine_start=1,
        sequence=sequence,
        engine_s=at_s,
        limits=LIMITS,
        running=[],
        waiting=waiting,
        free_blocks=LIMITS.num_blocks - 1,
    )


def book(fleet: FleetView, instance_id: str, count: int, now: float, tag: str = "r") -> None:
    for number in range(count):
        fleet.book(
            request_id=f"{tag}{number}",
            instance_id=instance_id,
            prompt_tokens=100,
            predicted_output_tokens=100.0,
            max_tokens=None,
            priority=0,
            now=now,
        )


def ended(ttft_s: float, total_s: float) -> Outcome:
    return Outcome(query_id="q", instance_id="api", status="ok", ttft_s=ttft_s, total_s=total_s)


def ask(estimator: QueueingEstimator, fleet: FleetView, now: float = 0.0, tokens: int = 3300) -> Estimate:
    (estimate,) = estimator.estimate(QUERY, fleet, [tokens], now)
    return estimate


# ---- limited processor sharing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("rho", "expected"), [(0.8, 0.0189), (0.9, 0.718), (0.95, 5.55), (0.99, 77.8)])
def test_the_published_check_values_come_out(rho: float, expected: float) -> None:
    """μ·E[W] at k = 25 for four loads, in units of the service time."""
    for service_rate_per_s in (1.0, 4.0):
        wait_s = lps_wait_s(rho * service_rate_per_s, service_rate_per_s, 25)
        assert wait_s * service_rate_per_s == pytest.approx(expected, rel=5e-3)


def test_one_slot_is_the_single_server_queue_and_many_are_no_wait() -> None:
    """k = 1 gives M/M/1's ρ/(μ−α); with k → ∞ nobody waits; an idle instance has no wait at all."""
    assert lps_wait_s(3.0, 4.0, 1) == pytest.approx(0.75 / 1.0)
    assert lps_wait_s(3.0, 4.0, 10_000) == pytest.approx(0.0, abs=1e-300)
    assert lps_wait_s(0.0, 4.0, 1) == 0.0


def test_variability_scales_the_wait() -> None:
    """Coefficients of variation 2 and 0 double it: (4 + 0)/2."""
    fleet = FleetView([replayed()])
    book(fleet, "gpu", 15, now=0.0)
    plain, bursty = ask(QueueingEstimator(), fleet), ask(QueueingEstimator(arrival_cv=2.0, service_cv=0.0), fleet)
    assert plain.wait_s > 0
    assert bursty.wait_s == pytest.approx(2 * plain.wait_s)


@pytest.mark.parametrize("rate", [4.0, 4.1, 1e9])
def test_beyond_capacity_the_wait_is_unbounded(rate: float) -> None:
    """At ρ ≥ 1 there is no average."""
    assert lps_wait_s(rate, 4.0, 25) == math.inf


def test_a_calibrated_instance_waits_prefills_and_decodes_once() -> None:
    """L = W + p/θ + T_dec, its 90 % quantile by the calibration's ratio; the source says queueing."""
    estimate = ask(QueueingEstimator(), FleetView([replayed()]))
    assert estimate.wait_s == 0.0
    assert estimate.ttft_s == pytest.approx(3300 / 33_000 + 0.008)
    assert estimate.ttft_p90_s == pytest.approx(1.25 * estimate.ttft_s)
    assert (estimate.source, estimate.snapshot_age_s) == ("queueing", None)


def test_a_saturated_instance_is_open_again_once_arrivals_fade() -> None:
    """A burst beyond μ makes the estimate infinite; without further bookings it comes down by itself."""
    fleet = FleetView([replayed()])
    book(fleet, "gpu", 40, now=0.0)
    assert ask(QueueingEstimator(), fleet).ttft_s == math.inf
    assert ask(QueueingEstimator(), fleet, now=30.0).ttft_s < 0.2


# ---- instances of which little is known --------------------------------------------------------------------------


def test_before_any_outcome_the_stated_default_speaks_under_its_own_name() -> None:
    """Half a second, or what the constructor says, and more with each 25 under way; no wait is claimed at first."""
    fleet = FleetView([HOSTED])
    estimate = ask(QueueingEstimator(), fleet)
    assert (estimate.ttft_s, estimate.ttft_p90_s, estimate.wait_s, estimate.source) == (0.5, 1.0, 0.0, "default")
    assert ask(QueueingEstimator(default_ttft_s=0.2), fleet).ttft_s == 0.2
    book(fleet, "api", 25, now=0.0)
    assert ask(QueueingEstimator(), fleet).ttft_s == 1.0


def test_a_plain_engines_queue_comes_first() -> None:
    """Ten waiting, four running, answers of two seconds: five seconds by Little's law, and those sent since."""
    plain = Instance(id="gpu", model="m", engine="vllm-0.32")
    fleet, estimator = FleetView([plain]), QueueingEstimator()
    estimator.observe(Outcome(query_id="q", instance_id="gpu", status="ok", ttft_s=0.5, total_s=2.0), plain, 0.0)
    fleet.observe_gauges("gpu", Gauges(4.0, 10.0, 0.5, read_s=1.0), 1.0)
    estimate = ask(estimator, fleet, 1.0)
    assert (estimate.wait_s, estimate.ttft_s, estimate.source) == (5.0, 5.5, "queueing")
    book(fleet, "gpu", 5, now=1.5)
    assert ask(estimator, fleet, 1.5).wait_s == pytest.approx(7.5 + 0.1)
    fleet.observe_gauges("gpu", Gauges(4.0, 0.0, 0.5, read_s=2.0), 2.0)
    assert ask(estimator, fleet, 2.0).wait_s == pytest.approx(0.1)
    fleet.observe_gauges("gpu", None, 3.0)
    assert ask(estimator, fleet, 3.0).source == "default"


def test_a_calibrated_engines_queue_is_served_at_its_rate() -> None:
    """Where gauges show requests waiting, the wait is at least their number over the service rate."""
    fleet = FleetView([replayed()])
    fleet.observe_gauges("gpu", Gauges(9.0, 6.0, 0.9, read_s=0.0), 0.0)
    estimate = ask(QueueingEstimator(), fleet)
    assert estimate.wait_s == pytest.approx(3.0)
    assert estimate.source == "queueing"


# ---- prefill throughput ------------------------------------------------------------------------------------------


def test_prefill_throughput_divides_everything_still_to_prefill() -> None:
    """(Σ remaining prefill + own)/θ + T_dec, the wait being the residents' part."""
    fleet = FleetView([replayed()])
    fleet.observe_snapshot(snapshot(6600, 3300), 0.0)
    fleet.age(0.0)
    (estimate,) = PrefillThroughputEstimator().estimate(QUERY, fleet, [3300], 0.0)
    assert estimate.wait_s == pytest.approx(9900 / 33_000)
    assert estimate.ttft_s == pytest.approx(13_200 / 33_000 + 0.008)
    assert estimate.ttft_p90_s == pytest.approx(1.25 * estimate.ttft_s)
    assert (estimate.source, estimate.snapshot_age_s) == ("prefill_throughput", 0.0)


def test_the_decode_step_can_be_left_out() -> None:
    """Engines give the first token in the batch that ends prefill: reports show the estimate with and without it."""
    fleet = FleetView([replayed()])
    fleet.observe_snapshot(snapshot(), 0.0)
    fleet.age(0.0)
    (estimate,) = PrefillThroughputEstimator(include_decode_step=False).estimate(QUERY, fleet, [3300], 0.0)
    assert estimate.ttft_s == pytest.approx(0.1)


def test_without_state_or_calibration_the_fallback_speaks_in_the_open() -> None:
    """No snapshot, a stale one and a hosted instance are answered by others, and say so."""
    fleet = FleetView([replayed("silent"), replayed("gpu"), HOSTED], stale_after_s=2.0)
    fleet.observe_snapshot(snapshot(3300), 0.0)
    estimator = PrefillThroughputEstimator()
    fleet.age(0.0)
    sources = [estimate.source for estimate in estimator.estimate(QUERY, fleet, [100] * 3, 0.0)]
    assert sources == ["queueing", "prefill_throughput", "default"]
    fleet.age(10.0)
    stale = estimator.estimate(QUERY, fleet, [100] * 3, 10.0)[1]
    assert (stale.source, stale.snapshot_age_s) == ("queueing", 10.0)


def test_outcomes_reach_the_fallback() -> None:
    """What the fallback learns, the throughput estimator answers with."""
    fleet, estimator = FleetView([HOSTED]), make_estimator("prefill_throughput")
    for second in range(3):
        estimator.observe(ended(0.7, 1.0), HOSTED, float(second))
    assert estimator.estimate(QUERY, fleet, [100], 3.0)[0].ttft_s == 0.7
