"""The batch-invariant mode: same bits whatever else is computed, in training and in sampling."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from hosted_tinker.default_model import ensure_default_model
from hosted_tinker.types import SampleOutput
from tests.integration.tiny_engine import PROMPT, Harness, save_model, save_random_adapter
from tests.parity.tiny_runs import REQUESTS, load, make_request, save_tiny_llama, take_gradients

NEIGHBOURS = st.lists(
    st.tuples(
        st.sampled_from([None, "a0", "a1", "a2", "a3"]), st.integers(1, 120), st.integers(1, 60)
    ),
    max_size=20,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("training")
    save_tiny_llama(directory)
    return str(directory)


@pytest.fixture(scope="module")
def sampling_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sampling")
    save_model(directory)
    return directory


@pytest.fixture(scope="module")
def engine(sampling_model: Path) -> Harness:
    return Harness(sampling_model, batch_invariant=True)


WAYS: dict[str, dict[str, Any]] = {
    "samples": {"num_samples": 3, "topk_sample_logprobs": 4},
    "greedy": {"temperature": 0.0},
    "cut": {"top_k": 20, "top_p": 0.9, "num_samples": 2},
    "scored": {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "prompt_alt_tokens_k": 3},
}


def ask(
    harness: Harness, request_id: str, prompt: Any, adapter: str | None, way: str = "scored"
) -> None:
    fields = {"max_tokens": 30, "seed": 3, "stop": (), **WAYS[way]}
    harness.add(request_id, prompt, adapter=adapter, **fields)


def list_arrays(output: SampleOutput) -> list[Any]:
    """Everything in the output that is a number."""
    tables = [
        output.topk_prompt_logprobs,
        *(sequence.topk_logprobs for sequence in output.sequences),
    ]
    return [
        output.prompt_logprobs,
        *(output.prompt_alt_tokens or ()),
        *(part for table in tables if table for part in (table.token_ids, table.logprobs)),
        *(part for one in output.sequences for part in (one.tokens, one.logprobs)),
    ]


def assert_same_bits(one: SampleOutput, other: SampleOutput) -> None:
    for mine, theirs in zip(list_arrays(one), list_arrays(other), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@settings(max_examples=25)
@given(
    neighbours=NEIGHBOURS,
    adapter=st.sampled_from([None, "a0", "a3"]),
    length=st.integers(1, 150),
    head_start=st.integers(0, 12),
    way=st.sampled_from(sorted(WAYS)),
    seed=st.integers(0, 99),
)
def test_a_sample_does_not_depend_on_its_neighbours(
    sampling_model: Path,
    engine: Harness,
    neighbours: list[tuple[str | None, int, int]],
    adapter: str | None,
    length: int,
    head_start: int,
    way: str,
    seed: int,
) -> None:
    """Nor on where its prompt is cut, on what is cached, or on making room for others: alone in an
    engine of its own, and in one with small chunks and few pages that others use, where earlier
    requests of its adapter begin like it."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(1, 300, length)
    small = {"prefill_chunk_tokens": 1 + seed, "sampling_cache_gib": 13 * 64 * 512 / 2**30}
    crowded = Harness(sampling_model, batch_invariant=True, max_context_length=300, **small)
    for index, (other, size, max_tokens) in enumerate(neighbours):
        tokens = np.concatenate([prompt[: index * 20], rng.integers(1, 300, size)])
        crowded.add(f"n{index}", tokens, adapter=other, max_tokens=max_tokens, seed=index, stop=())
    for _ in range(head_start):
        if crowded.engine.has_work:
            crowded.engine.step()
    ask(crowded, "asked", prompt, adapter, way)
    crowded.drain()
    ask(engine, "asked", prompt, adapter, way)
    engine.drain()
    assert_same_bits(crowded.output("asked"), engine.results.pop("asked"))  # pyright: ignore[reportArgumentType]


def test_what_is_found_in_the_cache_has_the_same_bits(sampling_model: Path) -> None:
    """Pages of a longer prompt that was computed in other passes, and of a completion."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(1, 300, 100)
    fresh, used = (
        Harness(sampling_model, batch_invariant=True, max_context_length=512) for _ in range(2)
    )
    used.add("longer", np.concatenate([prompt, [7] * 90]), adapter="a2", max_tokens=3, seed=1)
    used.add("other", rng.integers(1, 300, 77), max_tokens=3, seed=1)
    used.drain()
    for harness in (fresh, used):
        ask(harness, "asked", prompt, "a2", "samples")
        harness.drain()
    assert used.output("asked").prompt_cache_hit_tokens == 64
    assert fresh.output("asked").prompt_cache_hit_tokens == 0
    assert_same_bits(used.output("asked"), fresh.output("asked"))
    turn = np.concatenate([prompt, used.output("asked").sequences[0].tokens, [5] * 30])
    alone = Harness(sampling_model, batch_invariant=True)
    for harness in (alone, used):
        ask(harness, "turn", turn, "a2", "samples")
        harness.drain()
    assert used.output("turn").prompt_cache_hit_tokens == 128
    assert_same_bits(used.output("turn"), alone.output("turn"))


def test_a_sample_is_the_same_within_rounding_as_without_the_mode(
    sampling_model: Path, engine: Harness
) -> None:
    for adapter in (None, "a1"):
        plain = Harness(sampling_model)
        for harness in (plain, engine):
            ask(harness, f"{adapter}", PROMPT * 20, adapter)
            harness.drain()
        one, other = plain.output(f"{adapter}"), engine.output(f"{adapter}")
        np.testing.assert_array_equal(one.sequences[0].tokens, other.sequences[0].tokens)
        np.testing.assert_allclose(
            one.sequences[0].logprobs, other.sequences[0].logprobs, rtol=1e-4, atol=1e-4
        )


@given(shapes=REQUESTS, seed=st.integers(0, 99))
def test_training_numbers_do_not_depend_on_what_waits_beside(
    model_dir: str, shapes: list[Any], seed: int
) -> None:
    together, apart = (load(model_dir, batch_invariant=True) for _ in range(2))
    requests = [make_request(*shape, seed=seed + i) for i, shape in enumerate(shapes)]
    found = together.forward_backward(requests)
    wanted = [result for request in requests for result in apart.forward_backward([request])]
    for one, other in zip(found, wanted, strict=True):
        assert not isinstance(one, Exception)
        assert not isinstance(other, Exception)
        assert one.metrics == other.metrics
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    expected = take_gradients(apart)
    for key, gradient in take_gradients(together).items():
        assert (gradient is None) == (expected[key] is None), key
        assert gradient is None or torch.equal(gradient, expected[key]), key


@given(lengths=st.lists(st.integers(1, 40), min_size=2, max_size=6), seed=st.integers(0, 99))
def test_a_datum_does_not_depend_on_the_data_of_its_request(
    model_dir: str, lengths: list[int], seed: int
) -> None:
    backend = load(model_dir, batch_invariant=True)
    whole = make_request("a", "cross_entropy", lengths, seed=seed)
    (result,) = backend.forward_backward([whole])
    assert not isinstance(result, Exception)
    for datum, logprobs in zip(whole.data, result.logprobs, strict=True):
        (alone,) = backend.forward_backward([replace(whole, data=[datum])])
        assert not isinstance(alone, Exception)
        np.testing.assert_array_equal(alone.logprobs[0], logprobs)


@pytest.mark.slow
def test_the_default_model_gives_the_same_bits_in_a_crowd(tmp_path: Path) -> None:
    model = ensure_default_model(print)
    harness = Harness(model, batch_invariant=True)
    plain = AutoModelForCausalLM.from_pretrained(model)
    save_random_adapter(plain, tmp_path / "big", seed=0, rank=16)
    rng = np.random.default_rng(0)
    prompt = rng.integers(1, 40000, 200)
    harness.model_dir = tmp_path
    ask(harness, "alone", prompt, "big")
    harness.drain()
    crowded = Harness(model, batch_invariant=True, prefill_chunk_tokens=100)
    crowded.model_dir = tmp_path
    for index in range(9):
        tokens = rng.integers(1, 40000, 10 + 30 * index)
        adapter = "big" if index % 2 else None
        crowded.add(f"n{index}", tokens, adapter=adapter, max_tokens=40, seed=index)
    crowded.engine.step()
    ask(crowded, "asked", prompt, "big")
    crowded.drain()
    assert_same_bits(crowded.output("asked"), harness.output("alone"))
