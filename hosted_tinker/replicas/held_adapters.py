"""The adapters that one engine holds: loaded when asked for, counted while used, evicted when full.

A directory counts as held from before its load until after its unload, so that an engine which
looks for its files again finds them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hosted_tinker.errors import HostedTinkerError
from hosted_tinker.replicas.engine_client import EngineClient, ReplicaGoneError
from hosted_tinker.types import AdapterRef

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineDir:
    """Where an engine sees the state directory: there too, or mounted at another place."""

    state_dir: Path
    engine_state_dir: Path

    def translate(self, directory: Path) -> Path:
        """Our path as the engine's."""
        return self.engine_state_dir / directory.relative_to(self.state_dir)

    def contains(self, engine_path: Path) -> bool:
        """Whether a path of the engine's is below the state directory."""
        return engine_path.is_relative_to(self.engine_state_dir)


@dataclass(slots=True, eq=False)
class Entry:
    """An adapter that is loaded, being loaded, or wanted.

    Attributes:
        uses: requests that use it or wait for it.
        is_loaded: the engine has it.
        loading: what loads it; requests that are cancelled meanwhile leave it to its end.
    """

    adapter: AdapterRef
    uses: int = 0
    is_loaded: bool = False
    loading: asyncio.Task[bool] | None = None


class HeldAdapters:
    """Loads and unloads one at a time; the least recently used leaves first.

    Args:
        engine_dir: a directory as the engine sees it.
    """

    def __init__(self, client: EngineClient, max_adapters: int, engine_dir: EngineDir) -> None:
        self._client = client
        self._max_adapters = max_adapters
        self._engine_dir = engine_dir
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._switching = asyncio.Lock()
        self._released = asyncio.Event()

    @property
    def directories(self) -> dict[str, Path]:
        """Name -> directory of all that the engine has or is about to have."""
        return {name: entry.adapter.directory for name, entry in self._entries.items()}

    @property
    def loaded(self) -> list[AdapterRef]:
        """The least recently used first."""
        return [entry.adapter for entry in self._entries.values() if entry.is_loaded]

    @contextlib.asynccontextmanager
    async def use(self, adapter: AdapterRef) -> AsyncGenerator[None]:
        """The adapter is loaded, and stays so, while the context is open.

        Raises:
            UnservableError: the engine refuses it.
            ReplicaGoneError: the engine died.
        """
        entry = self._entries.setdefault(adapter.name, Entry(adapter))
        self._entries.move_to_end(adapter.name)
        entry.uses += 1
        try:
            await self._ensure_loaded(entry)
            yield
        finally:
            self._release(entry)

    async def unload(self, name: str) -> None:
        """Unloads it after the last request that uses it. One that is not held is fine."""
        while (entry := self._entries.get(name)) is not None:
            if entry.uses == 0:
                async with self._switching:
                    if self._entries.get(name) is entry and entry.uses == 0:
                        await self._unload(entry)
                        return
            else:
                await self._wait_released()

    def forget_loaded(self) -> list[AdapterRef]:
        """The engine was started anew, or its state is not known. Returns what it had."""
        had = self.loaded
        for name, entry in [*self._entries.items()]:
            entry.is_loaded = False
            if entry.uses == 0 and entry.loading is None:
                del self._entries[name]
        self._notify()
        return had

    def mark_lost(self, adapter: AdapterRef) -> None:
        """The engine does not know it any more."""
        if entry := self._entries.get(adapter.name):
            entry.is_loaded = False

    def adopt(self, adapter: AdapterRef) -> None:
        """Notes what the engine has already."""
        self._entries.setdefault(adapter.name, Entry(adapter)).is_loaded = True

    async def restore(self, adapters: Sequence[AdapterRef]) -> None:
        """Loads what an engine had before it died, the last used first. Raises ReplicaGoneError."""
        for adapter in adapters[::-1]:
            try:
                async with self.use(adapter):
                    pass
            except ReplicaGoneError:
                raise
            except HostedTinkerError as error:
                logger.warning("adapter not restored name=%s error=%s", adapter.name, error)

    async def _ensure_loaded(self, entry: Entry) -> None:
        while not entry.is_loaded:
            if entry.loading is None:
                entry.loading = asyncio.create_task(self._load(entry))
                entry.loading.add_done_callback(partial(self._note_loaded, entry))
            if not await asyncio.shield(entry.loading):
                await self._wait_released()

    async def _load(self, entry: Entry) -> bool:
        """False if there is no room."""
        async with self._switching:
            if not await self._make_room():
                return False
            await self._client.load_adapter(
                entry.adapter.name, self._engine_dir.translate(entry.adapter.directory)
            )
            entry.is_loaded = True
            return True

    def _note_loaded(self, entry: Entry, loading: asyncio.Task[bool]) -> None:
        entry.loading = None
        if not loading.cancelled() and (error := loading.exception()) is not None:
            logger.debug("adapter not loaded name=%s error=%s", entry.adapter.name, error)
        if entry.uses == 0:
            self._drop_unless_loaded(entry)

    async def _make_room(self) -> bool:
        """Unloads what is not in use until one more fits."""
        while len(self.loaded) >= self._max_adapters:
            idle = (e for e in self._entries.values() if e.is_loaded and e.uses == 0)
            evicted = next(idle, None)
            if evicted is None:
                return False
            await self._unload(evicted)
        return True

    async def _unload(self, entry: Entry) -> None:
        """The entry stays until the engine has forgotten it; a request that comes meanwhile waits."""
        if entry.is_loaded:
            entry.is_loaded = False
            await self._client.unload_adapter(entry.adapter.name)
        if entry.uses == 0:
            self._drop_unless_loaded(entry)
        self._notify()

    def _release(self, entry: Entry) -> None:
        entry.uses -= 1
        if entry.uses == 0:
            if entry.loading is None:
                self._drop_unless_loaded(entry)
            self._notify()

    def _drop_unless_loaded(self, entry: Entry) -> None:
        """What could not be loaded is not held."""
        if not entry.is_loaded and self._entries.get(entry.adapter.name) is entry:
            del self._entries[entry.adapter.name]

    def _notify(self) -> None:
        self._released.set()
        self._released = asyncio.Event()

    async def _wait_released(self) -> None:
        await self._released.wait()
