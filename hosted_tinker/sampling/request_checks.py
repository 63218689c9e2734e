"""Checks a sampling request against the base model before any engine sees it."""

from __future__ import annotations

import math

from hosted_tinker.errors import ContextError, UserError
from hosted_tinker.types import BaseModelInfo, Sample, SamplingParams

MAX_TOPK_LOGPROBS = 1000


def check_sample(sample: Sample, base: BaseModelInfo) -> None:
    """Raises UserError, naming the value and what is accepted, if the request can't be run."""
    length = len(sample.prompt)
    if length == 0:
        raise UserError("prompt has no tokens; at least one is needed")
    low, high = int(sample.prompt.min()), int(sample.prompt.max())
    if low < 0 or high >= base.vocab_size:
        raise UserError(
            f"prompt has token id {low if low < 0 else high}; accepted: 0 to {base.vocab_size - 1}"
        )
    check_length(length, sample.params.max_tokens, base.context_length)
    check_params(sample.params)
    most = min(MAX_TOPK_LOGPROBS, base.vocab_size)
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        check_range(name, getattr(sample, name), 0, most)
    if sample.prompt_logprobs_last_n is not None:
        check_range("prompt_logprobs_last_n", sample.prompt_logprobs_last_n, 1, length - 1)
    check_targets(sample, base)


def check_length(prompt_tokens: int, max_tokens: int | None, context_length: int) -> None:
    if max_tokens is not None and max_tokens < 1:
        raise UserError(f"max_tokens = {max_tokens}; accepted: at least 1, or none")
    asked = prompt_tokens + (max_tokens or 1)
    if asked > context_length:
        wanted = "at least 1" if max_tokens is None else str(max_tokens)
        raise ContextError(
            f"this model's maximum context length is {context_length} tokens; prompt of "
            f"{prompt_tokens} tokens plus max_tokens of {wanted} is {asked}"
        )


def check_params(params: SamplingParams) -> None:
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise UserError(f"temperature = {params.temperature}; accepted: a finite number >= 0")
    if not 0 < params.top_p <= 1:
        raise UserError(f"top_p = {params.top_p}; accepted: 0 < top_p <= 1")
    if params.top_k < -1 or params.top_k == 0:
        raise UserError(f"top_k = {params.top_k}; accepted: -1 for off, or at least 1")
    if params.seed is not None and not 0 <= params.seed < 2**64:
        raise UserError(f"seed = {params.seed}; accepted: 0 to 2**64 - 1")
    if any(stop == "" for stop in params.stop or ()):
        raise UserError("stop has an empty string, which would stop everywhere")


def check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UserError(f"{name} = {value}; accepted: {low} to {high}")


def check_targets(sample: Sample, base: BaseModelInfo) -> None:
    targets = sample.target_prompt_logprobs
    if targets is None:
        return
    if targets.ndim != 2 or len(targets) != len(sample.prompt) - 1:
        raise UserError(
            f"target_prompt_logprobs has shape {list(targets.shape)}; accepted: "
            f"[{len(sample.prompt) - 1}, K], one row less than the prompt has tokens"
        )
    if targets.size and not -1 <= int(targets.min()) <= int(targets.max()) < base.vocab_size:
        raise UserError(
            f"target_prompt_logprobs has ids from {targets.min()} to {targets.max()}; accepted: "
            f"-1 to skip, or 0 to {base.vocab_size - 1}"
        )
