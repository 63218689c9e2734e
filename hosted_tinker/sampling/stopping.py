"""When a sequence ends before its last token: end-of-sequence ids, stop ids, stop strings.

What stops stays in the tokens: for a string, the token that completes it is the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hosted_tinker.errors import UserError
from hosted_tinker.types import SamplingParams

CONTEXT_TOKENS = 4
"""Tokens decoded before a new one, so that its text is what it is in context: some decoders drop
the space of the first token they see."""

MAX_UNFINISHED_TOKENS = 8
"""A UTF-8 character has at most 4 bytes; after more tokens than that the bytes are no character."""


Decode = Callable[[list[int]], str]
"""Token ids to text, special tokens included."""


class StopWatch:
    """Sees the tokens of one sequence as they come."""

    def __init__(
        self,
        token_ids: frozenset[int],
        strings: Sequence[str],
        decode: Decode | None,
        prompt: Sequence[int],
    ) -> None:
        """`prompt` gives the first tokens their context; text in it stops nothing."""
        self._token_ids = token_ids
        self._strings = strings
        self._decode = decode
        self._seen = ""
        self._window = [int(token) for token in prompt[-CONTEXT_TOKENS:]]
        self._num_read = len(self._window)

    def push(self, token: int) -> bool:
        """Whether the sequence ends with this token."""
        if token in self._token_ids:
            return True
        return bool(self._strings) and self._completes_string(token)

    def _completes_string(self, token: int) -> bool:
        assert self._decode is not None
        self._window.append(token)
        read = self._decode(self._window[: self._num_read])
        seen = self._seen + self._decode(self._window)[len(read) :]
        if any(string in seen for string in self._strings):
            return True
        num_unread = len(self._window) - self._num_read
        # The replacement character may be the first bytes of one that the next token completes.
        if not seen.endswith("\N{REPLACEMENT CHARACTER}") or num_unread > MAX_UNFINISHED_TOKENS:
            longest = max(len(string) for string in self._strings)
            self._seen = seen[len(seen) - min(len(seen), longest - 1) :]
            self._window = self._window[-CONTEXT_TOKENS:]
            self._num_read = len(self._window)
        return False


def watch_for_stop(
    params: SamplingParams,
    eos_ids: frozenset[int],
    decode: Decode | None,
    prompt: Sequence[int],
) -> StopWatch:
    """The watch that `SamplingParams.stop` asks for.

    Raises:
        UserError: stop strings, and the model has no tokenizer to look for them.
    """
    if params.stop is None:
        return StopWatch(eos_ids, (), decode, prompt)
    if not params.stop:
        return StopWatch(frozenset(), (), decode, prompt)
    strings = [stop for stop in params.stop if isinstance(stop, str) and stop]
    ids = frozenset(stop for stop in params.stop if isinstance(stop, int))
    if strings and decode is None:
        raise UserError("the base model has no tokenizer: give `stop` as token ids")
    return StopWatch(eos_ids | ids, strings, decode, prompt)
