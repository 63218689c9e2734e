"""Who shares an engine with a request that scores its prompt."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hosted_tinker.adapter_layout import write_configs
from hosted_tinker.replicas.held_adapters import EngineDir
from hosted_tinker.replicas.replica import Replica
from hosted_tinker.settings import Settings
from hosted_tinker.types import AdapterRef, LoraConfig
from tests.unit.test_replicas_held_adapters import ListEngine


def make_replica(state_dir: Path, *, on_cpu: bool) -> tuple[ListEngine, Replica]:
    settings = Settings(
        base_model="base",
        vllm_url=("http://a:1",),
        vllm_url_on_cpu=on_cpu,
        state_dir=state_dir,
    )
    engine = ListEngine()

    async def make_base_adapter() -> AdapterRef:
        raise NotImplementedError

    engine_dir = EngineDir(state_dir, state_dir)
    return engine, Replica(engine, engine_dir, settings, ["base"], None, make_base_adapter)


def write_adapter(directory: Path, *, on_unembedding: bool) -> AdapterRef:
    directory.mkdir()
    lora = LoraConfig(lora_rank=4, seed=0, train_mlp=False, train_unembed=on_unembedding)
    write_configs(directory, lora, "base", ["q_proj"])
    return AdapterRef(directory.name, directory)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("on_cpu", [False, True])
def test_prompts_are_scored_together_until_an_adapter_is_on_the_unembedding(
    tmp_path: Path, on_cpu: bool
) -> None:
    """On the CPU they never are."""
    engine, replica = make_replica(tmp_path, on_cpu=on_cpu)
    inner = write_adapter(tmp_path / "inner", on_unembedding=False)
    outer = write_adapter(tmp_path / "outer", on_unembedding=True)
    log: list[str] = []

    async def use(
        name: str, adapter: AdapterRef | None, scores: bool, leave: asyncio.Event
    ) -> None:
        async with replica.use(adapter, scores_prompt=scores):
            log.append(name)
            await leave.wait()

    async def run() -> None:
        first, rest = asyncio.Event(), asyncio.Event()
        tasks = [
            asyncio.create_task(use("score 1", None, True, first)),
            asyncio.create_task(use("score 2", inner, True, first)),
            asyncio.create_task(use("sample", inner, False, first)),
        ]
        await settle()
        assert log == (["score 1"] if on_cpu else ["score 1", "score 2", "sample"])
        tasks += [
            asyncio.create_task(use("outer 1", outer, False, rest)),
            asyncio.create_task(use("outer 2", outer, False, rest)),
        ]
        await settle()
        if not on_cpu:
            assert "+outer" not in engine.log
            assert len(log) == 3
        first.set()
        await settle()
        assert engine.log[-1] == "+outer"
        assert log[-2:] == ["outer 1", "outer 2"]
        tasks.append(asyncio.create_task(use("score 3", None, True, rest)))
        await settle()
        assert log[-1] == "outer 2"
        rest.set()
        await asyncio.gather(*tasks)
        assert log[-1] == "score 3"

    asyncio.run(run())
