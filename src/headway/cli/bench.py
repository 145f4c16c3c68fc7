"""``headway bench``: what the core costs, in instructions and microseconds, and how fast the lab simulates.

Instructions are counted by callgrind on a native program without Python and are repeatable on a noisy machine;
microseconds are CPU time of this process on this machine and are for orientation only.
"""

from __future__ import annotations

import json as json_module
import shutil
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from headway.cli.bench_gateway import gateway
from headway.cli.bench_predict import predict
from headway.cli.bench_prices import prices
from headway.errors import HeadwayError

if TYPE_CHECKING:
    from headway.router import Router
    from headway.types import EngineLimits, EngineState, Prediction, Query, StepTime

app = App(name="bench", help="Measure what the core, predictions, the gateway and the lab cost.")
app.command(gateway)
app.command(predict)
app.command(prices)

_CASES = ("light_256", "saturated_128_128", "saturated_256_768", "cached")
_INSTRUCTION_BUDGETS = {"light_256": 10_000, "saturated_128_128": 120_000, "saturated_256_768": 600_000, "cached": 300}
_NUM_STATES = 8  # of which the native program takes the mean
_LAB_QUERIES = 10_000
_PYTHON_TARGETS = {"cached_ns": 100.0, "all_64_us": 5.0, "decide_3_us": 40.0, "decide_64_us": 150.0}


@app.command
def core(*, json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Count the instructions of the replay, and time it natively and from Python.

    Parameters
    ----------
    json
        Print one JSON object instead of a table.
    """
    from headway import _core

    program = Path(_core.__file__ or "").with_name("_bench_core")  # installed beside the native module
    if not program.exists():
        raise HeadwayError(f"{program.name} is missing: build the native core with `make build`")
    instructions, reason = _count_instructions(program)
    native = subprocess.run([program, "microseconds"], check=True, capture_output=True, text=True)
    figures: dict[str, Any] = {
        "instructions": instructions,
        "microseconds": json_module.loads(native.stdout),
        "python": _time_python(),
    }
    if reason is not None:
        figures["instructions_reason"] = reason
    if json:
        print(json_module.dumps(figures))
    else:
        _print_table(figures)
    return 0


@app.command
def lab(
    *, quick: Annotated[bool, Parameter(negative=())] = False, json: Annotated[bool, Parameter(negative=())] = False
) -> int:
    """Measure simulated queries per CPU second, and the memory that a million of them take.

    Parameters
    ----------
    quick
        Leave out the run of a million queries.
    json
        Print one JSON object instead of a table.
    """
    rates = {
        policy: {str(count): round(_simulate(policy, count, _LAB_QUERIES)["queries_per_cpu_s"], 1) for count in (3, 64)}
        for policy in ("bear", "round_robin", "shortest_queue")
    }
    figures: dict[str, Any] = {"queries_per_cpu_s": rates}
    if not quick:
        million = _simulate("bear", 3, 1_000_000)
        figures["peak_rss_mb_1m"] = round(million["peak_rss_mb"], 1)
        figures["queries_per_cpu_s_1m"] = round(million["queries_per_cpu_s"], 1)
    if json:
        print(json_module.dumps(figures))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Simulated queries per CPU second, {_LAB_QUERIES:,} queries", title_justify="left")
    for column in ("policy", "3 instances", "64 instances"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for policy, by_count in rates.items():
        table.add_row(policy, *(f"{rate:,.0f}" for rate in by_count.values()))
    console = Console()
    console.print(table)
    if not quick:
        console.print(f"A million queries under bear: {figures['peak_rss_mb_1m']:,.0f} MB at most.", highlight=False)
    return 0


def _simulate(policy: str, num_instances: int, num_queries: int) -> dict[str, float]:
    """One measurement in a process of its own, which nothing before it has warmed or filled; its CPU time only."""
    command = [sys.executable, "-m", "headway.lab.speed", policy, str(num_instances), str(num_queries)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise HeadwayError(f"the simulation failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    figures: dict[str, float] = json_module.loads(done.stdout)
    return figures


def _count_instructions(program: Path) -> tuple[dict[str, int | None], str | None]:
    """Instructions per estimate of each case, or None with the reason why they cannot be counted here."""
    nothing: dict[str, int | None] = dict.fromkeys(_CASES)
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        return nothing, "valgrind is not installed"
    counts = dict(nothing)
    with tempfile.TemporaryDirectory() as folder:
        for case in _CASES:
            out = Path(folder) / case
            command = [valgrind, "--tool=callgrind", "--toggle-collect=headway_measured_call"]
            run = subprocess.run(
                [*command, f"--callgrind-out-file={out}", str(program), case],
                check=False,
                capture_output=True,
                text=True,
            )
            if run.returncode != 0:
                return nothing, f"valgrind failed: {run.stderr.strip().splitlines()[-1:]}"
            totals = [line for line in out.read_text().splitlines() if line.startswith("totals:")]
            counts[case] = round(int(totals[0].split()[1]) / _NUM_STATES)
    return counts, None


def _cpu_s(statement: str, num_calls: int, **names: object) -> float:
    """CPU seconds per execution of ``statement``: the median of seven runs, because the machine may be busy."""
    timer = timeit.Timer(statement, timer=time.thread_time, globals=names)
    return median(timer.repeat(7, num_calls)) / num_calls


def _time_python() -> dict[str, float]:
    import numpy as np

    from headway._core import EngineGroup, ReplayedEngine

    limits, step_time, states = _states(num_running=64, num_waiting=64, num_states=64)
    engines = [ReplayedEngine.from_state(state, step_time) for state in states]
    group = EngineGroup(engines)
    prompt_tokens = np.full(64, 1000, np.int64)
    ttft_s, wait_s = np.zeros(64), np.zeros(64)
    figures = {
        "cached_ns": _cpu_s("ttft_s(1000)", 50_000, ttft_s=engines[0].ttft_s) * 1e9,
        "all_64_us": _cpu_s("ask(p, t, w)", 5_000, ask=group.first_tokens, p=prompt_tokens, t=ttft_s, w=wait_s) * 1e6,
    }
    for count in (3, 64):
        router, query, predictions = _pool(limits, step_time, states[:count])
        seconds = _cpu_s("decide(query, 0.0, given)", 300, decide=router.decide, query=query, given=predictions)
        figures[f"decide_{count}_us"] = seconds * 1e6
    return {name: round(value, 2) for name, value in figures.items()}


def _states(*, num_running: int, num_waiting: int, num_states: int) -> tuple[EngineLimits, StepTime, list[EngineState]]:
    """Saturated engines, seed 7: prompts 100-2,000, outputs so far 1-300, remaining 1-600, budget 8,192."""
    import numpy as np

    from headway.types import EngineLimits, EngineRequest, EngineState, StepTime

    rng = np.random.default_rng(7)
    limits = EngineLimits(
        max_num_batched_tokens=8192,
        max_num_seqs=num_running,
        max_model_len=32768,
        block_size=16,
        num_blocks=1_000_000,
    )

    def request(number: int) -> EngineRequest:
        prompt, output, remaining = (
            int(rng.integers(low, high + 1)) for low, high in ((100, 2000), (1, 300), (1, 600))
        )
        if number >= num_running:
            return EngineRequest(request_id=f"w{number}", prompt_tokens=prompt, target_output_tokens=remaining)
        return EngineRequest(
            request_id=f"r{number}",
            prompt_tokens=prompt,
            computed_tokens=prompt + output - 1,
            output_tokens=output,
            target_output_tokens=output + remaining,
        )

    states = []
    for _ in range(num_states):
        requests = [request(number) for number in range(num_running + num_waiting)]
        states.append(EngineState(limits=limits, running=requests[:num_running], waiting=requests[num_running:]))
    return limits, StepTime.linear(b0=7.49e-3, b1=2.078e-5, b2=5.037e-8, b3=1.033e-9), states


def _pool(
    limits: EngineLimits, step_time: StepTime, states: list[EngineState]
) -> tuple[Router, Query, dict[str, Prediction]]:
    """A router over as many instances as states (one model each), a query with a target, and its predictions."""
    import numpy as np

    from headway.estimate.queueing import QueueingEstimator
    from headway.estimate.replay import ReplayEstimator
    from headway.fleet import FleetView
    from headway.policy.registry import make_policy
    from headway.predict.prior import PriorPredictor
    from headway.router import Router
    from headway.types import Instance, ModelCard, Prediction, Query, Snapshot, SnapshotRequest

    names = [f"m{number}" for number in range(len(states))]
    instances = [
        Instance(id=f"i-{name}", model=name, engine="vllm-0.32", limits=limits, step_time=step_time) for name in names
    ]
    models = {name: ModelCard(name=name, input_per_1m_usd=0.07, output_per_1m_usd=0.29) for name in names}
    fleet = FleetView(instances, stale_after_s=1e9)
    router = Router(
        fleet=fleet,
        models=models,
        policy=make_policy("bear", rng=np.random.default_rng(0)),
        estimator=ReplayEstimator(QueueingEstimator()),
        predictor=PriorPredictor(models),
    )
    for instance, state in zip(instances, states, strict=True):
        rows = [
            SnapshotRequest(
                r.request_id,
                r.prompt_tokens,
                r.computed_tokens,
                r.output_tokens,
                -(-r.computed_tokens // 16),
                0,
                0,
                0.0,
                0,
            )
            for r in (*state.running, *state.waiting)
        ]
        num_running = len(state.running)
        held = sum(row.num_blocks for row in rows)
        snapshot = Snapshot(
            instance_id=instance.id,
            engine_version="vllm-0.32.0",
            engine_start=0,
            sequence=1,
            engine_s=0.0,
            limits=limits,
            running=rows[:num_running],
            waiting=rows[num_running:],
            free_blocks=limits.num_blocks - 1 - held,
        )
        router.observe(snapshot, 0.0)
    predictions = {name: Prediction(0.5 + 0.001 * i, 256.0, 1e-4, "prior") for i, name in enumerate(names)}
    query = Query(
        id="q",
        arrival_s=0.0,
        prompt_text="",
        prompt_tokens=dict.fromkeys(names, 1000),
        ttft_target_s=30.0,
    )
    return router, query, predictions


def _print_table(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="One TTFT estimate by replay, mean of 8 states", title_justify="left")
    for column in ("state", "instructions", "budget", "CPU µs"):
        table.add_column(column, justify="left" if column == "state" else "right")
    for case in _CASES:
        count = figures["instructions"][case]
        shown = "n/a" if count is None else f"{count:,}"
        table.add_row(case, shown, f"{_INSTRUCTION_BUDGETS[case]:,}", f"{figures['microseconds'][case]:.3f}")
    console = Console()
    console.print(table)
    if "instructions_reason" in figures:
        console.print(f"Instructions were not counted: {figures['instructions_reason']}.")
    python = Table(title="From Python, CPU time (for orientation: it depends on the machine)", title_justify="left")
    python.add_column("call")
    python.add_column("measured", justify="right")
    python.add_column("target", justify="right")
    labels = {
        "cached_ns": ("a second estimate on an unchanged engine", "ns"),
        "all_64_us": ("64 unchanged engines in one call", "µs"),
        "decide_3_us": ("Router.decide over 3 instances, predictions given", "µs"),
        "decide_64_us": ("Router.decide over 64 instances, predictions given", "µs"),
    }
    for name, (label, unit) in labels.items():
        python.add_row(label, f"{figures['python'][name]:.1f} {unit}", f"{_PYTHON_TARGETS[name]:.0f} {unit}")
    console.print(python)
