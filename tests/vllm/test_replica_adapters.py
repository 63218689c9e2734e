"""Adapters come and go in a real vLLM while it answers; no answer is ever by other weights."""

from __future__ import annotations

import asyncio
import shutil
import time

import pytest

from hosted_tinker.errors import UnservableError, UserError
from hosted_tinker.replicas.engine_client import EngineModels
from hosted_tinker.types import AdapterRef
from tests.integration.tiny_engine import PROMPT
from tests.vllm.tiny_replicas import MAX_HELD, TOO_HIGH_RANK, Reference, Serving, count_running

COUNT = 6
MANY = 128  # samples, more than run at once: they take seconds on any machine


def fetch_models(serving: Serving) -> EngineModels:
    return serving.loop.run(serving.replicas[0].client.fetch_models())


async def sample_greedily(serving: Serving, adapter: AdapterRef) -> list[int]:
    sample = serving.make_sample(PROMPT, adapter, max_tokens=COUNT, temperature=0.0, stop=())
    return (await serving.pool.sample(sample)).sequences[0].tokens.tolist()


def test_more_adapters_than_vllm_holds_take_turns(serving: Serving, reference: Reference) -> None:
    names = ["a0", "a1", "a2", "a3"]
    expected = {name: reference.continue_greedily(name, PROMPT, COUNT) for name in names}
    assert len({tuple(tokens) for tokens in expected.values()}) == 4

    async def ask_all(order: list[str]) -> list[list[int]]:
        adapters = [serving.tiny.adapter(name) for name in order]
        return await asyncio.gather(*(sample_greedily(serving, one) for one in adapters))

    for order in (names[:1], names[3:], names * 2):
        assert serving.loop.run(ask_all(order)) == [expected[name] for name in order]
    assert len(fetch_models(serving).adapters) <= MAX_HELD


def test_files_can_be_removed_as_soon_as_an_adapter_is_unloaded(
    serving: Serving, reference: Reference
) -> None:
    names = ["b0", "b1", "b2", "b3"]
    expected = {name: reference.continue_greedily(name, PROMPT, COUNT) for name in names}
    answers: dict[str, list[int]] = {}

    async def live(name: str, version: int) -> None:
        adapter = serving.tiny.copy_adapter(name, f"{name}@{version}")
        await serving.pool.load_everywhere(adapter)
        answers[adapter.name] = await sample_greedily(serving, adapter)
        await serving.pool.unload_everywhere(adapter.name)
        assert adapter.name not in serving.pool.held_adapters()
        shutil.rmtree(adapter.directory)

    async def live_all() -> None:
        for version in range(3):
            await asyncio.gather(*(live(name, version) for name in names))

    serving.loop.run(live_all())
    assert len(answers) == 12
    for name, tokens in answers.items():
        assert tokens == expected[name.partition("@")[0]]
    assert not [name for name in fetch_models(serving).adapters if "@" in name]


def test_what_is_held_is_known_by_its_directory(serving: Serving) -> None:
    adapter = serving.tiny.adapter("b2")
    serving.loop.run(serving.pool.load_everywhere(adapter))
    assert serving.pool.held_adapters()["b2"] == adapter.directory
    assert fetch_models(serving).adapters["b2"] == adapter.directory


def test_a_rank_that_is_too_high_is_refused_in_vllms_words(
    serving: Serving, reference: Reference
) -> None:
    with pytest.raises(UnservableError, match=rf"'too-high'.* rank {TOO_HIGH_RANK}.*"):
        serving.loop.run(serving.pool.load_everywhere(serving.tiny.adapter("too-high")))
    assert "too-high" not in serving.pool.held_adapters()
    tokens = serving.loop.run(sample_greedily(serving, serving.tiny.adapter("a0")))
    assert tokens == reference.continue_greedily("a0", PROMPT, COUNT)


def test_files_that_are_not_there_are_refused(serving: Serving) -> None:
    missing = AdapterRef("missing", serving.tiny.state_dir / "missing")
    with pytest.raises(UserError, match="'missing' has no readable LoRA configuration"):
        serving.loop.run(serving.pool.load_everywhere(missing))
    assert "missing" not in serving.pool.held_adapters()


def test_an_adapter_that_vllm_has_lost_is_loaded_again(
    serving: Serving, reference: Reference
) -> None:
    """As an external server that was started anew between two looks at its health."""
    for name in ("a1", None):
        expected = serving.sample(PROMPT, name, max_tokens=COUNT, temperature=0.0, stop=())
        held = name or "nothing"
        assert held in fetch_models(serving).adapters
        serving.loop.run(serving.replicas[0].client.unload_adapter(held))
        assert held not in fetch_models(serving).adapters
        again = serving.sample(PROMPT, name, max_tokens=COUNT, temperature=0.0, stop=())
        tokens = again.sequences[0].tokens.tolist()
        assert tokens == expected.sequences[0].tokens.tolist()
        assert tokens == reference.continue_greedily(name, PROMPT, COUNT)


@pytest.mark.parametrize("by_id", [True, False])
def test_a_cancelled_sample_ends_in_vllm_too(serving: Serving, by_id: bool) -> None:
    sample = serving.make_sample(PROMPT, "a0", num_samples=MANY, stop=())
    pending = serving.loop.submit(serving.pool.sample(sample))
    while count_running(serving) == 0:
        assert not pending.done()
        time.sleep(0.02)
    if by_id:
        serving.loop.run(serving.pool.cancel(sample.request_id))
        with pytest.raises(UserError, match="cancelled"):
            pending.result()
    else:
        pending.cancel()
    while count_running(serving) > 0:
        time.sleep(0.02)
    assert serving.replicas[0].num_requests == 0
