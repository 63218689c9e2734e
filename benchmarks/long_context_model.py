"""Writes a model for long sequences: four layers of SmolLM2's shape, random weights, 32,768 positions.

python -m benchmarks.long_context_model DIRECTORY
python -m benchmarks.train_throughput --model DIRECTORY --lengths 16384 --step-tokens 16384
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.servers import find_model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    # TRL asks for one.
    AutoTokenizer.from_pretrained(find_model(None)).save_pretrained(directory)


if __name__ == "__main__":
    main()
