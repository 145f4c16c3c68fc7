"""``headway demo``: the main job on simulated engines, to look at or, with ``--json``, to measure with.

It refuses to print anything but the figures on stdout under ``--json``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def demo(
    *,
    prompts: Annotated[tuple[Path, ...], Parameter(consume_multiple=True, negative=())] = (),
    trace: Path | None = None,
    qps: float = 8.0,
    seconds: float = 18.0,
    policies: str = "bear,round_robin,shortest_queue,latency_agnostic",
    seed: int = 0,
    predictor: Path | None = None,
    rows: Path | None = None,
    json: bool = False,
) -> None:
    """Route one workload under several policies and compare them.

    Starts three simulated engines and a gateway as processes on this machine, plays the same queries under each policy
    in turn, prints a table, and stops everything again.

    Parameters
    ----------
    prompts
        Files of prompts (.jsonl or .jsonl.gz, keys ``prompt`` and ``task``), tasks in equal shares. Without: generated.
    trace
        A .csv or .csv.gz file whose column ``arrival_s`` gives the shape of arrivals. Without: a Poisson process.
    qps
        Queries per second, on average.
    seconds
        How long queries arrive, under each policy. Those in flight at the end finish.
    policies
        Names of policies, separated by commas, in the order to run them.
    seed
        Seed of prompts, arrivals, targets, answers and engine noise.
    predictor
        A trained artifact for the gateway to predict by. Without: what an operator knows of each model on each task.
    rows
        Play nothing; write what each model would answer to these queries to this file, for headway train.
    json
        Print the figures as JSON, and nothing else.
    """
    import asyncio
    import shlex
    import sys

    import msgspec
    import uvloop

    from headway.demo.predictor import load_trained, write_answers
    from headway.demo.run import check_policies, run_demo
    from headway.demo.show import introduce, progress_on, show_report
    from headway.demo.workload import WorkloadSpec, build_workload

    names = [name.strip() for name in policies.split(",") if name.strip()]
    check_policies(names)
    workload = build_workload(WorkloadSpec(qps=qps, seconds=seconds, seed=seed, prompts=prompts, trace=trace))
    if rows is not None:
        print(f"Wrote {write_answers(workload, rows):,} rows of {len(workload.queries):,} queries to {rows}.")
        return
    trained = None if predictor is None else load_trained(predictor, workload)
    if not json:
        print(introduce(workload.summary, names, trained), flush=True)
    # uvloop wakes within a fraction of a millisecond, asyncio's own loop within one or two: TTFT is the measurement.
    with progress_on(sys.stderr) as progress, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report = runner.run(run_demo(workload, names, progress, trained))
    if json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
        return
    command = ["headway", "demo"]
    if prompts:
        command += ["--prompts", *map(str, prompts)]
    if trace:
        command += ["--trace", str(trace)]
    if predictor:
        command += ["--predictor", str(predictor)]
    command += ["--qps", f"{qps:g}", "--seconds", f"{seconds:g}", "--policies", ",".join(names), "--seed", str(seed)]
    show_report(report, shlex.join(command), sys.stdout)
