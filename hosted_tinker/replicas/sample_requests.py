"""A `Sample` as a request to `/v1/completions` by token ids, and the answer as a `SampleOutput`.

Shape letters: P prompt tokens, S sampled tokens, K tokens asked of a position.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hosted_tinker.adapter_layout import read_lora_config
from hosted_tinker.types import (
    EMPTY_TOPK_LOGPROB,
    AdapterRef,
    Float32Array,
    Sample,
    SampledSequence,
    SampleOutput,
    TopkLogprobs,
)

TEMPERATURES = (0.01, 2.0)
"""vLLM takes the first in place of a lower one other than 0 (its SamplingParams), and refuses those
above the second."""
NO_LOGPROB = -9999.0
"""What vLLM writes for minus infinity: the token was cut off by top_k or top_p."""
TOKEN_ID_PREFIX = "token_id:"
NO_UNEMBEDDING = (
    "log-probabilities of the prompt can't be computed by vLLM for an adapter on the unembedding; "
    "create the run with train_unembed=False"
)
"""vLLM 0.32 gives the adapter's part of the output head to as many positions as there are sequences
in the batch (`add_lora_logits` with the sampler's indices), and not to those of the prompt."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What must be known of a vLLM server to ask it.

    Attributes:
        max_model_len: the most tokens of one sequence.
        scales_logprobs: it reports log-probabilities of the temperature-scaled distribution
            (`--logprobs-mode processed_logprobs`); if not, those at temperature 1.
        on_cpu: it is a build for the CPU.
    """

    max_model_len: int
    scales_logprobs: bool
    on_cpu: bool


def describe_unservable(sample: Sample, facts: EngineFacts) -> str | None:
    """What of the request vLLM can't do, by name; None if it can do all of it."""
    if sample.target_prompt_logprobs is not None:
        return "target_prompt_logprobs can't be computed by vLLM"
    if sample.prompt_alt_tokens_k:
        return "prompt_alt_tokens_k can't be computed by vLLM"
    if wants_prompt_logprobs(sample) and adapts_unembedding(sample.adapter):
        return NO_UNEMBEDDING
    temperature = sample.params.temperature
    low, high = TEMPERATURES
    if temperature and not low <= temperature <= high:
        return f"temperature = {temperature}; vLLM takes 0, or {low} to {high}"
    if not facts.scales_logprobs and temperature not in (0.0, 1.0):
        return (
            f"temperature = {temperature}: this vLLM reports log-probabilities at temperature 1; "
            "start it with --logprobs-mode processed_logprobs"
        )
    return None


@functools.lru_cache(maxsize=4096)
def adapts_unembedding(adapter: AdapterRef | None) -> bool:
    """Raises UserError if the adapter's files can't be read."""
    return adapter is not None and read_lora_config(adapter.directory).train_unembed


def split_scoring(sample: Sample) -> tuple[Sample | None, Sample | None]:
    """The request's two parts: what scores the prompt, and what generates.

    One that scores the prompt is alone in the engine, so it generates no more than it must.
    """
    if not wants_prompt_logprobs(sample):
        return None, sample
    if sample.num_samples == 1 and sample.params.max_tokens == 1:
        return sample, None
    one_token = replace(sample.params, max_tokens=1)
    scoring = replace(sample, num_samples=1, params=one_token, topk_sample_logprobs=0)
    generating = replace(
        sample, prompt_logprobs=False, prompt_logprobs_last_n=None, topk_prompt_logprobs=0
    )
    return scoring, generating


def to_completion_body(sample: Sample, model: str, facts: EngineFacts) -> dict[str, Any]:
    """Every parameter is sent, so that no default of the model's or the server's takes part."""
    params = sample.params
    stops = params.stop or ()
    max_tokens = params.max_tokens
    if max_tokens is None:
        max_tokens = facts.max_model_len - len(sample.prompt)
    body: dict[str, Any] = {
        "model": model,
        "prompt": sample.prompt.tolist(),
        # vLLM takes one greedy sample only; all of them would be equal.
        "n": 1 if params.temperature == 0 else sample.num_samples,
        "max_tokens": max_tokens,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": [stop for stop in stops if isinstance(stop, str)],
        "stop_token_ids": [stop for stop in stops if isinstance(stop, int)],
        "ignore_eos": params.stop == (),
        "logprobs": sample.topk_sample_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
    }
    if params.seed is not None:
        body["seed"] = mix_seed(params.seed)
    if wants_prompt_logprobs(sample):
        body["prompt_logprobs"] = sample.topk_prompt_logprobs
    return body


def mix_seed(seed: int) -> int:
    """A seed below 2**62: vLLM takes int64, and gives each sample of a request the next one.

    Neighbouring seeds would share samples.
    """
    digest = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def wants_prompt_logprobs(sample: Sample) -> bool:
    return bool(
        sample.prompt_logprobs
        or sample.prompt_logprobs_last_n is not None
        or sample.topk_prompt_logprobs
    )


def to_sample_output(sample: Sample, answer: Mapping[str, Any]) -> SampleOutput:
    """The answer to `to_completion_body`'s request."""
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    sequences = [to_sequence(choice, sample.topk_sample_logprobs) for choice in choices]
    output = SampleOutput(sequences * (sample.num_samples // len(sequences)))
    if not wants_prompt_logprobs(sample):
        return output
    positions: Sequence[Mapping[str, Any] | None] = choices[0]["prompt_logprobs"]
    scored = sample.prompt_logprobs or sample.prompt_logprobs_last_n is not None
    topk = sample.topk_prompt_logprobs
    return SampleOutput(
        output.sequences,
        prompt_logprobs=read_prompt_logprobs(sample, positions) if scored else None,
        topk_prompt_logprobs=to_topk([read_ranked(one, topk) for one in positions], topk)
        if topk
        else None,
    )


def to_sequence(choice: Mapping[str, Any], topk: int) -> SampledSequence:
    tokens = np.asarray(choice["token_ids"], dtype=np.int32)
    logprobs = choice["logprobs"]
    return SampledSequence(
        tokens=tokens,
        logprobs=np.asarray(logprobs["token_logprobs"], dtype=np.float32),
        stop_reason="length" if choice["finish_reason"] == "length" else "stop",
        topk_logprobs=to_topk([read_named(one) for one in logprobs["top_logprobs"]], topk)
        if topk
        else None,
    )


def read_prompt_logprobs(
    sample: Sample, positions: Sequence[Mapping[str, Any] | None]
) -> Float32Array:
    """Float32 [P], NaN where not asked for; the first always is."""
    logprobs = np.full(len(sample.prompt), math.nan, dtype=np.float32)
    first = 1
    if sample.prompt_logprobs_last_n is not None:
        first = max(1, len(sample.prompt) - sample.prompt_logprobs_last_n)
    for index in range(first, len(sample.prompt)):
        position = positions[index]
        if position is not None:
            logprobs[index] = position[str(int(sample.prompt[index]))]["logprob"]
    return logprobs


def read_ranked(position: Mapping[str, Any] | None, topk: int) -> list[tuple[int, float]]:
    """(token, log-probability) of the `topk` most likely; vLLM adds the prompt's own token."""
    entries = (position or {}).items()
    return [(int(token), one["logprob"]) for token, one in entries if one["rank"] <= topk]


def read_named(position: Mapping[str, float] | None) -> list[tuple[int, float]]:
    """(token, log-probability) of a sampled position; vLLM adds the sampled token itself."""
    entries = (position or {}).items()
    return [(int(name.removeprefix(TOKEN_ID_PREFIX)), logprob) for name, logprob in entries]


def to_topk(positions: Sequence[Sequence[tuple[int, float]]], topk: int) -> TopkLogprobs:
    """The `topk` best of each position, best first."""
    token_ids = np.zeros((len(positions), topk), dtype=np.int32)
    logprobs = np.full((len(positions), topk), EMPTY_TOPK_LOGPROB, dtype=np.float32)
    for row, entries in enumerate(positions):
        likely = [entry for entry in entries if entry[1] > NO_LOGPROB]
        best = sorted(likely, key=lambda entry: (-entry[1], entry[0]))[:topk]
        for column, (token, logprob) in enumerate(best):
            token_ids[row, column], logprobs[row, column] = token, logprob
    return TopkLogprobs(token_ids, logprobs)
