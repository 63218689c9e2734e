"""What a pass computes of a sequence."""

from __future__ import annotations

from dataclasses import dataclass

from hosted_tinker.sampling.kv_cache import StoredSequence


@dataclass(frozen=True, slots=True)
class Span:
    """`count` positions of a sequence, `offset` after those that it has."""

    stored: StoredSequence
    count: int
    offset: int = 0

    @property
    def start(self) -> int:
        return self.stored.length + self.offset

    @property
    def stop(self) -> int:
        return self.start + self.count
