"""Log-probabilities of tokens in the two forms that OpenAI's answers have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hosted_tinker.openai_api.text import TextModel
from hosted_tinker.openai_api.text_stream import OffsetCounter
from hosted_tinker.types import NewToken


class TokenSpelling:
    """How tokens are written: as text, or as `token_id:N`."""

    def __init__(self, text_model: TextModel, *, as_ids: bool) -> None:
        self._text_model = text_model
        self._as_ids = as_ids

    def spell(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._text_model.spell(token)

    def to_chat(self, tokens: Sequence[NewToken], top: int) -> dict[str, Any]:
        """`logprobs` of a chat completion."""
        return {"content": [self._to_chat_entry(token, top) for token in tokens], "refusal": None}

    def to_completion(
        self, tokens: Sequence[NewToken], top: int, offsets: OffsetCounter
    ) -> dict[str, Any]:
        """`logprobs` of a completion. A NaN, which the first token of a prompt has, becomes null."""
        scored = [not math.isnan(token.logprob) for token in tokens]
        likely = [
            self._name_likely(token, top) if known else None
            for token, known in zip(tokens, scored, strict=True)
        ]
        return {
            "tokens": [self.spell(token.token) for token in tokens],
            "token_logprobs": [
                token.logprob if known else None
                for token, known in zip(tokens, scored, strict=True)
            ],
            "top_logprobs": likely if top else None,
            "text_offset": [offsets.advance(token.token) for token in tokens],
        }

    def _name_likely(self, token: NewToken, top: int) -> dict[str, float]:
        """The most likely tokens, and the token itself, as OpenAI has it. Of tokens that are spelled
        alike the most likely one is named."""
        likely: dict[str, float] = {}
        for one, logprob in (*token.topk[:top], (token.token, token.logprob)):
            likely.setdefault(self.spell(one), logprob)
        return likely

    def _to_chat_entry(self, token: NewToken, top: int) -> dict[str, Any]:
        likely = [self._to_entry(one, logprob) for one, logprob in token.topk[:top]]
        return {**self._to_entry(token.token, token.logprob), "top_logprobs": likely}

    def _to_entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._text_model.get_bytes(token)
        return {"token": self.spell(token), "logprob": logprob, "bytes": list(raw)}
