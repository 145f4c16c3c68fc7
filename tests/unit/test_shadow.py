"""The shadow of an engine that shows nothing: what its router sees moves it, what contradicts it is said aloud."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headway._core import ReplayedEngine
from headway.errors import EngineInputError
from headway.estimate.registry import make_estimator
from headway.fleet import FleetView, Gauges, InstanceView
from headway.fleet.shadow import GIVE_UP_S
from headway.types import EngineLimits, EngineRequest, EngineState, Estimate
from pools import LIMITS, SLOW, book, instance, query

STEP = SLOW.named()["b0"]


def shadowed() -> FleetView:
    return FleetView([instance("a", step_time=SLOW)], shadowed=["a"])


def view_of(fleet: FleetView) -> InstanceView:
    return fleet.views[0]


def ask(fleet: FleetView, now: float, tokens: int = 1000) -> Estimate:
    fleet.age(now)
    (estimate,) = make_estimator("replay").estimate(query(tokens), fleet, [tokens], now)
    return estimate


def residents(fleet: FleetView, now: float) -> tuple[list[str], list[str]]:
    fleet.age(now)
    engine = view_of(fleet).engine
    assert engine is not None
    return [one.request_id for one in engine.running], [one.request_id for one in engine.waiting]


def idle_ttft_s(tokens: int) -> float:
    return ReplayedEngine.from_state(EngineState(limits=LIMITS, running=[], waiting=[]), SLOW).ttft_s(tokens)


# ---- what is sent and what comes back ----------------------------------------------------------------------------


def test_an_instance_without_traffic_is_idle_and_known() -> None:
    """T42: the first estimate is the replay of an idle engine, under the name of its source, with no snapshot's age."""
    estimate = ask(shadowed(), 5.0)
    assert estimate.ttft_s == pytest.approx(idle_ttft_s(1000))
    assert (estimate.source, estimate.snapshot_age_s) == ("shadow", None)


def test_what_was_sent_stands_before_the_next_one() -> None:
    """A long prompt sent a moment ago delays the newcomer by what is left of its prefill."""
    fleet = shadowed()
    ask(fleet, 0.0)
    book(fleet, "r1", "a", now=0.0, prompt_tokens=8000)
    fleet.age(0.1)
    left_s = idle_ttft_s(8000) - 0.1
    assert ask(fleet, 0.1).wait_s == pytest.approx(left_s, rel=1e-6)


def test_a_first_token_sooner_than_replayed_moves_the_replay_on() -> None:
    """The engine was faster: the request decodes from now on, and the next one waits for a decode step only."""
    fleet = shadowed()
    book(fleet, "r1", "a", now=0.0, prompt_tokens=8000)
    fleet.first_token_seen("r1", 0.05)
    estimate = ask(fleet, 0.05)
    assert residents(fleet, 0.05) == (["r1"], [])
    assert estimate.wait_s < 2 * STEP


def test_a_first_token_later_than_replayed_holds_the_replay() -> None:
    """Until it comes nobody behind is prefilled, and as long again is expected; when it has come, all goes on."""
    fleet = shadowed()
    book(fleet, "r1", "a", now=0.0, prompt_tokens=8192)
    book(fleet, "r2", "a", now=0.0, prompt_tokens=8192)
    due_s = idle_ttft_s(8192)
    late_s = due_s + 0.4
    fleet.age(late_s)
    assert residents(fleet, late_s) == (["r1"], ["r2"])
    engine = view_of(fleet).engine
    assert engine is not None
    assert engine.residual_s == pytest.approx(0.4, abs=1e-3)
    fleet.first_token_seen("r1", late_s)
    fleet.age(late_s + 0.01)
    assert residents(fleet, late_s + 0.01)[0] == ["r1", "r2"]


def test_ends_free_what_they_held() -> None:
    """A request that ended is gone from the replay at once, with its blocks."""
    fleet = shadowed()
    book(fleet, "r1", "a", now=0.0)
    fleet.first_token_seen("r1", 0.1)
    assert fleet.release("r1", 0.2)
    assert residents(fleet, 0.2) == ([], [])
    engine = view_of(fleet).engine
    assert engine is not None
    assert engine.free_blocks == LIMITS.num_blocks - 1


def test_an_answer_that_outlives_its_prediction_stays() -> None:
    """Predictions end nothing: after a thousand tokens of predicted two hundred the request is still there."""
    fleet = shadowed()
    book(fleet, "r1", "a", now=0.0)
    fleet.first_token_seen("r1", 0.1)
    entry = fleet.entry("r1")
    assert entry is not None
    entry.num_events, entry.last_event_s = 1000, 20.0
    fleet.age(20.0)
    engine = view_of(fleet).engine
    assert engine is not None
    (resident,) = engine.running
    assert resident.output_tokens == pytest.approx(1000, abs=8)
    assert resident.target_output_tokens > 1200


def test_counts_of_events_are_corrected_by_reported_tokens() -> None:
    """Where events hold two tokens each, an answer with a hundred events is taken to have two hundred."""
    fleet = shadowed()
    for number in range(60):
        name = f"r{number}"
        book(fleet, name, "a", now=float(number))
        fleet.first_token_seen(name, number + 0.1)
        entry = fleet.entry(name)
        assert entry is not None
        entry.num_events, entry.last_event_s = 100, number + 0.5
        if number < 59:
            fleet.release(name, number + 0.9, 200)
    assert view_of(fleet).shadow is not None
    assert view_of(fleet).shadow.tokens_per_event == pytest.approx(2.0, abs=0.02)  # type: ignore[union-attr]
    fleet.age(59.5)
    engine = view_of(fleet).engine
    assert engine is not None
    assert engine.running[0].output_tokens == pytest.approx(200, abs=12)


def test_answers_that_are_not_streamed_hold_nothing_up() -> None:
    """Nothing is seen of them before their end, so the replay goes on by its own clock."""
    fleet = shadowed()
    fleet.book(
        request_id="whole", instance_id="a", prompt_tokens=1000, predicted_output_tokens=100.0, max_tokens=None,
        priority=0, now=0.0, is_streamed=False,
    )  # fmt: skip
    fleet.age(3.0)
    engine = view_of(fleet).engine
    assert engine is not None
    assert engine.running[0].output_tokens > 50
    assert ask(fleet, 3.0).source == "shadow"


# ---- when it no longer holds -------------------------------------------------------------------------------------


def test_an_engine_that_stops_to_answer_is_given_up_and_taken_up_again() -> None:
    """T10: beyond two seconds of silence other estimates speak, and say at least that; a first token brings it back."""
    fleet = shadowed()
    book(fleet, "r1", "a", now=0.0)
    due_s = idle_ttft_s(1000)
    assert ask(fleet, due_s + GIVE_UP_S - 0.1).source == "shadow"
    lost = ask(fleet, due_s + GIVE_UP_S + 1.0)
    assert lost.source == "queueing"
    assert lost.ttft_s >= GIVE_UP_S
    assert view_of(fleet).stale
    fleet.first_token_seen("r1", 4.0)
    assert ask(fleet, 4.0).source == "shadow"
    assert not view_of(fleet).stale


def test_one_mute_stream_does_not_take_the_engine_with_it() -> None:
    """A stream that keeps its first token back while others go on is taken to decode."""
    fleet = shadowed()
    book(fleet, "talks", "a", now=0.0)
    book(fleet, "mute", "a", now=0.0)
    fleet.first_token_seen("talks", 0.1)
    entry = fleet.entry("talks")
    assert entry is not None
    for tick in range(1, 60):
        entry.num_events, entry.last_event_s = 4 * tick, 0.1 + 0.06 * tick
        estimate = ask(fleet, entry.last_event_s + 0.001)
    assert (estimate.source, residents(fleet, entry.last_event_s)) == ("shadow", (["talks", "mute"], []))
    assert estimate.wait_s < 2 * STEP


def gauges(running: float, waiting: float, at_s: float, **more: float) -> Gauges:
    return Gauges(running, waiting, more.pop("usage", 0.0), at_s, **more)  # type: ignore[arg-type]


def test_traffic_past_the_router_is_found_and_widens_then_ends_the_shadow() -> None:
    """Three readings in a row with two requests too many widen it; with more foreign than own ones it is given up."""
    fleet = shadowed()
    for number in range(4):
        book(fleet, f"r{number}", "a", now=0.0)
        fleet.first_token_seen(f"r{number}", 0.1)
    plain = ask(fleet, 9.0)
    blocks = 4 * 64 + 2 * 500
    for at_s in (10.0, 11.0):
        fleet.observe_gauges("a", gauges(6, 0, at_s, usage=blocks / (LIMITS.num_blocks - 1)), at_s)
    assert ask(fleet, 11.0).source == "shadow"
    fleet.observe_gauges("a", gauges(6, 0, 12.0, usage=blocks / (LIMITS.num_blocks - 1)), 12.0)
    widened = ask(fleet, 12.0)
    assert widened.source == "shadow_widened"
    assert widened.ttft_p90_s / widened.ttft_s > 1.9 * plain.ttft_p90_s / plain.ttft_s
    assert "2 of its requests did not come through here" in (view_of(fleet).problem or "")
    assert len(residents(fleet, 12.0)[0]) == 6
    for at_s in (13.0, 14.0, 15.0):
        fleet.observe_gauges("a", gauges(9, 3, at_s), at_s)
    assert (ask(fleet, 15.0).source, view_of(fleet).stale) == ("queueing", True)
    for at_s in (16.0, 17.0, 18.0):
        fleet.observe_gauges("a", gauges(4, 0, at_s), at_s)
    assert (ask(fleet, 18.0).source, view_of(fleet).problem) == ("shadow", None)


def test_gauges_that_lag_a_little_accuse_nobody() -> None:
    """What was sent or has ended within three seconds may or may not show."""
    fleet = shadowed()
    for number in range(40):
        now = number * 0.5
        book(fleet, f"r{number}", "a", now=now)
        if number >= 4:
            fleet.release(f"r{number - 4}", now)
        lag = (number % 3) - 1
        fleet.observe_gauges("a", gauges(max(0, min(number, 4) + lag), 0, now), now)
        assert view_of(fleet).agreement.holds


def test_requests_that_the_gauges_lack_are_told() -> None:
    """Three settled requests that the engine does not know of: the replay is widened and says why."""
    fleet = shadowed()
    for number in range(3):
        book(fleet, f"r{number}", "a", now=0.0)
        fleet.first_token_seen(f"r{number}", 0.1)
    for at_s in (10.0, 11.0, 12.0):
        fleet.observe_gauges("a", gauges(0, 0, at_s), at_s)
    assert ask(fleet, 12.0).source == "shadow_widened"
    assert "3 requests sent there do not show in its gauges" in (view_of(fleet).problem or "")


def test_a_restarted_engine_has_nothing_of_what_was_sent_before() -> None:
    """Its counter begins anew: requests of the time before are gone, what was sent since the last reading stays."""
    fleet = shadowed()
    book(fleet, "old", "a", now=0.0)
    fleet.first_token_seen("old", 0.1)
    fleet.observe_gauges("a", gauges(1, 0, 5.0, generated_tokens=900.0), 5.0)
    book(fleet, "new", "a", now=5.5)
    fleet.observe_gauges("a", gauges(1, 0, 6.0, generated_tokens=3.0), 6.0)
    assert "old" not in {name for names in residents(fleet, 6.0) for name in names}
    assert "new" in {name for names in residents(fleet, 6.0) for name in names}
    fleet.observe_restart("a", 7.0)
    assert residents(fleet, 7.0) == ([], [])
    assert fleet.release("old", 7.1)
    assert fleet.release("new", 7.2)


def test_blocks_in_use_beyond_the_replay_are_believed_once_all_readings_agree() -> None:
    """Of six readings that show a thousand blocks more than replayed the first four change nothing."""
    fleet = shadowed()
    book(fleet, "r1", "a", now=0.0)
    fleet.first_token_seen("r1", 0.1)
    free = []
    for at_s in range(1, 7):
        fleet.observe_gauges("a", gauges(1, 0, at_s, usage=1064 / (LIMITS.num_blocks - 1)), at_s)
        ask(fleet, float(at_s))
        engine = view_of(fleet).engine
        assert engine is not None
        free.append(engine.free_blocks)
    assert all(LIMITS.num_blocks - 1 - blocks < 100 for blocks in free[:4])
    assert all(900 < LIMITS.num_blocks - 1 - blocks < 1100 for blocks in free[4:])


def test_a_new_configuration_takes_over_what_is_under_way() -> None:
    """Under other limits a request that has begun decodes on, one that has not waits for its prefill."""
    fleet = shadowed()
    for name in ("talks", "waits"):
        book(fleet, name, "a", now=0.0)
    fleet.first_token_seen("talks", 0.1)
    entry = fleet.entry("talks")
    assert entry is not None
    entry.num_events, entry.last_event_s = 40, 0.9
    other = FleetView([instance("a", step_time=SLOW, limits=replace(LIMITS, max_num_seqs=8))], shadowed=["a"])
    other.adopt(fleet, 1.0)
    other.age(1.0)
    engine = view_of(other).engine
    assert engine is not None
    assert {one.request_id: one.output_tokens for one in engine.running} == {"talks": 40}
    assert [one.request_id for one in engine.waiting] == ["waits"]


def test_a_cache_unlike_the_profiles_is_told() -> None:
    """An engine with another number of blocks than configured, or a prefix cache, shows as a problem."""
    fleet = shadowed()
    fleet.observe_gauges("a", gauges(0, 0, 1.0, num_blocks=9000, block_size=16), 1.0)
    assert "num_blocks is 9000, not 20000" in (view_of(fleet).problem or "")
    fleet.observe_gauges("a", gauges(0, 0, 2.0, prefix_caching=True), 2.0)
    assert "prefix_caching is True, not False" in (view_of(fleet).problem or "")


def test_a_request_that_cannot_be_replayed_is_told_and_stays_in_the_ledger() -> None:
    """An impossible priority keeps the request out of the replay only."""
    fleet = shadowed()
    fleet.book(
        request_id="r", instance_id="a", prompt_tokens=10, predicted_output_tokens=9.0, max_tokens=None,
        priority=2**40, now=0.0,
    )  # fmt: skip
    assert "request r cannot be replayed" in (view_of(fleet).problem or "")
    assert "r" in fleet
    assert residents(fleet, 0.0) == ([], [])
    fleet.first_token_seen("r", 0.1)
    assert fleet.release("r", 0.2)


def test_the_clock_scale_stretches_replayed_time() -> None:
    """An engine known to be twice as slow is half as far, and everything still to come takes twice as long."""
    fleet = shadowed()
    view_of(fleet).clock_scale = 2.0
    book(fleet, "r1", "a", now=0.0, prompt_tokens=8000)
    estimate = ask(fleet, 0.1)
    assert estimate.wait_s == pytest.approx(2 * idle_ttft_s(8000) - 0.1, rel=1e-6)
    assert estimate.raw_ttft_s == pytest.approx(estimate.ttft_s / 2)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5), st.sampled_from(["book", "first", "event", "release", "age", "gauges", "restart"])
        ),
        max_size=60,
    )
)
def test_whatever_is_seen_the_shadow_holds_what_is_under_way(events: list[tuple[int, str]]) -> None:
    """In any order of events the shadow holds no request that is not in the ledger, and is empty when that is."""
    fleet = shadowed()
    now = 0.0
    for number, event in events:
        now += 0.037
        name = f"r{number}"
        if event == "book" and name not in fleet:
            book(fleet, name, "a", now=now, prompt_tokens=1 + 700 * number)
        elif event == "first":
            fleet.first_token_seen(name, now)
        elif event == "event" and (entry := fleet.entry(name)) is not None:
            fleet.first_token_seen(name, now)
            entry.num_events, entry.last_event_s = entry.num_events + 30, now
        elif event == "release":
            fleet.release(name, now, 100)
        elif event == "gauges":
            fleet.observe_gauges("a", gauges(number, number % 2, now, usage=0.1), now)
        elif event == "restart":
            fleet.observe_restart("a", now)
        fleet.age(now)
        engine = view_of(fleet).engine
        if engine is not None:
            own = {one.request_id for one in (*engine.running, *engine.waiting) if not one.request_id.startswith("\0")}
            assert own <= set(view_of(fleet).ledger)
    for number in range(6):
        fleet.release(f"r{number}", now)
    view_of(fleet).agreement.__init__()  # type: ignore[misc]  # what gauges said is not the question here
    assert residents(fleet, now + 1.0) == ([], [])


def test_only_what_can_be_replayed_is_shadowed() -> None:
    """Without limits or a step time there is no shadow, whatever was asked for."""
    one = instance("a")
    fleet = FleetView([one.__class__(id="a", model="cheap")], shadowed=["a"])
    assert fleet.views[0].shadow is None
    assert math.isfinite(ask(fleet, 0.0).ttft_s)
    with pytest.raises(EngineInputError):
        EngineRequest(request_id="r", prompt_tokens=0, target_output_tokens=1)


# ---- engines that schedule a batch ahead -------------------------------------------------------------------------


class Engine:
    """The engine itself, by the core's own steps: when each batch ends, and what it gives then."""

    def __init__(self, limits: EngineLimits) -> None:
        self._is_async = limits.async_scheduling
        self.inside = ReplayedEngine(limits, SLOW)
        self.at_s, self._next_s = 0.0, 0.0
        self.given: tuple[dict[str, int], list[str]] | None = None  # outputs and ends, due at ``at_s``

    def step(self) -> bool:
        """Start the next batch; False when there is none. What the batch before it or itself gives is then due."""
        before = {one.request_id: one.output_tokens for one in self.inside.running}
        batch = self.inside.step()
        if not batch.time_s and not self._next_s:
            return False
        self.at_s += self._next_s if self._is_async else batch.time_s
        self._next_s = batch.time_s
        outputs = {
            one.request_id: one.output_tokens
            for one in self.inside.running
            if one.output_tokens > before.get(one.request_id, 0)
        }
        outputs.update({name: before.get(name, 0) + 1 for name in batch.finished})
        self.given = (outputs, list(batch.finished))
        return True


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_shadow_is_where_its_engine_is_also_a_batch_ahead(async_scheduling: bool) -> None:
    """At every arrival: the same queue, the same end of the batch in flight, the same requests in it or behind it."""
    limits = replace(LIMITS, async_scheduling=async_scheduling, max_num_batched_tokens=2048, max_num_seqs=12)
    fleet, engine, rng = (
        FleetView([instance("a", limits=limits, step_time=SLOW)], shadowed=["a"]),
        Engine(limits),
        random.Random(1),
    )
    arrivals = [0.0]
    while len(arrivals) < 120:
        arrivals.append(arrivals[-1] + rng.expovariate(6.0))
    waits = 0
    while arrivals or engine.given is not None:
        if arrivals and (engine.given is None or arrivals[0] < engine.at_s):
            now = arrivals.pop(0)
            engine.at_s = max(engine.at_s, now)
            running, waiting = residents(fleet, now)
            assert waiting == [one.request_id for one in engine.inside.waiting]
            ending = set() if engine.given is None else set(engine.given[1])
            assert set(running) == {one.request_id for one in engine.inside.running} | ending
            view = view_of(fleet)
            assert view.engine is not None
            assert view.engine.residual_s == pytest.approx(engine.at_s - now, abs=1e-6)
            waits += bool(waiting)
            name, tokens = f"r{len(arrivals)}", rng.randint(10, 5000)
            book(fleet, name, "a", now=now, prompt_tokens=tokens)
            engine.inside.submit(
                EngineRequest(request_id=name, prompt_tokens=tokens, target_output_tokens=rng.randint(1, 60))
            )
        elif engine.given is not None:
            (outputs, ended), engine.given = engine.given, None
            for name, count in outputs.items():
                entry = fleet.entry(name)
                assert entry is not None
                entry.num_events, entry.last_event_s = count, engine.at_s
                fleet.first_token_seen(name, engine.at_s)
            for name in ended:
                fleet.release(name, engine.at_s)
        if engine.given is None:
            engine.step()
    assert waits > 20
