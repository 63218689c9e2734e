"""Converts SmolLM2's GGUF file to a Hugging Face directory. Run by `hosted_tinker.default_model`.

    python -m hosted_tinker.modeling.smollm2 GGUF DIRECTORY

transformers reads the weights of the file right. Its tokenizer it takes for Llama's, because the
file names that architecture, so the tokenizer is built here from the vocabulary in the file.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

SPECIAL_ROLES = ("bos", "eos", "padding", "unknown")


def main() -> None:
    gguf_path, directory = Path(sys.argv[1]), Path(sys.argv[2])
    transformers.logging.disable_progress_bar()
    convert(gguf_path, directory)


def convert(gguf_path: Path, directory: Path) -> None:
    """Writes config, bfloat16 weights, generation config and tokenizer, and syncs them to disk."""
    tokenizer = build_tokenizer(GGUFReader(gguf_path))
    module = AutoModelForCausalLM.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32
    ).bfloat16()
    special_ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    module.config.update(special_ids)
    module.generation_config = GenerationConfig(**special_ids)
    module.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    sync_files(directory)


def build_tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    """SmolLM2's byte-level BPE, whose digits are tokens of their own; a turn ends with eos."""
    tokens: list[str] = read_field(reader, "tokenizer.ggml.tokens")
    merges: list[str] = read_field(reader, "tokenizer.ggml.merges")
    types: list[int] = read_field(reader, "tokenizer.ggml.token_type")
    if read_field(reader, "tokenizer.ggml.pre") != "smollm":
        raise ValueError("the file's pre-tokenizer is not SmolLM2's")
    bpe = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[(left, right) for left, right in (merge.split(" ") for merge in merges)],
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == TokenType.CONTROL
        ]
    )
    ids = {role: read_field(reader, f"tokenizer.ggml.{role}_token_id") for role in SPECIAL_ROLES}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[ids["bos"]],
        eos_token=tokens[ids["eos"]],
        pad_token=tokens[ids["padding"]],
        unk_token=tokens[ids["unknown"]],
        model_max_length=read_field(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
        chat_template=read_field(reader, "tokenizer.chat_template"),
    )


def read_field(reader: GGUFReader, key: str) -> Any:
    """Raises KeyError if the file does not have it."""
    return reader.fields[key].contents()


def sync_files(directory: Path) -> None:
    """After a power cut, the directory's name must not stand for files that are empty."""
    for path in [*directory.iterdir(), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


if __name__ == "__main__":
    main()
