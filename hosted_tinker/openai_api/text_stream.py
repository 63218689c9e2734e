"""Tokens to text as they come, with stop strings cut off."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from hosted_tinker.openai_api.text import REPLACEMENT, TextModel

CONTEXT_TOKENS = 4
"""Tokens decoded before new ones: some decoders drop the space of the first token that they see."""
MAX_UNREAD_TOKENS = 64
"""Bytes that are no text are given up after so many tokens; before, all of them are decoded again
with each new token, since together they may become a character."""
MAX_UNFINISHED = 3
"""Replacement characters at the end that may become one character with the next byte."""


class GrowingText:
    """The text of tokens, growing by whole characters."""

    def __init__(
        self, model: TextModel, context: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        """`context` are the tokens before the first."""
        self._model = model
        self._skip_special_tokens = skip_special_tokens
        self._window = [int(token) for token in context[-CONTEXT_TOKENS:]]
        self._num_unread = 0
        self._num_given = 0
        self.pending = ""
        """A part of a character at the end, as it would be written if nothing came after it."""
        if not self._forget_read():
            self._window = []

    def push(self, tokens: Sequence[int]) -> str:
        """The characters that the tokens complete."""
        self._window += tokens
        self._num_unread += len(tokens)
        text = self._decode(self._window)
        unfinished = len(text) - len(text.rstrip(REPLACEMENT))
        end = max(self._num_given, len(text) - min(unfinished, MAX_UNFINISHED))
        new, self.pending = text[self._num_given : end], text[end:]
        self._num_given = end
        forgotten = not unfinished and self._forget_read()
        if not forgotten and self._num_unread > MAX_UNREAD_TOKENS:
            new, self.pending = new + self.pending, ""
            self._window, self._num_given, self._num_unread = [], 0, 0
        return new

    def _forget_read(self) -> bool:
        """Keeps only the last tokens as context. False if they are no good as one."""
        context = self._window[-CONTEXT_TOKENS:]
        read = self._decode(context)
        if not read or read.endswith(REPLACEMENT):
            return False
        self._window, self._num_given, self._num_unread = context, len(read), 0
        return True

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._model.decode(tokens, skip_special_tokens=self._skip_special_tokens)


class TextStream:
    """The text of one sequence, which ends before its stop string or stop token.

    What may be the beginning of a stop string is held back until it is clear.
    """

    def __init__(
        self, growing: GrowingText, stops: Sequence[str], *, keep_stop: bool = False
    ) -> None:
        """`keep_stop` leaves the stop string or token in the text."""
        self._growing = growing
        self._stops = stops
        self._keep_stop = keep_stop
        self._text = ""
        self._num_given = 0

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is certain now and was not before."""
        self._text += self._growing.push(tokens)
        return self._give(len(self._text) - self._count_possible_stop())

    def end(self, last: int, *, stopped: bool) -> str:
        """The rest of the text. `stopped` says that the last token, or a string that it completes,
        ended the sequence."""
        without_last = self._text + self._growing.pending
        self._text += self._growing.push([last]) + self._growing.pending
        stop_end = self._find_stop() if stopped else None
        if stopped and stop_end is None and not self._keep_stop:
            self._text = without_last
        return self._give(len(self._text) if stop_end is None else stop_end)

    def _give(self, end: int) -> str:
        given = self._text[self._num_given : end]
        self._num_given += len(given)
        return given

    def _find_stop(self) -> int | None:
        """Where the text ends because of a stop string; None if it has none."""
        found = [(at, stop) for stop in self._stops if (at := self._text.find(stop)) >= 0]
        if not found:
            return None
        at, stop = min(found)
        return at + len(stop) if self._keep_stop else at

    def _count_possible_stop(self) -> int:
        """Characters at the end that a stop string may begin with."""
        if self._keep_stop:
            return 0
        longest = max((len(stop) for stop in self._stops), default=0)
        for count in range(min(longest - 1, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-count:]) for stop in self._stops):
                return count
        return 0


class OffsetCounter:
    """At which character of a text each token begins."""

    def __init__(self, model: TextModel, *, skip_special_tokens: bool) -> None:
        self._model = model
        self._skip_special_tokens = skip_special_tokens
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def advance(self, token: int) -> int:
        """The token's offset. A part of a character begins where the character does."""
        offset = self._offset
        if not (self._skip_special_tokens and self._model.is_special(token)):
            self._offset += len(self._characters.decode(self._model.get_bytes(token)))
        return offset
