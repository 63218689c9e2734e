"""Keys and values of everything that is being sampled, in pages under one budget.

Shape letters: G key and value heads, E head size, P positions of a pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hosted_tinker.sampling.pages import PageAllocator
from hosted_tinker.sampling.prefix_cache import Node, PrefixCache
from hosted_tinker.types import Int64Array

NOWHERE = Node(-1, None, is_kept=False)
"""What follows it is not kept."""
ReadTokens = Callable[[int, int], Int64Array]
"""Token ids of a sequence between two positions."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Of one position: [heads, head size] of its key and of its value."""

    key: tuple[int, int]
    value: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        sizes = (self.key, self.value)
        return self.dtype.itemsize * sum(heads * size for heads, size in sizes)


@dataclass(slots=True, eq=False)
class StoredSequence:
    """The pages of one sequence.

    Attributes:
        length: positions whose keys and values are there.
        node: where the prefix cache has its full pages up to here.
        num_reused: positions that were there before it began.
    """

    pages: list[int]
    length: int
    node: Node
    num_reused: int = 0


class KvCache:
    """Owns the memory.

    Args:
        layers: by index of the decoder layer.
        page_size: positions of a page.
    """

    def __init__(self, layers: Sequence[LayerShape], num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.prefixes = PrefixCache(self.allocator, page_size)
        self.keys, self.values = (
            [make_buffer((num_pages * page_size, *getattr(layer, name)), layer) for layer in layers]
            for name in ("key", "value")
        )

    @property
    def num_positions(self) -> int:
        """Of all pages that can be handed out."""
        return (self.allocator.num_pages - 1) * self.page_size

    def open(self, adapter: str | None, tokens: Int64Array, *, reuse: bool) -> StoredSequence:
        """Begins with the pages that are there already, but never with all of the tokens: at least
        one is left to compute."""
        found = self.prefixes.find(adapter, tokens[: len(tokens) - 1]) if reuse else []
        for node in found:
            self.allocator.hold(node.page)
        length = len(found) * self.page_size
        last = found[-1] if found else self.prefixes.get_root(adapter)
        return StoredSequence([node.page for node in found], length, last, length)

    def reserve(self, stored: StoredSequence, length: int) -> bool:
        """Makes room for that many positions. False if there is none."""
        missing = -(-length // self.page_size) - len(stored.pages)
        if not self._ensure_free(missing):
            return False
        for _ in range(missing):
            stored.pages.append(self.allocator.allocate())
        return True

    def advance(self, stored: StoredSequence, length: int, read_tokens: ReadTokens) -> None:
        """Counts positions that were computed. Pages that are full now can be found by others."""
        first = stored.length // self.page_size
        stored.length = length
        for index in range(first, length // self.page_size):
            start = index * self.page_size
            tokens = read_tokens(start, start + self.page_size)
            stored.node = self.prefixes.add(stored.node, tokens, stored.pages[index])

    def fork(self, stored: StoredSequence) -> StoredSequence | None:
        """A sequence that goes on from where this one is. None if there is no room.

        Full pages are shared, the last one is copied unless it is full.
        """
        num_full, rest = divmod(stored.length, self.page_size)
        pages = stored.pages[:num_full]
        if rest and not self._ensure_free(1):
            return None
        for page in pages:
            self.allocator.hold(page)
        if rest:
            pages.append(self.allocator.allocate())
            self._copy(stored.pages[num_full], pages[-1], rest)
        return StoredSequence(pages, stored.length, stored.node, stored.num_reused)

    def close(self, stored: StoredSequence) -> None:
        for page in stored.pages:
            self.allocator.release(page)
        stored.pages = []
        stored.length = 0
        stored.node = NOWHERE

    def find_slots(self, stored: StoredSequence, start: int, stop: int) -> Int64Array:
        """Rows of the buffers of these positions."""
        position_P = np.arange(start, stop)
        pages = np.array(stored.pages, np.int64)
        return pages[position_P // self.page_size] * self.page_size + position_P % self.page_size

    def _ensure_free(self, count: int) -> bool:
        """Frees many pages at once where it must free some: looking for them takes a while."""
        if self.allocator.num_free < count:
            self.prefixes.evict(max(count, self.allocator.num_pages // 16))
        return self.allocator.num_free >= count

    def _copy(self, source: int, target: int, count: int) -> None:
        start, goal = source * self.page_size, target * self.page_size
        for buffer in (*self.keys, *self.values):
            buffer[goal : goal + count] = buffer[start : start + count]


def make_buffer(shape: tuple[int, ...], layer: LayerShape) -> Tensor:
    """Zeros, which on the CPU take memory only once they are written."""
    if layer.device.type != "cpu":
        return torch.zeros(shape, dtype=layer.dtype, device=layer.device)
    num_bytes = math.prod(shape) * layer.dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(layer.dtype).view(shape)
