"""What an engine holds, against an engine that only keeps a list."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hosted_tinker.errors import UnservableError
from hosted_tinker.replicas.engine_client import EngineModels, ReplicaGoneError
from hosted_tinker.replicas.held_adapters import EngineDir, HeldAdapters
from hosted_tinker.types import AdapterRef

STATE = Path("/state")


class ListEngine:
    """Implements `EngineClient` as far as adapters go. Names that begin with "bad" are refused."""

    url = "list"

    def __init__(self) -> None:
        self.loaded: dict[str, Path] = {}
        self.log: list[str] = []
        self.is_gone = False

    async def is_healthy(self) -> bool:
        return not self.is_gone

    async def fetch_models(self) -> EngineModels:
        return EngineModels("base", "base", 100, self.loaded)

    async def load_adapter(self, name: str, directory: Path) -> None:
        await asyncio.sleep(0)
        if self.is_gone:
            raise ReplicaGoneError("gone")
        if name.startswith("bad"):
            raise UnservableError(f"{name} is refused")
        assert name not in self.loaded
        self.loaded[name] = directory
        self.log.append(f"+{name}")

    async def unload_adapter(self, name: str) -> None:
        await asyncio.sleep(0)
        del self.loaded[name]
        self.log.append(f"-{name}")

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def open(self, path: str, payload: bytes) -> Any:
        raise NotImplementedError


def ref(name: str) -> AdapterRef:
    return AdapterRef(name, STATE / name)


def make(max_adapters: int = 2) -> tuple[ListEngine, HeldAdapters]:
    engine = ListEngine()
    engine_dir = EngineDir(STATE, Path("/mnt"))
    return engine, HeldAdapters(engine, max_adapters, engine_dir)


async def use_once(held: HeldAdapters, *names: str) -> None:
    for name in names:
        async with held.use(ref(name)):
            pass


def test_an_adapter_is_loaded_once_from_where_the_engine_sees_it() -> None:
    engine, held = make()

    async def run() -> None:
        await asyncio.gather(*(use_once(held, "a") for _ in range(5)))

    asyncio.run(run())
    assert engine.loaded == {"a": Path("/mnt/a")}
    assert engine.log == ["+a"]


def test_the_least_recently_used_leaves_first() -> None:
    engine, held = make()
    asyncio.run(use_once(held, "a", "b", "a", "c"))
    assert engine.log == ["+a", "+b", "-b", "+c"]
    assert set(held.directories) == {"a", "c"}


def test_an_adapter_in_use_stays_and_the_next_waits_for_room() -> None:
    engine, held = make()

    async def run() -> None:
        async with held.use(ref("a")):
            async with held.use(ref("b")):
                waiting = asyncio.create_task(use_once(held, "c"))
                for _ in range(10):
                    await asyncio.sleep(0)
                assert engine.log == ["+a", "+b"]
            await waiting

    asyncio.run(run())
    assert engine.log == ["+a", "+b", "-b", "+c"]


def test_unloading_waits_for_the_last_request() -> None:
    engine, held = make()

    async def run() -> None:
        async with held.use(ref("a")):
            unloading = asyncio.create_task(held.unload("a"))
            for _ in range(10):
                await asyncio.sleep(0)
            assert "a" in engine.loaded
            assert held.directories == {"a": STATE / "a"}
        await unloading

    asyncio.run(run())
    assert engine.loaded == {}
    assert held.directories == {}


def test_what_is_refused_is_not_held() -> None:
    engine, held = make()
    with pytest.raises(UnservableError, match="bad is refused"):
        asyncio.run(use_once(held, "bad"))
    assert held.directories == {}
    asyncio.run(use_once(held, "a", "b"))
    assert engine.log == ["+a", "+b"]


def test_after_a_death_everything_is_loaded_again_the_last_used_first() -> None:
    engine, held = make(max_adapters=3)

    async def run() -> None:
        await use_once(held, "a", "b", "a")
        engine.is_gone = True
        with pytest.raises(ReplicaGoneError):
            await use_once(held, "c")
        had = held.forget_loaded()
        assert held.directories == {}
        engine.is_gone = False
        engine.loaded.clear()
        engine.log.clear()
        await held.restore([*had, ref("bad")])

    asyncio.run(run())
    assert engine.log == ["+a", "+b"]


def test_a_waiting_request_ends_when_the_engine_dies() -> None:
    engine, held = make(max_adapters=1)

    async def run() -> None:
        async with held.use(ref("a")):
            waiting = asyncio.create_task(use_once(held, "b"))
            for _ in range(10):
                await asyncio.sleep(0)
            engine.is_gone = True
            held.forget_loaded()
            with pytest.raises(ReplicaGoneError):
                await waiting

    asyncio.run(run())


def test_what_the_engine_has_already_is_adopted_and_what_it_lost_loaded_again() -> None:
    engine, held = make()
    engine.loaded["a"] = Path("/mnt/a")

    async def run() -> None:
        held.adopt(ref("a"))
        await use_once(held, "a")
        assert engine.log == []
        engine.loaded.clear()
        held.mark_lost(ref("a"))
        await use_once(held, "a")

    asyncio.run(run())
    assert engine.log == ["+a"]


def test_a_load_goes_on_when_its_request_is_cancelled() -> None:
    engine, held = make()

    async def run() -> None:
        request = asyncio.create_task(use_once(held, "a"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        assert held.directories == {"a": STATE / "a"}
        await asyncio.sleep(0.01)
        assert [one.name for one in held.loaded] == ["a"] == [*engine.loaded]
        await held.unload("a")

    asyncio.run(run())
    assert (engine.loaded, held.directories) == ({}, {})


def test_an_unload_that_is_overtaken_leaves_the_new_entry_alone() -> None:
    engine, held = make()

    async def run() -> None:
        await use_once(held, "a")
        unloading = asyncio.create_task(held.unload("a"))
        await asyncio.sleep(0)
        held.forget_loaded()
        using = held.use(ref("a"))
        entering = asyncio.create_task(using.__aenter__())
        await unloading
        await entering
        assert held.directories == {"a": STATE / "a"}
        await using.__aexit__(None, None, None)

    asyncio.run(run())
    assert [*engine.loaded] == ["a"]
