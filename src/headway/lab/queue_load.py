"""What arrives at the central queue: arrival times, lengths from a recorded trace, and predictions of them with error.

Times are in periods (the abstract clock) or in seconds. Lengths are drawn with replacement from the trace's pairs of
prompt and output, or from its totals split by a fixed ratio. Arrivals at one seed keep their pattern at every rate. It
refuses to invent lengths: they come from a file, or the caller brings them.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.errors import ConfigError
from headway.lab.traces import load_trace
from headway.lab.truth import stream

Index = NDArray[np.int64]

#: Prompt and output together, in the setting of arXiv 2607.03948.
CONTEXT_TOKENS = 4096
AZURE_CONVERSATIONS = "traces/azure_llm_2023_conv.csv.gz"


class Lengths(Struct, frozen=True, eq=False):
    """Pairs of prompt and output tokens to draw from."""

    prompt_tokens: Index
    output_tokens: Index

    def split(self, prompt_parts: int, output_parts: int) -> Lengths:
        """The same totals, divided between prompt and output in this ratio; at least a token on either side."""
        total = self.prompt_tokens + self.output_tokens
        outputs = np.clip(np.rint(total * output_parts / (prompt_parts + output_parts)), 1, total - 1).astype(np.int64)
        return Lengths(total - outputs, outputs)


def trace_lengths(path: Path, *, context_tokens: int = CONTEXT_TOKENS) -> Lengths:
    """The pairs of a trace that fit the context.

    Raises:
        DatasetError: the file is absent or malformed.
    """
    trace = load_trace(path, context_tokens=context_tokens)
    return Lengths(trace.prompt_tokens.astype(np.int64), trace.output_tokens.astype(np.int64))


class QueueLoad(Struct, frozen=True, eq=False, kw_only=True):
    """The requests in order of arrival. Output lengths are the true ones; routers see ``predicted_tokens``.

    ``values`` is what the answer of each device is worth, in [0, 1], shape (requests, devices); None: nothing is known.
    """

    arrivals: NDArray[np.float64]
    prompt_tokens: Index
    output_tokens: Index
    predicted_tokens: Index
    values: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.arrivals)

    def slot_load(self, num_slots: int) -> float:
        """ρ: slot-periods asked for over those there are while requests arrive, one token per period."""
        return float(self.output_tokens.sum() / self.arrivals[-1] / num_slots)

    def memory_load(self, kv_tokens: int) -> float:
        """The same of KV-token-periods."""
        held = self.prompt_tokens * self.output_tokens + self.output_tokens * (self.output_tokens + 1) / 2
        return float(held.sum() / self.arrivals[-1] / kv_tokens)


def queue_load(
    lengths: Lengths,
    *,
    num_requests: int,
    rate: float,
    seed: int,
    length_error: float = 0.0,
    rate_after: float | None = None,
    shift_at: float = math.inf,
    whole_periods: bool = True,
) -> QueueLoad:
    """Poisson arrivals at ``rate`` per unit of time, at ``rate_after`` from ``shift_at`` on, lengths of a trace.

    Predictions are uniform within ``length_error`` of the truth, as a share of it: ô ~ U((1−e)·o, (1+e)·o).
    ``whole_periods`` moves arrivals to the next whole number, where the abstract clock begins a period.

    Raises:
        ConfigError: no request, a rate that is not positive, or an error outside [0, 1).
    """
    for key, value in (("rate", rate), ("rate_after", rate if rate_after is None else rate_after)):
        if not 0.0 < value < math.inf:
            raise ConfigError(f"must be positive and finite, not {value!r}", key=key)
    if num_requests < 1:
        raise ConfigError(f"must be at least 1, not {num_requests}", key="num_requests")
    if not 0.0 <= length_error < 1.0:
        raise ConfigError(f"must be at least 0 and below 1, not {length_error!r}", key="length_error")
    expected = np.cumsum(stream(seed, "queue arrivals").standard_exponential(num_requests))
    arrivals = expected / rate
    if rate_after is not None:
        late = arrivals > shift_at
        arrivals[late] = shift_at + (expected[late] - rate * shift_at) / rate_after
    picks = stream(seed, "queue lengths").integers(len(lengths.prompt_tokens), size=num_requests)
    outputs = lengths.output_tokens[picks]
    factors = stream(seed, "queue predictions").uniform(1.0 - length_error, 1.0 + length_error, num_requests)
    return QueueLoad(
        arrivals=np.ceil(arrivals) if whole_periods else arrivals,
        prompt_tokens=lengths.prompt_tokens[picks],
        output_tokens=outputs,
        predicted_tokens=np.maximum(1, np.rint(outputs * factors)).astype(np.int64),
    )
