"""`torch.compile` on a model's layers: what it takes to start, and what it gives.

    python -m benchmarks.compile_layers

Forward pass and gradient of the input, of plain transformers without adapters, which is the most that
compiling could be worth here. Compiled for any shape; prints the seconds of the first pass and of the
first with another number of sequences, and the median time of a pass over the eager one's.
"""

from __future__ import annotations

import json
import os
import statistics
from typing import Any

# As on a machine that has compiled nothing before.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import torch
from transformers import AutoModelForCausalLM

from benchmarks.overhead import time_call
from benchmarks.servers import describe_machine, find_model, make_parser

ROUNDS = 5
SHAPES = {"1024 tokens": (2, 512), "8 tokens": (1, 8)}


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    model = find_model(arguments.model)
    module: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    module.requires_grad_(False)
    decoder = module.model
    eager = {name: measure(decoder, *shape) for name, shape in SHAPES.items()}
    for layer in decoder.layers:
        layer.compile(dynamic=True)
    first = time_call(lambda: run(decoder, 2, 512))
    other = time_call(lambda: run(decoder, 1, 300))
    compiled = {name: measure(decoder, *shape) for name, shape in SHAPES.items()}
    ratios = {name: round(compiled[name] / eager[name], 2) for name in SHAPES}
    row = {"first_s": round(first, 1), "first_of_other_shape_s": round(other, 1)}
    print(json.dumps({**row, "compiled_over_eager": ratios}))
    print(json.dumps({"model": model.name, **describe_machine()}))


def measure(decoder: Any, sequences: int, length: int) -> float:
    """Median seconds, after one pass to warm up."""
    run(decoder, sequences, length)
    return statistics.median(
        time_call(lambda: run(decoder, sequences, length)) for _ in range(ROUNDS)
    )


def run(decoder: Any, sequences: int, length: int) -> None:
    tokens = torch.randint(1000, 40000, (sequences, length))
    inputs = decoder.get_input_embeddings()(tokens).detach().requires_grad_()
    decoder(inputs_embeds=inputs, use_cache=False).last_hidden_state.sum().backward()


if __name__ == "__main__":
    main()
