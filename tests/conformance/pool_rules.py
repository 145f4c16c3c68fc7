"""Block pools that lack one rule each, and the runs that show it.

A rule of the prefix cache counts as exercised where a reference without it leaves the record. What these do wrong is
their only purpose; nothing but ``features.py`` uses them.
"""

from __future__ import annotations

from collections.abc import Sequence

from reference_pool import Block, ReferencePool, Table


class HeadFirst(ReferencePool):
    """Evicts the head of a request before its tail."""

    def release(self, table: Table) -> None:
        table.blocks.reverse()
        super().release(table)


class EmptyLast(ReferencePool):
    """Puts blocks that hold nothing to be found behind all others, not in front."""

    def release(self, table: Table) -> None:
        num_empty = sum(block.content is None and block.num_holders == 1 for block in table.blocks)
        super().release(table)
        for _ in range(num_empty):
            self.free.move_to_end(next(iter(self.free)))


class NewestFirst(ReferencePool):
    """Of equal blocks finds the one cached last."""

    def find(self, table: Table, num_tokens: int) -> list[Block]:
        found = super().find(table, num_tokens)
        return [self.cached[block.content][-1] for block in found if block.content is not None]


class NothingShared(ReferencePool):
    """Asks a free block for every block found, also for those that somebody holds."""

    def num_held(self, found: Sequence[Block]) -> int:
        return 0


class NeverAgain(ReferencePool):
    """Gives a preempted request nothing of what it had."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._released: set[int] = set()

    def release(self, table: Table) -> None:
        self._released.add(id(table))
        super().release(table)

    def find(self, table: Table, num_tokens: int) -> list[Block]:
        return [] if id(table) in self._released else super().find(table, num_tokens)


class NoSharing(ReferencePool):
    """Finds nothing."""

    def find(self, table: Table, num_tokens: int) -> list[Block]:
        return []


#: By what a run shows if the pool without the rule leaves it.
POOLS: dict[str, type[ReferencePool]] = {
    "a prefix is found": NoSharing,
    "a preempted request finds its own blocks": NeverAgain,
    "the tail of a request is evicted before its head": HeadFirst,
    "blocks that hold nothing are taken first": EmptyLast,
    "found blocks that others hold cost no free one": NothingShared,
    "of equal blocks the one cached first is found": NewestFirst,
}
