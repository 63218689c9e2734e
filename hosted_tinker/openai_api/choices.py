"""What has been generated of each choice of an answer, as text and tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from hosted_tinker.openai_api.requests import GenerationRequest
from hosted_tinker.openai_api.running import Engine, stream_all
from hosted_tinker.openai_api.text import TextModel
from hosted_tinker.openai_api.text_stream import GrowingText, TextStream
from hosted_tinker.types import NewToken, Sample, SampledSequence, SampleOutput


class Choice:
    """One sequence of an answer.

    Attributes:
        num_cached_tokens: of the prompt, what was not computed again; set on a prompt's first choice.
    """

    def __init__(
        self, index: int, prompt: Sequence[int], text_model: TextModel, request: GenerationRequest
    ) -> None:
        self.index = index
        self.tokens: list[NewToken] = []
        self.finish_reason: Literal["stop", "length"] | None = None
        self.text = ""
        self.num_cached_tokens = 0
        self._stream = TextStream(
            GrowingText(text_model, prompt, skip_special_tokens=request.skip_special_tokens),
            request.stop_strings,
            keep_stop=request.include_stop_str_in_output,
        )

    def push(self, tokens: Sequence[NewToken]) -> str:
        """Takes new tokens; the text that they add."""
        self.finish_reason = tokens[-1].stop_reason
        ids = [token.token for token in tokens]
        if self.finish_reason is None:
            new = self._stream.push(ids)
        else:
            new = self._stream.push(ids[:-1])
            new += self._stream.end(ids[-1], stopped=self.finish_reason == "stop")
        self.tokens += tokens
        self.text += new
        return new


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step of the engine added to a choice."""

    choice: Choice
    tokens: Sequence[NewToken]
    text: str


async def stream_pieces(
    engine: Engine, samples: Sequence[Sample], choices: Sequence[Choice]
) -> AsyncGenerator[Piece]:
    """Pieces until every choice has its finish reason. The choices of a sample are neighbours."""
    async with aclosing(stream_all(engine, samples)) as events:
        async for event in events:
            first = event.prompt_index * samples[0].num_samples
            if isinstance(event.news, SampleOutput):
                choices[first].num_cached_tokens = event.news.prompt_cache_hit_tokens
            for index, tokens in list_news(event.news):
                choice = choices[first + index]
                # The output at the end has all tokens again.
                new = (
                    tokens[len(choice.tokens) :] if isinstance(event.news, SampleOutput) else tokens
                )
                if new:
                    text = choice.push(new)
                    yield Piece(choice, new, text)


def list_news(news: Sequence[NewToken] | SampleOutput) -> Iterator[tuple[int, list[NewToken]]]:
    """Indices of sequences, and tokens of each."""
    if isinstance(news, SampleOutput):
        for index, sequence in enumerate(news.sequences):
            yield index, list_tokens(index, sequence)
        return
    by_index: dict[int, list[NewToken]] = {}
    for token in news:
        by_index.setdefault(token.index, []).append(token)
    yield from by_index.items()


def list_tokens(index: int, sequence: SampledSequence) -> list[NewToken]:
    """A sequence's tokens one by one."""
    topk = sequence.topk_logprobs
    last = len(sequence.tokens) - 1
    tokens: list[NewToken] = []
    for position, (token, logprob) in enumerate(
        zip(sequence.tokens.tolist(), sequence.logprobs.tolist(), strict=True)
    ):
        likely: tuple[tuple[int, float], ...] = ()
        if topk is not None:
            pairs = zip(topk.token_ids[position], topk.logprobs[position], strict=True)
            likely = tuple((int(one), float(value)) for one, value in pairs)
        reason = sequence.stop_reason if position == last else None
        tokens.append(NewToken(index, token, logprob, likely, reason))
    return tokens
