"""The embedded sampling engine beside `transformers` `generate` and, where asked, vLLM.

    python -m benchmarks.sampling [--vllm]

Requests of mixed lengths arrive at random times, 1, 8 and 32 of them, for the base model and for an
adapter. Ours and vLLM go over HTTP, streamed, through /v1 of a server of their own; `generate` has
its requests in its own process, and makes padded batches of what has arrived. Rounds alternate.
Prints medians over the rounds, and the time of 16 samples of one prompt over that of one.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import tinker

from benchmarks.load import Load, Measured, Timing, make_prompts, send_load
from benchmarks.servers import (
    cpu_flags,
    describe_machine,
    find_model,
    make_parser,
    running_server,
    running_vllm,
)
from benchmarks.train_throughput_memory import list_workers, read_peak_rss_gib

SERVED = "model"
COUNTS = (1, 8, 32)
RANK = 16
GROUP = 16
GROUP_PROMPT_TOKENS = 512
Engine = Callable[[Load], Measured]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="of generate, at most")
    parser.add_argument("--vllm", action="store_true", help="measure vLLM too")
    arguments = parser.parse_args()
    model = find_model(arguments.model)
    with contextlib.ExitStack() as stack:
        config = json.dumps({"max_context_length": 2048, "dtype": "float32"})
        flags = ("--base-model", str(model), "--served-model-name", SERVED)
        flags += ("--backend-config", config)
        urls = {"embedded": stack.enter_context(running_server(*flags))}
        if arguments.vllm:
            args = f"--dtype float32 {arguments.vllm_args}"
            vllm = running_vllm(arguments.vllm_python, model, max_lora_rank=RANK, args=args)
            vllm_url = stack.enter_context(vllm)
            server = running_server(*flags, "--vllm-url", vllm_url, *cpu_flags())
            urls["vllm"] = stack.enter_context(server)
        adapters = {name: make_adapter(url) for name, url in urls.items()}
        for weights, rank in (("base", 0), ("adapter", RANK)):
            with running_generate(model, arguments.batch_size, rank) as (generate, pid):
                engines: dict[str, Engine] = {"generate": generate}
                for name, url in urls.items():
                    served = SERVED if weights == "base" else adapters[name]
                    engines[name] = make_engine(url, served)
                compare(engines, weights, arguments.rounds)
                print(json.dumps({"weights": weights, "generate_peak_gib": read_peak(pid)}))
        print(json.dumps({"embedded_peak_gib": max(map(read_peak, list_workers()))}))
        print(json.dumps({"samples_over_one": measure_group(urls["embedded"], arguments.rounds)}))
    python = arguments.vllm_python if arguments.vllm else None
    print(json.dumps({"model": model.name, **describe_machine(python)}))


def compare(engines: dict[str, Engine], weights: str, rounds: int) -> None:
    for count in COUNTS:
        results: dict[str, list[Measured]] = {name: [] for name in engines}
        for round_number in range(rounds):
            load = make_load(count, f"{weights} {count} {round_number}")
            for name, run in engines.items():
                results[name].append(run(load))
        row: dict[str, Any] = {"weights": weights, "requests": count}
        row |= {name: take_medians(measured) for name, measured in results.items()}
        for figure in ("tokens_per_s", "latency_p50_ms"):
            row[f"{figure}_over_generate"] = median_ratio(
                results["embedded"], results["generate"], figure
            )
        print(json.dumps(row), flush=True)


def make_engine(url: str, served: str) -> Engine:
    def run(load: Load) -> Measured:
        return send_load(
            url, Load(served, load.prompts, load.max_tokens, load.concurrency, load.starts)
        )

    return run


@contextlib.contextmanager
def running_generate(model: Path, batch_size: int, rank: int) -> Iterator[tuple[Engine, int]]:
    """The rival in a process of its own: what runs a load, and the process id."""
    arguments = [str(model), str(batch_size), str(rank)]
    command = [sys.executable, "-m", "benchmarks.rivals.generate", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    pipes = process.stdin, process.stdout

    def run(load: Load) -> Measured:
        fields = {
            "prompts": load.prompts,
            "max_tokens": load.max_tokens,
            "starts": load.starts,
            "concurrency": load.concurrency,
        }
        begin = time.perf_counter()
        pipes[0].write(json.dumps(fields) + "\n")
        pipes[0].flush()
        rows = json.loads(pipes[1].readline())
        duration = time.perf_counter() - begin
        return Measured([Timing(end, end, int(count)) for end, count in rows], duration)

    try:
        run(make_load(1, "warm up"))
        yield run, process.pid
    finally:
        pipes[0].close()
        process.wait(60)


def make_adapter(url: str) -> str:
    """A run with weights that do something. Returns its id."""
    with tinker.ServiceClient(base_url=url, api_key="tml-benchmark") as client:
        run = client.create_lora_training_client(base_model=SERVED, rank=RANK, seed=1).result()
        run.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        return run.model_id


def make_load(count: int, seed: str) -> Load:
    """Prompts of 16 to 256 tokens, completions of 8 to 48, arriving within a second for each 8."""
    draw = random.Random(seed)
    number = max(4, count)
    prompts = [
        make_prompts(1, draw.randint(16, 256), seed=draw.randrange(2**31))[0] for _ in range(number)
    ]
    starts = sorted(draw.uniform(0, count / 8) for _ in range(number))
    lengths = [draw.randint(8, 48) for _ in range(number)]
    return Load(SERVED, prompts, lengths, count, None if count == 1 else starts)


def measure_group(url: str, rounds: int) -> float:
    """Median time of one token for each of 16 samples, over that of one sample."""
    ratios: list[float] = []
    for number in range(rounds + 1):
        seconds: list[float] = []
        for count in (1, GROUP):
            (prompt,) = make_prompts(1, GROUP_PROMPT_TOKENS, seed=1000 * number + count)
            body = {"model": SERVED, "prompt": prompt, "max_tokens": 1, "n": count}
            begin = time.perf_counter()
            httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status()
            seconds.append(time.perf_counter() - begin)
        ratios.append(seconds[1] / seconds[0])
    return round(statistics.median(ratios[1:]), 2)


def take_medians(rows: Sequence[Measured]) -> dict[str, float]:
    summaries = [row.summarize() for row in rows]
    return {
        name: statistics.median(summary[name] for summary in summaries) for name in summaries[0]
    }


def median_ratio(ours: Sequence[Measured], theirs: Sequence[Measured], figure: str) -> float:
    pairs = zip(ours, theirs, strict=True)
    return round(
        statistics.median(a.summarize()[figure] / b.summarize()[figure] for a, b in pairs), 2
    )


def read_peak(pid: int) -> float:
    return round(read_peak_rss_gib(pid), 2)


if __name__ == "__main__":
    main()
