"""Tokens to text: tokenizers of the two common kinds, against Python's own UTF-8 codec."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hosted_tinker.openai_api.text import TextModel
from hosted_tinker.openai_api.text_stream import GrowingText, OffsetCounter, TextStream
from hosted_tinker.sampling.fake import make_tokenizer
from hosted_tinker.types import TokenizerInfo

END = 256
"""A special token of the byte-level tokenizer; the ids below are bytes."""


def make_byte_level() -> TextModel:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return TextModel(TokenizerInfo(tokenizer.to_str()))


def make_metaspace() -> TextModel:
    """As of Llama 2: pieces begin with a mark for their space, bytes are spelled `<0xE4>`."""
    pieces = ["<unk>", "▁", "▁world", "▁Hello", "lo", "▁two▁words"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    vocabulary |= {f"<0x{byte:02X}>": len(pieces) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return TextModel(TokenizerInfo(tokenizer.to_str()))


BYTE_LEVEL, METASPACE = make_byte_level(), make_metaspace()


def stream_all(stream: TextStream, tokens: list[int], *, stopped: bool) -> list[str]:
    return [
        *(stream.push([token]) for token in tokens[:-1]),
        stream.end(tokens[-1], stopped=stopped),
    ]


def open_stream(
    model: TextModel,
    *stops: str,
    prompt: tuple[int, ...] = (),
    keep_stop: bool = False,
    skip_special_tokens: bool = True,
) -> TextStream:
    growing = GrowingText(model, prompt, skip_special_tokens=skip_special_tokens)
    return TextStream(growing, stops, keep_stop=keep_stop)


@given(st.binary(min_size=1, max_size=60))
def test_bytes_one_by_one_become_what_the_codec_makes_of_them(raw: bytes) -> None:
    pieces = stream_all(open_stream(BYTE_LEVEL), [*raw], stopped=False)
    assert "".join(pieces) == raw.decode(errors="replace")


@given(st.text(min_size=1, max_size=40))
def test_characters_come_whole(text: str) -> None:
    pieces = stream_all(open_stream(BYTE_LEVEL), [*text.encode()], stopped=False)
    assert "".join(pieces) == text
    assert sum(map(len, pieces)) == len(text)
    assert all("\N{REPLACEMENT CHARACTER}" not in piece or piece in text for piece in pieces)


@given(st.binary(min_size=1, max_size=60), st.integers(1, 7))
def test_tokens_in_groups_give_the_text_of_tokens_one_by_one(raw: bytes, size: int) -> None:
    *others, last = raw
    stream = open_stream(BYTE_LEVEL)
    starts = range(0, len(others), size)
    text = "".join(stream.push(others[start : start + size]) for start in starts)
    assert text + stream.end(last, stopped=False) == raw.decode(errors="replace")


def test_bytes_that_never_become_text_are_given_up() -> None:
    pieces = stream_all(open_stream(BYTE_LEVEL), [0x80] * 500, stopped=False)
    assert "".join(pieces) == "\N{REPLACEMENT CHARACTER}" * 500
    assert sum(map(len, pieces[:200])) > 100


@given(st.text(alphabet="abc", min_size=1, max_size=30), st.text("abc", min_size=1, max_size=4))
def test_a_stop_string_never_begins_to_come_out(text: str, stop: str) -> None:
    if stop not in text:
        assert (
            "".join(stream_all(open_stream(BYTE_LEVEL, stop), [*text.encode()], stopped=False))
            == text
        )
        return
    end = text.index(stop)
    tokens = [*text.encode()][: end + len(stop)]
    assert "".join(stream_all(open_stream(BYTE_LEVEL, stop), tokens, stopped=True)) == text[:end]
    kept = stream_all(open_stream(BYTE_LEVEL, stop, keep_stop=True), tokens, stopped=True)
    assert "".join(kept) == text[:end] + stop


def test_text_comes_as_soon_as_it_can_be_no_stop_string() -> None:
    stream = open_stream(BYTE_LEVEL, "STOP", "aSx")
    pieces = [stream.push([token]) for token in b"a STaS-"]
    assert pieces == ["", "a ", "", "", "ST", "", "aS-"]


def test_what_a_character_hides_of_a_stop_string_is_cut() -> None:
    tokens = [*"é;中;;".encode()]
    assert "".join(stream_all(open_stream(BYTE_LEVEL, ";;"), tokens, stopped=True)) == "é;中"


@pytest.mark.parametrize(
    ("last", "keep_stop", "skip", "text"),
    [
        (ord("!"), False, True, "Hi"),
        (ord("!"), True, True, "Hi!"),
        (END, False, False, "Hi"),
        (END, True, False, "Hi<end>"),
        (END, True, True, "Hi"),
    ],
)
def test_the_token_that_stops_is_no_text_unless_asked_for(
    last: int, keep_stop: bool, skip: bool, text: str
) -> None:
    stream = open_stream(BYTE_LEVEL, keep_stop=keep_stop, skip_special_tokens=skip)
    assert "".join(stream_all(stream, [*b"Hi", last], stopped=True)) == text


def test_a_sequence_that_just_ends_keeps_its_last_token() -> None:
    assert "".join(stream_all(open_stream(BYTE_LEVEL), [*b"Hi!"], stopped=False)) == "Hi!"


def test_spaces_between_pieces_stay_and_the_first_goes_only_without_a_prompt() -> None:
    tokens = [3, 2, 1, 2, 4]
    assert stream_all(open_stream(METASPACE), tokens, stopped=False) == [
        *("Hello", " world", " ", " world", "lo")
    ]
    assert "".join(stream_all(open_stream(METASPACE, prompt=(3, 4)), tokens, stopped=False)) == (
        " Hello world  worldlo"
    )


def test_bytes_between_pieces_become_a_character() -> None:
    tokens = [3, *(6 + byte for byte in "中".encode()), 2]
    assert stream_all(open_stream(METASPACE), tokens, stopped=False) == [
        *("Hello", "", "", "中", " world")
    ]


def test_a_prompt_that_ends_within_a_character_is_no_context() -> None:
    first, *rest = "é".encode()
    stream = open_stream(BYTE_LEVEL, prompt=(first,))
    assert "".join(stream_all(stream, [*rest, *b"ab"], stopped=False)) == (
        "\N{REPLACEMENT CHARACTER}ab"
    )


@pytest.mark.parametrize(
    ("model", "token", "raw", "spelling"),
    [
        (BYTE_LEVEL, ord("a"), b"a", "a"),
        (BYTE_LEVEL, ord(" "), b" ", " "),
        (BYTE_LEVEL, 0xE4, b"\xe4", "bytes:\\xe4"),
        (BYTE_LEVEL, END, b"<end>", "<end>"),
        (BYTE_LEVEL, 999, b"", ""),
        (METASPACE, 2, b" world", " world"),
        (METASPACE, 5, b" two words", " two words"),
        (METASPACE, 6 + 0xE4, b"\xe4", "bytes:\\xe4"),
    ],
)
def test_a_token_by_itself_is_its_bytes(
    model: TextModel, token: int, raw: bytes, spelling: str
) -> None:
    assert model.get_bytes(token) == raw
    assert model.spell(token) == spelling


def test_offsets_are_where_characters_begin() -> None:
    counter = OffsetCounter(BYTE_LEVEL, skip_special_tokens=True)
    tokens = [*b"a", *"中".encode(), END, *b"b"]
    assert [counter.advance(token) for token in tokens] == [0, 1, 1, 1, 2, 2]


def test_a_prompt_is_never_cut_to_what_a_tokenizers_file_says() -> None:
    tokenizer = make_tokenizer()
    tokenizer.enable_truncation(4)
    model = TextModel(TokenizerInfo(tokenizer.to_str()))
    assert model.encode("123456", add_special_tokens=True) == [*b"123456"]
