"""The lab's truth engine: the same schedule as a replayed one, under a clock of its own; and what a mirror may tell."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from engine_builders import fresh, limits
from headway._core import LengthRule, ReplayedEngine, TruthEngine
from headway.errors import EngineInputError
from headway.types import EngineLimits, StepTime

CLOCK = StepTime.six_term(b0=7.296e-3, bp=2.0789e-5, bpp=5.1196e-10, bd=2.5632e-5, bs=4.6491e-8, bss=2.6851e-13)
FIT = StepTime.linear(b0=7.49e-3, b1=2.078e-5, b2=5.037e-8, b3=1.033e-9)
SURVIVAL = LengthRule("survival")
Arrival = tuple[float, int, int]


def truth(seed: int = 1, *, within: EngineLimits | None = None, clock: StepTime = CLOCK, **noise: float) -> TruthEngine:
    quiet: dict[str, Any] = {"noise": 0.0, "stall_probability": 0.0, "stall_mean_s": 0.0}
    quiet |= {"gap_low_s": 0.0, "gap_high_s": 0.0, **noise}
    return TruthEngine(within or limits(max_num_batched_tokens=2048, max_num_seqs=32), clock, seed=seed, **quiet)


def arrivals(seed: int, num: int = 300) -> list[Arrival]:
    rng = random.Random(seed)
    times = itertools.accumulate(rng.expovariate(4.0) for _ in range(num))
    return [(now, rng.randint(5, 400), rng.randint(1, 120)) for now in times]


def submit(engine: TruthEngine, name: str, prompt: int, target: int, now: float, *, predicted: float = 60.0) -> None:
    engine.submit(
        name,
        prompt_tokens=prompt,
        target_output_tokens=target,
        predicted_output_tokens=predicted,
        max_tokens=1024,
        now=now,
    )


def played(engine: TruthEngine, rows: list[Arrival]) -> dict[tuple[str, bool], float]:
    events = []
    for number, (now, prompt, target) in enumerate(rows):
        events += engine.run_until(now)
        submit(engine, str(number), prompt, target, now)
    events += engine.run_until(float("inf"))
    return {(name, ended): time_s for time_s, name, ended in events}


def stepped(within: EngineLimits, rows: list[Arrival]) -> dict[tuple[str, bool], float]:
    """The same by stepping a replayed engine: arrivals join the first batch that begins at or after them."""
    engine, clock_s, waiting = ReplayedEngine(within, CLOCK), 0.0, list(enumerate(rows))
    events: dict[tuple[str, bool], float] = {}
    while waiting or engine.num_running or engine.num_waiting:
        while waiting and waiting[0][1][0] <= clock_s:
            number, (_, prompt, target) = waiting.pop(0)
            engine.submit(fresh(str(number), prompt, target, max_tokens=1024))
        if not (engine.num_running or engine.num_waiting):
            clock_s = waiting[0][1][0]
            continue
        batch = engine.step()
        clock_s += batch.time_s
        events |= {(name, False): clock_s for name in batch.first_tokens}
        events |= {(name, True): clock_s for name in batch.finished}
    return events


@pytest.mark.parametrize("seed", range(6))
def test_without_noise_events_are_those_of_stepping(seed: int) -> None:
    """First tokens and ends come when stepping batch by batch gives them, also where blocks are short."""
    within = limits(max_num_batched_tokens=512, max_num_seqs=16, num_blocks=(400, 120)[seed % 2])
    rows = arrivals(seed)
    by_events, by_steps = played(truth(within=within), rows), stepped(within, rows)
    assert by_events.keys() == by_steps.keys()
    assert max(abs(by_events[key] - by_steps[key]) for key in by_steps) < 1e-9


def test_the_same_seed_gives_the_same_times_and_another_seed_does_not() -> None:
    """Noise is drawn from the engine's own seed."""
    noise = {"noise": 0.03, "stall_probability": 2e-3, "stall_mean_s": 0.03, "gap_low_s": 1e-4, "gap_high_s": 3e-4}
    rows = arrivals(9)
    assert played(truth(5, **noise), rows) == played(truth(5, **noise), rows)
    assert played(truth(5, **noise), rows) != played(truth(6, **noise), rows)


def test_step_noise_has_the_spread_asked_for() -> None:
    """The logarithm of a step's factor has the given standard deviation, and stalls and gaps lengthen the mean."""
    flat = StepTime.six_term(b0=0.01, bp=0, bpp=0, bd=0, bs=0, bss=0)
    engine = truth(3, clock=flat, noise=0.05)
    submit(engine, "a", 8, 20_000, 0.0, predicted=1e4)
    edges = []
    for step in range(3000):
        engine.run_until(step * 1e-2)
        view = ReplayedEngine(limits(), flat)
        edges.append(engine.mirror(view, SURVIVAL))
    durations = np.diff(np.unique(edges))
    single = durations[durations < 0.0149]  # now and then two steps fall between two looks
    assert np.std(np.log(single / 0.01)) == pytest.approx(0.05, rel=0.1)
    slow = truth(3, clock=flat, stall_probability=0.5, stall_mean_s=0.02, gap_low_s=0.001, gap_high_s=0.003)
    submit(slow, "a", 8, 900, 0.0)
    end_s = max(time_s for time_s, _, _ in slow.run_until(float("inf")))
    assert end_s / 900 == pytest.approx(0.01 + 0.5 * 0.02 + 0.002, rel=0.1)


def test_events_of_the_batch_in_flight_lie_ahead() -> None:
    """A batch that began is told at once, with the time at which it will end."""
    engine = truth()
    submit(engine, "a", 100, 5, 1.0)
    ((time_s, name, ended),) = engine.run_until(1.0 + 1e-9)
    assert (name, ended) == ("a", False)
    assert time_s > 1.0
    assert engine.run_until(time_s) == []


def test_a_mirror_shows_expected_lengths_not_true_ones() -> None:
    """A router's view holds the prediction; the request's own length is nowhere in it."""
    engine = truth()
    submit(engine, "a", 100, 777, 0.0, predicted=200.0)
    engine.run_until(0.1)
    view = ReplayedEngine(limits(), FIT)
    engine.mirror(view, SURVIVAL)
    (resident,) = view.running
    assert resident.target_output_tokens == 200
    assert resident.output_tokens >= 1


def test_a_mirror_does_not_betray_an_end_in_the_batch_in_flight() -> None:
    """A request that ends by itself in the present batch still stands there for the router, one by max_tokens not."""
    for max_tokens, remaining in ((1024, 1), (1, 0)):
        engine = truth()
        engine.submit(
            "a", prompt_tokens=50, target_output_tokens=1, predicted_output_tokens=300.0, max_tokens=max_tokens, now=0.0
        )
        engine.run_until(1e-6)
        view = ReplayedEngine(limits(), FIT)
        engine.mirror(view, SURVIVAL)
        assert engine.num_running == 0
        assert view.num_running == remaining


def test_a_mirror_stands_at_the_end_of_the_batch_in_flight() -> None:
    """Residual is that batch by the estimator's clock, counted from its start; the state is the one after it."""
    engine = truth()
    submit(engine, "a", 300, 50, 0.0)
    engine.run_until(1e-6)
    view = ReplayedEngine(limits(), FIT)
    assert engine.mirror(view, SURVIVAL) == 0.0
    c = FIT.named()
    assert view.residual_s == pytest.approx(c["b0"] + c["b1"] * 300 + c["b3"] * 300 * 301 / 2, rel=1e-12)
    (resident,) = view.running
    assert (resident.computed_tokens, resident.output_tokens) == (300, 1)


def test_a_clone_is_a_snapshot() -> None:
    """A copy keeps the state of its moment while the engine runs on."""
    engine = truth()
    submit(engine, "a", 300, 50, 0.0)
    engine.run_until(0.05)
    copy = engine.clone()
    engine.run_until(float("inf"))
    assert engine.num_running == 0
    assert copy.num_running == 1


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("noise", {"noise": -0.1}),
        ("noise", {"noise": float("nan")}),
        ("stall_mean_s", {"stall_probability": 0.1}),
        ("gap_low_s", {"gap_low_s": 2.0, "gap_high_s": 1.0}),
    ],
)
def test_impossible_noise_is_refused_by_name(field: str, change: dict[str, float]) -> None:
    """Negative, NaN or contradictory noise raises an error that names the field."""
    with pytest.raises(EngineInputError, match=field):
        truth(**change)


def test_impossible_requests_are_refused_by_name() -> None:
    """A prompt that never fits and a time that is none are errors, not crashes."""
    engine = truth()
    with pytest.raises(EngineInputError, match="prompt_tokens"):
        submit(engine, "a", 10**9, 5, 0.0)
    with pytest.raises(EngineInputError, match="target_output_tokens"):
        submit(engine, "a", 10, 0, 0.0)
    with pytest.raises(EngineInputError, match="now"):
        engine.run_until(float("nan"))


@pytest.mark.parametrize("setting", ["async_scheduling", "prefix_caching"])
def test_what_a_truth_engine_does_not_do_is_refused(setting: str) -> None:
    """The lab plays synchronous engines without a prefix cache, and says so instead of playing others wrongly."""
    with pytest.raises(EngineInputError, match=setting):
        truth(within=limits(**{setting: True}))
