"""``headway route``: ask a running gateway where a prompt would go, and why. Nothing is sent to any instance."""

from __future__ import annotations

from typing import cast

_TABLE_WIDTH = 126
_CHARGE_WIDTH = 8


def route(
    prompt: str,
    /,
    *,
    url: str = "http://127.0.0.1:8080",
    ttft_ms: float | None = None,
    max_tokens: int | None = None,
    model: str = "auto",
    json: bool = False,
) -> None:
    """Explain where the live pool would send a prompt. Where the gateway has keys, set HEADWAY_ADMIN_KEY.

    Parameters
    ----------
    prompt
        The prompt, or ``-`` to read it from standard input.
    url
        The gateway's address.
    ttft_ms
        Target for the time to first token, in milliseconds.
    max_tokens
        Cap of the answer.
    model
        A model of the pool or an alias.
    json
        Print the decision as JSON.
    """
    import sys

    import msgspec

    text = sys.stdin.read() if prompt == "-" else prompt
    body: dict[str, object] = {"model": model, "messages": [{"role": "user", "content": text}]}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    if ttft_ms is not None:
        body["slo"] = {"ttft_ms": ttft_ms}
    answer = _post(url.rstrip("/").removesuffix("/v1") + "/v1/route", msgspec.json.encode(body))
    decision = msgspec.json.decode(answer)
    if json:
        sys.stdout.write(msgspec.json.format(answer, indent=2).decode() + "\n")
    else:
        _show(decision)


def _post(url: str, body: bytes) -> bytes:
    import os
    import urllib.error
    import urllib.request

    import msgspec

    from headway.errors import ConfigError, HeadwayError

    try:
        headers = {"content-type": "application/json"}
        if key := os.environ.get("HEADWAY_ADMIN_KEY"):
            headers["authorization"] = f"Bearer {key}"
        request = urllib.request.Request(url, body, headers)
        if request.type not in ("http", "https"):
            raise ValueError
    except ValueError:
        raise ConfigError(f"must be an http or https address, not {url!r}", key="--url") from None
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return cast("bytes", response.read())
    except urllib.error.HTTPError as error:
        with error:
            text = error.read()
        try:
            message = msgspec.json.decode(text)["error"]["message"]
        except (msgspec.DecodeError, KeyError, TypeError):
            message = f"status {error.code}"
        raise HeadwayError(f"the gateway at {url} refused: {message}") from None
    except OSError as error:  # URLError too
        reason = getattr(error, "reason", error)
        raise HeadwayError(f"no gateway answers at {url}: {reason}") from None


def _show(decision: dict[str, object]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    candidates = cast("list[dict[str, object]]", decision["candidates"])
    charges = ("price", "harm") if any(candidate.get("price") is not None for candidate in candidates) else ()
    width = _TABLE_WIDTH + _CHARGE_WIDTH * len(charges)
    console.width = max(console.width, width)  # a narrow terminal wraps a line; cut figures would be worse
    table = Table(box=None, pad_edge=False)
    for name in ("", "instance (model)", "verdict"):
        table.add_column(name, no_wrap=True)
    for name in ("TTFT ms", "p90", "wait", "quality", "cost µ$", "utility", *charges, "in", "out", "queue"):
        table.add_column(name, justify="right")
    table.add_column("estimate")
    for candidate in candidates:
        estimate = cast("dict[str, object]", candidate["estimate"] or {})
        age = _figure(estimate.get("snapshot_age_s"), 1e3, ".0f")
        source = str(estimate.get("source") or "-")
        table.add_row(
            "▶" if candidate["instance_id"] == decision["chosen"] else "",
            f"{candidate['instance_id']} ({candidate['model']})",
            str(candidate["verdict"]),
            _figure(estimate.get("ttft_s"), 1e3),
            _figure(estimate.get("ttft_p90_s"), 1e3),
            _figure(estimate.get("wait_s"), 1e3),
            _figure(candidate["quality"], 1, ".3f"),
            _figure(candidate["cost_usd"], 1e6),
            _figure(candidate["utility"], 1, ".3f"),
            *(_figure(candidate[name], 1, ".3f") for name in charges),
            _figure(candidate["prompt_tokens"], 1, ".0f"),
            _figure(candidate["output_tokens"], 1, ".0f"),
            str(candidate["num_outstanding"]),
            source if age == "-" else f"{source}, {age} ms old",
        )
    console.print(table)
    console.print(str(decision["reason"]), soft_wrap=True)
    took = _figure(decision["decision_s"], 1e6, ".0f")
    console.print(f"decision {decision['id']}, {took} µs, configuration {decision['config_hash']}", soft_wrap=True)


def _figure(value: object, scale: float, form: str = ".1f") -> str:
    return f"{value * scale:{form}}" if isinstance(value, (int, float)) else "-"
