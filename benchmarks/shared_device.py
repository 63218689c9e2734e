"""Training and sampling at once on one device: in one process that takes turns, and in two.

    python -m benchmarks.shared_device

While batches of 256 tokens are trained on, one after another, 8 requests to sample arrive at random.
Prints, for one process with several shares for sampling and for two processes, medians over the rounds
of what both get done, of the latency of a sample, and the memory of the worker processes together.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import tinker

from benchmarks.load import make_prompts, send_load
from benchmarks.sampling import make_load
from benchmarks.servers import describe_machine, find_model, make_parser, running_server
from benchmarks.train_throughput_data import SERVED, connect, make_data
from benchmarks.train_throughput_memory import list_workers, read_peak_rss_gib

RANK = 16
BATCH_TOKENS = 256
REQUESTS = 8
SHARES = (0.2, 0.5, 0.8)
CONFIGS: dict[str, dict[str, Any]] = {
    **{f"one process, {share}": {"sampling_share": share} for share in SHARES},
    "two processes": {"share_base_model": False},
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model = find_model(arguments.model)
    for name, config in CONFIGS.items():
        flags = ("--base-model", str(model), "--served-model-name", SERVED)
        before = list_workers()
        with running_server(*flags, "--backend-config", json.dumps(config)) as url:
            rows = [measure(url, number) for number in range(arguments.rounds + 1)][1:]
            workers = [pid for pid in list_workers() if pid not in before]
            memory = sum(map(read_peak_rss_gib, workers))
        medians = {key: round(statistics.median(row[key] for row in rows), 1) for key in rows[0]}
        print(json.dumps({"case": name, **medians, "peak_rss_gib": round(memory, 2)}), flush=True)
    print(json.dumps({"model": model.name, "rounds": arguments.rounds, **describe_machine()}))


def measure(url: str, number: int) -> dict[str, float]:
    with training(url) as count_tokens:
        before = count_tokens()
        begin = time.perf_counter()
        sampled = send_load(url, make_load(REQUESTS, f"shared {number}")).summarize()
        trained = (count_tokens() - before) / (time.perf_counter() - begin)
    return {
        "training_tokens_per_s": trained,
        "sampling_tokens_per_s": sampled["tokens_per_s"],
        "sample_latency_p50_ms": sampled["latency_p50_ms"],
    }


@contextlib.contextmanager
def training(url: str) -> Iterator[Any]:
    """Goes on until the block ends. Yields what says how many tokens were trained on so far."""
    done, is_over = [0], threading.Event()
    data = make_data(make_prompts(2, BATCH_TOKENS // 2, seed=1))

    def train(run: tinker.TrainingClient) -> None:
        while not is_over.is_set():
            # Two are under way, so that the device never waits for the client.
            for future in [run.forward_backward(data, "cross_entropy") for _ in range(2)]:
                future.result()
                done[0] += BATCH_TOKENS

    with connect(url) as client:
        run = client.create_lora_training_client(base_model=SERVED, rank=RANK, seed=1).result()
        run.forward_backward(data, "cross_entropy").result()
        thread = threading.Thread(target=train, args=(run,))
        thread.start()
        try:
            yield lambda: done[0]
        finally:
            is_over.set()
            thread.join()


if __name__ == "__main__":
    main()
