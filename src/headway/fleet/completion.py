"""From a snapshot to the engine that it shows: whose its requests are, and what it says that nobody expected.

The requests shown are matched with the ledger here; ``ReplayedEngine.load_snapshot`` then brings the batch in flight to
its end and gives each resident the length it is expected to have. Nothing is guessed that the snapshot says.
"""

from __future__ import annotations

from collections.abc import Container

from headway._core import LengthRule, ReplayedEngine, shown_ids
from headway.fleet.view import InstanceView
from headway.types import Instance, Snapshot, StepTime

_ENGINE_ID_PREFIXES = ("chatcmpl-", "cmpl-")


def load(
    view: InstanceView, snapshot: Snapshot, step_time: StepTime, rule: LengthRule, default_output_tokens: float
) -> ReplayedEngine:
    """The instance's engine at the end of the batch in flight, whose duration is its residual; an asynchronous engine
    at that batch's start. The one that is there already is filled anew.

    Raises:
        EngineInputError: no engine can be in that state; the engine is not to be used then.
    """

    def match(engine_id: str) -> str | None:
        """The ledger's name of a request not shown before, which is thereby seen."""
        ledger_id = _ledger_id(engine_id, view.ledger, view.released)
        entry = view.unseen.pop(ledger_id, None) if ledger_id is not None else None
        if entry is not None:
            entry.engine_id = engine_id
        return ledger_id

    view.ledger_ids = shown_ids(snapshot, view.ledger_ids, match)
    engine = view.engine
    if engine is None:
        engine = ReplayedEngine(snapshot.limits, step_time)
    engine.load_snapshot(snapshot, view.ledger_ids, view.ledger, view.released, rule, default_output_tokens)
    return engine


def _ledger_id(engine_id: str, *ledgers: Container[str]) -> str | None:
    """The ledger's name of a request that the engine calls ``cmpl-<name>-0`` or the like."""
    name = engine_id
    for prefix in _ENGINE_ID_PREFIXES:
        if name.startswith(prefix):
            name = name[len(prefix) :]
            break
    for candidate in (engine_id, name, name.rpartition("-")[0], name.rpartition("-")[0].rpartition("-")[0]):
        for ledger in ledgers:
            if candidate in ledger:
                return candidate
    return None


def mismatch(instance: Instance, snapshot: Snapshot) -> str | None:
    """What the snapshot says of the engine that the configuration, or the replay, does not; in words."""
    found = []
    if instance.limits is not None and instance.limits != snapshot.limits:
        differing = [
            name
            for name in snapshot.limits.__struct_fields__
            if getattr(snapshot.limits, name) != getattr(instance.limits, name)
        ]
        found.append(f"the engine's limits differ from the configured ones: {', '.join(differing)}")
    if not f"{snapshot.engine_version}.".startswith(f"{instance.engine}."):  # vllm-0.32 covers vllm-0.32.0
        found.append(f"the engine is {snapshot.engine_version}, the configuration says {instance.engine}")
    if snapshot.unchecked:
        found.append(f"the replay was never checked on {', '.join(snapshot.unchecked)}")
    return "; ".join(found) or None
