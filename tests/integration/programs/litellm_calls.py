"""Asks an OpenAI API through litellm, in each of its ways. Writes the answers as one line of JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm

MESSAGES = [
    {"role": "system", "content": "Answer in a word."},
    {"role": "user", "content": "the quick brown fox"},
]


def main(base_url: str, model: str) -> None:
    target = {"model": f"openai/{model}", "api_base": base_url, "api_key": "tml-any"}
    greedy: dict[str, Any] = {**target, "messages": MESSAGES, "temperature": 0, "max_tokens": 16}
    whole = litellm.completion(**greedy, logprobs=True, top_logprobs=2)
    chunks = [
        *litellm.completion(**greedy, stream=True, stream_options={"include_usage": True}),
    ]
    several = asyncio.run(litellm.acompletion(**{**greedy, "temperature": 1}, n=2, seed=4))
    text = litellm.text_completion(
        model=f"text-completion-openai/{model}",
        api_base=base_url,
        api_key="tml-any",
        prompt="the quick",
        temperature=0,
        max_tokens=8,
    )
    try:
        litellm.completion(**{**greedy, "model": "openai/nobody"})
        refused = ""
    except litellm.NotFoundError as error:
        refused = str(error)
    answers = {
        "whole": whole.choices[0].message.content,
        "logprobs": [entry.logprob for entry in whole.choices[0].logprobs.content],
        "usage": whole.usage.completion_tokens,
        "streamed": "".join(
            chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
        ),
        "several": [choice.message.content for choice in several.choices],
        "text": text.choices[0].text,
        "refused": refused,
    }
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
