"""What the way through hosted-tinker costs against asking vLLM itself.

    python -m benchmarks.inference

One vLLM server gets the same streamed requests for one adapter directly and through a hosted-tinker
server that is in front of it, in turns. Prints for each number of concurrent requests the medians over the rounds,
and the ratio of the throughputs.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
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
PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Config:
    concurrencies: Sequence[int]
    rounds: int
    max_tokens: int


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    arguments = parser.parse_args()
    config = Config(arguments.concurrency, arguments.rounds, arguments.max_tokens)
    model = find_model(arguments.model)
    with running_vllm(
        arguments.vllm_python, model, max_lora_rank=8, args=arguments.vllm_args
    ) as vllm_url:
        flags = ("--base-model", str(model), "--served-model-name", SERVED)
        with running_server(*flags, "--vllm-url", vllm_url, *cpu_flags()) as url:
            run_id, adapter = make_adapter(url)
            measure(config, direct=(vllm_url, adapter), through=(url, run_id))
    print(json.dumps({"model": model.name, **describe_machine(arguments.vllm_python)}))


def make_adapter(url: str) -> tuple[str, str]:
    """A run's id, and the name of its adapter in vLLM."""
    with tinker.ServiceClient(base_url=url, api_key="tml-benchmark") as client:
        run = client.create_lora_training_client(base_model=SERVED, rank=8, seed=1).result()
        run.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        body = {"model": run.model_id, "prompt": "a", "max_tokens": 1}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        answer.raise_for_status()
        return run.model_id, answer.headers["x-hosted-tinker-adapter"]


def measure(config: Config, direct: tuple[str, str], through: tuple[str, str]) -> None:
    """Prints a JSON line for each concurrency."""
    seeds = itertools.count()
    for concurrency in config.concurrencies:
        summaries: dict[str, list[dict[str, float]]] = {"direct": [], "through": []}
        ratios: list[float] = []
        for round_number in range(config.rounds + 1):
            order = [("direct", direct), ("through", through)]
            speeds: dict[str, float] = {}
            for name, (url, model) in order if round_number % 2 else reversed(order):
                count = max(8, 2 * concurrency)
                prompts = make_prompts(count, PROMPT_TOKENS, next(seeds))
                load = Load(model, prompts, [config.max_tokens] * count, concurrency)
                measured = send_load(url, load)
                speeds[name] = measured.tokens_per_s
                if round_number > 0:  # The first round warms up.
                    summaries[name].append(measured.summarize())
            if round_number > 0:
                ratios.append(speeds["through"] / speeds["direct"])
        line = {name: take_medians(rows) for name, rows in summaries.items()}
        ratio = round(statistics.median(ratios), 3)
        print(json.dumps({"concurrency": concurrency, "ratio": ratio, **line}), flush=True)


def take_medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


if __name__ == "__main__":
    main()
