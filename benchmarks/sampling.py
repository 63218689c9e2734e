"""The embedded sampling engine and vLLM on the same machine and requests.

    python -m benchmarks.sampling

Requests of mixed lengths arrive at random times, at 1, 8 and 32 at once, for the base model and for
an adapter, through /v1 of two servers: one that samples with the embedded engine, one with vLLM.
Prints the medians over the rounds.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence

import tinker

from benchmarks.load import Load, Measured, make_prompts, send_load
from benchmarks.servers import (
    cpu_flags,
    describe_machine,
    find_model,
    make_parser,
    running_server,
    running_vllm,
)

SERVED = "model"
CONCURRENCIES = (1, 8, 32)
RANK = 16


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model = find_model(arguments.model)
    config = ("--backend-config", json.dumps({"max_context_length": 2048, "dtype": "float32"}))
    flags = ("--base-model", str(model), "--served-model-name", SERVED, *config)
    args = f"--dtype float32 {arguments.vllm_args}"
    with (
        running_vllm(arguments.vllm_python, model, max_lora_rank=RANK, args=args) as vllm_url,
        running_server(*flags) as embedded,
        running_server(*flags, "--vllm-url", vllm_url, *cpu_flags()) as through_vllm,
    ):
        engines = {"embedded": embedded, "vllm": through_vllm}
        adapters = {name: make_adapter(url) for name, url in engines.items()}
        for weights in ("base", "adapter"):
            for concurrency in CONCURRENCIES:
                results: dict[str, list[Measured]] = {name: [] for name in engines}
                for round_number in range(arguments.rounds):
                    seed = f"{weights} {concurrency} {round_number}"
                    for name, url in engines.items():
                        served = SERVED if weights == "base" else adapters[name]
                        load = make_load(served, concurrency, seed)
                        results[name].append(send_load(url, load))
                line = {name: take_medians(rows) for name, rows in results.items()}
                row = {"weights": weights, "concurrency": concurrency, **line}
                print(json.dumps(row), flush=True)
    print(json.dumps({"model": model.name, **describe_machine(arguments.vllm_python)}))


def make_adapter(url: str) -> str:
    """A run with weights that do something. Returns its id."""
    with tinker.ServiceClient(base_url=url, api_key="tml-benchmark") as client:
        run = client.create_lora_training_client(base_model=SERVED, rank=RANK, seed=1).result()
        run.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        return run.model_id


def make_load(model: str, concurrency: int, seed: str) -> Load:
    """Prompts of 16 to 256 tokens, completions of 8 to 48, arriving within a second for each 8."""
    draw = random.Random(seed)
    count = max(4, concurrency)
    prompts = [
        make_prompts(1, draw.randint(16, 256), seed=draw.randrange(2**31))[0] for _ in range(count)
    ]
    starts = sorted(draw.uniform(0, concurrency / 8) for _ in range(count))
    lengths = [draw.randint(8, 48) for _ in range(count)]
    return Load(model, prompts, lengths, concurrency, None if concurrency == 1 else starts)


def take_medians(rows: Sequence[Measured]) -> dict[str, float]:
    summaries = [row.summarize() for row in rows]
    return {
        name: statistics.median(summary[name] for summary in summaries) for name in summaries[0]
    }


if __name__ == "__main__":
    main()
