"""Headway routes every LLM query to the model instance that gives the most useful answer in time.

The public names below are resolved on first use, so that ``import headway`` loads neither the native core nor numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway._core import ReplayedEngine, TokenBatch
    from headway.errors import EngineInputError, HeadwayError
    from headway.estimate.replay import replay
    from headway.router import Router
    from headway.types import (
        Decision,
        EngineLimits,
        EngineRequest,
        EngineState,
        Instance,
        ModelCard,
        Outcome,
        Query,
        Replay,
        Snapshot,
        StepTime,
    )

__version__ = "0.1.0"

_HOMES = {
    "Decision": "headway.types",
    "EngineInputError": "headway.errors",
    "EngineLimits": "headway.types",
    "EngineRequest": "headway.types",
    "EngineState": "headway.types",
    "HeadwayError": "headway.errors",
    "Instance": "headway.types",
    "ModelCard": "headway.types",
    "Outcome": "headway.types",
    "Query": "headway.types",
    "Replay": "headway.types",
    "ReplayedEngine": "headway.estimate.replay",
    "Router": "headway.router",
    "Snapshot": "headway.types",
    "StepTime": "headway.types",
    "TokenBatch": "headway.estimate.replay",
    "replay": "headway.estimate.replay",
}

__all__ = [
    "Decision",
    "EngineInputError",
    "EngineLimits",
    "EngineRequest",
    "EngineState",
    "HeadwayError",
    "Instance",
    "ModelCard",
    "Outcome",
    "Query",
    "Replay",
    "ReplayedEngine",
    "Router",
    "Snapshot",
    "StepTime",
    "TokenBatch",
    "__version__",
    "replay",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'headway' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
