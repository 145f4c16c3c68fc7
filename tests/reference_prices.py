"""Bid prices as the formulas say them, one period and one column at a time: slow, and plain to check by eye."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headway.policy.bid_plan import Devices


class Column(NamedTuple):
    """A candidate: its device, the priced periods it covers from ``start`` on, KV tokens in the first, its reward."""

    device: int
    num_periods: int
    base_tokens: float
    reward: float
    start: int = 0


class ReferencePrices:
    """Prices by device and priced period; the token's in units of the device's KV tokens per slot."""

    def __init__(self, devices: Devices, num_periods: int, stride: int) -> None:
        self.num_periods = num_periods
        self.growth = [speed * stride for speed in devices.speeds.tolist()]
        self.units = [kv / slots for kv, slots in zip(devices.kv_tokens, devices.max_num_seqs, strict=True)]
        self.slots = [[0.0] * num_periods for _ in self.units]
        self.tokens = [[0.0] * num_periods for _ in self.units]

    def usage(self, column: Column, period: int) -> tuple[float, float]:
        """a and m: the slot and the KV tokens (in units) that a column takes in a priced period."""
        since = period - column.start
        if not 0 <= since < column.num_periods:
            return 0.0, 0.0
        tokens = column.base_tokens + self.growth[column.device] * since
        return 1.0, tokens / self.units[column.device]

    def charge(self, column: Column) -> float:
        """a·p, a sum over periods."""
        total = 0.0
        for period in range(self.num_periods):
            slot, tokens = self.usage(column, period)
            total += slot * self.slots[column.device][period] + tokens * self.tokens[column.device][period]
        return total

    def step(
        self, requests: Sequence[Sequence[Column]], d_slots: list[list[float]], d_tokens: list[list[float]], size: float
    ) -> None:
        """p ← max(0, p − η·(d − (1/m)·Σ a)), a request counting on the device of best margin r − a·p if that is > 0."""
        taken = []
        for columns in requests:
            margin, place = max((column.reward - self.charge(column), -number) for number, column in enumerate(columns))
            if margin > 0.0:
                taken.append(columns[-place])
        for device in range(len(self.units)):
            for period in range(self.num_periods):
                used = [self.usage(column, period) for column in taken if column.device == device]
                slots = sum(slot for slot, _ in used) / len(requests)
                tokens = sum(tokens for _, tokens in used) / len(requests)
                for prices, d, mean in ((self.slots, d_slots, slots), (self.tokens, d_tokens, tokens)):
                    moved = prices[device][period] - size * (d[device][period] - mean)
                    prices[device][period] = max(0.0, moved)

    def advance(self, num_periods: int) -> None:
        """Each price keeps its period."""
        for prices in (*self.slots, *self.tokens):
            gone = min(num_periods, self.num_periods)
            prices[:] = prices[gone:] + [0.0] * gone
