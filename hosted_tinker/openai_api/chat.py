"""`/v1/chat/completions` from the embedded engine."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from hosted_tinker.openai_api.choices import Choice, Piece, list_tokens, stream_pieces
from hosted_tinker.openai_api.logprobs import TokenSpelling
from hosted_tinker.openai_api.requests import ChatRequest
from hosted_tinker.openai_api.running import Engine, run_all
from hosted_tinker.openai_api.text import TextModel
from hosted_tinker.openai_api.usage import make_usage
from hosted_tinker.served_weights import ServedWeights
from hosted_tinker.types import NewToken, Sample

ROLE = "assistant"


@dataclass(frozen=True, slots=True)
class Chat:
    """One request: its rendered prompt, and what answers it."""

    request: ChatRequest
    served: ServedWeights
    text_model: TextModel
    prompt: Sequence[int]
    answer_id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    async def answer(self, engine: Engine, sample: Sample) -> dict[str, Any]:
        """The whole answer."""
        (output,) = await run_all(engine, [sample])
        choices = self._make_choices()
        choices[0].num_cached_tokens = output.prompt_cache_hit_tokens
        for choice, sequence in zip(choices, output.sequences, strict=True):
            choice.push(list_tokens(choice.index, sequence))
        answer = {
            **self._make_head("chat.completion"),
            "choices": [self._write_choice(choice) for choice in choices],
            "usage": make_usage([self.prompt], choices),
        }
        if self.request.return_token_ids:
            answer["prompt_token_ids"] = list(self.prompt)
        return answer

    async def stream(self, engine: Engine, sample: Sample) -> AsyncGenerator[dict[str, Any]]:
        """The answer in chunks: each choice's role first, its text, and why it ended."""
        choices = self._make_choices()
        begun = False
        async with aclosing(stream_pieces(engine, [sample], choices)) as pieces:
            async for piece in pieces:
                if not begun:
                    begun = True
                    for choice in choices:
                        yield self._write_first_chunk(choice)
                if piece.text or piece.choice.finish_reason or self.request.wants_tokens:
                    yield self._write_chunk(piece)
        if self.request.include_usage:
            usage = make_usage([self.prompt], choices)
            yield {**self._make_head("chat.completion.chunk"), "choices": [], "usage": usage}

    def _make_choices(self) -> list[Choice]:
        return [
            Choice(index, self.prompt, self.text_model, self.request)
            for index in range(self.request.n or 1)
        ]

    def _make_head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.served.model,
        }

    def _write_choice(self, choice: Choice) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": ROLE, "content": choice.text, "refusal": None},
            "logprobs": self._write_logprobs(choice.tokens),
            "finish_reason": choice.finish_reason,
        }
        if self.request.return_token_ids:
            entry["token_ids"] = [token.token for token in choice.tokens]
        return entry

    def _make_chunk(self, entry: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._make_head("chat.completion.chunk"), "choices": [entry]}
        return {**chunk, "usage": None} if self.request.include_usage else chunk

    def _write_first_chunk(self, choice: Choice) -> dict[str, Any]:
        delta = {"role": ROLE, "content": ""}
        entry = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._make_chunk(entry)
        if self.request.return_token_ids:
            chunk["prompt_token_ids"] = list(self.prompt)
        return chunk

    def _write_chunk(self, piece: Piece) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "index": piece.choice.index,
            "delta": {"content": piece.text},
            "logprobs": self._write_logprobs(piece.tokens),
            "finish_reason": piece.choice.finish_reason,
        }
        if self.request.return_token_ids:
            entry["token_ids"] = [token.token for token in piece.tokens]
        return self._make_chunk(entry)

    def _write_logprobs(self, tokens: Sequence[NewToken]) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        spelling = TokenSpelling(
            self.text_model, as_ids=bool(self.request.return_tokens_as_token_ids)
        )
        return spelling.to_chat(tokens, self.request.top_logprobs or 0)
