"""How byte-level vocabularies write bytes as characters."""

from __future__ import annotations


def map_bytes_to_characters() -> dict[int, str]:
    """The character that stands for each byte: itself if it is printable, otherwise the next one
    from 256 on (GPT-2's encoder.py, `bytes_to_unicode`)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    return characters | {byte: chr(256 + number) for number, byte in enumerate(others)}


BYTE_OF_CHARACTER = {character: byte for byte, character in map_bytes_to_characters().items()}
