"""Lets many requests into an engine at once, or one alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator


class Gate:
    """One that wants to be alone goes before those that come after it."""

    def __init__(self) -> None:
        self._num_inside = 0
        self._is_alone = False
        self._num_waiting_alone = 0
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def enter(self, *, alone: bool) -> AsyncGenerator[None]:
        """Waits for its turn."""
        await (self._wait_alone() if alone else self._wait_shared())
        self._num_inside += 1
        self._is_alone = alone
        try:
            yield
        finally:
            self._num_inside -= 1
            self._is_alone = False
            self._notify()

    async def _wait_shared(self) -> None:
        while self._is_alone or self._num_waiting_alone:
            await self._changed.wait()

    async def _wait_alone(self) -> None:
        self._num_waiting_alone += 1
        try:
            while self._num_inside:
                await self._changed.wait()
        finally:
            self._num_waiting_alone -= 1
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
