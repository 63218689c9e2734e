"""Stop rules, on decoders small enough to read."""

from __future__ import annotations

import pytest

from hosted_tinker.errors import UserError
from hosted_tinker.sampling.stopping import Decode, watch_for_stop
from hosted_tinker.types import SamplingParams

EOS = frozenset({0})
# Token 0 is the end of sequence; two bytes make e-acute; 9 has no text.
PIECES = [b"<eos>", b"a", b"b", b"ST", b"OP", b"xSTOPy", b" ", b"\xc3", b"\xa9", b"", b"STO\xc3"]


def decode_bytes(tokens: list[int]) -> str:
    return b"".join(PIECES[token] for token in tokens).decode(errors="replace")


def decode_without_first_space(tokens: list[int]) -> str:
    """As sentencepiece decoders do."""
    return decode_bytes(tokens).removeprefix(" ")


def count_until_stop(
    tokens: list[int],
    stop: tuple[str, ...] | tuple[int, ...] | None,
    *,
    decode: Decode = decode_bytes,
    prompt: tuple[int, ...] = (1,),
) -> int | None:
    watch = watch_for_stop(SamplingParams(stop=stop), EOS, decode, prompt)
    for count, token in enumerate(tokens, start=1):
        if watch.push(token):
            return count
    return None


@pytest.mark.parametrize(
    ("tokens", "stop", "expected"),
    [
        ([1, 0, 2], None, 2),
        ([1, 0, 2], (), None),
        ([1, 2, 0], (2,), 2),
        ([1, 0, 2], (2,), 2),
        ([1, 0, 2], ("zzz",), 2),
        ([3, 4, 1], ("STOP",), 2),
        ([1, 3, 9, 9, 9, 9, 9, 9, 4, 1], ("STOP",), 9),
        ([1, 5, 1], ("STOP",), 2),
        ([1, 2, 1], ("zzz", "b"), 2),
        ([3, 1, 4], ("STOP",), None),
        ([7, 8, 1], ("\u00e9",), 2),
        ([3, 7, 8], ("T\u00e9",), 3),
        ([10, 8], ("STO",), 1),
        ([10, 8, 1], ("O\u00e9a",), 3),
        ([7] * 30 + [3, 4], ("STOP",), 32),
        ([1, 2] * 50 + [3, 4], ("abSTOP",), 102),
    ],
)
def test_where_a_sequence_ends(
    tokens: list[int], stop: tuple[str, ...] | tuple[int, ...] | None, expected: int | None
) -> None:
    assert count_until_stop(tokens, stop) == expected


def test_a_space_that_the_decoder_drops_at_the_start_counts() -> None:
    for tokens in ([6, 1], [1, 2, 1, 2, 1, 2, 6, 1]):
        stop = (" a",)
        assert count_until_stop(tokens, stop, decode=decode_without_first_space) == len(tokens)


def test_the_prompt_is_no_part_of_a_stop_string() -> None:
    assert count_until_stop([4, 1], ("STOP",), prompt=(1, 3)) is None


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(UserError, match="token ids"):
        watch_for_stop(SamplingParams(stop=("a",)), EOS, None, [1])
    assert watch_for_stop(SamplingParams(stop=(2,)), EOS, None, [1]).push(2)
