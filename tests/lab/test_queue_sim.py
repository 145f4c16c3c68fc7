"""The central-queue lab: what dispatchers make of a load, and that they are the policies of the gateway."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace

from headway.errors import ConfigError, HeadwayError
from headway.estimate.registry import make_estimator
from headway.fleet import FleetView
from headway.lab.queue_device import DeviceSpec, IterationTime
from headway.lab.queue_dispatch import AtOnce, BidPriceQueue, CentralQueue
from headway.lab.queue_load import QueueLoad
from headway.lab.queue_prices import PriceWatch
from headway.lab.queue_score import queue_score
from headway.lab.queue_sim import Dispatcher, QueueOutcomes, play
from headway.policy.bid_control import BidSettings
from headway.policy.bid_objective import Objective
from headway.policy.registry import make_choosing_policy, make_policy
from headway.predict.prior import PriorPredictor
from headway.router import Router
from headway.types import EngineLimits, Instance, ModelCard, Outcome, Prediction, Query
from queue_loads import load_of, small_load

TWO = [DeviceSpec(max_num_seqs=3, kv_tokens=2000)] * 2
SETTINGS = BidSettings(horizon=128, stride=4, reward_periods=100)


def bid(
    objective: Objective | None = None, seed: int = 0, settings: BidSettings = SETTINGS, **more: object
) -> BidPriceQueue:
    return BidPriceQueue(objective or Objective(), settings, np.random.default_rng(seed), **more)  # type: ignore[arg-type]


def at_once(name: str) -> AtOnce:
    return AtOnce(make_choosing_policy(name, rng=np.random.default_rng(3)))


DISPATCHERS: dict[str, Callable[[], Dispatcher]] = {
    "round_robin": lambda: at_once("round_robin"),
    "random": lambda: at_once("random"),
    "shortest_queue": lambda: at_once("shortest_queue"),
    "power_of_two": lambda: at_once("power_of_two"),
    "fcfs": lambda: CentralQueue("fcfs"),
    "shortest_first": lambda: CentralQueue("shortest_first"),
    "bid": bid,
    "bid threshold": lambda: bid(settings=replace(SETTINGS, work_conserving=False, history="ahead")),
    "bid request": lambda: bid(settings=replace(SETTINGS, history="request")),
    "bid as predicted": lambda: bid(settings=replace(SETTINGS, reconcile=False)),
    "plan alone": lambda: bid(settings=replace(SETTINGS, num_steps=0)),
    "by arrival": lambda: BidPriceQueue(None, replace(SETTINGS, num_steps=0), np.random.default_rng(0)),
}


@pytest.mark.parametrize("name", DISPATCHERS)
@pytest.mark.parametrize("clock", [IterationTime(), IterationTime(fixed=0.6, per_sequence=0.1, per_token=1e-4)])
def test_every_request_is_sent_once_and_ends(name: str, clock: IterationTime) -> None:
    """Whatever the dispatcher and the clock, each request goes to one device after it came and ends after it began."""
    load = small_load(length_error=0.2, rate=0.2, whole_periods=clock.fixed == 1.0)
    outcomes = play(load, [replace(spec, time=clock) for spec in TWO], DISPATCHERS[name]())
    assert set(outcomes.device.tolist()) == {0, 1}
    order = (load.arrivals, outcomes.sent, outcomes.joined, outcomes.first_token, outcomes.ended)
    for earlier, later in pairwise(order):
        assert (later >= earlier).all()
    again = play(load, [replace(spec, time=clock) for spec in TWO], DISPATCHERS[name]())
    assert (again.ended == outcomes.ended).all()


def test_no_more_run_together_than_there_are_slots() -> None:
    """At no time are more requests on a device between joining and ending than it has slots."""
    outcomes = play(small_load(rate=1.0), TWO, bid())
    for device in range(2):
        here = outcomes.device == device
        for time in outcomes.joined[here]:
            assert ((outcomes.joined[here] <= time) & (outcomes.ended[here] > time)).sum() <= 3


def test_with_known_lengths_a_plan_needs_no_preemption() -> None:
    """Where memory binds and lengths are known, what was planned never overflows; a queue by slots alone does."""
    load, tight = small_load(rate=0.4), [DeviceSpec(max_num_seqs=6, kv_tokens=300)] * 2
    assert play(load, tight, bid()).num_preemptions == 0
    assert play(load, tight, CentralQueue("fcfs")).num_preemptions > 0


def test_alike_devices_without_scarce_memory_are_served_shortest_first() -> None:
    """Under the latency weights every release is that of the central queue, shortest predicted answer first."""
    load = small_load(400, 0.25, length_error=0.2)
    ours, theirs = play(load, TWO, bid()), play(load, TWO, CentralQueue("shortest_first"))
    assert (ours.ended == theirs.ended).all()


def test_the_figures_are_those_of_the_requests() -> None:
    """Latency, waits, missed objectives and rates of a run that can be counted by hand."""
    load = load_of((0, 10, 4), (0, 10, 2), (6, 10, 2))
    one = [DeviceSpec(max_num_seqs=1, kv_tokens=100)]
    score = queue_score(play(load, one, CentralQueue("fcfs")), wait_slo=4.0, latency_slo=6.0)
    assert (score.latency, score.wait, score.ttft) == pytest.approx(((4 + 6 + 2) / 3, 4 / 3, 7 / 3))
    assert (score.wait_missed, score.latency_missed, score.slo_missed) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert score.requests_per_time == pytest.approx(2 / 6)
    assert score.tokens_per_time == pytest.approx(1.0)
    assert score.value is None
    valued = replace(load, values=np.array([[0.1], [0.2], [0.6]]))
    assert queue_score(play(valued, one, bid()), wait_slo=4.0, latency_slo=6.0).value == pytest.approx(0.3)


class Scripted:
    """Sends what it is told to, all at the first call."""

    def __init__(self, *released: tuple[int, int]) -> None:
        self.released = list(released)

    def bind(self, load: QueueLoad, devices: Sequence[DeviceSpec]) -> None:
        """Nothing to prepare."""

    def ended(self, request: int, device: int, now: float) -> None:
        """Nothing to note."""

    def release(self, queue: list[int], num_new: int, now: float) -> list[tuple[int, int]]:
        out, self.released = self.released, []
        return out

    def next_release(self, now: float) -> float | None:
        return None


@pytest.mark.parametrize(
    ("released", "message"),
    [([], "never sent"), ([(0, 0), (0, 1)], "not in the queue"), ([(1, 0)], "not in the queue")],
)
def test_a_dispatcher_that_loses_or_makes_up_requests_is_an_error(
    released: list[tuple[int, int]], message: str
) -> None:
    """Requests that stay in the queue for good, are sent twice, or before they came, end the run with a reason."""
    with pytest.raises(HeadwayError, match=message):
        play(load_of((0, 5, 5), (9, 5, 5)), TWO, Scripted(*released))


def test_what_can_never_run_is_refused_before_the_run() -> None:
    """A request larger than every device, or longer than the horizon, is an error instead of an endless run."""
    with pytest.raises(ConfigError, match="no device holds more than 2000"):
        play(load_of((0, 1995, 10)), TWO, CentralQueue("fcfs"))
    with pytest.raises(ConfigError, match="must reach the longest request of 129 periods, not 128"):
        play(load_of((0, 5, 129)), TWO, bid())


def test_prices_are_watched_over_time() -> None:
    """A watch notes charges per device while requests come, and they are those for slots where slots are short."""
    watch = PriceWatch(every=10.0)
    play(small_load(400, 0.6), TWO, bid(watch=watch))
    series = watch.series()
    assert series.slots.shape == series.tokens.shape == (len(series.time), 2)
    assert (np.diff(series.time) >= 10.0).all()
    slots, tokens = series.means(after=200.0)
    assert slots > 10 * tokens
    assert slots > 0.0


# ---- the same policies as in the gateway -----------------------------------------------------------------------------


def routed(load: QueueLoad, name: str, **options: float | str) -> QueueOutcomes:
    """The run of a registered holding policy behind a router, a period being a second, in the lab's own event loop."""
    limits = EngineLimits(
        max_num_batched_tokens=4096, max_num_seqs=3, max_model_len=2000, block_size=1, num_blocks=2001
    )
    instances = [Instance(id=f"device-{n}", model="m", engine="vllm-0.32", limits=limits) for n in range(2)]
    models = {"m": ModelCard(name="m")}
    fleet = FleetView(instances)
    policy = make_policy(name, rng=np.random.default_rng(0), options=options)
    router = Router(
        fleet=fleet,
        models=models,
        policy=policy,
        estimator=make_estimator("queueing"),
        predictor=PriorPredictor(models),
    )
    return play(load, TWO, _Routed(router, load))


class _Routed:
    """Drives a router as a dispatcher of the lab: admits, releases, books, reports ends."""

    def __init__(self, router: Router, load: QueueLoad) -> None:
        self._router, self._load = router, load

    def bind(self, load: QueueLoad, devices: Sequence[DeviceSpec]) -> None:
        """Begin with no query held."""
        self._queries: dict[int, tuple[Query, float]] = {}

    def ended(self, request: int, device: int, now: float) -> None:
        outcome = Outcome(query_id=str(request), instance_id=f"device-{device}", status="ok", ttft_s=1.0, total_s=2.0)
        self._router.observe(outcome, now)

    def release(self, queue: list[int], num_new: int, now: float) -> list[tuple[int, int]]:
        for request in queue[len(queue) - num_new :]:
            tokens = int(self._load.prompt_tokens[request])
            query = Query(id=str(request), arrival_s=now, prompt_text="", prompt_tokens={"m": tokens})
            length = float(self._load.predicted_tokens[request])
            self._router.admit(query, now, {"m": Prediction(0.5, length, 0.0, "test")})
            self._queries[request] = (query, now)
        released: list[tuple[int, int]] = []
        while decisions := self._router.release(list(self._queries.values()), now):
            for decision in decisions:
                assert decision.candidate is not None
                request, device = int(decision.query_id), int(decision.candidate.instance_id[-1])
                self._router.fleet.book(
                    request_id=decision.query_id,
                    instance_id=decision.candidate.instance_id,
                    prompt_tokens=1,
                    predicted_output_tokens=1.0,
                    max_tokens=None,
                    priority=0,
                    now=now,
                )
                del self._queries[request]
                released.append((request, device))
        return released

    def next_release(self, now: float) -> float | None:
        """Events are enough where nothing is left idle."""
        return None


@pytest.mark.parametrize(
    ("name", "ours"),
    [("central_fcfs", CentralQueue("fcfs")), ("central_shortest_first", CentralQueue("shortest_first"))],
)
def test_the_labs_central_queues_are_the_policies(name: str, ours: CentralQueue) -> None:
    """The fast central queue of the lab releases what the registered policy does behind its router."""
    load = small_load(120, 0.3, length_error=0.2)
    assert (routed(load, name).ended == play(load, TWO, ours).ended).all()


@pytest.mark.parametrize("history", ["period", "request", "ahead"])
def test_the_lab_and_the_policy_share_their_control(history: str) -> None:
    """``bid_price`` behind its router releases, period by period, what the lab's dispatcher does."""
    load = small_load(120, 0.3, length_error=0.2)
    options = {"horizon": 128.0, "stride": 4.0, "period_s": 1.0, "mode": "disaggregated", "wait_slo_s": 20.0}
    theirs = routed(load, "bid_price", history=history, zeta2=1.0, **options)
    settings = replace(SETTINGS, history=history, reward_periods=BidSettings().reward_periods)
    objective = Objective(zeta2=1.0, wait_slo_s=20.0)
    ours = play(load, TWO, bid(objective, settings=settings, period_s=1.0))
    assert (theirs.device == ours.device).all()
    assert (theirs.ended == ours.ended).all()
