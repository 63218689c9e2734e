"""The base model's tokenizer: text to tokens, tokens to text, and one token by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from tokenizers import Tokenizer

from hosted_tinker.byte_characters import BYTE_OF_CHARACTER
from hosted_tinker.types import TokenizerInfo

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
METASPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""Stands for a space in vocabularies of SentencePiece."""


class TextModel:
    """Reads and writes text for the API process."""

    def __init__(self, info: TokenizerInfo) -> None:
        self._tokenizer = Tokenizer.from_str(info.tokenizer_json)
        # A tokenizer's file may ask for both, and a prompt must not be cut silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._decoders = set(list_decoders(json.loads(info.tokenizer_json).get("decoder")))
        self._added = self._tokenizer.get_added_tokens_decoder()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def is_special(self, token: int) -> bool:
        return token in self._added and self._added[token].special

    def get_bytes(self, token: int) -> bytes:
        """What one token adds to a text; it may be a part of a character."""
        if token in self._added:
            return self._added[token].content.encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if "ByteFallback" in self._decoders and is_byte_piece(piece):
            return bytes([int(piece[3:5], 16)])
        if "ByteLevel" in self._decoders and all(one in BYTE_OF_CHARACTER for one in piece):
            return bytes(BYTE_OF_CHARACTER[one] for one in piece)
        if self._decoders & {"Metaspace", "Replace"} and METASPACE in piece:
            return piece.replace(METASPACE, " ").encode()
        return self.decode([token], skip_special_tokens=False).encode()

    def spell(self, token: int) -> str:
        """One token by itself. A part of a character is written as its bytes, as OpenAI does it."""
        raw = self.get_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def list_decoders(decoder: Mapping[str, Any] | None) -> Iterator[str]:
    """Types of a decoder and its parts, as tokenizer.json names them."""
    if decoder is None:
        return
    yield decoder["type"]
    for part in cast("list[dict[str, Any]]", decoder.get("decoders", [])):
        yield from list_decoders(part)


def is_byte_piece(piece: str) -> bool:
    """Whether it is the form in which SentencePiece spells a byte: `<0xE4>`."""
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
