"""From a configuration to a router: profiles read, limits overridden, policy, estimator and predictor put together.

Gateway, command line and lab all build their router here, so that a configuration means the same to each of them. What
is wrong is reported at the configuration's own line. It refuses to open sockets or segments and to read secrets.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from headway.config import Config, InstanceConfig, ModelConfig
from headway.config.keys import beside
from headway.errors import ArtifactError, ConfigError, EngineInputError, ProfileError
from headway.estimate.base import Estimator
from headway.estimate.registry import make_estimator
from headway.fleet import FleetView
from headway.policy.base import HoldingPolicy, Policy
from headway.policy.options import Option
from headway.policy.registry import POLICIES, make_policy
from headway.predict.base import Predictor
from headway.predict.prior import PriorPredictor
from headway.profiles import Profile, load_profile
from headway.router import Router
from headway.snapshot.shared_memory import segment_path
from headway.types import EngineLimits, Instance, ModelCard, ModelPrior


def build_router(config: Config, *, predictor: Predictor | None = None, seed: int = 0) -> Router:
    """A router over the pool of ``config``; ``seed`` feeds what a policy draws.

    ``predictor`` is the one that the configuration names, where it is loaded already.

    Raises:
        ConfigError: a profile, limit, segment, address, policy option or predictor is wrong; path, line and key say
            where.
    """
    shadowed = [entry.id for entry in config.instances if entry.shadowed]
    return _router(config, FleetView(build_instances(config), shadowed=shadowed), predictor or _predictor(config), seed)


def rebuild_router(
    config: Config, earlier: Router, before: Config, *, now: float, predictor: Predictor | None = None, seed: int = 0
) -> Router:
    """A router for ``config`` that goes on from ``earlier``, which served ``before`` and is used up thereby.

    Instances described as before keep their state and requests. The estimator goes on with what it learned where it is
    the same one; the policy begins anew. Nothing is taken from ``earlier`` when this raises.

    Raises:
        ConfigError: as :func:`build_router`.
    """
    predictor = predictor or _predictor(config)
    build_router(config, predictor=predictor, seed=seed)  # whatever is wrong is found here
    shadowed = [entry.id for entry in config.instances if entry.shadowed]
    fleet = FleetView(build_instances(config), shadowed=shadowed)
    begun = fleet.adopt(earlier.fleet, now)
    router = _router(config, fleet, predictor, seed, _same_estimator(config, earlier, before))
    router.adopt(earlier, begun)
    return router


def _same_estimator(config: Config, earlier: Router, before: Config) -> Estimator | None:
    names = [POLICIES[one.routing.policy].estimator for one in (before, config)]
    return earlier.estimator if names[0] == names[1] else None


def _predictor(config: Config) -> Predictor:
    path = predictor_path(config, config.routing.predictor)
    if path is None:
        return prior_predictor(config)
    try:
        return load_predictor(config, path.read_bytes())
    except OSError as error:
        raise config.error("routing.predictor", f"{path}: cannot be read: {error.strerror}") from error
    except ArtifactError as error:
        raise config.error("routing.predictor", f"{path}: {error}", kind=ArtifactError) from error


def prior_predictor(config: Config) -> Predictor:
    """The predictor that knows only what the configuration says of each model."""
    return PriorPredictor({model.name: model_card(model) for model in config.models})


def predictor_path(config: Config, name: str) -> Path | None:
    """Where the artifact that ``routing.predictor`` or ``shadow.predictor`` names lies; None for the prior."""
    return None if name == "prior" else beside(config, name)


def load_predictor(config: Config, content: bytes) -> Predictor:
    """The predictor in an artifact's bytes, for the models of ``config``.

    Raises:
        ArtifactError: no artifact, damaged, or of no use here.
    """
    from headway.predict.artifact import decode_artifact  # pools without an artifact need none of its code
    from headway.predict.learned import LearnedPredictor

    return LearnedPredictor(decode_artifact(content), {model.name: model_card(model) for model in config.models})


def build_shadow(config: Config, live: Router, predictor: Predictor, *, seed: int = 0) -> Router:
    """The router of the section ``shadow``: over the fleet of ``live``, with a policy and estimator of its own.

    Raises:
        ConfigError: the section is missing, or its policy does not take the options of ``routing``.
    """
    shadow, routing = config.shadow, config.routing
    if shadow is None:
        raise config.error("shadow", "is missing")
    if shadow.policy is not None and shadow.policy != routing.policy:  # options are those of the live policy
        routing = msgspec.structs.replace(
            routing, policy=shadow.policy, delta_per_ms=0.0, fallback=None, price=None, bid_price=None
        )
    if routing.on_infeasible == "queue":  # a shadow has no queue: it says where it would send a query now
        routing = msgspec.structs.replace(routing, on_infeasible="best_effort")
    if POLICIES[routing.policy].holds:
        raise config.error("shadow", f"needs a policy that chooses, and {routing.policy} holds queries in a queue")
    return _router(msgspec.structs.replace(config, routing=routing), live.fleet, predictor, seed)


def _router(
    config: Config, fleet: FleetView, predictor: Predictor, seed: int, estimator: Estimator | None = None
) -> Router:
    return Router(
        fleet=fleet,
        models={model.name: model_card(model) for model in config.models},
        policy=_policy(config, seed),
        estimator=estimator or make_estimator(POLICIES[config.routing.policy].estimator),
        predictor=predictor,
        lambda_per_musd=config.routing.lambda_per_musd,
        default_ttft_s=None if config.routing.default_ttft_ms is None else config.routing.default_ttft_ms / 1e3,
        on_infeasible=config.routing.on_infeasible,
        config_hash=config.config_hash,
    )


def build_instances(config: Config) -> list[Instance]:
    """The instances in the order of the file, each with what its profile knows.

    Raises:
        ConfigError: as :func:`build_router`.
    """
    profiles: dict[str, Profile] = {}
    return [_instance(config, index, entry, profiles) for index, entry in enumerate(config.instances)]


def model_card(model: ModelConfig) -> ModelCard:
    """The model as the core sees it; a task prior fills its gaps from the model's own."""
    prior = model.prior
    tasks: Mapping[str, ModelPrior] = {}
    if prior is not None:
        tasks = {
            name: ModelPrior(
                quality=prior.quality if task.quality is None else task.quality,
                output_tokens=prior.output_tokens if task.output_tokens is None else task.output_tokens,
            )
            for name, task in prior.tasks.items()
        }
    return ModelCard(
        name=model.name,
        input_per_1m_usd=model.price.input_per_1m,
        output_per_1m_usd=model.price.output_per_1m,
        context_tokens=model.context_tokens,
        parameters=model.parameters,
        prior=None if prior is None else ModelPrior(quality=prior.quality, output_tokens=prior.output_tokens),
        tasks=dict(tasks),
    )


def _instance(config: Config, index: int, entry: InstanceConfig, profiles: dict[str, Profile]) -> Instance:
    key = f"instances[{index}]"
    profile = None
    if entry.profile is not None:
        try:
            if entry.profile not in profiles:
                profiles[entry.profile] = load_profile(entry.profile)
        except ProfileError as error:
            raise config.error(f"{key}.profile", str(error), kind=ProfileError) from error
        profile = profiles[entry.profile]
        if not f"{profile.engine_version}.".startswith(f"{entry.engine}."):
            raise config.error(
                f"{key}.profile",
                f"{entry.profile!r} was made on {profile.engine_version}, and this instance runs {entry.engine}",
                kind=ProfileError,
            )
    _check_place(config, key, entry)
    return Instance(
        id=entry.id,
        model=entry.model,
        api_base=entry.api_base,
        engine=entry.engine,
        profile=entry.profile,
        limits=None if profile is None else _limits(config, key, entry, profile.limits),
        step_time=None if profile is None else profile.step_time,
        calibration=None if profile is None else profile.calibration,
    )


def _check_place(config: Config, key: str, entry: InstanceConfig) -> None:
    source = entry.snapshots
    if source is None:
        return
    try:
        if source.shared_memory is not None:
            segment_path(source.shared_memory)
        elif source.zeromq is not None:
            from headway.snapshot.zeromq import check_address  # pools on one machine need no ZeroMQ

            check_address(source.zeromq)
    except ConfigError as error:
        message = str(error).removeprefix(f"{error.key}: ")
        raise config.error(f"{key}.snapshots.{source.transport}", message) from error


def _limits(config: Config, key: str, entry: InstanceConfig, limits: EngineLimits) -> EngineLimits:
    if entry.limits is None:
        return limits
    overrides = {
        name: value for name in entry.limits.__struct_fields__ if (value := getattr(entry.limits, name)) is not None
    }
    try:
        return msgspec.structs.replace(limits, **overrides)
    except EngineInputError as error:
        raise config.error(f"{key}.limits.{error.field}", str(error)) from error


def fallback_of(config: Config) -> str:
    """Where a hopeless query goes: as configured, else the least work where the policy knows such a rule.

    Least work held on-time utility at overload where the smallest TTFT let it fall (docs/acceptance.md, A16).
    """
    routing = config.routing
    if routing.fallback is not None:
        return routing.fallback
    row = POLICIES.get(routing.policy)
    knows_it = row is not None and "fallback" in row.options and routing.delta_per_ms == 0.0
    return "least_work" if knows_it else "least_ttft"


def _policy(config: Config, seed: int) -> Policy | HoldingPolicy:
    routing = config.routing
    options: dict[str, Option] = {"delta_per_ms": routing.delta_per_ms, "fallback": fallback_of(config)}
    if routing.price is not None:
        options["price"] = routing.price
    own = {} if routing.bid_price is None else msgspec.structs.asdict(routing.bid_price)
    options |= {key: value for key, value in own.items() if value is not None}
    try:
        return make_policy(routing.policy, rng=np.random.default_rng(seed), options=options)
    except ConfigError as error:
        key = error.key or "routing.policy"
        message = str(error).removeprefix(f"{key}: ")
        if (name := key.removeprefix("routing.")) in own:
            key = f"routing.bid_price.{name}"
        raise config.error(key, message) from error
