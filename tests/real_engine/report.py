"""Writes ``docs/real-engine.json`` and ``docs/real-engine.md`` out of whatever parts have been run.

A claim is made only where the figures hold it, and the page says so where they do not; a part that was not run is
named as such. Figures stand beside the command that makes them.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any, Final

from real_engine.figures import ttft_figures

PARTS: Final = ("calibrate", "passes", "batches", "errors", "choice", "mixed")
SHAPE_NAMES: Final = {
    "poisson": "Azure lengths, Poisson", "bursty": "Azure lengths, bursty", "decode_heavy": "long answers, Poisson",
}  # fmt: skip
STATE_NAMES: Final = {
    "snapshots": "snapshots (plugin)", "shadow": "shadow state (no plugin)",
    "prefill_throughput": "prefill throughput, refitted", "history": "history",
}  # fmt: skip
CAUSE_NAMES: Final = {
    "total": "**all of it**",
    "step_time": "step time",
    "in_flight": "batch in flight",
    "arrival_delay": "arrival delay",
    "http": "HTTP",
    "correction": "correction",
    "rest": "later arrivals in its batches, and the rest",
    "unknown_lengths": "unknown lengths (beside)",
}


def write(results: Path, docs: Path) -> None:
    """Both files, from the results directory."""
    parts = {part: json.loads(path.read_text()) for part in PARTS if (path := results / f"{part}.json").exists()}
    note = results / "note.txt"
    found: dict[str, Any] = {
        "machine": _machine(),
        "note": note.read_text().strip() if note.exists() else "",
        **ttft_figures(results),
        "batch_agreement": None,
    }
    if "batches" in parts:
        found["batch_agreement"] = {
            "prefix_cache_off": parts["batches"]["prefix_cache_off"]["agreement"],
            "prefix_cache_on": parts["batches"]["prefix_cache_on"]["agreement"],
            "admission": parts["batches"]["admission"],
        }
    found["verdicts"] = verdicts(found)
    found["parts"] = {part: parts.get(part) for part in PARTS}
    docs.mkdir(parents=True, exist_ok=True)
    (docs / "real-engine.json").write_text(json.dumps(found, indent=1) + "\n")
    (docs / "real-engine.md").write_text(page(found))


def verdicts(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Each expectation with what was measured and whether it holds; nothing where a pass is missing."""
    made: list[dict[str, Any]] = []
    mape, floor = found["mape"], found["noise_floor"]
    heavy = found["by_workload"].get("decode_heavy", {}).get("states", {})

    def say(what: str, value: float | None, limit: float | None) -> None:
        if value is not None and limit is not None:
            made.append({"expectation": what, "measured": value, "limit": limit, "holds": value <= limit})

    say("snapshots: MAPE at most 12 %", mape["snapshots"], 0.12)
    say("snapshots: MAPE within 1.5 × the noise floor", mape["snapshots"], None if floor is None else 1.5 * floor)
    say("shadow: MAPE within 1.5 × that of snapshots", mape["shadow"],
        None if mape["snapshots"] is None else 1.5 * mape["snapshots"])  # fmt: skip
    rival = heavy.get("prefill_throughput")
    for name in ("snapshots", "shadow"):
        mine = heavy.get(name)
        if mine is not None and rival is not None:
            say(f"{name}: long answers, at most half the MAPE of refitted prefill throughput", mine["client"]["mape"],
                0.5 * rival["client"]["mape"])  # fmt: skip
    return made


def page(found: dict[str, Any]) -> str:
    """The report as Markdown."""
    sections = [
        _HEAD.format(machine=found["machine"], scales=_scales(found["parts"])),
        found["note"],
        _ttft(found),
        _expectations(found["verdicts"], found["noise_floor"]),
        _calibration(found["parts"]["calibrate"]),
        _batches(found["parts"]["batches"]),
        _errors(found["parts"]["errors"]),
        _choice(found["parts"]["choice"]),
        _mixed(found["parts"]["mixed"]),
        _TAIL,
    ]
    return "\n\n".join(section.strip() for section in sections if section) + "\n"


_HEAD: Final = """# Headway against a real vLLM

vLLM 0.32.0 on CPU serves a Qwen3 of random weights (hidden size 512, 8 layers, bfloat16, 4,096 tokens of context,
128 MiB of KV cache). One core ({machine}) does the model's arithmetic; the gateway, the client and the engine's HTTP
process share a second one. Every figure below comes from

```console
$ make real-engine                                   # everything, about an hour on a machine that does nothing else
$ make real-engine ARGS="--only passes --only report"    # one part; what is there already is not run again
```

`docs/real-engine.json` holds the same figures and more. Here parts ran with
{scales}.
Requests are token-id prompts of exact length with `ignore_eos`, so that answers have the length asked for and the
gateway may take `max_tokens` for it."""

_TAIL: Final = """## What would change on a GPU

Steps take 5 to 20 ms instead of 20 to 400 ms, so HTTP and the arrival delay (a few milliseconds here and there) weigh
more in a time to first token, and step times are steadier: a GPU's clock is not shared with an HTTP server. Engines
schedule asynchronously there: one more batch is fixed before a newcomer is seen, which the replay models
(`async_scheduling`) and `make conformance` compares with vLLM's AsyncScheduler, but no page of this kind has measured
by the clock. Budgets of 8,192 tokens and more make long prompts one batch. What is counted in batches, not in seconds,
carries over as it is."""


def _scales(parts: dict[str, Any]) -> str:
    """The ``--scale`` of each part."""
    return ", ".join(f"`--only {name} --scale {part['scale']:g}`" for name, part in parts.items() if part is not None)


def _machine() -> str:
    model = next(
        (line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")),
        platform.processor(),
    )  # fmt: skip
    return f"{model}, {os.cpu_count()} cores"


def _percent(value: float | None) -> str:
    return "—" if value is None else f"{100 * value:.1f} %"


def _table(head: list[str], rows: list[list[str]], *, num_left: int = 1) -> str:
    lines = [head, ["---"] * num_left + ["---:"] * (len(head) - num_left), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _ttft(found: dict[str, Any]) -> str:
    if not found["by_workload"]:
        return "## Predicted and observed time to first token\n\nNot run yet: `--only passes`."
    rows = []
    for shape, one in found["by_workload"].items():
        for state, name in STATE_NAMES.items():
            rows.append(_ttft_row(SHAPE_NAMES[shape], name, one["states"][state], one["noise_floor"]))
    for state, name in STATE_NAMES.items():
        rows.append(_ttft_row("**all**", name, found["pooled"][state], found["noise_floor"]))
    head = ["workload", "what the gateway knows", "n", "observed ms", "MAPE at client", "median", "bias",
            "by time", "MAPE at engine", "noise floor"]  # fmt: skip
    loads = "; ".join(
        f"{SHAPE_NAMES[shape]}: {one['num_requests']} requests at {one['rate_per_s']:.2f}/s"
        for shape, one in found["by_workload"].items()
    )
    best = found["pooled"].get("prefill_throughput") or {}
    hindsight = best.get("client_best_scale", {}).get("mape")
    return f"""## Predicted and observed time to first token

The same recorded workloads through fresh gateways that know the engine in different ways
({loads};
the first five of each pass, from which corrections and histories learn, are left out). MAPE is the mean of
|predicted ÷ observed − 1|, the median that of the same, the bias the mean without the bars; *by time* is
Σ|predicted − observed| ÷ Σ observed. The noise floor is the MAPE of the first run of the workload taken as a prediction
of its second run.

{_table(head, rows, num_left=2)}

With its one constant chosen in hindsight for these very rows, prefill throughput comes to {_percent(hindsight)}. Before
any correction learned on the way, snapshots come to {_uncorrected(found, "snapshots")} and shadow state to
{_uncorrected(found, "shadow")}. Who spoke: {_speakers(found)}."""


def _uncorrected(found: dict[str, Any], state: str) -> str:
    one = found["pooled"].get(state) or {}
    return _percent(one.get("client_uncorrected", {}).get("mape"))


def _speakers(found: dict[str, Any]) -> str:
    """By whom the estimates of each state really were made."""
    return "; ".join(
        f"{STATE_NAMES[state]}: " + ", ".join(f"{source} {num}" for source, num in one["sources"].items())
        for state, one in found["pooled"].items()
        if one is not None and "sources" in one
    )


def _ttft_row(shape: str, name: str, one: dict[str, Any] | None, floor: float | None) -> list[str]:
    if one is None:
        return [shape, name, "not run", *["—"] * 6, _percent(floor)]
    client = one["client"]
    return [
        shape, name, str(one["num"]), f"{one['mean_observed_ms']:.0f}", _percent(client["mape"]),
        _percent(client["median_ape"]), f"{100 * client['bias']:+.1f} %", _percent(client["wape"]),
        _percent(one["engine"]["mape"]), _percent(floor),
    ]  # fmt: skip


def _expectations(made: list[dict[str, Any]], floor: float | None) -> str:
    if not made:
        return ""
    rows = [
        [one["expectation"], _percent(one["measured"]), _percent(one["limit"]), _verdict(one, floor)] for one in made
    ]
    return "## What was expected, and what came\n\n" + _table(["expectation", "measured", "limit", ""], rows)


def _verdict(one: dict[str, Any], floor: float | None) -> str:
    """In words; a margin below the noise floor decides nothing."""
    word = "holds" if one["holds"] else "**missed**"
    decided = floor is None or abs(one["measured"] - one["limit"]) >= floor
    return word if decided else f"{word}, by less than the noise floor"


def _calibration(part: dict[str, Any] | None) -> str:
    if part is None:
        return "## Step times\n\nNot run yet: `--only calibrate`."
    chosen = next(fit for fit in part["fits"] if fit["form"] == part["chosen"])
    rows = [
        [kind, str(held["num_steps"]), _percent(held["mape"]), _percent(held["p95"])]
        for kind, held in {"all": chosen["held_out"], **chosen["by_kind"]}.items()
    ]
    figures = part["calibration"]
    return f"""## Step times

`headway calibrate` on the step log of one workload of other seeds: {part["log"]["num_train"]} steps fitted, the
{part["log"]["num_held_out"]} after them held out; the {part["chosen"]} form has the smallest held-out error.

{_table(["held-out steps", "n", "MAPE", "95 %"], rows)}

Refitted prefill throughput {figures["prefill_tokens_per_s"]:,.0f} tokens/s, decode step
{1e3 * figures["decode_step_s"]:.1f} ms, service rate {figures["service_rate_per_s"]:.2f} requests/s."""


def _batches(part: dict[str, Any] | None) -> str:
    if part is None:
        return "## Batches\n\nNot run yet: `--only batches`."
    off, on = part["prefix_cache_off"], part["prefix_cache_on"]
    rows = [
        [f"known {1e3 * one['known_before_s']:.0f} ms before{which}", str(shown["num"]), _percent(shown["exact"]),
         _percent(shown["within_1"])]
        for one in part["admission"]
        for which, shown in (("", one), (", had to wait for room", one["had_to_wait"]))
        if shown["num"]
    ]  # fmt: skip
    return f"""## Batches

Given the call of `schedule()` that first saw each request, and true lengths, the mirror repeated
{off["num_repeated"]:,} of {off["num_batches"]:,} batches of {off["num_requests"]:,} requests with the prefix cache off
({_percent(off["agreement"])}; preempted: {off["num_preempted"]}), and {on["num_repeated"]:,} of {on["num_batches"]:,}
of {on["num_requests"]} requests with it on ({_percent(on["agreement"])}; {on["num_cached"]} requests found a prefix).
A batch is repeated when requests, token counts, order, preempted requests and free blocks are all the same.

By the clock: the state is what it was when the batch in flight some time before the decision was scheduled, goes on by
fitted step times, and takes in each newcomer at its decision. The batch that admits it is then

{_table(["state", "newcomers", "exact", "±1"], rows)}"""


def _errors(part: dict[str, Any] | None) -> str:
    shapes = {} if part is None else {shape: part[shape] for shape in SHAPE_NAMES if shape in part}
    if not shapes:
        return "## The error by cause\n\nNot run yet: `--only errors`."
    rows = [
        [SHAPE_NAMES[shape], CAUSE_NAMES[cause], f"{one['mean_ms']:+.1f}", f"{one['mean_absolute_ms']:.1f}",
         _percent(one["mean_absolute_share"])]
        for shape, found in shapes.items()
        for cause, one in found["causes"].items()
    ]  # fmt: skip
    head = ["workload", "cause", "mean ms", "mean absolute ms", "mean share of TTFT"]
    return f"""## The error by cause

Over the passes with snapshots, predicted − observed at the client is the sum of: *step time*, fitted − measured, of the
very batches from the engine's first sight of a request to its first token; *batch in flight*, the same for what was
left of the batch that ran at the decision; *arrival delay* behind that batch (HTTP between gateway and engine, where it
does not pass while a batch runs); *HTTP* from the client to the decision and back from the engine; the *correction*
that the gateway learned; and the *rest*, mostly requests that came later and made its batches longer. *Unknown lengths*
were not part of it, because answers had the length asked for: they are the replay with the trace's mean length against
that with true lengths.

{_table(head, rows, num_left=2)}"""


def _choice(part: dict[str, Any] | None) -> str:
    if part is None:
        return "## The choice between two engines\n\nNot run yet: `--only choice`."
    rows = [
        [name, *(_percent(value) for value in one["attainment"]), _percent(one["mean"])]
        for name, one in part["policies"].items()
    ]
    return f"""## The choice between two engines

Two unlike engines ({part["engines"]}), the same recorded workload ({part["num_requests"]} requests at
{part["rate_per_s"]:.2f}/s) under each policy, three times. The target of {part["target_s"]:.2f} s is the median of a
pilot under round robin with another seed. Share of requests whose first token came in time; failures count as late:

{_table(["policy", "first", "second", "third", "mean"], rows)}"""


def _mixed(part: dict[str, Any] | None) -> str:
    if part is None:
        return "## Mixed load with a kill\n\nNot run yet: `--only mixed`."
    ends = "\n".join(f"- {what}: {times}" for what, times in part["requests"].items())
    growth = "not measured" if part["memory_growth"] is None else _percent(part["memory_growth"])
    wrong = "\n".join(f"- wrong: {one}" for one in (*part["wrong"], *part["requests_standing_twice"]))
    return f"""## Mixed load with a kill

Two engines, six clients, {part["seconds"] / 60.0:.0f} minutes; one in five requests is left by its client, and one
engine is killed and started again. What became of the requests:

{ends}

Lost, doubled, ended as no rule allows, or still under way at the end: {part["num_wrong"]}. The gateway's memory grew by
{growth} in the second half.
{wrong}""".rstrip()
