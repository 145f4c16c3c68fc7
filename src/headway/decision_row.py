"""One line of the decision log: written by the gateway, read by ``headway whatif``.

A row holds what the router knew and did, and what came of it: enough to route the same traffic once more by another
policy or over another pool. It has no room for prompts, answers or credentials.
"""

from __future__ import annotations

from msgspec import Struct

from headway.types import Outcome

#: Version of the row's fields.
VERSION = 1


class LoggedModel(Struct, frozen=True):
    """What one model was expected to make of the request."""

    prompt_tokens: int | None
    quality: float | None
    output_tokens: float | None
    cost_usd: float | None
    prediction: str | None


class LoggedInstance(Struct, frozen=True):
    """One candidate as it stood; times in seconds, null where unknown or endless."""

    id: str
    model: str
    verdict: str
    utility: float | None
    num_outstanding: int
    ttft_s: float | None
    ttft_p90_s: float | None
    wait_s: float | None
    source: str | None
    snapshot_age_s: float | None


class LoggedDecision(Struct, frozen=True, kw_only=True):
    """One row. Times are seconds; ``wall_s`` is Unix time at arrival, ``ttft_s`` and ``duration_s`` count from there.

    ``outcome`` is the last upstream call's, null where none was made; ``instances`` holds the chosen candidate alone
    unless ``decisions.candidates`` is set. ``ttft_target_s`` is what was left of the target at the decision.
    ``config`` is the path of the configuration that ruled.
    """

    version: int = VERSION
    wall_s: float
    request_id: str
    decision_id: str
    client: str | None
    operation: str
    requested_model: str
    stream: bool
    max_tokens: int | None
    priority: int
    ttft_target_s: float | None
    quality_min: float | None
    max_cost_usd: float | None
    policy: str
    config: str = ""
    config_hash: str
    reason: str
    slo: str
    held_s: float | None
    retry_after_s: float | None
    decision_s: float | None
    models: dict[str, LoggedModel]
    instances: list[LoggedInstance]
    chosen: str | None
    attempts: int
    status: int
    ttft_s: float | None
    duration_s: float
    outcome: Outcome | None
