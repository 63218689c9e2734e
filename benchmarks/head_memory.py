"""Peak memory of a long sequence with a large vocabulary, over that of the same body with a small one.

    python -m benchmarks.head_memory

A `forward_backward` of 32,768 tokens on a Llama of random weights, with an adapter on the output head,
in a process for each vocabulary. Prints the peak resident memory of each, less what the process held
before the pass, and what the logits alone would take.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.servers import describe_machine
from benchmarks.train_throughput_memory import read_peak_rss_gib
from hosted_tinker.backend_configs import PytorchConfig
from hosted_tinker.training.pytorch import PytorchBackend
from hosted_tinker.types import Datum, ForwardBackward, LoraConfig

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
SMALL, LARGE = 1_000, 151_936
RANK = 16


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--vocab-size", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.vocab_size is not None:
        print(json.dumps(measure(arguments.tokens, arguments.vocab_size)))
        return
    peaks = {size: run_process(arguments.tokens, size) for size in (SMALL, LARGE)}
    row = {
        "tokens": arguments.tokens,
        **{f"pass_gib_vocabulary_{size}": round(peak, 2) for size, peak in peaks.items()},
        "large_over_small": round(peaks[LARGE] / peaks[SMALL], 2),
        "logits_gib": round(4 * arguments.tokens * LARGE / 2**30, 1),
    }
    print(json.dumps(row))
    print(json.dumps({**SHAPE, "rank": RANK, **describe_machine()}))


def run_process(tokens: int, vocab_size: int) -> float:
    command = [sys.executable, "-m", "benchmarks.head_memory", "--tokens", str(tokens)]
    command += ["--vocab-size", str(vocab_size)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.strip().splitlines()[-1])


def measure(tokens: int, vocab_size: int) -> float:
    """GiB at the peak of the pass, less those before it."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=vocab_size, max_position_embeddings=tokens, **SHAPE)
    with tempfile.TemporaryDirectory() as directory:
        LlamaForCausalLM(config).save_pretrained(directory)
        backend = PytorchBackend.load(directory, PytorchConfig(), lambda _: None)
    backend.create_model("run", LoraConfig(lora_rank=RANK, seed=1))
    sequence = np.random.default_rng(0).integers(0, vocab_size, tokens)
    inputs = {"target_tokens": sequence, "weights": np.ones(tokens, np.float32)}
    operation = ForwardBackward("run", [Datum(sequence, inputs)], "cross_entropy")
    # Forgets the peak so far.
    Path("/proc/self/clear_refs").write_text("5")
    before = read_peak_rss_gib(os.getpid())
    (output,) = backend.forward_backward([operation])
    if isinstance(output, Exception):
        raise output
    return read_peak_rss_gib(os.getpid()) - before


if __name__ == "__main__":
    main()
