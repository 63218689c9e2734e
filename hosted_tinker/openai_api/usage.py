"""Token counts of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hosted_tinker.openai_api.choices import Choice


def make_usage(prompts: Sequence[Sequence[int]], choices: Sequence[Choice]) -> dict[str, Any]:
    """`usage` of an answer."""
    num_prompt_tokens = sum(map(len, prompts))
    num_sampled_tokens = sum(len(choice.tokens) for choice in choices)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_sampled_tokens,
        "total_tokens": num_prompt_tokens + num_sampled_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(choice.num_cached_tokens for choice in choices)
        },
    }
