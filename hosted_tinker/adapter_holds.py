"""Which adapters requests are using, so that their files stay until the last one has ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from pathlib import Path

from hosted_tinker.types import AdapterRef


class AdapterHolds:
    """Counts the requests that use an adapter, whatever engine answers them."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._directories: dict[str, Path] = {}
        self._freed: dict[str, asyncio.Event] = {}

    @contextlib.contextmanager
    def hold(self, adapter: AdapterRef | None) -> Generator[None]:
        """Keeps the adapter's files while the context is open."""
        if adapter is None:
            yield
            return
        self._counts[adapter.name] = self._counts.get(adapter.name, 0) + 1
        self._directories[adapter.name] = adapter.directory
        try:
            yield
        finally:
            self._counts[adapter.name] -= 1
            if self._counts[adapter.name] == 0:
                del self._counts[adapter.name], self._directories[adapter.name]
                if freed := self._freed.pop(adapter.name, None):
                    freed.set()

    @property
    def directories(self) -> set[Path]:
        """Absolute directories of the adapters in use."""
        return set(self._directories.values())

    async def wait_free(self, name: str) -> None:
        """Returns when no request uses the adapter."""
        while name in self._counts:
            await self._freed.setdefault(name, asyncio.Event()).wait()
