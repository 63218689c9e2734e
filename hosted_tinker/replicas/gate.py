"""Lets many requests into an engine at once, or one alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable


class Gate:
    """First come, first served: one that must be alone holds up those that come after it only."""

    def __init__(self) -> None:
        self._num_inside = 0
        self._is_alone = False
        self._line: OrderedDict[object, None] = OrderedDict()
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def enter(self, must_be_alone: Callable[[], bool]) -> AsyncGenerator[None]:
        """Waits for its turn. Whether it must be alone is asked at the moment that it enters."""
        place = object()
        self._line[place] = None
        try:
            while next(iter(self._line)) is not place or self._is_shut(must_be_alone()):
                await self._changed.wait()
            self._num_inside += 1
            self._is_alone = must_be_alone()
        finally:
            del self._line[place]
            self._notify()
        try:
            yield
        finally:
            self._num_inside -= 1
            self._is_alone = False
            self._notify()

    def _is_shut(self, must_be_alone: bool) -> bool:
        return self._is_alone or (must_be_alone and self._num_inside > 0)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
