"""Samples as vLLM's requests, and answers as vLLM 0.32 writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hosted_tinker.replicas.sample_requests import (
    EngineFacts,
    describe_unservable,
    split_scoring,
    to_completion_body,
    to_sample_output,
)
from hosted_tinker.types import AdapterRef, LoraConfig, Sample, SamplingParams

FACTS = EngineFacts(max_model_len=100, scales_logprobs=True, on_cpu=False)
PROMPT = np.array([5, 6, 7, 8], dtype=np.int64)


def sample(params: dict[str, Any] | None = None, **fields: Any) -> Sample:
    return Sample(
        "r", fields.pop("adapter", None), PROMPT, SamplingParams(**(params or {})), **fields
    )


def body(params: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return to_completion_body(sample(params, **fields), "m", FACTS)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (None, ([], [], False)),
        ((), ([], [], True)),
        (("a", "b"), (["a", "b"], [], False)),
        ((3, 4), ([], [3, 4], False)),
    ],
)
def test_stops_mean_what_they_mean_in_the_embedded_engine(stop: Any, expected: Any) -> None:
    made = body({"stop": stop})
    assert (made["stop"], made["stop_token_ids"], made["ignore_eos"]) == expected


def test_every_parameter_is_sent() -> None:
    made = body({"max_tokens": None, "temperature": 0.7, "top_k": 5, "top_p": 0.9}, num_samples=3)
    assert (made["model"], made["prompt"], made["n"]) == ("m", [5, 6, 7, 8], 3)
    assert made["max_tokens"] == 96
    assert (made["temperature"], made["top_k"], made["top_p"]) == (0.7, 5, 0.9)
    assert (made["min_p"], made["repetition_penalty"], made["presence_penalty"]) == (0, 1, 0)


@given(st.integers(0, 2**64 - 1))
def test_seeds_of_64_bits_become_seeds_that_vllm_takes(seed: int) -> None:
    assert 0 <= body({"seed": seed})["seed"] < 2**62
    assert body({"seed": seed}) == body({"seed": seed})


def test_neighbouring_seeds_share_no_sample() -> None:
    """vLLM gives the samples of a request the seeds from its own on."""
    seeds = {body({"seed": seed})["seed"] + index for seed in range(100) for index in range(64)}
    assert len(seeds) == 6400
    assert "seed" not in body()


def test_scoring_is_split_from_generating() -> None:
    both = sample({"max_tokens": 9}, num_samples=4, prompt_logprobs=True, topk_prompt_logprobs=2)
    scoring, generating = split_scoring(both)
    assert scoring is not None
    assert generating is not None
    assert (scoring.num_samples, scoring.params.max_tokens) == (1, 1)
    assert to_completion_body(scoring, "m", FACTS)["prompt_logprobs"] == 2
    assert "prompt_logprobs" not in to_completion_body(generating, "m", FACTS)
    assert (generating.num_samples, generating.params.max_tokens) == (4, 9)
    assert split_scoring(sample()) == (None, sample())
    only = sample({"max_tokens": 1}, prompt_logprobs=True)
    assert split_scoring(only) == (only, None)


@pytest.mark.parametrize(
    ("params", "fields", "facts", "words"),
    [
        ({}, {"prompt_alt_tokens_k": 2}, FACTS, "prompt_alt_tokens_k"),
        (
            {},
            {"target_prompt_logprobs": np.zeros((3, 1), dtype=np.int64)},
            FACTS,
            "target_prompt_logprobs",
        ),
        ({"temperature": 0.5}, {}, EngineFacts(100, False, False), "--logprobs-mode"),
        ({"temperature": 0.009}, {}, FACTS, "temperature = 0.009; vLLM takes 0, or 0.01 to 2.0"),
        ({"temperature": 2.5}, {}, FACTS, "temperature = 2.5"),
    ],
)
def test_what_vllm_lacks_is_named(params: Any, fields: Any, facts: EngineFacts, words: str) -> None:
    assert words in (describe_unservable(sample(params, **fields), facts) or "")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unscaled_log_probabilities_are_right_at_these_temperatures(temperature: float) -> None:
    facts = EngineFacts(100, scales_logprobs=False, on_cpu=False)
    assert describe_unservable(sample({"temperature": temperature}), facts) is None


@pytest.mark.parametrize("train_unembed", [True, False])
def test_prompts_are_not_scored_with_an_adapter_on_the_output_head(
    tmp_path: Path, train_unembed: bool
) -> None:
    lora = LoraConfig(lora_rank=1, seed=0, train_unembed=train_unembed)
    fields = ("lora_rank", "seed", "train_attn", "train_mlp", "train_unembed")
    (tmp_path / "lora_config.json").write_text(
        json.dumps({name: getattr(lora, name) for name in fields})
    )
    adapter = AdapterRef("a", tmp_path)
    scored = describe_unservable(sample(adapter=adapter, prompt_logprobs=True), FACTS)
    assert (scored is not None) == train_unembed
    assert describe_unservable(sample(adapter=adapter), FACTS) is None


def choice(index: int, tokens: list[int], logprobs: list[float], **fields: Any) -> dict[str, Any]:
    return {
        "index": index,
        "text": "",
        "token_ids": tokens,
        "finish_reason": "length",
        "logprobs": {
            "token_logprobs": logprobs,
            "tokens": [f"token_id:{token}" for token in tokens],
            "top_logprobs": [
                {f"token_id:{one}": value} for one, value in zip(tokens, logprobs, strict=True)
            ],
        },
        **fields,
    }


def test_sequences_come_in_order_with_their_log_probabilities() -> None:
    answer = {
        "choices": [choice(1, [4], [-0.5], finish_reason="stop"), choice(0, [2, 3], [-1.0, -2.0])]
    }
    output = to_sample_output(sample(num_samples=2), answer)
    assert [one.tokens.tolist() for one in output.sequences] == [[2, 3], [4]]
    assert [one.logprobs.tolist() for one in output.sequences] == [[-1.0, -2.0], [-0.5]]
    assert [one.stop_reason for one in output.sequences] == ["length", "stop"]
    assert output.prompt_logprobs is None


def test_greedy_samples_are_all_the_same_one() -> None:
    asked = sample({"temperature": 0.0}, num_samples=3)
    assert to_completion_body(asked, "m", FACTS)["n"] == 1
    output = to_sample_output(asked, {"choices": [choice(0, [2], [-1.0])]})
    assert [one.tokens.tolist() for one in output.sequences] == [[2], [2], [2]]


def test_the_most_likely_tokens_come_best_first_without_the_sampled_one() -> None:
    entry = choice(0, [9], [-4.0])
    entry["logprobs"]["top_logprobs"] = [
        {"token_id:9": -4.0, "token_id:1": -1.0, "token_id:2": -0.5}
    ]
    output = to_sample_output(sample(topk_sample_logprobs=2), {"choices": [entry]})
    topk = output.sequences[0].topk_logprobs
    assert topk is not None
    assert topk.token_ids.tolist() == [[2, 1]]
    assert topk.logprobs.tolist() == [[-0.5, -1.0]]


def test_tokens_that_top_k_cuts_off_are_not_among_the_most_likely() -> None:
    entry = choice(0, [9], [-0.1])
    entry["logprobs"]["top_logprobs"] = [{"token_id:9": -0.1, "token_id:1": -9999.0}]
    output = to_sample_output(sample(topk_sample_logprobs=2), {"choices": [entry]})
    topk = output.sequences[0].topk_logprobs
    assert topk is not None
    assert topk.token_ids.tolist() == [[9, 0]]
    np.testing.assert_allclose(topk.logprobs, [[-0.1, -99999.0]])


def test_prompts_are_scored_from_their_second_token() -> None:
    positions = [
        None,
        {"6": {"logprob": -3.0, "rank": 7}, "1": {"logprob": -0.1, "rank": 1}},
        {"7": {"logprob": -0.2, "rank": 1}},
        {"8": {"logprob": -5.0, "rank": 2}, "3": {"logprob": -0.3, "rank": 1}},
    ]
    answer = {"choices": [choice(0, [2], [-1.0], prompt_logprobs=positions)]}
    output = to_sample_output(sample(prompt_logprobs=True, topk_prompt_logprobs=1), answer)
    assert output.prompt_logprobs is not None
    assert np.isnan(output.prompt_logprobs[0])
    np.testing.assert_allclose(output.prompt_logprobs[1:], [-3.0, -0.2, -5.0])
    assert output.topk_prompt_logprobs is not None
    assert output.topk_prompt_logprobs.token_ids.tolist() == [[0], [1], [7], [3]]
    assert output.topk_prompt_logprobs.logprobs[0, 0] == -99999.0

    last = to_sample_output(sample(prompt_logprobs_last_n=1), answer).prompt_logprobs
    assert last is not None
    assert np.isnan(last).tolist() == [True, True, True, False]
