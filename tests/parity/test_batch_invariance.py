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

from hosted_tinker.default_model import ensure_default_model
from hosted_tinker.types import SampleOutput
from tests.integration.tiny_engine import PROMPT, Harness, save_model
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


def ask(harness: Harness, request_id: str, prompt: Any, adapter: str | None) -> None:
    harness.add(
        request_id,
        prompt,
        adapter=adapter,
        max_tokens=30,
        seed=3,
        stop=(),
        topk_sample_logprobs=4,
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
    )


def assert_same_bits(one: SampleOutput, other: SampleOutput) -> None:
    for mine, theirs in zip(one.sequences, other.sequences, strict=True):
        np.testing.assert_array_equal(mine.tokens, theirs.tokens)
        np.testing.assert_array_equal(mine.logprobs, theirs.logprobs)
        assert mine.topk_logprobs is not None
        assert theirs.topk_logprobs is not None
        np.testing.assert_array_equal(mine.topk_logprobs.logprobs, theirs.topk_logprobs.logprobs)
    assert one.prompt_logprobs is not None
    np.testing.assert_array_equal(one.prompt_logprobs, other.prompt_logprobs)


@settings(max_examples=25)
@given(
    neighbours=NEIGHBOURS,
    adapter=st.sampled_from([None, "a0", "a3"]),
    length=st.integers(1, 150),
    head_start=st.integers(0, 12),
    seed=st.integers(0, 99),
)
def test_a_sample_does_not_depend_on_its_neighbours(
    sampling_model: Path,
    engine: Harness,
    neighbours: list[tuple[str | None, int, int]],
    adapter: str | None,
    length: int,
    head_start: int,
    seed: int,
) -> None:
    """Nor on where its prompt is cut, on what is cached, or on making room for others: alone in an
    engine of its own, and in one with small chunks and few pages that others use."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(1, 300, length)
    small = {"prefill_chunk_tokens": 1 + seed, "sampling_cache_gib": 13 * 64 * 512 / 2**30}
    crowded = Harness(sampling_model, batch_invariant=True, max_context_length=300, **small)
    for index, (other, size, max_tokens) in enumerate(neighbours):
        tokens = np.concatenate([prompt[: index * 10], rng.integers(1, 300, size)])
        crowded.add(f"n{index}", tokens, adapter=other, max_tokens=max_tokens, seed=index, stop=())
    for _ in range(head_start):
        if crowded.engine.has_work:
            crowded.engine.step()
    ask(crowded, "asked", prompt, adapter)
    crowded.drain()
    ask(engine, "asked", prompt, adapter)
    engine.drain()
    assert_same_bits(crowded.output("asked"), engine.results.pop("asked"))  # pyright: ignore[reportArgumentType]


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
def test_the_default_model_gives_the_same_bits_in_a_crowd() -> None:
    model = ensure_default_model(print)
    harness = Harness(model, batch_invariant=True)
    rng = np.random.default_rng(0)
    prompt = rng.integers(1, 40000, 200)
    ask(harness, "alone", prompt, None)
    harness.drain()
    crowded = Harness(model, batch_invariant=True, prefill_chunk_tokens=100)
    for index in range(9):
        crowded.add(f"n{index}", rng.integers(1, 40000, 10 + 30 * index), max_tokens=40, seed=index)
    crowded.engine.step()
    ask(crowded, "asked", prompt, None)
    crowded.drain()
    assert_same_bits(crowded.output("asked"), harness.output("alone"))
