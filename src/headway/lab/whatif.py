"""Yesterday's traffic once more: a decision log, routed by another policy or over another pool, in simulation.

Arrivals, prompts, targets and predictions are those of the log. What cannot be known is assumed in the open: an
answer's length on a model that did not give it is its prediction, stretched by how much longer the real answer became
than predicted; quality is the predicted one; engines run by their profile's own step times with noise, so a profile
that is wrong is wrong here too. Instances without a profile cannot be simulated and are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct

from headway.assembly import build_instances, fallback_of, model_card
from headway.config import Config
from headway.config.lines import decode_lines
from headway.decision_row import VERSION, LoggedDecision, LoggedModel
from headway.errors import ConfigError, DatasetError
from headway.estimate.registry import make_estimator
from headway.lab.metrics import score
from headway.lab.pool import LabInstance, Pool
from headway.lab.simulate import simulate
from headway.lab.truth import stream
from headway.lab.workload import Workload
from headway.policy.registry import POLICIES, make_policy
from headway.profiles import TruthProfile
from headway.types import Instance

#: Noise of a simulated step's time around the profile's, as a share; real engines show 3 to 5 %.
STEP_NOISE: Final = 0.03
#: The target of a query that brought none, seconds.
NO_TARGET_S: Final = 1e9
#: An answer is taken to be at most so much longer than predicted.
MAX_STRETCH: Final = 16.0
_QUEUEING_POLICIES: Final = ("random", "round_robin")


class WhatIf(Struct, frozen=True, kw_only=True):
    """What one policy would have made of the traffic, or what really happened (``policy`` None).

    ``attainment`` is over the queries with a target; costs are USD; ``mean_quality`` is the predicted quality of the
    models that answered; TTFTs are seconds; ``shares`` are of all queries, by instance. Intervals are over seeds:
    (smallest, largest) of the attainment.
    """

    policy: str | None
    num_queries: int
    num_with_target: int
    attainment: float | None
    attainment_range: tuple[float, float] | None
    cost_usd: float
    cost_per_1000_usd: float
    mean_quality: float | None
    refused: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    shares: dict[str, float]


def read_decisions(paths: Sequence[Path]) -> list[LoggedDecision]:
    """The rows of the files in order of arrival; those that came to no decision or asked for no answer are left out.

    Raises:
        DatasetError: unreadable, a row that is none, one of another version, or no usable row; with file and line.
    """
    rows = []
    decoder = msgspec.json.Decoder(LoggedDecision)
    for path in paths:
        for number, row in decode_lines(path, decoder, what="is no logged decision: "):
            if row.version != VERSION:
                raise DatasetError(f"has version {row.version}, not {VERSION}", path=str(path), line=number)
            if any(model.prompt_tokens for model in row.models.values()):
                rows.append(row)
    if not rows:
        raise DatasetError("holds no decision that could be taken again", path=", ".join(map(str, paths)))
    return sorted(rows, key=lambda row: row.wall_s)


def as_it_was(rows: Sequence[LoggedDecision]) -> WhatIf:
    """What the log says happened: targets met, real cost, where queries went."""
    with_target = [row for row in rows if row.ttft_target_s is not None]
    met = sum(row.ttft_s is not None and row.ttft_s <= (row.ttft_target_s or math.inf) for row in with_target)
    ttft_s = sorted(row.ttft_s for row in rows if row.ttft_s is not None)
    cost_usd = sum(row.outcome.cost_usd or 0.0 for row in rows if row.outcome is not None)
    qualities = [one.quality for row in rows if (one := _answering(row)) is not None and one.quality is not None]
    chosen = [row.chosen for row in rows if row.chosen is not None]
    return WhatIf(
        policy=None,
        num_queries=len(rows),
        num_with_target=len(with_target),
        attainment=met / len(with_target) if with_target else None,
        attainment_range=None,
        cost_usd=cost_usd,
        cost_per_1000_usd=1e3 * cost_usd / len(rows),
        mean_quality=float(np.mean(qualities)) if qualities else None,
        refused=sum(row.chosen is None for row in rows) / len(rows),
        ttft_p50_s=_quantile(ttft_s, 0.5),
        ttft_p99_s=_quantile(ttft_s, 0.99),
        shares={name: chosen.count(name) / len(rows) for name in sorted(set(chosen))},
    )


def what_if(rows: Sequence[LoggedDecision], config: Config, policy: str, *, seeds: Sequence[int]) -> WhatIf:
    """The traffic under ``policy`` over the pool of ``config``, the mean of ``seeds`` (step noise and policy draws).

    Raises:
        ConfigError: an unknown policy, or an instance that cannot be simulated.
        DatasetError: a row that fits no model of this pool.
    """
    pool = simulated_pool(config)
    workload = workload_of(rows, pool, config.routing.lambda_per_musd)
    row = POLICIES.get(policy)
    options = {"fallback": fallback_of(config)} if row is not None and "fallback" in row.options else {}
    with_target = workload.ttft_target_s < NO_TARGET_S
    runs = []
    attained = []
    for seed in seeds:
        chosen = make_policy(policy, rng=stream(seed, "policy"), options=options)
        estimator = None if policy in _QUEUEING_POLICIES else make_estimator(POLICIES[policy].estimator)
        outcomes = simulate(workload, pool, policy=chosen, estimator=estimator, seed=seed)
        runs.append(score(workload, pool, outcomes))
        if with_target.any():
            attained.append(float((outcomes.ttft_s <= workload.ttft_target_s)[with_target].mean()))
    cost_usd = float(np.mean([(run.mean_cost_usd or 0.0) * run.num_queries * (1 - run.refused) for run in runs]))
    return WhatIf(
        policy=policy,
        num_queries=len(rows),
        num_with_target=int(with_target.sum()),
        attainment=float(np.mean(attained)) if attained else None,
        attainment_range=(min(attained), max(attained)) if attained else None,
        cost_usd=cost_usd,
        cost_per_1000_usd=1e3 * cost_usd / len(rows),
        mean_quality=_mean([run.mean_quality for run in runs]),
        refused=float(np.mean([run.refused for run in runs])),
        ttft_p50_s=_mean([run.ttft_p50_s for run in runs]),
        ttft_p99_s=_mean([run.ttft_p99_s for run in runs]),
        shares={name: float(np.mean([run.shares[name] for run in runs])) for name in pool.ids},
    )


def simulated_pool(config: Config) -> Pool:
    """The pool of a configuration, its engines running by their profiles' step times.

    Raises:
        ConfigError: an instance has no profile.
    """
    instances = []
    for index, instance in enumerate(build_instances(config)):
        if instance.limits is None or instance.step_time is None:
            raise config.error(f"instances[{index}]", f"{instance.id!r} has no profile and cannot be simulated")
        instances.append(LabInstance(instance=instance, truth=_truth(instance)))
    return Pool(instances=tuple(instances), cards={model.name: model_card(model) for model in config.models})


def workload_of(rows: Sequence[LoggedDecision], pool: Pool, lambda_per_musd: float) -> Workload:
    """The logged traffic as a workload for the models of ``pool``.

    Raises:
        DatasetError: a request bound to models that this pool has not.
    """
    models = pool.models
    shape = (len(rows), len(models))
    lengths, predicted, quality = np.ones(shape, np.int32), np.ones(shape), np.full(shape, 0.5)
    logged_models = {model for row in rows for model in row.models}
    candidates: list[tuple[str, ...] | None] = []
    max_tokens = max([row.max_tokens or 0 for row in rows] + [card.context_tokens for card in pool.cards.values()])
    for number, row in enumerate(rows):
        bound = _bound_to(row, logged_models)
        mine = None if bound is None else tuple(model for model in models if model in bound)
        if mine == ():
            raise DatasetError(f"request {row.request_id!r} is for {row.requested_model!r}, which this pool has not")
        candidates.append(mine)
        stretch = _stretch(row)
        for column, model in enumerate(models):
            known, card = row.models.get(model), pool.cards[model]
            prior = card.prior
            expected = (known.output_tokens if known else None) or (prior.output_tokens if prior else 256.0)
            cap = row.max_tokens or card.context_tokens
            predicted[number, column] = expected
            lengths[number, column] = int(min(max(expected * stretch, 1.0), cap, max_tokens))
            judged = known.quality if known else None
            quality[number, column] = judged if judged is not None else prior.quality if prior else 0.5
        real = None if row.outcome is None else row.outcome.output_tokens
        answering = _model_of(row)
        if real and answering in models:
            lengths[number, models.index(answering)] = real
    first_s = rows[0].wall_s
    return Workload(
        arrival_s=np.array([row.wall_s - first_s for row in rows]),
        task=np.zeros(len(rows), np.int8),
        task_names=("logged",),
        models=models,
        prompt_tokens=np.array([_prompt_tokens(row) for row in rows], np.int32),
        ttft_target_s=np.array([NO_TARGET_S if row.ttft_target_s is None else row.ttft_target_s for row in rows]),
        true_output_tokens=np.minimum(lengths, max_tokens),
        true_quality=quality,
        predicted_output_tokens=predicted,
        predicted_quality=quality.copy(),
        max_tokens=max_tokens,
        lambda_per_musd=lambda_per_musd,
        note="lengths on models that did not answer, and all qualities, are predictions",
        candidates=tuple(candidates) if any(one is not None for one in candidates) else None,
    )


def _truth(instance: Instance) -> TruthProfile:
    assert instance.limits is not None
    assert instance.step_time is not None
    return TruthProfile(
        name=instance.id,
        model=instance.model,
        hardware="as profiled",
        engine_version=instance.engine,
        source=f"profile {instance.profile}",
        limits=instance.limits,
        step_time=instance.step_time,
        step_noise=STEP_NOISE,
        stall_probability=0.0,
        stall_mean_s=0.0,
        host_gap_s=(0.0, 0.0),
    )


def _model_of(row: LoggedDecision) -> str | None:
    return next((one.model for one in row.instances if one.id == row.chosen), None)


def _answering(row: LoggedDecision) -> LoggedModel | None:
    name = _model_of(row)
    return None if name is None else row.models.get(name)


def _bound_to(row: LoggedDecision, logged_models: AbstractSet[str]) -> AbstractSet[str] | None:
    """The models that the request asked for, by name or by an alias of some; None where any may answer."""
    if row.requested_model in row.models:
        return {row.requested_model}
    return None if row.models.keys() == logged_models else set(row.models)


def _prompt_tokens(row: LoggedDecision) -> int:
    real = None if row.outcome is None else row.outcome.prompt_tokens
    return real or max(model.prompt_tokens or 1 for model in row.models.values())


def _stretch(row: LoggedDecision) -> float:
    """How much longer the real answer became than predicted, as far as it came to its own end."""
    model, outcome = _answering(row), row.outcome
    if model is None or not model.output_tokens or outcome is None or outcome.status != "ok":
        return 1.0
    return min((outcome.output_tokens or 1) / model.output_tokens, MAX_STRETCH)


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return float(np.quantile(ordered, share)) if ordered else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def check_policies(names: Sequence[str]) -> None:
    """Raises ConfigError for a policy that does not exist, before anything is simulated."""
    for name in names:
        make_policy(name, rng=np.random.default_rng(0))
    if not names:
        raise ConfigError("name at least one policy", key="policy")
