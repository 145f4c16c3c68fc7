"""How much of an engine's time a query takes: its own work in seconds, by the engine's step time.

An engine that is kept full spends, on a query of P prompt and L output tokens,
``w = prefill(P) + L·(b1 + b2·(P + L/2)) + b0·L·max((P + L/2)/KV, 1/max_num_seqs)``: its tokens and their contexts, and
the share of each step's constant that it pays because it occupies blocks or a slot. An instance is stable exactly when
arrival rate × mean w ≤ 1 (measured: within 3 to 12 % of a simulated engine's capacity). It refuses to know a queue:
how long a query waits is the estimators' business.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.types import MAX_COUNT, EngineLimits, StepTime

#: One query or a column of them.
Tokens = TypeVar("Tokens", float, NDArray[np.float64])


class OwnWork(Struct, frozen=True, kw_only=True):
    """What a query costs one engine, in seconds per unit. Build one with :func:`own_work`.

    ``square_chunk_tokens`` bounds p in Σ p²: the six-term form squares each chunk alone, the linear one the prompt.
    ``knee_s`` per token above ``knee`` comes on top of ``prefill_token_s``.
    """

    step_s: float
    prefill_token_s: float
    prefill_square_s: float
    decode_token_s: float
    decode_context_s: float
    kv_tokens: float
    max_num_seqs: float
    budget_tokens: float
    square_chunk_tokens: float = float(MAX_COUNT)
    knee: float = 0.0
    knee_s: float = 0.0

    def seconds(self, prompt_tokens: Tokens, output_tokens: Tokens) -> Tokens:
        """w of a query, or of each query of two columns. O(1) a query, cheap enough for every candidate."""
        context = prompt_tokens + output_tokens * 0.5
        decode_s = output_tokens * (self.decode_token_s + context * self.decode_context_s)
        by_blocks = context / self.kv_tokens
        by_slots = 1.0 / self.max_num_seqs
        share = (by_blocks + by_slots + abs(by_blocks - by_slots)) * 0.5  # the larger, of numbers and columns alike
        return self.prefill_s(prompt_tokens) + decode_s + output_tokens * share * self.step_s

    def prefill_s(self, prompt_tokens: Tokens) -> Tokens:
        """What the prompt adds to the steps that compute it, without their constant."""
        full = prompt_tokens // self.square_chunk_tokens
        rest = prompt_tokens - full * self.square_chunk_tokens
        squares = full * self.square_chunk_tokens**2 + rest * rest
        above = prompt_tokens - self.knee
        above = (above + abs(above)) * 0.5
        return prompt_tokens * self.prefill_token_s + squares * self.prefill_square_s + above * self.knee_s

    def alone_s(self, prompt_tokens: Tokens) -> Tokens:
        """Time to first token on an idle engine: no instance gives one sooner (contexts of later chunks left out)."""
        num_steps = -(-prompt_tokens // self.budget_tokens)
        return self.prefill_s(prompt_tokens) + num_steps * self.step_s


def own_work(step_time: StepTime, limits: EngineLimits) -> OwnWork:
    """The own work of queries on an engine of this step time and these limits.

    The linear form's pairs p·c + p(p+1)/2 sum to P(P+1)/2 however the prompt is cut; a knee is charged to the prompt as
    if it were computed alone, decodes below it; a per-request constant is paid once per step.
    """
    beta = step_time.named()
    pair_s = beta.get("b3", 0.0)
    per_request_s = beta.get("b_seq", 0.0)
    knee_s = 0.0
    if step_time.form == "six_term":
        token_s, decode_s, context_s, square_s = beta["bp"], beta["bd"], beta["bs"], beta["bpp"]
    elif step_time.form == "knee":
        token_s = decode_s = beta["b1_below"]
        context_s, square_s = beta["b2"], 0.5 * pair_s
        knee_s = beta["b1_above"] - token_s
    else:
        token_s = decode_s = beta["b1"]
        context_s, square_s = beta["b2"], 0.5 * pair_s
    return OwnWork(
        step_s=beta["b0"],
        prefill_token_s=token_s + 0.5 * pair_s,
        prefill_square_s=square_s,
        decode_token_s=decode_s + per_request_s,
        decode_context_s=context_s,
        kv_tokens=float((limits.num_blocks - 1) * limits.block_size),
        max_num_seqs=float(limits.max_num_seqs),
        budget_tokens=float(limits.max_num_batched_tokens),
        square_chunk_tokens=float(limits.max_num_batched_tokens if step_time.form == "six_term" else MAX_COUNT),
        knee=beta.get("knee", 0.0),
        knee_s=knee_s,
    )
