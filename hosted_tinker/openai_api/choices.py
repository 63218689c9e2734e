"""What has been generated of each choice, in the forms that OpenAI's answers have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from hosted_tinker.openai_api.requests import GenerationRequest
from hosted_tinker.openai_api.text import TextModel, TextStream
from hosted_tinker.types import NewToken, SampledSequence


class Choice:
    """One sequence of an answer."""

    def __init__(self, index: int, text_model: TextModel, request: GenerationRequest) -> None:
        self.index = index
        self.tokens: list[NewToken] = []
        self.finish_reason: Literal["stop", "length"] | None = None
        self.text = ""
        self._stream = TextStream(
            text_model,
            request.stop_strings,
            skip_special_tokens=request.skip_special_tokens,
            keep_stop=request.include_stop_str_in_output,
        )

    def push(self, tokens: Sequence[NewToken]) -> str:
        """Takes new tokens; the text that they add."""
        new = "".join(self._stream.push(token.token) for token in tokens)
        self.tokens += tokens
        self.text += new
        return new

    def finish(self, sequence: SampledSequence) -> tuple[list[NewToken], str]:
        """The sequence has ended: the tokens that were not pushed yet, and the rest of the text."""
        rest = list(list_tokens(self.index, sequence))[len(self.tokens) :]
        text = self.push(rest)
        ending = self._stream.finish()
        self.text += ending
        self.finish_reason = sequence.stop_reason
        return rest, text + ending


def list_tokens(index: int, sequence: SampledSequence) -> Iterator[NewToken]:
    """A sequence's tokens one by one."""
    topk = sequence.topk_logprobs
    for position, (token, logprob) in enumerate(
        zip(sequence.tokens.tolist(), sequence.logprobs.tolist(), strict=True)
    ):
        likely: tuple[tuple[int, float], ...] = ()
        if topk is not None:
            pairs = zip(topk.token_ids[position], topk.logprobs[position], strict=True)
            likely = tuple((int(one), float(value)) for one, value in pairs)
        yield NewToken(index, token, logprob, likely)


class TokenSpelling:
    """How tokens are written in log-probabilities: as text, or as `token_id:N`."""

    def __init__(self, text_model: TextModel, as_ids: bool) -> None:
        self._text_model = text_model
        self._as_ids = as_ids

    def spell(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._text_model.spell(token)

    def to_chat(self, tokens: Sequence[NewToken], top: int) -> dict[str, Any]:
        """`logprobs` of a chat completion."""
        return {"content": [self._to_chat_entry(token, top) for token in tokens]}

    def to_completion(self, tokens: Sequence[NewToken], top: int, offset: int) -> dict[str, Any]:
        """`logprobs` of a completion. Offsets count characters from the text's beginning.

        A NaN log-probability, which the first token of a prompt has, becomes null.
        """
        texts = [self.spell(token.token) for token in tokens]
        offsets: list[int] = []
        for token in tokens:
            offsets.append(offset)
            offset += len(self._text_model.spell(token.token))
        scored = [token.logprob == token.logprob for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [
                token.logprob if known else None
                for token, known in zip(tokens, scored, strict=True)
            ],
            "top_logprobs": [
                self._name_likely(token, top) if known else None
                for token, known in zip(tokens, scored, strict=True)
            ]
            if top
            else None,
            "text_offset": offsets,
        }

    def _name_likely(self, token: NewToken, top: int) -> dict[str, float]:
        """The most likely tokens, and the token itself, as OpenAI has it."""
        likely = {self.spell(one): logprob for one, logprob in token.topk[:top]}
        likely.setdefault(self.spell(token.token), token.logprob)
        return likely

    def _to_chat_entry(self, token: NewToken, top: int) -> dict[str, Any]:
        likely = [self._to_entry(one, logprob) for one, logprob in token.topk[:top]]
        return {**self._to_entry(token.token, token.logprob), "top_logprobs": likely}

    def _to_entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text_model.spell(token)
        return {"token": self.spell(token), "logprob": logprob, "bytes": list(text.encode())}
