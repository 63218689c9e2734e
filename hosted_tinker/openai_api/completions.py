"""`/v1/completions` from the embedded engine."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from hosted_tinker.openai_api.choices import Choice, Piece, list_tokens, stream_pieces
from hosted_tinker.openai_api.logprobs import TokenSpelling
from hosted_tinker.openai_api.requests import CompletionRequest
from hosted_tinker.openai_api.running import Engine, run_all
from hosted_tinker.openai_api.text import TextModel
from hosted_tinker.openai_api.text_stream import OffsetCounter
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
        choices = self._make_choices()
        entries: list[dict[str, Any]] = []
        for choice in choices:
            prompt_index, index = divmod(choice.index, self.request.n or 1)
            output = outputs[prompt_index]
            if index == 0:
                choice.num_cached_tokens = output.prompt_cache_hit_tokens
            # The engine draws a token at least.
            if self.request.max_tokens != 0:
                choice.push(list_tokens(index, output.sequences[index]))
            entries.append(self._write_choice(choice, output))
        return {**self._make_head(), "choices": entries, "usage": make_usage(self.prompts, choices)}

    async def stream(
        self, engine: Engine, samples: Sequence[Sample]
    ) -> AsyncGenerator[dict[str, Any]]:
        """The answer in chunks."""
        choices = self._make_choices()
        offsets = [self._make_offsets() for _ in choices]
        async with aclosing(stream_pieces(engine, samples, choices)) as pieces:
            async for piece in pieces:
                if piece.text or piece.choice.finish_reason or self.request.wants_tokens:
                    yield self._write_chunk(piece, offsets[piece.choice.index])
        if self.request.include_usage:
            usage = make_usage(self.prompts, choices)
            yield {**self._make_head(), "choices": [], "usage": usage}

    def _make_choices(self) -> list[Choice]:
        n = self.request.n or 1
        return [
            Choice(index, self.prompts[index // n], self.text_model, self.request)
            for index in range(n * len(self.prompts))
        ]

    def _make_head(self) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.served.model,
        }

    def _make_offsets(self) -> OffsetCounter:
        skip = self.request.skip_special_tokens
        return OffsetCounter(self.text_model, skip_special_tokens=skip)

    def _find_prompt(self, choice: Choice) -> Sequence[int]:
        return self.prompts[choice.index // (self.request.n or 1)]

    def _write_chunk(self, piece: Piece, offsets: OffsetCounter) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "index": piece.choice.index,
            "text": piece.text,
            "logprobs": self._write_logprobs(piece.tokens, offsets),
            "finish_reason": piece.choice.finish_reason,
        }
        if self.request.return_token_ids:
            is_first = len(piece.choice.tokens) == len(piece.tokens)
            entry["prompt_token_ids"] = list(self._find_prompt(piece.choice)) if is_first else None
            entry["token_ids"] = [token.token for token in piece.tokens]
        chunk = {**self._make_head(), "choices": [entry]}
        return {**chunk, "usage": None} if self.request.include_usage else chunk

    def _write_choice(self, choice: Choice, output: SampleOutput) -> dict[str, Any]:
        prompt = self._find_prompt(choice)
        text, tokens = choice.text, choice.tokens
        if self.request.echo:
            skip = self.request.skip_special_tokens
            text = self.text_model.decode(prompt, skip_special_tokens=skip) + text
            tokens = [*list_prompt_tokens(prompt, output), *tokens]
        entry: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": self._write_logprobs(tokens, self._make_offsets()),
            "finish_reason": choice.finish_reason or "length",
        }
        if self.request.return_token_ids:
            entry["prompt_token_ids"] = list(prompt)
            entry["token_ids"] = [token.token for token in choice.tokens]
        return entry

    def _write_logprobs(
        self, tokens: Sequence[NewToken], offsets: OffsetCounter
    ) -> dict[str, Any] | None:
        if self.request.logprobs is None:
            return None
        spelling = TokenSpelling(
            self.text_model, as_ids=bool(self.request.return_tokens_as_token_ids)
        )
        return spelling.to_completion(tokens, self.request.logprobs, offsets)


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
