"""The KV blocks with their prefix cache once more, in plain Python: what the native block pool is compared with.

Rules: ``vllm/v1/core/block_pool.py``, ``vllm/v1/core/kv_cache_manager.py`` (``get_computed_blocks``) and the
full-attention part of ``vllm/v1/core/single_type_kv_cache_manager.py`` at 0.32.0. Blocks are objects and the free queue
is an ordered dictionary of them, where the native pool links numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Block:
    """One block. ``content`` is None until it is full and cached."""

    content: Hashable | None = None
    num_holders: int = 0


@dataclass(slots=True)
class Table:
    """The blocks of a request, and the names of what is in its full blocks."""

    owner: Hashable
    hashes: Sequence[int]
    blocks: list[Block] = field(default_factory=list)
    num_cached: int = 0

    def content(self, index: int) -> Hashable:
        """What its block at ``index`` holds once full: a known hash, or something only this request has."""
        return self.hashes[index] if index < len(self.hashes) else (self.owner, index)


class ReferencePool:
    """Blocks in the free queue, the one taken next first, and cached blocks by content, the first cached first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        # One of them is the null block.
        self.free: OrderedDict[Block, None] = OrderedDict.fromkeys(Block() for _ in range(num_blocks - 1))
        self.cached: dict[Hashable, list[Block]] = {}

    def find(self, table: Table, num_tokens: int) -> list[Block]:
        """The cached blocks a request of ``num_tokens`` begins with; its last token is always computed."""
        found: list[Block] = []
        for index in range((num_tokens - 1) // self.block_size):
            same = self.cached.get(table.content(index))
            if same is None:
                break
            found.append(same[0])
        return found

    def num_held(self, found: Sequence[Block]) -> int:
        """Of the blocks found, those that somebody holds: the others are among the free ones."""
        return sum(block.num_holders > 0 for block in found)

    def take_found(self, table: Table, found: Sequence[Block]) -> None:
        """Give a request the cached blocks it begins with."""
        for block in found:
            if block.num_holders == 0:
                del self.free[block]
            block.num_holders += 1
        table.blocks.extend(found)
        table.num_cached = len(found)

    def take(self, table: Table, num_blocks: int) -> None:
        """Give a request new blocks; what they held cannot be found any more."""
        for _ in range(num_blocks):
            block, _ = self.free.popitem(last=False)
            if block.content is not None:
                same = self.cached[block.content]
                same.remove(block)
                if not same:
                    del self.cached[block.content]
                block.content = None
            block.num_holders = 1
            table.blocks.append(block)

    def cache(self, table: Table, num_tokens: int) -> None:
        """Cache the full blocks among the first ``num_tokens`` tokens."""
        for index in range(table.num_cached, num_tokens // self.block_size):
            block = table.blocks[index]
            block.content = table.content(index)
            self.cached.setdefault(block.content, []).append(block)
            table.num_cached = index + 1

    def release(self, table: Table) -> None:
        """Take all blocks from a request, its last first: what can be found goes to the end of the queue."""
        for block in reversed(table.blocks):
            block.num_holders -= 1
        freed = [block for block in reversed(table.blocks) if block.num_holders == 0]
        self.free.update((block, None) for block in freed)
        for block in reversed(freed):  # those that hold nothing go to the front, in the order of the others
            if block.content is None:
                self.free.move_to_end(block, last=False)
        table.blocks, table.num_cached = [], 0
