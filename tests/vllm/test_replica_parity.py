"""Samples of a real vLLM mean what those of the embedded engine mean; numbers are those of PEFT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from hosted_tinker.errors import UnservableError
from hosted_tinker.types import SampledSequence
from tests.integration.tiny_engine import EOS, PROMPT, Harness
from tests.vllm.tiny_replicas import CONTEXT_LENGTH, Reference, Serving, TinyModel

TOLERANCE = 1e-4
"""Float32 on both sides, in another order of additions."""
COUNT = 12


@pytest.fixture(scope="module")
def embedded(tiny: TinyModel) -> Harness:
    return Harness(tiny.model_dir)


def expect_logprobs(
    reference: Reference,
    adapter: str | None,
    sequence: SampledSequence,
    prompt: Sequence[int] = PROMPT,
    temperature: float = 1.0,
) -> None:
    tokens = sequence.tokens.tolist()
    logprobs = reference.compute_logprobs(adapter, [*prompt, *tokens], temperature)
    rows = np.arange(len(prompt) - 1, len(prompt) - 1 + len(tokens))
    np.testing.assert_allclose(sequence.logprobs, logprobs[rows, tokens], atol=TOLERANCE)


@pytest.mark.parametrize("adapter", [None, "a0", "b0"])
def test_greedy_tokens_and_logprobs_are_pefts(
    serving: Serving, reference: Reference, adapter: str | None
) -> None:
    (sequence,) = serving.sample(
        PROMPT, adapter, max_tokens=COUNT, temperature=0.0, stop=()
    ).sequences
    assert sequence.tokens.tolist() == reference.continue_greedily(adapter, PROMPT, COUNT)
    assert sequence.stop_reason == "length"
    expect_logprobs(reference, adapter, sequence)


@pytest.mark.parametrize("adapter", [None, "a1", "b1"])
def test_seeded_samples_differ_from_each_other_and_repeat(
    serving: Serving, reference: Reference, adapter: str | None
) -> None:
    fields: dict[str, Any] = {"max_tokens": COUNT, "temperature": 0.7, "stop": ()}
    fields |= {"num_samples": 4, "seed": 2**64 - 1}
    one = serving.sample(PROMPT, adapter, **fields).sequences
    again = serving.sample(PROMPT, adapter, **fields).sequences
    other = serving.sample(PROMPT, adapter, **(fields | {"seed": 0})).sequences
    drawn = [tuple(sequence.tokens.tolist()) for sequence in one]
    assert len(set(drawn)) == 4
    assert drawn == [tuple(sequence.tokens.tolist()) for sequence in again]
    assert not set(drawn) & {tuple(sequence.tokens.tolist()) for sequence in other}
    for sequence in one:
        expect_logprobs(reference, adapter, sequence, temperature=0.7)


def test_greedy_samples_of_one_prompt_are_the_same_one(
    serving: Serving, reference: Reference
) -> None:
    output = serving.sample(
        PROMPT, "a0", max_tokens=8, temperature=0.0, stop=(), num_samples=3, seed=1
    )
    expected = reference.continue_greedily("a0", PROMPT, 8)
    assert [sequence.tokens.tolist() for sequence in output.sequences] == [expected] * 3


def test_all_adapters_and_the_base_model_in_one_batch_answer_for_themselves(
    serving: Serving, reference: Reference
) -> None:
    adapters = [None, "a0", "b0", "b0", None, "a0", "b0", None]
    prompts = [[*PROMPT, index] for index in range(len(adapters))]
    samples = [
        serving.make_sample(prompt, adapter, max_tokens=6, temperature=0.0, stop=())
        for prompt, adapter in zip(prompts, adapters, strict=True)
    ]
    outputs = serving.sample_all(samples)
    for prompt, adapter, output in zip(prompts, adapters, outputs, strict=True):
        (sequence,) = output.sequences
        assert sequence.tokens.tolist() == reference.continue_greedily(adapter, prompt, 6)
        expect_logprobs(reference, adapter, sequence, prompt)


@pytest.mark.parametrize("adapter", [None, "b0"])
def test_prompts_are_scored_as_peft_scores_them(
    serving: Serving, reference: Reference, adapter: str | None
) -> None:
    prompt = [*PROMPT, *range(1, 60)]
    output = serving.sample(
        prompt, adapter, max_tokens=4, prompt_logprobs=True, topk_prompt_logprobs=3, num_samples=2
    )
    expected = reference.compute_logprobs(adapter, prompt)[:-1]
    assert output.prompt_logprobs is not None
    assert np.isnan(output.prompt_logprobs[0])
    np.testing.assert_allclose(
        output.prompt_logprobs[1:],
        expected[np.arange(len(prompt) - 1), prompt[1:]],
        atol=TOLERANCE,
    )
    assert output.topk_prompt_logprobs is not None
    np.testing.assert_allclose(
        output.topk_prompt_logprobs.logprobs[1:],
        -np.sort(-expected, axis=-1)[:, :3],
        atol=TOLERANCE,
    )
    rows = np.arange(len(prompt) - 1)[:, None]
    np.testing.assert_allclose(
        expected[rows, output.topk_prompt_logprobs.token_ids[1:]],
        output.topk_prompt_logprobs.logprobs[1:],
        atol=TOLERANCE,
    )
    assert len(output.sequences) == 2


def test_prompts_are_scored_right_while_others_generate(
    serving: Serving, reference: Reference
) -> None:
    prompt = [*PROMPT, *range(1, 60)]
    generating = [
        serving.make_sample(PROMPT, adapter, max_tokens=COUNT, temperature=0.0, stop=())
        for adapter in ("a0", None, "b0")
    ]
    scoring = [
        serving.make_sample(prompt, adapter, max_tokens=1, prompt_logprobs=True)
        for adapter in ("b0", None)
    ]
    outputs = serving.sample_all([*generating, *scoring])
    for sample, output in zip(generating, outputs[:3], strict=True):
        adapter = sample.adapter.name if sample.adapter else None
        expected = reference.continue_greedily(adapter, PROMPT, COUNT)
        assert output.sequences[0].tokens.tolist() == expected
    for adapter, output in zip(("b0", None), outputs[3:], strict=True):
        logprobs = reference.compute_logprobs(adapter, prompt)[:-1]
        assert output.prompt_logprobs is not None
        np.testing.assert_allclose(
            output.prompt_logprobs[1:],
            logprobs[np.arange(len(prompt) - 1), prompt[1:]],
            atol=TOLERANCE,
        )


def test_only_the_end_of_a_prompt_is_scored_where_that_is_asked(
    serving: Serving, reference: Reference
) -> None:
    output = serving.sample(PROMPT, "b0", max_tokens=1, prompt_logprobs_last_n=2)
    assert output.prompt_logprobs is not None
    assert np.isnan(output.prompt_logprobs).tolist() == [True] * (len(PROMPT) - 2) + [False] * 2
    expected = reference.compute_logprobs("b0", PROMPT)
    np.testing.assert_allclose(
        output.prompt_logprobs[-2:],
        [expected[-3, PROMPT[-2]], expected[-2, PROMPT[-1]]],
        atol=TOLERANCE,
    )


def test_the_most_likely_tokens_of_a_sample_are_pefts(
    serving: Serving, reference: Reference
) -> None:
    (sequence,) = serving.sample(
        PROMPT, "b0", max_tokens=6, temperature=0.5, seed=3, stop=(), topk_sample_logprobs=5
    ).sequences
    assert sequence.topk_logprobs is not None
    tokens = [*PROMPT, *sequence.tokens.tolist()]
    expected = reference.compute_logprobs("b0", tokens, 0.5)[len(PROMPT) - 1 : -1]
    np.testing.assert_allclose(
        sequence.topk_logprobs.logprobs, -np.sort(-expected, axis=-1)[:, :5], atol=TOLERANCE
    )


def test_with_top_k_the_logprobs_are_of_what_it_leaves(
    serving: Serving, reference: Reference
) -> None:
    (sequence,) = serving.sample(
        PROMPT, "b0", max_tokens=6, top_k=2, seed=3, stop=(), topk_sample_logprobs=3
    ).sequences
    tokens = [*PROMPT, *sequence.tokens.tolist()]
    full = reference.compute_logprobs("b0", tokens)[len(PROMPT) - 1 : -1]
    best = -np.sort(-full, axis=-1)[:, :2]
    left = best - np.logaddexp(best[:, :1], best[:, 1:])
    assert sequence.topk_logprobs is not None
    np.testing.assert_allclose(sequence.topk_logprobs.logprobs[:, :2], left, atol=TOLERANCE)
    assert sequence.topk_logprobs.logprobs[:, 2].tolist() == [-99999.0] * 6


def test_stops_end_a_sample_where_the_embedded_engine_ends_it(
    serving: Serving, embedded: Harness, reference: Reference, tiny: TinyModel
) -> None:
    tokens = reference.continue_greedily("a0", PROMPT, COUNT)
    text = AutoTokenizer.from_pretrained(tiny.model_dir).decode(tokens)
    stops: list[Any] = [None, (), (tokens[6],), (text[5:8],), (text[5:8], tokens[3])]
    for stop in stops:
        fields: dict[str, Any] = {"max_tokens": COUNT, "temperature": 0.0, "stop": stop}
        (expected,) = embedded.sample(PROMPT, adapter="a0", **fields).sequences
        (sequence,) = serving.sample(PROMPT, "a0", **fields).sequences
        assert sequence.tokens.tolist() == expected.tokens.tolist(), stop
        assert sequence.stop_reason == expected.stop_reason, stop
        np.testing.assert_allclose(sequence.logprobs, expected.logprobs, atol=TOLERANCE)


def test_the_end_of_sequence_token_stops_unless_nothing_does(
    serving: Serving, reference: Reference
) -> None:
    tokens = reference.continue_greedily("ending", PROMPT, COUNT)
    end = tokens.index(EOS) + 1
    never = next(token for token in range(300) if token not in tokens)
    assert end < COUNT
    fields: dict[str, Any] = {"max_tokens": COUNT, "temperature": 0.0}
    for stop in (None, (never,)):
        (stopped,) = serving.sample(PROMPT, "ending", **fields, stop=stop).sequences
        assert stopped.tokens.tolist() == tokens[:end]
        assert stopped.stop_reason == "stop"
        expect_logprobs(reference, "ending", stopped)
    (unstopped,) = serving.sample(PROMPT, "ending", **fields, stop=()).sequences
    assert unstopped.tokens.tolist() == tokens


def test_without_max_tokens_the_context_is_filled(serving: Serving) -> None:
    (sequence,) = serving.sample(PROMPT, "b0", temperature=0.0, stop=()).sequences
    assert len(sequence.tokens) == CONTEXT_LENGTH - len(PROMPT)
    assert sequence.stop_reason == "length"


@pytest.mark.parametrize(
    ("adapter", "fields", "words"),
    [
        (None, {"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
        ("a0", {"prompt_logprobs": True}, "train_unembed=False"),
        (None, {"temperature": 0.001}, "temperature = 0.001"),
        (None, {"temperature": 2.1}, "temperature = 2.1"),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_name(
    serving: Serving, adapter: str | None, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnservableError, match=words):
        serving.sample(PROMPT, adapter, max_tokens=1, **fields)
