"""What the batch-invariant mode costs, and that it does what it says.

    python -m benchmarks.batch_invariance

Two servers, with the mode and without, do the same in turns: a training step on mixed lengths, and
requests to sample that arrive at random. Prints medians over the rounds, and the mode's speed over the
other's. Before that, one datum is scored alone and among others, by both: the largest difference of a
log-probability is 0 with the mode.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from typing import Any

import numpy as np
import tinker

from benchmarks.load import send_load
from benchmarks.sampling import make_load
from benchmarks.servers import describe_machine, find_model, make_parser, running_server
from benchmarks.train_throughput_data import ADAM, SERVED, connect, make_data, make_mixed_case

RANK = 16
SEQUENCES = 16
COUNTS = (1, 8, 32)
MODES = {"plain": False, "invariant": True}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model = find_model(arguments.model)
    with contextlib.ExitStack() as stack:
        urls = {
            name: stack.enter_context(
                running_server(
                    *("--base-model", str(model), "--served-model-name", SERVED),
                    *("--backend-config", json.dumps({"batch_invariant": mode})),
                    *("--adapter-sync", "on_request"),
                )
            )
            for name, mode in MODES.items()
        }
        runs = {name: make_run(stack.enter_context(connect(url))) for name, url in urls.items()}
        print(json.dumps({"difference_among_others": compare_scores(runs)}), flush=True)
        print(json.dumps(compare_training(runs, arguments.rounds)), flush=True)
        for count in COUNTS:
            print(json.dumps(compare_sampling(urls, count, arguments.rounds)), flush=True)
    print(json.dumps({"model": model.name, "rounds": arguments.rounds, **describe_machine()}))


def make_run(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model=SERVED, rank=RANK, seed=1).result()


def compare_scores(runs: dict[str, tinker.TrainingClient]) -> dict[str, float]:
    (sequences,) = make_mixed_case(SEQUENCES, 1, 30000, seed=0).steps
    data = make_data(sequences)
    differences: dict[str, float] = {}
    for name, run in runs.items():
        together = run.forward(data, "cross_entropy").result().loss_fn_outputs
        alone = [run.forward([one], "cross_entropy").result().loss_fn_outputs[0] for one in data]
        differences[name] = max(
            float(np.abs(one["logprobs"].to_numpy() - other["logprobs"].to_numpy()).max())
            for one, other in zip(together, alone, strict=True)
        )
    return differences


def compare_training(runs: dict[str, tinker.TrainingClient], rounds: int) -> dict[str, Any]:
    case = make_mixed_case(SEQUENCES, rounds + 1, 30000, seed=1)
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for number, sequences in enumerate(case.steps):
        data = make_data(sequences)
        for name, run in runs.items():
            begin = time.perf_counter()
            run.forward_backward(data, "cross_entropy").result()
            run.optim_step(ADAM).result()
            if number:  # The first warms up.
                tokens = sum(map(len, sequences))
                speeds[name].append(tokens / (time.perf_counter() - begin))
    return {"case": "training step", "unit": "tokens_per_s", **summarize(speeds)}


def compare_sampling(urls: dict[str, str], count: int, rounds: int) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {name: [] for name in urls}
    for number in range(rounds):
        load = make_load(count, f"{count} {number}")
        for name, url in urls.items():
            speeds[name].append(send_load(url, load).summarize()["tokens_per_s"])
    return {"case": f"sampling, {count} requests", "unit": "tokens_per_s", **summarize(speeds)}


def summarize(speeds: dict[str, list[float]]) -> dict[str, float]:
    pairs = zip(speeds["invariant"], speeds["plain"], strict=True)
    medians = {name: round(statistics.median(values), 1) for name, values in speeds.items()}
    ratio = statistics.median(ours / plain for ours, plain in pairs)
    return {**medians, "invariant_over_plain": round(ratio, 2)}


if __name__ == "__main__":
    main()
