"""Small loads for the central-queue lab, without any recorded trace."""

from __future__ import annotations

import numpy as np

from headway.lab.queue_load import Lengths, QueueLoad, queue_load

#: Prompts and outputs of all sizes.
LENGTHS = Lengths(
    np.random.default_rng(1).integers(5, 200, 500), np.clip(np.random.default_rng(2).geometric(1 / 20, 500), 1, 90)
)


def small_load(num: int = 200, rate: float = 0.3, seed: int = 0, **more: object) -> QueueLoad:
    return queue_load(LENGTHS, num_requests=num, rate=rate, seed=seed, **more)  # type: ignore[arg-type]


def load_of(*requests: tuple[int, int, int]) -> QueueLoad:
    """(arrival, prompt, output) of each request, in order of arrival; lengths are known."""
    arrivals, prompts, outputs = (np.array(part) for part in zip(*requests, strict=True))
    return QueueLoad(
        arrivals=arrivals.astype(np.float64),
        prompt_tokens=prompts,
        output_tokens=outputs,
        predicted_tokens=outputs,
    )
