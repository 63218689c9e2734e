"""How the embedded engine shares rows, prefills and adapters among requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from hosted_tinker.errors import SettingsError
from hosted_tinker.workers.messages import Failure
from tests.integration.tiny_engine import (
    DIMENSIONS,
    PROMPT,
    Harness,
    count_passes,
    greedy_tokens,
    save_model,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_model(directory)
    return directory


def test_samples_of_one_prompt_share_its_prefill(model_dir: Path) -> None:
    harness = Harness(model_dir)
    shapes = count_passes(harness.engine)
    harness.add("group", PROMPT, num_samples=4, max_tokens=3, stop=())
    harness.add("same", PROMPT, max_tokens=3, stop=())
    harness.add("other adapter", PROMPT, max_tokens=3, stop=(), adapter="a0")
    harness.drain()
    assert shapes == [(1, 14), (1, 6), (1, 6)]


def test_more_samples_than_rows_start_in_parts(model_dir: Path) -> None:
    harness = Harness(model_dir, max_sampling_sequences=3)
    shapes = count_passes(harness.engine)
    harness.add("early", [1, 2, 3], max_tokens=6, stop=())
    harness.add("group", PROMPT, num_samples=8, max_tokens=4, seed=9, stop=())
    harness.drain()
    parts = harness.output("group")
    assert shapes[0] == (1, 10)
    assert max(length for _, length in shapes[1:]) == 3
    whole = Harness(model_dir).sample(PROMPT, num_samples=8, max_tokens=4, seed=9, stop=())
    assert [one.tokens.tolist() for one in parts.sequences] == [
        one.tokens.tolist() for one in whole.sequences
    ]


def test_max_tokens_none_runs_to_the_end_of_the_context(model_dir: Path) -> None:
    harness = Harness(model_dir, max_context_length=32)
    (sequence,) = harness.sample(PROMPT, stop=()).sequences
    assert len(sequence.tokens) == 32 - len(PROMPT)
    assert sequence.stop_reason == "length"


def test_cancel_frees_rows_for_the_next_request(model_dir: Path) -> None:
    harness = Harness(model_dir, max_sampling_sequences=2)
    harness.add("dropped", [1, 2], max_tokens=400, stop=())
    harness.add("kept", PROMPT, max_tokens=30, stop=(), temperature=0.0)
    harness.add("waits", [9, 8], max_tokens=2, stop=())
    harness.engine.step()
    assert "waits" not in harness.results
    harness.engine.cancel("dropped")
    harness.engine.cancel("unknown")
    assert harness.results["dropped"] == Failure("cancelled", "user")
    harness.engine.step()
    harness.engine.step()
    assert "waits" in harness.results
    harness.drain()
    assert harness.output("kept").sequences[0].tokens.tolist() == greedy_tokens(harness, 30)


def test_cancel_of_a_waiting_request(model_dir: Path) -> None:
    harness = Harness(model_dir, max_sampling_sequences=1)
    harness.add("runs", PROMPT, max_tokens=3, stop=())
    harness.add("waits", PROMPT, max_tokens=3, stop=())
    harness.engine.step()
    harness.engine.cancel("waits")
    harness.drain()
    assert harness.results["waits"] == Failure("cancelled", "user")
    assert len(harness.output("runs").sequences[0].tokens) == 3


def test_least_recently_used_adapter_leaves_but_never_one_in_use(model_dir: Path) -> None:
    harness = Harness(model_dir, max_sampling_adapters=2)
    held = harness.engine._scheduler._adapters
    harness.add("long", PROMPT, adapter="a0", max_tokens=50, stop=())
    harness.engine.step()
    for name in ("a1", "a2"):
        harness.add(name, PROMPT, adapter=name, max_tokens=1)
        harness.engine.step()
    assert held.held == ["a0", "a2"]
    harness.add("also long", PROMPT, adapter="a2", max_tokens=50, stop=())
    harness.engine.step()
    harness.add("waits", PROMPT, adapter="a3", max_tokens=1)
    harness.engine.step()
    assert "waits" not in harness.results
    harness.drain()
    assert held.held == ["a2", "a3"]
    assert set(harness.results) == {"long", "a1", "a2", "also long", "waits"}


def test_use_counts_for_what_leaves(model_dir: Path) -> None:
    harness = Harness(model_dir, max_sampling_adapters=2)
    for name in ("a0", "a1", "a0", "a2"):
        harness.sample(PROMPT, adapter=name, max_tokens=1)
    assert harness.engine._scheduler._adapters.held == ["a0", "a2"]


def test_an_adapter_read_again_gives_the_same(model_dir: Path) -> None:
    harness = Harness(model_dir, max_sampling_adapters=1)
    request = {"max_tokens": 8, "seed": 2, "stop": ()}
    first = harness.sample(PROMPT, adapter="a0", **request).sequences[0]
    harness.sample(PROMPT, adapter="a1", **request)
    again = harness.sample(PROMPT, adapter="a0", **request).sequences[0]
    assert first.tokens.tolist() == again.tokens.tolist()
    np.testing.assert_array_equal(first.logprobs, again.logprobs)


def test_a_sliding_window_is_refused_in_a_sentence(tmp_path: Path) -> None:
    config = MistralConfig(vocab_size=100, sliding_window=64, **DIMENSIONS)
    MistralForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match=r"full-attention decoders only.*64 tokens"):
        Harness(tmp_path)
    Harness(tmp_path, max_context_length=64)


def test_layers_with_a_window_are_refused_by_their_type(tmp_path: Path) -> None:
    config = Gemma2Config(vocab_size=100, sliding_window=600, **DIMENSIONS)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match="layers of type sliding_attention"):
        Harness(tmp_path)


def test_thousands_wait_and_each_gets_what_it_gets_alone(model_dir: Path) -> None:
    harness = Harness(model_dir)
    prompts = [[5 + number % 250, 5 + number // 250, 17] for number in range(3000)]
    for number, prompt in enumerate(prompts):
        harness.add(str(number), prompt, max_tokens=2, temperature=0.0, stop=())
    for number in range(0, 3000, 3):
        harness.engine.cancel(str(number))
    harness.drain()
    for number in range(3000):
        is_cancelled = isinstance(harness.results[str(number)], Failure)
        assert is_cancelled == (number % 3 == 0)
    for number in range(1, 3000, 300):
        alone = harness.sample(prompts[number], max_tokens=2, temperature=0.0, stop=())
        (expected,), (found,) = alone.sequences, harness.output(str(number)).sequences
        assert found.tokens.tolist() == expected.tokens.tolist()
        np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)
