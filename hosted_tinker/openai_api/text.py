"""Tokens to text as they come, with stop strings cut off."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from hosted_tinker.types import TokenizerInfo


class TextModel:
    """The base model's tokenizer."""

    def __init__(self, info: TokenizerInfo) -> None:
        self.tokenizer = Tokenizer.from_str(info.tokenizer_json)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def spell(self, token: int) -> str:
        """One token by itself; a part of a character is the replacement character."""
        return self.decode([token], skip_special_tokens=False)


class TextStream:
    """The text of one sequence, grown token by token.

    What may be the beginning of a stop string is held back until it is clear. A stop string and all
    after it never come out, unless `keep_stop`.
    """

    def __init__(
        self,
        model: TextModel,
        stops: Sequence[str],
        *,
        skip_special_tokens: bool = True,
        keep_stop: bool = False,
    ) -> None:
        self._tokenizer = model.tokenizer
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._model = model
        self._skip_special_tokens = skip_special_tokens
        self._stops = [stop for stop in stops if stop]
        self._keep_stop = keep_stop
        self._tokens: list[int] = []
        self._decoded = ""
        self._num_given = 0
        self._stopped = False

    def push(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self._tokens.append(token)
        self._decoded += self._stream.step(self._tokenizer, token) or ""
        return self._give(hold_back=True)

    def finish(self) -> str:
        """The rest: the sequence has ended."""
        whole = self._model.decode(self._tokens, skip_special_tokens=self._skip_special_tokens)
        # The stream keeps the bytes of an unfinished character to itself.
        if whole.startswith(self._decoded):
            self._decoded = whole
        return self._give(hold_back=False)

    def _give(self, *, hold_back: bool) -> str:
        if self._stopped:
            return ""
        end = len(self._decoded)
        found = [at for stop in self._stops if (at := self._find(stop)) >= 0]
        if found:
            self._stopped = True
            end = min(found)
        elif hold_back:
            end -= self._count_possible_stop()
        given = self._decoded[self._num_given : max(end, self._num_given)]
        self._num_given += len(given)
        return given

    def _find(self, stop: str) -> int:
        """Where the text ends because of the stop string; -1 if it is not there."""
        start = max(0, self._num_given - len(stop))
        at = self._decoded.find(stop, start)
        return at + len(stop) if at >= 0 and self._keep_stop else at

    def _count_possible_stop(self) -> int:
        """Characters at the end that a stop string may begin with."""
        longest = max((len(stop) for stop in self._stops), default=0)
        for count in range(min(longest - 1, len(self._decoded)), 0, -1):
            if any(stop.startswith(self._decoded[-count:]) for stop in self._stops):
                return count
        return 0
