"""From one fleet to the next when a pool's description changes: what is kept, what begins anew, what is forgotten."""

from __future__ import annotations

import msgspec
import numpy as np

from headway.assembly import build_router, rebuild_router
from headway.config import parse_config
from headway.fleet import FleetView
from headway.types import Outcome
from pools import LIMITS, book, instance, snapshot

NARROW = msgspec.structs.replace(LIMITS, max_num_seqs=8)


def counts(fleet: FleetView) -> dict[str, int]:
    return {view.instance.id: view.num_outstanding for view in fleet.views}


def test_what_stays_keeps_its_engine_and_requests() -> None:
    """Order may change: the same views, each request released exactly once, on the right one."""
    before = FleetView([instance("a"), instance("b"), instance("c")], stale_after_s=1e6)
    for name in "abc":
        before.observe_snapshot(snapshot(name, 500), 0.0)
        book(before, f"on-{name}", name)
    before.age(0.1)
    engines = {view.instance.id: view.engine for view in before.views}
    after = FleetView([instance("d"), instance("c"), instance("a")], stale_after_s=1e6)
    assert after.adopt(before, 0.1) == ["d"]
    after.age(0.2)
    assert [view.engine for view in after.views] == [None, engines["c"], engines["a"]]
    assert counts(after) == {"d": 0, "c": 1, "a": 1}
    assert "on-b" not in after
    assert not after.release("on-b", 0.2)
    assert after.release("on-c", 0.2)
    assert not after.release("on-c", 0.2)
    assert counts(after) == {"d": 0, "c": 0, "a": 1}
    ttft_s, _ = after.first_tokens([100, 100, 100], 0)
    assert ttft_s[0] is None
    assert ttft_s[1] is not None
    assert ttft_s[2] is not None
    assert ttft_s[1] < ttft_s[2]  # one more request is booked there


def test_other_limits_keep_requests_and_marks_but_no_state() -> None:
    """The same server on other terms: its state is read anew, with what was sent there joined to it."""
    before = FleetView([instance("a")], stale_after_s=1e6)
    before.observe_snapshot(snapshot("a", 500), 0.0)
    book(before, "mine", "a")
    before.set_draining("a", True)
    before.age(0.1)
    after = FleetView([instance("a", limits=NARROW)], stale_after_s=1e6)
    assert after.adopt(before, 0.2) == ["a"]
    view = after.views[0]
    assert (view.engine, view.draining, view.num_outstanding) == (None, True, 1)
    shown = msgspec.structs.replace(snapshot("a", at_s=0.3, sequence=7), limits=NARROW)
    after.observe_snapshot(shown, 0.3)
    after.age(0.3)
    assert view.engine is not None
    assert view.engine.num_waiting + view.engine.num_running == 1
    assert after.release("mine", 0.4)
    assert view.engine.num_waiting + view.engine.num_running == 0


def test_another_server_of_the_same_name_begins_with_nothing() -> None:
    """Requests of the old address say nothing of the new one."""
    before = FleetView([instance("a")], stale_after_s=1e6)
    book(before, "old", "a")
    moved = msgspec.structs.replace(instance("a"), api_base="http://elsewhere/v1")
    after = FleetView([moved], stale_after_s=1e6)
    assert after.adopt(before, 0.0) == ["a"]
    assert counts(after) == {"a": 0}
    assert not after.release("old", 1.0)


def test_random_changes_lose_and_double_no_request() -> None:
    """Over many fleets in a row, every count is that of the requests booked and not released on what was kept."""
    rng = np.random.default_rng(3)
    names = [f"i{number}" for number in range(6)]
    fleet = FleetView([instance(name) for name in names], stale_after_s=1e6)
    booked: dict[str, str] = {}
    for step in range(300):
        now = 0.01 * step
        present = [view.instance.id for view in fleet.views]
        draw = rng.random()
        if draw < 0.5:
            name = present[rng.integers(len(present))]
            book(fleet, f"r{step}", name, now=now)
            booked[f"r{step}"] = name
        elif draw < 0.8 and booked:
            request = list(booked)[rng.integers(len(booked))]
            assert fleet.release(request, now)
            del booked[request]
        else:
            chosen = [names[index] for index in rng.permutation(6)[: rng.integers(1, 7)]]
            after = FleetView([instance(name) for name in chosen], stale_after_s=1e6)
            after.adopt(fleet, now)
            fleet = after
            booked = {request: name for request, name in booked.items() if name in chosen}
        held = {name: sum(1 for one in booked.values() if one == name) for name in counts(fleet)}
        assert counts(fleet) == held


POOL = """
models: [{name: m}]
instances:
  - {id: a, model: m, api_base: "http://x/v1", engine: vllm-0.32, profile: h100-qwen3-8b}
  - {id: b, model: m, api_base: "http://y/v1"}
routing: {policy: bear}
"""


def test_a_router_goes_on_with_what_was_learned() -> None:
    """The estimator stays where it is the same one; corrections stay but for an instance whose clock is another."""
    before = parse_config(POOL)
    router = build_router(before)
    for number in range(20):
        router.residuals.observe("a", 1.0, 2.0)
        router.observe(Outcome(query_id=str(number), instance_id="b", status="ok", ttft_s=0.3), 0.0)
    learned = router.residuals.residual("a").ratio
    assert learned is not None
    same = parse_config(POOL + "server: {port: 0}\n")
    after = rebuild_router(same, router, before, now=1.0)
    assert after.estimator is router.estimator
    assert after.residuals.residual("a").ratio == learned
    assert after.fleet is not router.fleet
    other = parse_config(POOL.replace("h100-qwen3-8b", "h100-qwen3-32b").replace("bear}", "bear_throughput}"))
    last = rebuild_router(other, after, same, now=2.0)
    assert last.residuals.residual("a").ratio is None
    assert last.estimator is not router.estimator
