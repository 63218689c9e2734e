"""Small batches of many runs: sent together, against one after another."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import tinker

from benchmarks.load import make_prompts
from benchmarks.train_throughput_data import ADAM, SERVED, connect, make_data

NUM_SEQUENCES = 2
LENGTHS = ((2, 6), (8, 24), (16, 64))
"""Shortest and longest sequence of a batch, for small batches of three sizes."""


def measure_runs(url: str, count: int, rounds: int, rank: int) -> Iterator[dict[str, Any]]:
    """Seconds of a `forward_backward` of every run, each run with a client of its own."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(url)) for _ in range(count)]
        runs = [
            client.create_lora_training_client(base_model=SERVED, rank=rank, seed=1).result()
            for client in clients
        ]
        for lengths in LENGTHS:
            yield measure_lengths(runs, lengths, rounds)


def measure_lengths(
    runs: Sequence[tinker.TrainingClient], lengths: tuple[int, int], rounds: int
) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"together": [], "one_by_one": []}
    draw = random.Random(0)
    for round_number in range(rounds + 1):
        data = [draw_data(draw, lengths) for _ in runs]
        order = ["together", "one_by_one"] if round_number % 2 else ["one_by_one", "together"]
        for way in order:
            taken = time_passes(runs, data, together=way == "together")
            if round_number > 0:  # The first round warms up.
                seconds[way].append(taken)
        for run in runs:
            run.optim_step(ADAM).result()
    pairs = zip(seconds["one_by_one"], seconds["together"], strict=True)
    ratios = [alone / shared for alone, shared in pairs]
    return {
        "case": f"{len(runs)} runs",
        "tokens_of_a_run": [NUM_SEQUENCES * length for length in lengths],
        **{f"{way}_ms": round(1000 * statistics.median(s)) for way, s in seconds.items()},
        "speedup_together": round(statistics.median(ratios), 3),
        "speedups": [round(ratio, 3) for ratio in ratios],
    }


def draw_data(draw: random.Random, lengths: tuple[int, int]) -> list[tinker.Datum]:
    drawn = [draw.randint(*lengths) for _ in range(NUM_SEQUENCES)]
    return make_data([make_prompts(1, length, draw.randrange(2**31))[0] for length in drawn])


def time_passes(
    runs: Sequence[tinker.TrainingClient], data: list[list[tinker.Datum]], *, together: bool
) -> float:
    begin = time.perf_counter()
    futures: list[Any] = []
    for run, own in zip(runs, data, strict=True):
        future = run.forward_backward(own, "cross_entropy")
        if together:
            futures.append(future)
        else:
            future.result()
    for future in futures:
        future.result()
    return time.perf_counter() - begin
