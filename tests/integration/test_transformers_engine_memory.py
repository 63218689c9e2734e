"""The embedded engine where memory is short, and where weights or settings are not as they should be."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hosted_tinker.modeling.adapter_files import load_adapter_weights, save_adapter
from hosted_tinker.sampling import transformers_engine
from hosted_tinker.types import LoraConfig
from hosted_tinker.workers.messages import Failure
from tests.integration.tiny_engine import PROMPT, Harness, save_model

PAGE_BYTES = 64 * 2 * 2 * 32 * 4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_model(directory)
    return directory


@pytest.fixture(scope="module")
def roomy(model_dir: Path) -> Harness:
    return Harness(model_dir)


def test_a_prompt_that_waits_for_a_row_gives_its_pages_to_those_that_have_the_rows(
    model_dir: Path, roomy: Harness
) -> None:
    """Three rows and nine pages. The second request of the first prompt takes all rows; what is
    between them has six pages by then."""
    cache = {"sampling_cache_gib": 9.5 * PAGE_BYTES / 2**30, "max_context_length": 450}
    harness = Harness(model_dir, max_sampling_sequences=3, prefill_chunk_tokens=512, **cache)
    prompts = {"first": PROMPT, "between": [9] * 380, "many": PROMPT}
    options = {
        "first": {"max_tokens": 2},
        "between": {"max_tokens": 5},
        "many": {"max_tokens": 150, "num_samples": 8},
    }
    for name, prompt in prompts.items():
        harness.add(name, prompt, seed=1, stop=(), **options[name])
    harness.drain()
    for name, prompt in prompts.items():
        expected = roomy.sample(prompt, seed=1, stop=(), **options[name])
        assert [one.tokens.tolist() for one in harness.output(name).sequences] == [
            one.tokens.tolist() for one in expected.sequences
        ]


@pytest.mark.parametrize("where", ["run", "compute_logits"])
def test_a_pass_without_memory_costs_one_request_or_none(
    model_dir: Path, roomy: Harness, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(model_dir)
    call = getattr(harness.engine._passes, where)
    failing = {3, 7, 8}
    calls = 0

    def fail_sometimes(*args: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls in failing:
            raise torch.OutOfMemoryError("no")
        return call(*args)

    monkeypatch.setattr(harness.engine._passes, where, fail_sometimes)
    for index in range(4):
        harness.add(str(index), PROMPT[index:], max_tokens=12, seed=index, stop=())
    harness.drain()
    assert calls > max(failing)
    for index in range(4):
        request = {"max_tokens": 12, "seed": index, "stop": ()}
        (expected,) = roomy.sample(PROMPT[index:], **request).sequences
        (found,) = harness.output(str(index)).sequences
        assert found.tokens.tolist() == expected.tokens.tolist()


def test_a_prompt_without_memory_fails_in_a_sentence(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(model_dir)
    run = harness.engine._passes.run

    def run_short(parts: list) -> torch.Tensor:
        if sum(part.span.count for part in parts) > 50:
            raise torch.OutOfMemoryError("no")
        return run(parts)

    monkeypatch.setattr(harness.engine._passes, "run", run_short)
    harness.add("short", PROMPT, max_tokens=5, stop=())
    harness.add("long", PROMPT * 10, max_tokens=5, stop=(), num_samples=2)
    harness.drain()
    failure = harness.results["long"]
    assert isinstance(failure, Failure)
    assert "out of memory on a sequence of 70 tokens" in failure.message
    assert len(harness.output("short").sequences[0].tokens) == 5


def test_diverged_weights_fail_their_own_requests_only(
    model_dir: Path, roomy: Harness, tmp_path: Path
) -> None:
    shutil.copytree(model_dir, tmp_path / "model")
    state = {
        name: torch.full_like(tensor, 1e30)
        for name, tensor in load_adapter_weights(model_dir / "a0").items()
    }
    (tmp_path / "model" / "diverged").mkdir()
    save_adapter(tmp_path / "model" / "diverged", state, LoraConfig(lora_rank=4, seed=0), "tiny")
    harness = Harness(tmp_path / "model")
    for index, params in enumerate([{}, {"top_k": 5}, {"temperature": 0.0}, {"num_samples": 3}]):
        harness.add(f"bad{index}", PROMPT, adapter="diverged", max_tokens=8, stop=(), **params)
        harness.add(f"good{index}", PROMPT, max_tokens=8, seed=index, stop=())
    harness.drain()
    for index in range(4):
        failure = harness.results[f"bad{index}"]
        assert isinstance(failure, Failure)
        assert "'diverged' give logits that are not numbers" in failure.message
        (expected,) = roomy.sample(PROMPT, max_tokens=8, seed=index, stop=()).sequences
        (found,) = harness.output(f"good{index}").sequences
        assert found.tokens.tolist() == expected.tokens.tolist()


def test_stop_strings_without_a_tokenizer_fail_their_request(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(model_dir)
    monkeypatch.setattr(harness.engine, "_decode_text", None)
    harness.add("words", PROMPT, max_tokens=2, stop=("x",))
    failure = harness.results["words"]
    assert isinstance(failure, Failure)
    assert "tokenizer" in failure.message
    assert len(harness.sample(PROMPT, max_tokens=2, stop=()).sequences[0].tokens) == 2


def test_a_step_that_fails_takes_its_requests_with_it_and_no_more(
    model_dir: Path, roomy: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(model_dir, max_sampling_sequences=2)
    for name in ("running", "also running", "waiting"):
        harness.add(name, PROMPT, max_tokens=20, seed=1)
    harness.engine.step()
    harness.engine.step()

    def fail(*_: object) -> None:
        raise RuntimeError("broken kernel")

    with monkeypatch.context() as patch:
        patch.setattr(harness.engine._passes, "run", fail)
        harness.engine.step()
    assert not harness.engine.has_work
    failures = {
        name: (result.message, result.category)
        for name, result in harness.results.items()
        if isinstance(result, Failure)
    }
    wanted = ("RuntimeError: broken kernel", "server")
    assert failures == dict.fromkeys(("running", "also running", "waiting"), wanted)
    again = harness.sample(PROMPT, max_tokens=20, seed=1)
    expected = roomy.sample(PROMPT, max_tokens=20, seed=1)
    assert again.sequences[0].tokens.tolist() == expected.sequences[0].tokens.tolist()


def test_choosing_tokens_without_memory_for_all_is_done_in_parts(
    model_dir: Path, roomy: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(model_dir)
    choose = transformers_engine.choose_tokens

    def choose_few(logits_BV: torch.Tensor, *arguments: Any) -> Any:
        if len(logits_BV) > 2:
            raise torch.OutOfMemoryError
        return choose(logits_BV, *arguments)

    monkeypatch.setattr(transformers_engine, "choose_tokens", choose_few)
    harness.add("many", PROMPT, num_samples=7, max_tokens=12, seed=4, topk_sample_logprobs=3)
    harness.drain()
    expected = roomy.sample(PROMPT, num_samples=7, max_tokens=12, seed=4, topk_sample_logprobs=3)
    for one, other in zip(harness.output("many").sequences, expected.sequences, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.topk_logprobs is not None
        assert one.topk_logprobs.token_ids.shape == (len(one.tokens), 3)


def test_an_adapter_without_memory_beside_a_pass_of_training_is_loaded_after_it(
    model_dir: Path, roomy: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(model_dir)

    def fail(*_: object) -> bool:
        raise torch.OutOfMemoryError

    harness.add("asked", PROMPT, adapter="a1", max_tokens=5, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(harness.engine._scheduler._adapters, "ensure_loaded", fail)
        harness.engine.step(can_wait=True)
    assert harness.engine.has_work
    harness.drain()
    expected = roomy.sample(PROMPT, adapter="a1", max_tokens=5, seed=1)
    found = harness.output("asked").sequences[0].tokens.tolist()
    assert found == expected.sequences[0].tokens.tolist()
