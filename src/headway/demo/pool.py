"""The demo's pool: three models of one family on three simulated H100 engines, and the gateway configuration for them.

The priors are what an operator knows from past traffic, the mean quality and answer length of each model on each task.
It refuses to tell the gateway anything of a single query: no draw of ``truth`` enters the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml
from msgspec import Struct

from headway.lab.pool import QWEN3_CARDS
from headway.lab.truth import Task
from headway.lab.workload import LAMBDA_PER_MUSD
from headway.predict.tasks import TaskType


class Price(Struct, frozen=True):
    """USD per million tokens, which is also micro-USD per token."""

    input_per_1m_usd: float
    output_per_1m_usd: float

    def cost_usd(self, prompt_tokens: int, output_tokens: int) -> float:
        """What a query of that size costs, in USD."""
        return (prompt_tokens * self.input_per_1m_usd + output_tokens * self.output_per_1m_usd) / 1e6


class PoolModel(Struct, frozen=True, kw_only=True):
    """One model of the pool, its engine's profile and what the operator knows: (quality, output tokens) per task."""

    name: str
    instance: str
    profile: str
    price: Price
    parameters: float | None
    context_tokens: int
    overall: tuple[float, int]
    prior: dict[Task, tuple[float, int]]


def _model(
    size: str,
    overall: tuple[float, int],
    *,
    alpaca: tuple[float, int],
    hotpotqa: tuple[float, int],
    gov_report: tuple[float, int],
    writing_prompts: tuple[float, int],
) -> PoolModel:
    prior: dict[Task, tuple[float, int]] = {
        "alpaca": alpaca,
        "hotpotqa": hotpotqa,
        "gov_report": gov_report,
        "writing_prompts": writing_prompts,
    }
    card = QWEN3_CARDS[f"qwen3-{size}"]
    return PoolModel(
        name=card.name,
        instance=f"h100-{size}",
        profile=f"h100-qwen3-{size}",
        price=Price(card.input_per_1m_usd, card.output_per_1m_usd),
        parameters=card.parameters,
        context_tokens=card.context_tokens,
        overall=overall,
        prior=prior,
    )


#: Published prices and mean judge scores; mean answer lengths of the measured workload under a limit of 1,024 tokens.
POOL = (
    _model(
        "0.6b", (0.353, 441),
        alpaca=(0.535, 194), hotpotqa=(0.410, 142), gov_report=(0.290, 705), writing_prompts=(0.177, 723),
    ),
    _model(
        "8b", (0.788, 460),
        alpaca=(0.827, 194), hotpotqa=(0.883, 134), gov_report=(0.866, 748), writing_prompts=(0.575, 763),
    ),
    _model(
        "32b", (0.895, 548),
        alpaca=(0.889, 247), hotpotqa=(0.927, 171), gov_report=(0.959, 885), writing_prompts=(0.807, 887),
    ),
)  # fmt: skip
PRICES = {model.name: model.price for model in POOL}
INSTANCES = tuple(model.instance for model in POOL)

#: Which task each task type of the gateway's rules is a sign of. Code and mathematics are instructions like others.
_TASK_OF_TYPE: dict[TaskType, Task] = {
    "summarise": "gov_report",
    "question": "hotpotqa",
    "story": "writing_prompts",
    "code": "alpaca",
    "math": "alpaca",
    "instruct": "alpaca",
}


class RunningEngine(Struct, frozen=True):
    """Where the engine of a model listens and publishes its snapshots."""

    url: str
    segment: str


def gateway_config(policy: str, engines: Mapping[str, RunningEngine], predictor: Path | None = None) -> str:
    """The YAML configuration of a gateway in front of ``engines`` (by model name), routing by ``policy``.

    ``predictor`` is a trained artifact; without one the priors speak.
    """
    models = [
        {
            "name": model.name,
            "price": {"input_per_1m": model.price.input_per_1m_usd, "output_per_1m": model.price.output_per_1m_usd},
            "context_tokens": model.context_tokens,
            "parameters": model.parameters,
            "prior": {
                **_prior(model.overall),
                "tasks": {kind: _prior(model.prior[task]) for kind, task in _TASK_OF_TYPE.items()},
            },
        }
        for model in POOL
    ]
    instances = [
        {
            "id": model.instance,
            "model": model.name,
            "api_base": f"{engines[model.name].url}/v1",
            "engine": "vllm-0.32",
            "profile": model.profile,
            "snapshots": {"shared_memory": engines[model.name].segment},
        }
        for model in POOL
    ]
    said_by = "prior" if predictor is None else str(predictor.resolve())
    config = {
        "models": models,
        "instances": instances,
        "aliases": {"auto": {"candidates": "all"}},
        "routing": {"policy": policy, "lambda_per_musd": LAMBDA_PER_MUSD, "predictor": said_by},
        # A late answer has to show as late: nothing here may turn it into a failure or send it twice.
        "resilience": {"deadline_s": 600, "attempts": 1, "first_byte_timeout_s": 600, "idle_timeout_s": 600},
        "server": {"host": "127.0.0.1", "port": 0, "drain_s": 1},
    }
    return yaml.safe_dump(config, sort_keys=False)


def _prior(figures: tuple[float, int]) -> dict[str, float]:
    quality, output_tokens = figures
    return {"quality": quality, "output_tokens": output_tokens}
