"""What the router says of a decision: why nobody may be chosen, when to come again, why the chosen one was.

Kept apart from the router so that its path reads without the words. It refuses to decide: verdicts and choice are
given.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from headway.errors import HeadwayError, NoInstanceError, RejectedError, RequestError
from headway.estimate.replay import time_until_feasible
from headway.policy.base import CHOOSABLE, UTILITY_TIE, ttft_s_of, utility_of
from headway.policy.verdict import Place, Worth
from headway.types import Candidate, Query

#: What ``Retry-After`` says where nothing can tell when capacity frees up, seconds.
_UNKNOWN_RETRY_S = 30.0


class Weighed(NamedTuple):
    """A query with every candidate's figures and verdict; ``places`` runs parallel to ``candidates``.

    ``best_ttft_s`` is the smallest estimate among those that a policy may choose; None where it may choose none.
    """

    places: Sequence[Place]
    worths: Mapping[str, Worth]
    candidates: tuple[Candidate, ...]
    best_ttft_s: float | None
    target_s: float | None

    @property
    def eligible(self) -> list[Candidate]:
        """The candidates that a policy may choose."""
        return [candidate for candidate in self.candidates if candidate.verdict in CHOOSABLE]


def drain_time_s(weighed: Weighed) -> float:
    """Seconds until some candidate is expected to be in time for a newcomer; without a target, free at once.

    By replay where there is one, else by how late the estimate is; 30 s where nothing can tell.
    """
    target_s = math.inf if weighed.target_s is None else weighed.target_s
    waits_s = []
    for place, candidate in zip(weighed.places, weighed.candidates, strict=True):
        if candidate.verdict in CHOOSABLE:
            view = place.view
            engine = view.engine if view.clock_trusted and not view.stale else None
            if math.isinf(target_s):
                waits_s.append(0.0)
            elif engine is None:
                waits_s.append(ttft_s_of(candidate) - target_s)
            else:
                tokens, scale = candidate.prompt_tokens or 1, view.clock_scale
                waits_s.append(time_until_feasible(engine, tokens, target_s / scale) * scale)
    drain_s = min(waits_s, default=math.inf)
    return max(drain_s, 0.0) if math.isfinite(drain_s) else _UNKNOWN_RETRY_S


def rejection_of(weighed: Weighed) -> RejectedError | None:
    """The 429 of a query that no candidate is expected to answer in time; None where one is. Needs an eligible one."""
    target_s, best_ttft_s = weighed.target_s, weighed.best_ttft_s
    if target_s is None or best_ttft_s is None or best_ttft_s <= target_s:
        return None
    retry_after_s = max(1.0, drain_time_s(weighed))
    best = "every instance is saturated" if math.isinf(best_ttft_s) else f"the best offers {milliseconds(best_ttft_s)}"
    return RejectedError(
        f"no instance is expected to give the first token within {milliseconds(target_s)}: {best}; "
        f"retry in {retry_after_s:.1f} s",
        retry_after_s=retry_after_s,
        best_ttft_s=best_ttft_s,
        reason="ttft_target",
    )


def no_candidate(query: Query, weighed: Weighed, models: Container[str]) -> HeadwayError:
    """Why no instance may be chosen: the request itself where waiting cannot help, else the pool."""
    places, worths, candidates = weighed.places, weighed.worths, weighed.candidates
    if not places:
        names = query.candidates
        if names is not None and not any(name in models for name in names):
            listed = ", ".join(map(repr, names))
            return RequestError(f"unknown model {listed}", status=404, param="model", code="model_not_found")
        return NoInstanceError(f"no instance serves {'any model' if names is None else ', '.join(names)}")
    fitting = [place for place in places if worths[place.model].prompt_tokens <= place.max_prompt_tokens]
    if not fitting:
        longest = max(place.max_prompt_tokens for place in places)
        shortest = min(worth.prompt_tokens for worth in worths.values())
        return RequestError(
            f"the prompt of {shortest} tokens fits no instance: the largest takes {longest}",
            param="messages",
            code="context_length_exceeded",
        )
    if all(worths[place.model].refused is not None for place in fitting):
        return _unattainable(query, [worths[place.model] for place in fitting])
    verdicts = ", ".join(f"{candidate.instance_id} is {candidate.verdict}" for candidate in candidates[:8])
    return NoInstanceError(f"no instance can take the query now: {verdicts}")


def reason_of(policy: str, weighed: Weighed, chosen: int) -> str:
    """One sentence on the chosen candidate: when, against which target, worth how much beside the others."""
    eligible, target_s, candidate = weighed.eligible, weighed.target_s, weighed.candidates[chosen]
    ttft_s = ttft_s_of(candidate)
    when = "saturated" if ttft_s == math.inf else f"first token expected in {milliseconds(ttft_s)}"
    in_time = [one for one in eligible if one.verdict == "feasible"]
    if target_s is None:
        goal = "no target given"
    else:
        side = "within" if candidate.verdict == "feasible" else "beyond"
        share = f"{len(in_time)} of {len(eligible)} instances meet" if in_time else "no instance is expected to meet"
        goal = f"{side} the target of {milliseconds(target_s)} that {share}"
    utility = utility_of(candidate)
    best = max([utility_of(one) for one in in_time or eligible])
    worth = "the best of them" if utility >= best - UTILITY_TIE else f"the best of them has {best:.3f}"
    said = f"{policy} chose {candidate.instance_id}: {when}, {goal}; utility {utility:.3f}, {worth}"
    return said if candidate.price is None else f"{said}; {_charge_of(candidate, in_time)}"


def _charge_of(candidate: Candidate, in_time: Sequence[Candidate]) -> str:
    """What a pricing policy charged the chosen candidate, and whether any was worth its place."""
    price, harm = candidate.price or 0.0, candidate.harm or 0.0
    margins = [utility_of(one) - (one.price or 0.0) - (one.harm or 0.0) for one in in_time]
    words = f"price {price:.3f}, harm {harm:.3f}, margin {utility_of(candidate) - price - harm:.3f}"
    return f"{words}, and no instance in time has one above 0" if margins and max(margins) < 0.0 else words


def _unattainable(query: Query, worths: Sequence[Worth]) -> RequestError:
    """The 400 for a quality floor or budget that no fitting model meets; names the one nearest to being met."""
    good_enough = [worth for worth in worths if worth.refused == "budget"]
    if good_enough:
        cheapest = min(worth.cost_usd for worth in good_enough)
        return RequestError(
            f"no model answers this within {query.max_cost_usd:.6g} USD: the cheapest would cost {cheapest:.6g}",
            param="slo.max_cost_usd",
            code="slo_unattainable",
        )
    best = max(worth.quality for worth in worths)
    return RequestError(
        f"no model is expected to reach quality {query.quality_min:.3f}: the best offers {best:.3f}",
        param="slo.quality_min",
        code="slo_unattainable",
    )


def milliseconds(seconds: float) -> str:
    """A time as text."""
    return f"{seconds * 1e3:.0f} ms"
