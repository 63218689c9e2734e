"""The embedded engine on a tiny random Llama, against Hugging Face and PEFT run on their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
)

from hosted_tinker.types import AdapterRef, Sample, SamplingParams
from hosted_tinker.workers.messages import Failure
from tests.integration.tiny_engine import (
    EOS,
    PROMPT,
    Harness,
    count_passes,
    greedy_tokens,
    save_model,
    save_random_adapter,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_model(directory)
    return directory


@pytest.fixture(scope="module")
def harness(model_dir: Path) -> Harness:
    return Harness(model_dir, logits_chunk_tokens=3)


@pytest.fixture(autouse=True)
def fresh_results(harness: Harness) -> Iterator[None]:
    harness.results.clear()
    yield
    assert not harness.engine.has_work


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Callable[..., torch.Tensor]:
    """Log-probabilities [T, V] by Hugging Face, with the adapter loaded by PEFT."""
    loaded: dict[str | None, Any] = {}

    def compute(tokens: Any, adapter: str | None = None, temperature: float = 1.0) -> torch.Tensor:
        if adapter not in loaded:
            base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
            loaded[adapter] = (
                base if adapter is None else PeftModel.from_pretrained(base, model_dir / adapter)
            ).eval()
        with torch.no_grad():
            logits = loaded[adapter](input_ids=torch.tensor([list(map(int, tokens))])).logits[0]
        return torch.log_softmax(logits.float() / temperature, dim=-1)

    return compute


@pytest.mark.parametrize("adapter", [None, "a1"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_teacher_forced_pass(
    harness: Harness, reference: Any, adapter: str | None, temperature: float
) -> None:
    output = harness.sample(
        PROMPT, adapter=adapter, max_tokens=40, seed=3, stop=(), temperature=temperature
    )
    (sequence,) = output.sequences
    assert len(sequence.tokens) == 40
    logprobs = reference([*PROMPT, *sequence.tokens], adapter, temperature)
    expected = logprobs[range(len(PROMPT) - 1, len(PROMPT) + 39), sequence.tokens.tolist()]
    np.testing.assert_allclose(sequence.logprobs, expected.numpy(), atol=1e-4)


def test_greedy_equals_generate(harness: Harness, model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    expected = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=30)
    (sequence,) = harness.sample(PROMPT, max_tokens=30, temperature=0.0).sequences
    assert sequence.tokens.tolist() == expected[0, len(PROMPT) :].tolist()


def test_greedy_logprobs_are_those_of_temperature_one(harness: Harness, reference: Any) -> None:
    (sequence,) = harness.sample(PROMPT, max_tokens=1, temperature=0.0, stop=()).sequences
    expected = reference(PROMPT)[-1].max()
    assert sequence.logprobs[0] == pytest.approx(float(expected), abs=1e-4)


def test_seed_decides_whatever_runs_beside(harness: Harness) -> None:
    request = {"max_tokens": 25, "seed": 11, "stop": (), "top_k": 50, "num_samples": 2}
    alone = harness.sample(PROMPT, **request)
    again = harness.sample(PROMPT, **request)
    for index in range(4):
        harness.add(
            f"before{index}", [index + 1] * (index + 20), max_tokens=30, adapter=f"a{index}"
        )
    harness.engine.step()
    harness.add("watched", PROMPT, **request)
    for index in range(3):
        harness.add(f"after{index}", PROMPT[index:], max_tokens=5)
    harness.drain()
    for other in (again, harness.output("watched")):
        for one, two in zip(alone.sequences, other.sequences, strict=True):
            assert one.tokens.tolist() == two.tokens.tolist()
    assert alone.sequences[0].tokens.tolist() != alone.sequences[1].tokens.tolist()


def test_without_a_seed_samples_differ(harness: Harness) -> None:
    first = harness.sample(PROMPT, max_tokens=20, stop=())
    second = harness.sample(PROMPT, max_tokens=20, stop=())
    assert first.sequences[0].tokens.tolist() != second.sequences[0].tokens.tolist()


def test_adapters_in_one_batch_do_not_mix(harness: Harness) -> None:
    adapters = [None, "a0", "a1", "a2", "a0"]
    request = {"max_tokens": 15, "seed": 4, "stop": (), "topk_sample_logprobs": 5}
    apart = [harness.sample(PROMPT, adapter=adapter, **request) for adapter in adapters]
    for index, adapter in enumerate(adapters):
        harness.add(str(index), PROMPT, adapter=adapter, **request)
    harness.drain()
    for index, expected in enumerate(apart):
        mixed = harness.output(str(index)).sequences[0]
        assert mixed.tokens.tolist() == expected.sequences[0].tokens.tolist()
        np.testing.assert_allclose(mixed.logprobs, expected.sequences[0].logprobs, atol=1e-5)
    assert len({tuple(one.sequences[0].logprobs.tolist()) for one in apart}) == 4


def test_requests_join_while_others_run(harness: Harness, reference: Any) -> None:
    shapes = count_passes(harness.engine)
    harness.add("first", PROMPT, max_tokens=300, seed=1, stop=())
    for _ in range(5):
        harness.engine.step()
    harness.add("second", [3, 4], max_tokens=4, seed=2, stop=())
    harness.drain()
    assert (1, 2) in shapes
    assert list(harness.results) == ["second", "first"]
    for request_id, prompt in (("first", PROMPT), ("second", [3, 4])):
        sequence = harness.output(request_id).sequences[0]
        rows = range(len(prompt) - 1, len(prompt) + len(sequence.tokens) - 1)
        expected = reference([*prompt, *sequence.tokens])[rows, sequence.tokens.tolist()]
        np.testing.assert_allclose(sequence.logprobs, expected.numpy(), atol=1e-4)


def test_what_is_there_of_a_prompt_is_not_computed_again(harness: Harness, reference: Any) -> None:
    """Neither of the same prompt nor of the next turn, but with another adapter."""
    prompt = PROMPT * 22
    request = {"adapter": "a1", "max_tokens": 60, "seed": 8, "stop": ()}
    first = harness.sample(prompt, **request)
    assert first.prompt_cache_hit_tokens == 0
    turn = [*prompt, *first.sequences[0].tokens.tolist(), 9, 8, 7]
    shapes = count_passes(harness.engine)
    for tokens, adapter, reused in (
        (prompt, "a1", 128),
        (turn, "a1", 192),
        (turn, "a2", 0),
        (prompt, None, 0),
    ):
        shapes.clear()
        output = harness.sample(tokens, **{**request, "adapter": adapter})
        assert output.prompt_cache_hit_tokens == reused
        assert shapes[0] == (1, min(256, len(tokens) - reused))
        (sequence,) = output.sequences
        logprobs = reference([*tokens, *sequence.tokens], adapter)
        rows = range(len(tokens) - 1, len(tokens) + 59)
        expected = logprobs[rows, sequence.tokens.tolist()].numpy()
        np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-4)


def test_a_long_prompt_does_not_hold_up_what_runs(model_dir: Path, reference: Any) -> None:
    harness = Harness(model_dir, prefill_chunk_tokens=40)
    shapes = count_passes(harness.engine)
    harness.add("runs", PROMPT, max_tokens=60, seed=1, stop=(), stream=True)
    for _ in range(3):
        harness.engine.step()
    shapes.clear()
    prompt = PROMPT * 60
    harness.add("long", prompt, max_tokens=10, seed=2, stop=(), prompt_logprobs=True)
    for step in range(10):
        assert len(harness.reported["runs"]) == 3 + step
        harness.engine.step()
    assert shapes[:10] == [(1, 40)] * 10
    harness.drain()
    scores = harness.output("long").prompt_logprobs
    assert scores is not None
    expected = reference(prompt)[range(len(prompt) - 1), prompt[1:]]
    np.testing.assert_allclose(scores[1:], expected.numpy(), atol=1e-4)


def test_what_gave_up_its_pages_goes_on_as_if_nothing_had_been(
    model_dir: Path, reference: Any
) -> None:
    """Twelve sequences of up to 7 pages, where there are 15."""
    page_bytes = 64 * 2 * 2 * 32 * 4
    cache = {"sampling_cache_gib": 16 * page_bytes / 2**30, "max_context_length": 448}
    harness = Harness(model_dir, **cache)
    assert harness.engine._cache.allocator.num_pages == 17
    prompts = [[index + 1] * (30 * index + 5) for index in range(10)]
    for index, prompt in enumerate(prompts):
        adapter = (None, "a1", "a2")[index % 3]
        harness.add(str(index), prompt, adapter=adapter, max_tokens=120, seed=index, stop=())
    harness.add("group", PROMPT * 10, num_samples=2, max_tokens=80, seed=3, stop=())
    shapes = count_passes(harness.engine)
    harness.drain()
    computed = sum(length for _, length in shapes)
    assert computed > sum(map(len, prompts)) + 70 + 10 * 120 + 2 * 80, "nothing was computed again"
    for index, prompt in enumerate(prompts):
        (sequence,) = harness.output(str(index)).sequences
        logprobs = reference([*prompt, *sequence.tokens], (None, "a1", "a2")[index % 3])
        rows = range(len(prompt) - 1, len(prompt) + 119)
        expected = logprobs[rows, sequence.tokens.tolist()].numpy()
        np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-4)
    assert len(harness.output("group").sequences) == 2
    harness.add("too long", PROMPT * 50, max_tokens=700)
    failure = harness.results["too long"]
    assert isinstance(failure, Failure)


def test_nothing_is_left_of_what_ended(model_dir: Path) -> None:
    harness = Harness(model_dir)
    allocator, prefixes = harness.engine._cache.allocator, harness.engine._cache.prefixes
    for index in range(6):
        harness.add(str(index), PROMPT * (index + 9), max_tokens=50, num_samples=3, stop=())
    for _ in range(20):
        harness.engine.step()
    for index in (1, 4):
        harness.engine.cancel(str(index))
    harness.drain()
    prefixes.evict(allocator.num_pages)
    assert allocator.num_free == allocator.num_pages - 1


def test_stop_id_is_kept_and_ends(harness: Harness) -> None:
    tokens = greedy_tokens(harness, 20)
    stop = tokens[6]
    (sequence,) = harness.sample(PROMPT, max_tokens=20, temperature=0.0, stop=(stop,)).sequences
    assert sequence.tokens.tolist() == tokens[: tokens.index(stop) + 1]
    assert sequence.stop_reason == "stop"


def test_stop_string_over_tokens_ends_with_the_token_that_completes_it(harness: Harness) -> None:
    tokens = greedy_tokens(harness, 40)
    decode = harness.engine._decode_text
    assert decode is not None
    text = decode(tokens)
    clean = [part for part in text.split("\N{REPLACEMENT CHARACTER}") if len(part) > 3]
    string = max(clean, key=len)[1:4]
    expected = next(count for count in range(41) if string in decode(tokens[:count]))
    (sequence,) = harness.sample(PROMPT, max_tokens=40, temperature=0.0, stop=(string,)).sequences
    assert sequence.tokens.tolist() == tokens[:expected]
    assert sequence.stop_reason == "stop"


def seed_that_samples_eos(harness: Harness) -> tuple[int, int]:
    """A seed whose sequence has the end-of-sequence token, and where."""
    for seed in range(200):
        (sequence,) = harness.sample(PROMPT, max_tokens=60, seed=seed, stop=()).sequences
        assert sequence.stop_reason == "length"
        tokens = sequence.tokens.tolist()
        if EOS in tokens:
            return seed, tokens.index(EOS)
    raise AssertionError("no seed samples the end-of-sequence token")


def test_eos_stops_unless_stop_is_empty(harness: Harness) -> None:
    seed, position = seed_that_samples_eos(harness)
    for stop in (None, ("no such string",), (299999,)):
        (sequence,) = harness.sample(PROMPT, max_tokens=60, seed=seed, stop=stop).sequences
        assert len(sequence.tokens) == position + 1
        assert sequence.tokens[-1] == EOS
        assert sequence.stop_reason == "stop"
    (sequence,) = harness.sample(PROMPT, max_tokens=60, seed=seed, stop=()).sequences
    assert len(sequence.tokens) == 60


def test_prompt_scores_equal_a_plain_pass(harness: Harness, reference: Any) -> None:
    targets = np.array([[7, -1], [0, 3], [-1, -1], [9, 9], [1, 2], [200, 100]])
    output = harness.sample(
        PROMPT,
        adapter="a2",
        max_tokens=1,
        temperature=0.5,
        prompt_logprobs=True,
        topk_prompt_logprobs=4,
        target_prompt_logprobs=targets,
        prompt_alt_tokens_k=3,
    )
    expected = reference(PROMPT, "a2")[:-1]
    assert output.prompt_logprobs is not None
    assert np.isnan(output.prompt_logprobs[0])
    np.testing.assert_allclose(
        output.prompt_logprobs[1:], expected[range(6), PROMPT[1:]].numpy(), atol=1e-4
    )
    topk = output.topk_prompt_logprobs
    assert topk is not None
    assert topk.token_ids[0].tolist() == [0] * 4
    assert topk.logprobs[0].tolist() == [-99999.0] * 4
    assert topk.token_ids[1:].tolist() == expected.topk(4).indices.tolist()
    np.testing.assert_allclose(topk.logprobs[1:], expected.topk(4).values.numpy(), atol=1e-4)
    scored = expected.gather(1, torch.from_numpy(targets.clip(0))).numpy()
    np.testing.assert_allclose(
        output.target_prompt_logprobs, np.where(targets < 0, 0, scored), atol=1e-4
    )
    assert output.prompt_alt_tokens is not None
    tokens, logprobs = output.prompt_alt_tokens
    assert tokens.shape == logprobs.shape == (6, 3)
    np.testing.assert_allclose(
        logprobs, expected.gather(1, torch.from_numpy(tokens)).numpy(), atol=1e-4
    )


def test_alternatives_follow_the_distribution(harness: Harness, reference: Any) -> None:
    output = harness.sample([5, 17], max_tokens=1, prompt_alt_tokens_k=4000, seed=0)
    assert output.prompt_alt_tokens is not None
    expected = reference([5, 17])[0].exp().numpy()
    found = np.bincount(output.prompt_alt_tokens[0][0], minlength=len(expected)) / 4000
    # Four standard deviations of a binomial share.
    assert np.all(np.abs(found - expected) < 4 * np.sqrt(expected / 4000) + 1e-3)


def test_last_n_prompt_logprobs_are_the_last_of_all(harness: Harness) -> None:
    every = harness.sample(PROMPT, max_tokens=1, prompt_logprobs=True).prompt_logprobs
    assert every is not None
    for fields in ({}, {"topk_prompt_logprobs": 1}):
        last = harness.sample(
            PROMPT, max_tokens=1, prompt_logprobs_last_n=2, **fields
        ).prompt_logprobs
        assert last is not None
        assert np.isnan(last[:5]).all()
        np.testing.assert_allclose(last[5:], every[5:], atol=1e-6)


def test_one_token_prompt_has_nothing_to_score(harness: Harness) -> None:
    output = harness.sample(
        [4], max_tokens=1, prompt_logprobs=True, topk_prompt_logprobs=2, prompt_alt_tokens_k=2
    )
    assert output.prompt_logprobs is not None
    assert output.prompt_alt_tokens is not None
    assert np.isnan(output.prompt_logprobs).tolist() == [True]
    assert output.prompt_alt_tokens[0].shape == (0, 2)


def test_topk_of_sampled_positions(harness: Harness, reference: Any) -> None:
    (sequence,) = harness.sample(
        PROMPT, max_tokens=6, stop=(), temperature=2.0, topk_sample_logprobs=3, seed=5
    ).sequences
    expected = reference([*PROMPT, *sequence.tokens], None, 2.0)[6:12].topk(3)
    assert sequence.topk_logprobs is not None
    assert sequence.topk_logprobs.token_ids.tolist() == expected.indices.tolist()
    np.testing.assert_allclose(sequence.topk_logprobs.logprobs, expected.values.numpy(), atol=1e-4)


def test_missing_adapter_fails_its_request_only(harness: Harness) -> None:
    harness.add("broken", PROMPT, adapter="nowhere", max_tokens=2)
    harness.add("sound", PROMPT, max_tokens=2, stop=())
    harness.drain()
    failure = harness.results["broken"]
    assert isinstance(failure, Failure)
    assert failure.category == "user"
    assert "nowhere" in failure.message
    assert len(harness.output("sound").sequences[0].tokens) == 2


def test_an_adapter_of_another_model_fails_its_request(harness: Harness, tmp_path: Path) -> None:
    save_random_adapter(torch.nn.Sequential(torch.nn.Linear(3, 3)), tmp_path / "odd", 0, rank=2)
    prompt = np.array(PROMPT)
    adapter = AdapterRef("odd", tmp_path / "odd")
    harness.engine.add(Sample("odd", adapter, prompt, SamplingParams(max_tokens=1)))
    harness.drain()
    failure = harness.results["odd"]
    assert isinstance(failure, Failure)
    assert "do not fit" in failure.message


def test_a_prompt_over_the_context_fails_its_request(harness: Harness) -> None:
    harness.add("long", [1] * 512, max_tokens=1)
    failure = harness.results["long"]
    assert isinstance(failure, Failure)
    assert "512" in failure.message
