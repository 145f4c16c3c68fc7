"""What an instance's prefix cache holds, as far as the router can know: the prompts that it sent there.

Engines keep the blocks of prompts they computed until they need the room, the longest unused ones going first, a
prompt's end before its beginning. So does this store, with as many blocks as the engine has, answers included. It knows
nothing of what others sent, of blocks that running requests keep from being dropped, and of answers that come back as
part of a next prompt: a hint, not a promise. It also counts who holds a block: what a request under way holds costs a
newcomer no free block. It refuses to grow beyond the engine's own memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixStore:
    """Block hashes in order of their last use, at most ``capacity_blocks`` of them, and how many hold each."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._blocks: OrderedDict[int, int] = OrderedDict()
        self._num_anonymous = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def num_hits(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks are here, up to the first that is not. Changes nothing. O(hits)."""
        held = self._blocks
        for number, block in enumerate(blocks):
            if block not in held:
                return number
        return len(blocks)

    def num_held(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks are held by a request under way. Changes nothing. O(held)."""
        held = self._blocks
        for number, block in enumerate(blocks):
            if not held.get(block):
                return number
        return len(blocks)

    def add(self, blocks: Sequence[int]) -> None:
        """Take in a prompt's blocks as the ones used last, its first block the very last; its request holds them until
        :meth:`let_go`. O(blocks)."""
        held = self._blocks
        for block in reversed(blocks):
            held[block] = held.get(block, 0) + 1
            held.move_to_end(block)
        self._trim()

    def let_go(self, blocks: Sequence[int]) -> None:
        """Note that the request that held these blocks has ended; they stay to be found. O(blocks)."""
        held = self._blocks
        for block in blocks:
            if held.get(block):  # else it was dropped meanwhile
                held[block] -= 1

    def add_anonymous(self, num_blocks: int) -> None:
        """Take in blocks that no prompt will ask for, such as those of an answer. O(blocks)."""
        for _ in range(min(num_blocks, self._capacity)):
            self._num_anonymous += 1
            self._blocks[-self._num_anonymous] = 0  # hashes are not negative
        self._trim()

    def clear(self) -> None:
        """Forget everything: the engine was started anew."""
        self._blocks.clear()

    def _trim(self) -> None:
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
