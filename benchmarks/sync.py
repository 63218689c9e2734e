"""How long new weights take from the trainer to the sampler, and what that costs the training.

    python -m benchmarks.sync

Prints for each LoRA rank the time from the end of an `optim_step` to the first token that vLLM
generates from its weights, beside the time to a first token of weights that are loaded already; and
the training throughput of a run whose steps are synced, over that of one whose steps are not, in
turns against the same vLLM.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import numpy as np
import tinker

from benchmarks.load import Load, make_prompts, send_load
from benchmarks.servers import (
    cpu_flags,
    describe_machine,
    find_model,
    make_parser,
    running_server,
    running_vllm,
)

SERVED = "model"
ADAM = tinker.AdamParams(learning_rate=1e-5)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="steps of a throughput measurement")
    parser.add_argument("--tokens", type=int, default=512, help="training tokens of a step")
    arguments = parser.parse_args()
    model = find_model(arguments.model)
    flags = ("--base-model", str(model), "--served-model-name", SERVED)
    with running_vllm(arguments.vllm_python, model, args=arguments.vllm_args) as vllm_url:
        flags = (*flags, "--vllm-url", vllm_url, *cpu_flags())
        with (
            running_server(*flags) as synced,
            running_server(*flags, "--adapter-sync", "on_request") as unsynced,
        ):
            for rank in arguments.ranks:
                print(json.dumps(measure_latency(synced, rank, arguments.repeats)), flush=True)
            print(json.dumps(measure_throughput(synced, unsynced, arguments)), flush=True)
    print(json.dumps({"model": model.name, **describe_machine(arguments.vllm_python)}))


def connect(url: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=url, api_key="tml-benchmark")


def measure_latency(url: str, rank: int, repeats: int) -> dict[str, Any]:
    """Medians in milliseconds."""
    fresh: list[float] = []
    loaded: list[float] = []
    with connect(url) as client:
        run = client.create_lora_training_client(base_model=SERVED, rank=rank, seed=1).result()
        for repeat in range(repeats):
            run.optim_step(ADAM).result()
            fresh.append(time_first_token(url, run.model_id, 2 * repeat))
            loaded.append(time_first_token(url, run.model_id, 2 * repeat + 1))
    return {
        "rank": rank,
        "new_weights_to_first_token_ms": round(1000 * statistics.median(fresh)),
        "loaded_weights_to_first_token_ms": round(1000 * statistics.median(loaded)),
    }


def time_first_token(url: str, model: str, seed: int) -> float:
    load = Load(model, make_prompts(1, 32, seed), [1], 1)
    return send_load(url, load).timings[0].first_token_s


def measure_throughput(synced: str, unsynced: str, arguments: Any) -> dict[str, Any]:
    """Training tokens per second, medians over the rounds, and the median ratio."""
    speeds: dict[str, list[float]] = {"synced": [], "unsynced": []}
    with connect(synced) as first, connect(unsynced) as second:
        runs = {
            name: client.create_lora_training_client(base_model=SERVED, rank=16, seed=1).result()
            for name, client in (("synced", first), ("unsynced", second))
        }
        for round_number in range(arguments.rounds + 1):
            order = list(runs.items())
            for name, run in order if round_number % 2 else reversed(order):
                speed = time_steps(run, arguments.steps, arguments.tokens)
                if round_number > 0:  # The first round warms up.
                    speeds[name].append(speed)
    ratios = [one / other for one, other in zip(speeds["synced"], speeds["unsynced"], strict=True)]
    return {
        **{f"{name}_tokens_per_s": round(statistics.median(s)) for name, s in speeds.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def time_steps(run: tinker.TrainingClient, steps: int, num_tokens: int) -> float:
    """Tokens per second of forward_backward and optim_step, one after another."""
    (tokens,) = make_prompts(1, num_tokens + 1, seed=0)
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(np.asarray(tokens[1:], dtype=np.int64)),
            "weights": tinker.TensorData.from_numpy(np.ones(num_tokens, dtype=np.float32)),
        },
    )
    begin = time.perf_counter()
    for _ in range(steps):
        run.forward_backward([datum], "cross_entropy")
        run.optim_step(ADAM).result()
    return steps * num_tokens / (time.perf_counter() - begin)


if __name__ == "__main__":
    main()
