"""The sequences that the training benchmarks train on, and how they reach the server."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tinker

from benchmarks.load import make_prompts

SERVED = "model"
LEARNING_RATE = 1e-5
ADAM = tinker.AdamParams(learning_rate=LEARNING_RATE)
SHORTEST, LONGEST = 16, 1024
MEDIAN_LENGTH, LENGTH_SIGMA = 200, 1.0
"""Of the log-normal lengths: many short answers, a few long ones."""

Sequences = list[list[int]]


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences of each optimizer step."""

    name: str
    steps: list[Sequences]

    @property
    def is_mixed(self) -> bool:
        return len({len(sequence) for sequence in self.steps[0]}) > 1

    @property
    def lengths(self) -> list[int]:
        return [len(sequence) for step in self.steps for sequence in step]


def make_fixed_case(length: int, count: int, num_steps: int, vocab_size: int) -> Case:
    steps = [make_prompts(count, length, seed, vocab_size) for seed in range(num_steps)]
    return Case(str(length), steps)


def make_mixed_case(count: int, num_steps: int, vocab_size: int, seed: int) -> Case:
    draw = random.Random(seed)
    steps: list[Sequences] = []
    for _ in range(num_steps):
        drawn = (draw.lognormvariate(math.log(MEDIAN_LENGTH), LENGTH_SIGMA) for _ in range(count))
        lengths = [min(LONGEST, max(SHORTEST, round(length))) for length in drawn]
        seeds = [draw.randrange(2**31) for _ in lengths]
        steps.append(
            [make_prompts(1, n, s, vocab_size)[0] for n, s in zip(lengths, seeds, strict=True)]
        )
    return Case("mixed", steps)


def make_data(sequences: Sequence[Sequence[int]]) -> list[tinker.Datum]:
    """Every token of a sequence goes through the model, as with the rivals; the last has no target."""
    return [make_datum(sequence) for sequence in sequences]


def make_datum(tokens: Sequence[int]) -> tinker.Datum:
    targets = np.asarray([*tokens[1:], tokens[0]], dtype=np.int64)
    weights = np.ones(len(tokens), dtype=np.float32)
    weights[-1] = 0.0
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(tokens)),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(targets),
            "weights": tinker.TensorData.from_numpy(weights),
        },
    )


def connect(url: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=url, api_key="tml-benchmark")
