"""A pool of simulated instances: for each what an estimator may know, and the truth that its engine runs by.

The two stand side by side here and nowhere else; the simulator hands the router only ``instance``. It refuses pools in
which a name stands twice or a model has no card.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from headway.errors import ConfigError
from headway.lab.truth import COMPLETION_CAP_TOKENS, PROMPT_CAP_TOKENS
from headway.profiles import TruthProfile, load_profile, load_truth
from headway.types import Instance, ModelCard

#: Published prices; the context holds the longest prompt and answer of the measured runs.
QWEN3_CARDS: dict[str, ModelCard] = {
    f"qwen3-{size}": ModelCard(
        name=f"qwen3-{size}",
        input_per_1m_usd=input_per_1m_usd,
        output_per_1m_usd=output_per_1m_usd,
        context_tokens=PROMPT_CAP_TOKENS + COMPLETION_CAP_TOKENS,
        parameters=parameters,
    )
    for size, input_per_1m_usd, output_per_1m_usd, parameters in (
        ("0.6b", 0.044, 0.173, 0.6e9),
        ("8b", 0.072, 0.287, 8.2e9),
        ("32b", 0.287, 0.640, 32.8e9),
    )
}


class LabInstance(Struct, frozen=True, kw_only=True):
    """One simulated instance: what the router sees of it, and the clock of its engine."""

    instance: Instance
    truth: TruthProfile


class Pool(Struct, frozen=True, kw_only=True):
    """The instances in fleet order, and the card of every model they serve.

    Raises:
        ConfigError: no instance, an id that stands twice, a model without a card, or limits that the engine and its
            estimator do not share.
    """

    instances: tuple[LabInstance, ...]
    cards: dict[str, ModelCard]

    def __post_init__(self) -> None:
        if not self.instances:
            raise ConfigError("needs at least one instance", key="pool.instances")
        seen: set[str] = set()
        for index, one in enumerate(self.instances):
            key = f"pool.instances[{index}]"
            if one.instance.id in seen:
                raise ConfigError(f"{one.instance.id!r} stands twice", key=f"{key}.id")
            seen.add(one.instance.id)
            if one.instance.model not in self.cards:
                raise ConfigError(f"model {one.instance.model!r} has no card", key=f"{key}.model")
            if one.instance.limits not in (None, one.truth.limits):
                raise ConfigError("differ between estimator and truth profile", key=f"{key}.limits")

    @property
    def ids(self) -> tuple[str, ...]:
        """The instances' ids in fleet order."""
        return tuple(one.instance.id for one in self.instances)

    @property
    def models(self) -> tuple[str, ...]:
        """The models served, each once, in order of their first instance."""
        return tuple(dict.fromkeys(one.instance.model for one in self.instances))


def lab_instance(instance_id: str, model: str, profile_name: str, *, truth_name: str | None = None) -> LabInstance:
    """An instance of ``model``: what its estimator knows, and the truth, by default the one of the same name.

    Raises:
        ProfileError: no profile, or no truth, is called so.
    """
    profile = load_profile(profile_name)
    instance = Instance(
        id=instance_id,
        model=model,
        engine="vllm-0.32",
        profile=profile_name,
        limits=profile.limits,
        step_time=profile.step_time,
        calibration=profile.calibration,
    )
    return LabInstance(instance=instance, truth=load_truth(truth_name or profile_name))


def qwen3_pool(copies: int | Sequence[int] = 1) -> Pool:
    """Qwen3 0.6B, 8B and 32B on H100, ``copies`` of each: one number for all, or one per size (22, 21, 21 makes 64).

    Raises:
        ConfigError: a negative number of copies, not three numbers, or none at all.
    """
    numbers = (copies,) * len(QWEN3_CARDS) if isinstance(copies, int) else tuple(copies)
    if len(numbers) != len(QWEN3_CARDS):
        raise ConfigError(f"must be one number or {len(QWEN3_CARDS)}, not {len(numbers)}", key="pool.copies")
    if min(numbers) < 0:
        raise ConfigError(f"must be at least 0, not {min(numbers)}", key="pool.copies")
    instances: list[LabInstance] = []
    for (model, card), number in zip(QWEN3_CARDS.items(), numbers, strict=True):
        if number == 0:
            continue
        size = card.name.removeprefix("qwen3-")
        first = lab_instance(f"h100-{size}", model, f"h100-qwen3-{size}")
        instances += [first] if number == 1 else _numbered(first, number)
    return Pool(instances=tuple(instances), cards=dict(QWEN3_CARDS))


def _numbered(one: LabInstance, number: int) -> list[LabInstance]:
    ids = [f"{one.instance.id}-{copy}" for copy in range(1, number + 1)]
    return [LabInstance(instance=replace(one.instance, id=name), truth=one.truth) for name in ids]
