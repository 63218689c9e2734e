"""`/v1/completions` from the embedded engine."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hosted_tinker.openai_api.choices import Choice, TokenSpelling
from hosted_tinker.openai_api.requests import CompletionRequest
from hosted_tinker.openai_api.running import Engine, run_all, stream_all
from hosted_tinker.openai_api.text import TextModel
from hosted_tinker.openai_api.usage import make_usage
from hosted_tinker.served_weights import ServedWeights
from hosted_tinker.types import NewToken, Sample, SampleOutput

PROMPT_INDEX = -1
"""Marks the tokens of a prompt where they are written like sampled ones."""


@dataclass(frozen=True, slots=True)
class Completions:
    """One request: its prompts as token ids, and what answers it."""

    request: CompletionRequest
    served: ServedWeights
    text_model: TextModel
    prompts: Sequence[Sequence[int]]
    answer_id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    async def answer(self, engine: Engine, samples: Sequence[Sample]) -> dict[str, Any]:
        """The whole answer."""
        outputs = await run_all(engine, samples)
        choices = [
            self._make_choice(prompt_index, sequence_index, output)
            for prompt_index, output in enumerate(outputs)
            for sequence_index in range(len(output.sequences))
        ]
        sampled = 0
        if self.request.max_tokens != 0:
            sampled = sum(len(one.tokens) for output in outputs for one in output.sequences)
        usage = make_usage(sum(map(len, self.prompts)), sampled)
        return {**self._make_head(), "choices": choices, "usage": usage}

    async def stream(
        self, engine: Engine, samples: Sequence[Sample]
    ) -> AsyncGenerator[dict[str, Any]]:
        """The answer in chunks."""
        n = self.request.n or 1
        choices = [
            Choice(index, self.text_model, self.request) for index in range(n * len(self.prompts))
        ]
        async for event in stream_all(engine, samples):
            first = event.prompt_index * n
            if isinstance(event.news, SampleOutput):
                for choice, sequence in zip(
                    choices[first : first + n], event.news.sequences, strict=True
                ):
                    offset = len(choice.text)
                    tokens, text = choice.finish(sequence)
                    yield self._make_chunk(choice, tokens, text, offset)
                continue
            for index in dict.fromkeys(token.index for token in event.news):
                choice = choices[first + index]
                tokens = [token for token in event.news if token.index == index]
                offset = len(choice.text)
                text = choice.push(tokens)
                if text or self.request.logprobs is not None or self.request.return_token_ids:
                    yield self._make_chunk(choice, tokens, text, offset)
        if self.request.include_usage:
            sampled = sum(len(choice.tokens) for choice in choices)
            usage = make_usage(sum(map(len, self.prompts)), sampled)
            yield {**self._make_head(), "choices": [], "usage": usage}

    def _make_head(self) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.served.model,
        }

    def _make_chunk(
        self, choice: Choice, tokens: Sequence[NewToken], text: str, offset: int
    ) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": self._write_logprobs(tokens, offset),
            "finish_reason": choice.finish_reason,
        }
        if self.request.return_token_ids:
            is_first = len(choice.tokens) == len(tokens)
            prompt = self.prompts[choice.index // (self.request.n or 1)]
            entry["prompt_token_ids"] = list(prompt) if is_first else None
            entry["token_ids"] = [token.token for token in tokens]
        return {**self._make_head(), "choices": [entry]}

    def _make_choice(
        self, prompt_index: int, sequence_index: int, output: SampleOutput
    ) -> dict[str, Any]:
        request, prompt = self.request, self.prompts[prompt_index]
        choice = Choice(prompt_index * (request.n or 1) + sequence_index, self.text_model, request)
        tokens: list[NewToken] = []
        if request.max_tokens != 0:
            choice.finish(output.sequences[sequence_index])
            tokens = choice.tokens
        text = choice.text
        written = tokens
        if request.echo:
            text = self.text_model.decode(prompt) + text
            written = [*list_prompt_tokens(prompt, output), *tokens]
        entry: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": self._write_logprobs(written, 0),
            "finish_reason": choice.finish_reason or "length",
        }
        if request.return_token_ids:
            entry["prompt_token_ids"] = list(prompt)
            entry["token_ids"] = [token.token for token in tokens]
        return entry

    def _write_logprobs(self, tokens: Sequence[NewToken], offset: int) -> dict[str, Any] | None:
        if self.request.logprobs is None:
            return None
        spelling = TokenSpelling(self.text_model, bool(self.request.return_tokens_as_token_ids))
        return spelling.to_completion(tokens, self.request.logprobs, offset)


def list_prompt_tokens(prompt: Sequence[int], output: SampleOutput) -> list[NewToken]:
    """The prompt's tokens with their log-probabilities, the first one's NaN."""
    logprobs, topk = output.prompt_logprobs, output.topk_prompt_logprobs
    tokens: list[NewToken] = []
    for position, token in enumerate(prompt):
        logprob = math.nan if logprobs is None else float(logprobs[position])
        likely: tuple[tuple[int, float], ...] = ()
        if topk is not None and position > 0:
            pairs = zip(topk.token_ids[position], topk.logprobs[position], strict=True)
            likely = tuple((int(one), float(value)) for one, value in pairs)
        tokens.append(NewToken(PROMPT_INDEX, int(token), logprob, likely))
    return tokens
