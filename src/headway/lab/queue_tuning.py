"""What the settings of bid prices were chosen on: other seeds than those of any published row.

``python -m headway.lab.queue_tuning TRACE`` prints a table per load: latency, waits, missed objectives and the value of
the answers, for step sizes, strides, kinds of columns, and the published settings taken by the letter. TRACE is a table
of ``prompt_tokens`` and ``output_tokens``. It refuses to choose: it shows what was to choose from.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from msgspec import Struct
from msgspec.structs import replace

from headway.lab.acceptance.queue_units import CUT_KV_TOKENS, KV_TOKENS, NUM_DEVICES, NUM_SLOTS, two_models
from headway.lab.queue_device import DeviceSpec
from headway.lab.queue_dispatch import PERIOD_S, BidPriceQueue
from headway.lab.queue_load import Lengths, queue_load, trace_lengths
from headway.lab.queue_score import QueueScore, queue_score
from headway.lab.queue_sim import play
from headway.lab.truth import stream
from headway.policy.bid_control import BidSettings
from headway.policy.bid_objective import LATENCY_SLO_S, WAIT_SLO_S, Objective

#: The seeds of all choices; none of them is an evaluation seed.
SEEDS = (77, 78)
_NUM_REQUESTS = 3_000


class Load(Struct, frozen=True, kw_only=True):
    """A load to choose on, and what is asked for there."""

    title: str
    rate: float
    kv_tokens: int = KV_TOKENS
    has_values: bool = False
    objective: Objective = Objective()


LOADS = (
    Load(title="slots scarce: lambda .5", rate=0.5),
    Load(title="memory scarce: lambda .4, 27,000 KV tokens", rate=0.4, kv_tokens=CUT_KV_TOKENS),
    Load(
        title="two devices give better answers: lambda .45, all weight on value",
        rate=0.45,
        has_values=True,
        objective=Objective(beta=0.0, gamma=0.0, quality=1.0),
    ),
)
_AHEAD, _LETTER = BidSettings(history="ahead"), BidSettings(stride=1, step_size=0.01, work_conserving=False)
CASES: Mapping[str, BidSettings] = {
    "no prices": BidSettings(num_steps=0),
    "period": BidSettings(),
    "period, step .0003": BidSettings(step_size=3e-4),
    "period, step .01": BidSettings(step_size=0.01),
    "period, stride 4": BidSettings(stride=4),
    "period, N = 400": BidSettings(num_columns=400.0),
    "request": BidSettings(history="request"),
    "ahead": _AHEAD,
    "ahead, step .0003": replace(_AHEAD, step_size=3e-4),
    "ahead, step .01": replace(_AHEAD, step_size=0.01),
    "ahead, stride 4": replace(_AHEAD, stride=4),
    "ahead, threshold 0": replace(_AHEAD, work_conserving=False),
    "period, threshold 0": BidSettings(work_conserving=False),
    "by the letter: stride 1, step .01, threshold 0": _LETTER,
}


def score_of(load: Load, lengths: Lengths, settings: BidSettings, seed: int, *, num_requests: int) -> QueueScore:
    """The figures of one run, in periods."""
    requests = queue_load(lengths, num_requests=num_requests, rate=load.rate, seed=seed)
    if load.has_values:
        requests = replace(requests, values=two_models(num_requests, seed))
    queue = BidPriceQueue(load.objective, settings, stream(seed, "queue policy"))
    outcomes = play(requests, [DeviceSpec(max_num_seqs=NUM_SLOTS, kv_tokens=load.kv_tokens)] * NUM_DEVICES, queue)
    return queue_score(outcomes, wait_slo=WAIT_SLO_S / PERIOD_S, latency_slo=LATENCY_SLO_S / PERIOD_S)


def table(
    load: Load,
    lengths: Lengths,
    cases: Mapping[str, BidSettings] = CASES,
    *,
    seeds: Sequence[int] = SEEDS,
    num_requests: int = _NUM_REQUESTS,
) -> str:
    """A Markdown table of means over seeds."""
    lines = [
        f"{load.title} (seeds {', '.join(map(str, seeds))}, {num_requests} requests)",
        "",
        "| settings | latency | P95 | wait | tokens per period | objectives missed, % | value |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, settings in cases.items():
        found = [score_of(load, lengths, settings, seed, num_requests=num_requests) for seed in seeds]
        value = f"{fmean(one.value or 0.0 for one in found):.3f}" if load.has_values else ""
        shown = (
            f"{fmean(one.latency for one in found):.1f}",
            f"{fmean(one.latency_p95 for one in found):.0f}",
            f"{fmean(one.wait for one in found):.1f}",
            f"{fmean(one.tokens_per_time for one in found):.1f}",
            f"{fmean(one.slo_missed for one in found):.2%}".removesuffix("%"),
            value,
        )
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    """Prints the tables; some minutes."""
    parser = argparse.ArgumentParser(description="Compare settings of bid prices on the seeds of choices.")
    parser.add_argument("trace", type=Path, help="table of prompt_tokens and output_tokens (.csv, .csv.gz)")
    lengths = trace_lengths(parser.parse_args().trace)
    for load in LOADS:
        print(table(load, lengths), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
