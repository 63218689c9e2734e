"""Full pages of keys and values, found again by the tokens that they are of.

A tree for each adapter: a node is a page, its key the page's tokens, its ancestors what came before
them. An adapter's name never stands for other weights, so a page is never stale. Pages that no
sequence holds stay until room is needed; the least recently used leave first, the ends of a text
before its beginning.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count

from hosted_tinker.sampling.pages import PageAllocator
from hosted_tinker.types import Int64Array


@dataclass(slots=True, eq=False)
class Node:
    """A page in the tree; a root has none.

    `is_kept` turns false when the node leaves the tree. What a sequence computes after it is then
    not kept either: nobody could find it.
    """

    page: int
    parent: Node | None
    key: bytes = b""
    children: dict[bytes, Node] = field(default_factory=dict[bytes, "Node"])
    used_at: int = 0
    is_kept: bool = True


class PrefixCache:
    """Holds each of its pages once."""

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self._allocator = allocator
        self._page_size = page_size
        self._roots: dict[str | None, Node] = {}
        self._clock = count(1)

    def get_root(self, adapter: str | None) -> Node:
        """What a text of this adapter begins at."""
        return self._roots.setdefault(adapter, Node(-1, None))

    def find(self, adapter: str | None, tokens: Int64Array) -> list[Node]:
        """The pages that the tokens begin with, as many whole ones as there are."""
        node = self.get_root(adapter)
        found: list[Node] = []
        for start in range(0, len(tokens) - self._page_size + 1, self._page_size):
            child = node.children.get(tokens[start : start + self._page_size].tobytes())
            if child is None:
                break
            child.used_at = next(self._clock)
            found.append(child)
            node = child
        return found

    def add(self, parent: Node, tokens: Int64Array, page: int) -> Node:
        """Keeps a page that is full. One with the same text and past is kept instead, if there is."""
        if not parent.is_kept:
            return parent
        key = tokens.tobytes()
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(page, parent, key)
            self._allocator.hold(page)
        node.used_at = next(self._clock)
        return node

    def evict(self, num_pages: int) -> None:
        """Frees that many pages that nobody else holds, or all there are."""
        heap = [
            (node.used_at, id(node), node)
            for root in self._roots.values()
            for node in walk(root)
            if self._is_idle_leaf(node)
        ]
        heapq.heapify(heap)
        for _ in range(num_pages):
            if not heap:
                return
            _, _, node = heapq.heappop(heap)
            parent = node.parent
            assert parent is not None
            del parent.children[node.key]
            self._remove(node)
            if self._is_idle_leaf(parent):
                heapq.heappush(heap, (parent.used_at, id(parent), parent))

    def _remove(self, node: Node) -> None:
        node.is_kept = False
        if node.parent is not None:
            self._allocator.release(node.page)

    def _is_idle_leaf(self, node: Node) -> bool:
        return (
            node.parent is not None
            and not node.children
            and self._allocator.count_holders(node.page) == 1
        )


def walk(root: Node) -> list[Node]:
    """All nodes of a tree, parents first."""
    nodes = [root]
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes
