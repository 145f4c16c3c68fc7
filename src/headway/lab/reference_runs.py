"""The cheap references of a scenario as runs of their own: what each policy is held against without asking.

``task_label`` takes the best model by each task's means alone. ``random_mix`` are mixtures of every two models at some
shares, whose upper hull over cost a router has to pass. ``two_model`` are routers of every two models with one
threshold on the predicted gain. None looks at an engine, so none needs a replay. It refuses to choose the best of them:
that is read off the results, in favour of the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.lab.pool import Pool
from headway.lab.references import RandomMixPolicy, TwoModelPolicy, gain_thresholds, model_pairs
from headway.lab.scenario import Option, PolicyConfig, Reference
from headway.lab.workload import Workload
from headway.policy.base import HoldingPolicy, Policy
from headway.policy.registry import make_policy

#: What an estimator is called where none is asked.
NO_ESTIMATOR = "none"
#: Shares of queries that go to the second, or strong, model of a pair.
SHARES = (0.25, 0.5, 0.75)


def reference_policies(asked: Sequence[Reference], models: Sequence[str]) -> list[tuple[Reference, PolicyConfig]]:
    """A row per run, each under a label that no two of one reference share; nothing for a pool of one model."""
    rows: list[tuple[Reference, PolicyConfig]] = []
    if len(models) < 2:
        return rows
    pairs = model_pairs(models)
    for one in dict.fromkeys(asked):
        if one == "task_label":
            rows.append((one, _row("latency_agnostic", "best model by task label", {}, sees="task_label")))
        elif one == "random_mix":
            pure = [(models[0], model, float(place > 0)) for place, model in enumerate(models)]
            mixed = [(first, second, share) for first, second in pairs for share in SHARES]
            for first, second, share in (*pure, *mixed):
                label = f"{second if share == 1.0 else first} alone" if share in (0.0, 1.0) else None
                label = label or f"{1.0 - share:.0%} {first}, {share:.0%} {second}"
                rows.append((one, _row(one, label, {"first": first, "second": second, "share": share})))
        else:
            for weak, strong in pairs:
                for share in SHARES:
                    label = f"{weak}, {strong} for the {share:.0%} that gain most"
                    rows.append((one, _row(one, label, {"weak": weak, "strong": strong, "share": share})))
    return rows


def _row(policy: str, label: str, options: dict[str, Option], *, sees: str = "scenario") -> PolicyConfig:
    return PolicyConfig(
        policy=policy,
        label=label,
        options=options,
        estimator=NO_ESTIMATOR,
        sees="task_label" if sees == "task_label" else "scenario",
        on_infeasible="best_effort",
    )


def make_player(
    name: str, options: dict[str, Option], rng: np.random.Generator, workload: Workload, pool: Pool
) -> Policy | HoldingPolicy:
    """A registered policy, or a reference on this workload: a threshold is set so that it splits it as asked.

    Raises:
        ConfigError: as :func:`headway.policy.registry.make_policy`.
    """
    if name == "random_mix":
        first, second = str(options["first"]), str(options["second"])
        return RandomMixPolicy(rng, first=first, second=second, share=_share(options))
    if name == "two_model":
        weak, strong = str(options["weak"]), str(options["strong"])
        (threshold,) = gain_thresholds(workload, pool, weak, strong, [_share(options)])
        return TwoModelPolicy(rng, weak=weak, strong=strong, threshold=threshold)
    return make_policy(name, rng=rng, options=options)


def _share(options: dict[str, Option]) -> float:
    share = options["share"]
    assert isinstance(share, (int, float))
    return float(share)
