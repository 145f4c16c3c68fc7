"""SCORE: utility less a price on the seconds until the whole answer is there.

``W + S`` is the wait by backlog and the service by length (source: Lakha, Yu and Shahout, "Faster, cheaper, just as
good", 2025, as the latency-aware router's comparison states it). It prices the end of the answer, not its first token,
and divides backlogs by constant rates. The result changes by tens of points with the units, so they are spelt out
below. It ignores targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from headway.fleet import FleetView
from headway.policy.base import Rotation, break_tie, choosable, largest, ttft_s_of, utility_of
from headway.policy.observed import EWMA_WEIGHT, tpot_s
from headway.policy.options import Options, by_instance, number, spread_over, word
from headway.policy.residents import Residents
from headway.types import Calibration, Candidate, Instance, Outcome, Query

#: Seconds per output token of an instance of which nothing is known yet.
UNKNOWN_TPOT_S = 0.02


class ScorePolicy:
    """Fair form: largest ``U − λs·(W + S)``; literal form: largest ``Q − λ·(C + W + S)``.

    W = (prefill backlog + prompt)/θ + decode backlog/decode rate and S = s·predicted output tokens, both in
    **seconds**; backlogs and prompt in tokens, θ and the decode rate in tokens per second, s in seconds per token.
    U is the router's utility, Q quality in [0, 1], C cost in **micro-USD**.

    Options: ``form`` (``fair``, the default, or ``literal``); ``price_per_s``, λs in utility per second (.05);
    ``price``, the literal form's λ per micro-USD and per second alike (5e-4); ``decode_tokens_per_s`` and
    ``token_s`` by instance or model, in the place of what the calibration says: k/T_dec and T_dec. An instance without
    calibration counts with the router's estimated TTFT for W and its observed TPOT for s.
    """

    name = "score"

    def __init__(self, rng: np.random.Generator, options: Options) -> None:
        self._rotation = Rotation(rng)
        self._residents = Residents()
        self._literal = word(options, "form", "fair", ("fair", "literal")) == "literal"
        self._price_per_s = number(options, "price_per_s", 0.05)
        self._price = number(options, "price", 5e-4)
        self._given_rates = by_instance(options, "decode_tokens_per_s")
        self._given_token_s = by_instance(options, "token_s")
        self._calibrations: dict[str, Calibration] = {}
        self._decode_tokens_per_s: dict[str, float] = {}
        self._token_s: dict[str, float] = {}

    def bind(self, fleet: FleetView) -> None:
        """Know the rates of this fleet's instances.

        Raises:
            ConfigError: an option names what is neither an instance nor a model of the fleet.
        """
        self._residents.bind(fleet)
        for view in fleet.views:
            self._know(view.instance)
        self._decode_tokens_per_s.update(spread_over(fleet, self._given_rates, "decode_tokens_per_s"))
        self._token_s.update(spread_over(fleet, self._given_token_s, "token_s"))

    def _know(self, instance: Instance) -> None:
        calibration = instance.calibration
        if calibration is not None:
            self._calibrations[instance.id] = calibration
            self._decode_tokens_per_s[instance.id] = calibration.concurrency / calibration.decode_step_s
            self._token_s[instance.id] = calibration.decode_step_s

    def choose(self, query: Query, candidates: Sequence[Candidate], now: float) -> int | None:
        """The instance with the best score; equals go to fewer requests, then take turns."""
        indices = choosable(candidates)
        if not indices:
            return None
        tied = largest(indices, [self.score(candidates[index]) for index in indices])
        return break_tie(tied, candidates, self._rotation, by_ttft=False)

    def observe(self, outcome: Outcome, now: float) -> None:
        """Learn the seconds per token of an instance without calibration."""
        seen_s = tpot_s(outcome)
        if seen_s is None or outcome.instance_id in self._calibrations:
            return
        known_s = self._token_s.get(outcome.instance_id, seen_s)
        self._token_s[outcome.instance_id] = known_s + EWMA_WEIGHT * (seen_s - known_s)

    def score(self, candidate: Candidate) -> float:
        """What ``choose`` maximises; minus infinity where a figure is missing."""
        seconds = self.wait_s(candidate) + self.service_s(candidate)
        if not self._literal:
            return utility_of(candidate) - self._price_per_s * seconds
        if candidate.quality is None or candidate.cost_usd is None:
            return -math.inf
        return candidate.quality - self._price * (candidate.cost_usd * 1e6 + seconds)

    def wait_s(self, candidate: Candidate) -> float:
        """W: seconds until the backlogs and the query's own prompt are through, at constant rates."""
        calibration = self._calibrations.get(candidate.instance_id)
        if calibration is None or candidate.prompt_tokens is None:
            return ttft_s_of(candidate)
        load = self._residents.load(candidate)
        prefill_s = (load.prefill_tokens + candidate.prompt_tokens) / calibration.prefill_tokens_per_s
        return prefill_s + load.decode_tokens / self._decode_tokens_per_s[candidate.instance_id]

    def service_s(self, candidate: Candidate) -> float:
        """S: seconds to give the predicted output, one token after the other."""
        token_s = self._token_s.get(candidate.instance_id, UNKNOWN_TPOT_S)
        return math.inf if candidate.output_tokens is None else token_s * candidate.output_tokens
