"""Token counts of an answer."""

from __future__ import annotations


def make_usage(num_prompt_tokens: int, num_sampled_tokens: int) -> dict[str, int]:
    """`usage` of an answer."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_sampled_tokens,
        "total_tokens": num_prompt_tokens + num_sampled_tokens,
    }
