"""Which replica gets a request: the one that holds the longest known prefix of its prompt, within reason.

An engine's prefix cache is worth the most when samples of one prompt, and turns of one conversation,
come to the same engine. A replica that is much busier than the idlest one is passed over, or one
popular prefix would keep all others waiting. The rule is that of cache-aware routers: SGLang's
(https://docs.sglang.io/advanced_features/sgl_model_gateway.html) and vLLM production-stack's.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

BLOCK_BYTES = 256
"""Prefixes are told apart at multiples of this: 32 tokens of 8 bytes, or some 60 tokens of text."""
MAX_BLOCKS = 65_536
"""Blocks that are remembered; the least recently used are forgotten."""
BALANCE_ABS = 16
BALANCE_REL = 1.5
"""A replica is too busy if it has more requests than the idlest one by both measures."""


class PrefixAffinity:
    """Remembers which replica, by index, was given which prefix."""

    def __init__(self) -> None:
        self._replica_by_block: OrderedDict[bytes, int] = OrderedDict()

    def choose(self, key: str, prefix: bytes, loads: dict[int, int]) -> int:
        """Chooses among replicas, and remembers the choice.

        Args:
            key: what must be equal too for a prefix to be shared: the adapter's name.
            prefix: the prompt, or any bytes that begin alike where prompts do.
            loads: replica -> requests that it has; those that are down are left out.
        """
        blocks = list(hash_blocks(key, prefix))
        idlest = min(loads, key=lambda replica: (loads[replica], replica))
        chosen = self._find_longest(blocks, loads)
        if chosen is None or is_too_busy(loads[chosen], loads[idlest]):
            chosen = idlest
        for block in blocks:
            self._replica_by_block[block] = chosen
            self._replica_by_block.move_to_end(block)
        while len(self._replica_by_block) > MAX_BLOCKS:
            self._replica_by_block.popitem(last=False)
        return chosen

    def _find_longest(self, blocks: Sequence[bytes], loads: dict[int, int]) -> int | None:
        for block in reversed(blocks):
            replica = self._replica_by_block.get(block)
            if replica in loads:
                return replica
        return None


def is_too_busy(load: int, least: int) -> bool:
    return load - least > BALANCE_ABS and load > BALANCE_REL * least


def hash_blocks(key: str, prefix: bytes) -> Iterator[bytes]:
    """A hash for each whole block, of it and all before it; one for a shorter prefix."""
    digest = hashlib.blake2b(key.encode(), digest_size=16)
    whole = len(prefix) - len(prefix) % BLOCK_BYTES or len(prefix)
    for start in range(0, max(whole, 1), BLOCK_BYTES):
        digest.update(prefix[start : start + BLOCK_BYTES])
        yield digest.digest()
