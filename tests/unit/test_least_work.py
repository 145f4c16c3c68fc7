"""The least-work fallback: where it sends a query, when it stands back, and from the configuration to a decision."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from headway.assembly import build_router
from headway.cli.validate import validate
from headway.config import parse_config
from headway.errors import ConfigError
from headway.estimate.registry import make_estimator
from headway.estimate.work import own_work
from headway.fleet import FleetView
from headway.policy.least_work import LeastWork
from headway.policy.registry import make_policy
from headway.predict.prior import PriorPredictor
from headway.router import Router
from headway.types import Candidate, Estimate, Instance, Snapshot, Verdict
from pools import FAST, LIMITS, MODELS, SLOW, choice, instance, query, snapshot

QUEUE = [8000] * 30
POOL = """
models: [{name: qwen3-0.6b}, {name: qwen3-8b}]
instances:
  - {id: small, model: qwen3-0.6b, api_base: "http://127.0.0.1:1/v1", engine: vllm-0.32, profile: h100-qwen3-0.6b}
  - {id: medium, model: qwen3-8b, api_base: "http://127.0.0.1:2/v1", engine: vllm-0.32, profile: h100-qwen3-8b}
routing: {policy: bear, fallback: least_work}
"""


def router(*instances: Instance, queued: dict[str, list[int]], fallback: str = "least_work") -> Router:
    made = Router(
        fleet=FleetView(instances, stale_after_s=1e6),
        models=MODELS,
        policy=make_policy("bear", rng=np.random.default_rng(1), options={"fallback": fallback}),
        estimator=make_estimator("replay"),
        predictor=PriorPredictor(MODELS),
    )
    for one in instances:
        if one.limits is not None:
            made.observe(snapshot(one.id, *queued.get(one.id, [])), 0.0)
    return made


def candidate(name: str, ttft_s: float = 9.0, verdict: Verdict = "late", **figures: object) -> Candidate:
    known: dict[str, object] = {"utility": 0.5, "output_tokens": 200.0, "prompt_tokens": 1000, **figures}
    return Candidate(name, "m", verdict, estimate=Estimate(ttft_s, ttft_s, 0.0, "replay"), **known)  # type: ignore[arg-type]


def bound(*instances: Instance) -> tuple[LeastWork, FleetView]:
    fleet, rule = FleetView(instances), LeastWork()
    rule.bind(fleet)
    return rule, fleet


def test_a_hopeless_query_goes_where_it_is_the_least_work() -> None:
    """With every instance late, the fast engine takes it although the slow one would begin sooner."""
    fast, slow = instance("fast", step_time=FAST), instance("slow", model="dear", step_time=SLOW)
    queued = {"fast": QUEUE * 20, "slow": QUEUE[:3]}
    hopeless = query(1000, target_s=0.2)
    least_work, least_ttft = (
        router(fast, slow, queued=queued, fallback=name).decide(hopeless, 0.0) for name in ("least_work", "least_ttft")
    )
    assert [candidate.verdict for candidate in least_work.candidates] == ["late", "late"]
    assert choice(least_work).instance_id == "fast"
    assert choice(least_ttft).instance_id == "slow"


def test_a_query_that_can_be_served_in_time_is_not_affected() -> None:
    """With an instance in time the largest utility wins as ever."""
    fast, slow = instance("fast", step_time=FAST), instance("slow", model="dear", step_time=SLOW)
    decision = router(fast, slow, queued={"fast": QUEUE}).decide(query(1000, target_s=0.5), 0.0)
    assert choice(decision).instance_id == "slow"


def test_the_work_is_that_of_the_step_time_and_limits() -> None:
    """The seconds compared are those of the query's own work, and its predicted length counts."""
    rule, _ = bound(instance("a", step_time=SLOW))
    assert rule.work_s(candidate("a")) == own_work(SLOW, LIMITS).seconds(1000.0, 200.0)
    assert rule.work_s(candidate("a", output_tokens=400.0)) == own_work(SLOW, LIMITS).seconds(1000.0, 400.0)


def test_a_clock_that_is_not_trusted_is_left_out() -> None:
    """An instance whose clock was found wrong takes no hopeless queries; without any trusted one TTFT decides again."""
    fast, slow = instance("fast", step_time=FAST), instance("slow", model="dear", step_time=SLOW)
    queued = {"fast": QUEUE * 20, "slow": QUEUE[:3]}
    made = router(fast, slow, instance("third", step_time=FAST), queued=queued | {"third": QUEUE * 10})
    hopeless = query(1000, target_s=0.02)
    assert choice(made.decide(hopeless, 0.0)).instance_id == "third"  # equal work, sooner
    made.fleet.views[2].clock_trusted = False
    assert choice(made.decide(hopeless, 0.0)).instance_id == "fast"
    for view in made.fleet.views:
        view.clock_trusted = False
    assert choice(made.decide(hopeless, 0.0)).instance_id == "slow"
    made.fleet.views[0].clock_trusted = True
    assert choice(made.decide(hopeless, 0.0)).instance_id == "fast"


def test_an_instance_of_unknown_work_is_left_out() -> None:
    """A hosted instance has no step time: it takes a hopeless query only where nobody's work is known."""
    hosted = Instance(id="hosted", model="dear")
    rule, _ = bound(instance("a", step_time=SLOW), hosted)
    pool = [candidate("hosted", 1.0), candidate("a", 9.0)]
    assert rule.choose([0, 1], pool) == [1]
    assert rule.choose([0], pool) == []
    assert LeastWork().choose([0, 1], pool) == []  # not bound to any fleet


def test_an_instance_that_cannot_run_the_query_is_left_out() -> None:
    """An infinite replay is no wait but a refusal; an infinite average-case estimate is overload, and may take it."""
    rule, fleet = bound(instance("a", step_time=FAST), instance("b", step_time=SLOW))
    pool = [candidate("a", np.inf, "saturated"), candidate("b")]
    assert rule.choose([0, 1], pool) == [0]
    fleet.observe_snapshot(snapshot("a"), 0.0)
    fleet.age(0.0)
    assert rule.choose([0, 1], pool) == [1]


def test_equal_work_goes_to_the_sooner_replica() -> None:
    """Two replicas are the same work to both; the smaller estimated TTFT decides, then the fewer requests."""
    policy = make_policy("bear", rng=np.random.default_rng(0), options={"fallback": "least_work"})
    policy.bind(FleetView([instance("a"), instance("b")]))  # type: ignore[attr-defined]
    pool = [candidate("a", 5.0), candidate("b", 4.0)]
    assert policy.choose(query(), pool, 0.0) == 1
    pool = [candidate("a", 4.0, num_outstanding=3), candidate("b", 4.0, num_outstanding=2)]
    assert policy.choose(query(), pool, 0.0) == 1


def test_the_throughput_ablation_takes_the_fallback_too() -> None:
    """The rule is the same on another estimate, so that estimates alone are compared."""
    policy = make_policy("bear_throughput", rng=np.random.default_rng(0), options={"fallback": "least_work"})
    policy.bind(FleetView([instance("a", step_time=SLOW), instance("b", step_time=FAST)]))  # type: ignore[attr-defined]
    assert policy.choose(query(), [candidate("a", 1.0), candidate("b", 2.0)], 0.0) == 1


# ------------------------------------------------------------ from the configuration


def crowded(router: Router, instance_id: str, count: int) -> Snapshot:
    limits = router.fleet.views[router.fleet.index(instance_id)].instance.limits
    assert limits is not None
    return replace(snapshot(instance_id, *[8000] * count), limits=limits, free_blocks=limits.num_blocks - 1)


@pytest.mark.parametrize(("fallback", "chosen"), [("least_work", "small"), ("least_ttft", "medium")])
def test_the_configured_fallback_decides(fallback: str, chosen: str) -> None:
    """The key reaches the decision: the same hopeless query goes to the small or to the sooner instance."""
    made = build_router(parse_config(POOL.replace("least_work", fallback)))
    made.fleet._stale_after_s = 1e6
    for instance_id, count in (("small", 400), ("medium", 5)):
        made.observe(crowded(made, instance_id, count), 0.0)
    hopeless = replace(query(1000, target_s=0.2), prompt_tokens={"qwen3-0.6b": 1000, "qwen3-8b": 1000})
    assert choice(made.decide(hopeless, 0.0)).instance_id == chosen


@pytest.mark.parametrize(
    ("routing", "key", "words"),
    [
        ("{policy: shortest_queue, fallback: least_work}", "routing.fallback", "shortest_queue does not take it"),
        ("{fallback: least_work, delta_per_ms: 1.0e-5}", "routing.fallback", "delta_per_ms"),
        ("{fallback: least_wrok}", "routing.fallback", "did you mean 'least_work'"),
        ("{policy: bear_lagrangain}", "routing.policy", "did you mean 'bear_lagrangian'"),
    ],
)
def test_a_fallback_in_vain_is_refused_at_its_line(routing: str, key: str, words: str) -> None:
    """The error names key and line once, and the nearest thing that exists."""
    with pytest.raises(ConfigError) as caught:
        build_router(parse_config(POOL.replace("{policy: bear, fallback: least_work}", routing)))
    assert (caught.value.key, caught.value.line) == (key, 6)
    assert words in str(caught.value)
    assert str(caught.value).count(key) == 1


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("fallback: least_work", "fallback: least_work, on_infeasible: reject", ["never used"]),
        (", profile: h100-qwen3-8b", "", ["instance medium: without a profile"]),
        ("fallback: least_work", "fallback: least_ttft, on_infeasible: reject", []),
        ("no change", "", []),
    ],
)
def test_validate_warns_of_a_fallback_that_cannot_work(
    old: str, new: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A least-work fallback that is never asked, or knows no work of an instance, is right but worth a word."""
    path = tmp_path / "pool.yaml"
    path.write_text(POOL.replace(old, new))
    assert validate(path, json=True) == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert len(warnings) == len(words)
    assert all(word in warning for word, warning in zip(words, warnings, strict=True))


def test_validate_names_the_estimator_of_the_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An instance that shows its state, or is replayed without, is estimated as the configured policy says."""
    path = tmp_path / "pool.yaml"
    shown = POOL.replace("profile: h100-qwen3-8b", "profile: h100-qwen3-8b, snapshots: {shared_memory: headway-x}")
    path.write_text(shown.replace("bear, fallback: least_work", "bear_throughput"))
    assert validate(path, json=True) == 0
    instances = json.loads(capsys.readouterr().out)["instances"]
    assert [instance["estimate"] for instance in instances] == ["prefill_throughput", "prefill_throughput"]


def test_a_configured_ablation_speaks_by_its_own_estimator() -> None:
    """``bear_throughput`` in a configuration decides on the throughput estimate, and says so in every candidate."""
    made = build_router(parse_config(POOL.replace("bear, fallback: least_work", "bear_throughput")))
    for instance_id in ("small", "medium"):
        made.observe(crowded(made, instance_id, 1), 0.0)
    decision = made.decide(replace(query(), prompt_tokens={"qwen3-0.6b": 1000, "qwen3-8b": 1000}), 0.0)
    sources = {one.estimate.source for one in decision.candidates if one.estimate is not None}
    assert (decision.policy, sources) == ("bear_throughput", {"prefill_throughput"})
