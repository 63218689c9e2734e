"""Training through the official SDK, beside the plain Hugging Face loop and TRL.

    make .venv-rivals/.installed
    python -m benchmarks.train_throughput
    python -m benchmarks.train_throughput --lengths 8192 32768 --step-tokens 32768 --no-unembed

The same sequences go through `forward`, `forward_backward` and `optim_step` of a server, through a
loop of transformers and PEFT that pads its batches, and through TRL's SFTTrainer, which pads, and for
mixed lengths packs too. All have the same base model, LoRA shape, dtype, gradient checkpointing and
number of threads, and each is a fresh process in every round, in turn. Adapters are on attention, MLP
and output head; TRL refuses one on the head and trains without, which is less work.

Prints for each length, and for lengths as chats have them, medians over the rounds of tokens per
second and of the peak memory of the process that trains. A step is `forward_backward` and
`optim_step`. Ratios are ours over the rival's, the median of the rounds'; over 1 is better for ours,
in memory too. Then the time that small batches of several runs take together and one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tinker
from transformers import AutoConfig

from benchmarks.rivals.work import Work
from benchmarks.servers import describe_machine, find_model, running_server
from benchmarks.train_throughput_data import (
    ADAM,
    LEARNING_RATE,
    SERVED,
    Case,
    connect,
    make_data,
    make_fixed_case,
    make_mixed_case,
)
from benchmarks.train_throughput_memory import (
    GpuMemory,
    find_trainer,
    list_workers,
    read_peak_rss_gib,
)
from benchmarks.train_throughput_runs import measure_runs
from hosted_tinker.types import LORA_ALPHA

Result = dict[str, Any]
OPERATIONS = ("forward", "forward_backward", "step")
OURS, HF, TRL, TRL_PACKED = "ours", "hf_peft", "trl", "trl_packed"


def main() -> None:
    arguments = parse_arguments()
    on_gpu = shutil.which("nvidia-smi") is not None
    arguments.dtype = arguments.dtype or ("bfloat16" if on_gpu else "float32")
    if arguments.gradient_checkpointing is None:
        arguments.gradient_checkpointing = on_gpu
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    arguments.model = find_model(arguments.model)
    versions: dict[str, str] = {}
    for case in make_cases(arguments):
        print(json.dumps(measure_case(case, arguments, versions)), flush=True)
    if arguments.runs:
        with running_server(*server_flags(arguments)) as url:
            results = measure_runs(url, arguments.runs, arguments.runs_rounds, arguments.rank)
            for result in results:
                print(json.dumps(result), flush=True)
    print(json.dumps(describe(arguments, versions)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="directory; unset: SmolLM2-135M-Instruct")
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 1024, 2048, 4096])
    parser.add_argument(
        "--step-tokens", type=int, default=4096, help="tokens of a step, with one length"
    )
    parser.add_argument(
        "--mixed", type=int, default=32, help="sequences of a step, with mixed lengths; 0: none"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="of a round, after one to warm up")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--no-unembed", action="store_true", help="no adapter on the output head")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="unset: as on a GPU or not"
    )
    parser.add_argument("--gradient-checkpointing", action=argparse.BooleanOptionalAction)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rivals", nargs="*", choices=[HF, TRL], default=[HF, TRL])
    parser.add_argument("--rivals-python", type=Path, default=Path(".venv-rivals/bin/python"))
    parser.add_argument("--batch-size", type=int, default=4, help="sequences of a rival's pass")
    parser.add_argument("--pack-tokens", type=int, default=1024, help="length of TRL's packs")
    parser.add_argument("--sort", action="store_true", help="rivals batch sequences of like length")
    parser.add_argument("--backend-config", type=json.loads, default={}, help="more, for ours")
    parser.add_argument("--seed", type=int, default=0, help="of the mixed lengths and the order")
    parser.add_argument("--runs", type=int, default=8, help="runs with small batches; 0: none")
    parser.add_argument("--runs-rounds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.mixed % arguments.batch_size:
        parser.error("--mixed must be a multiple of --batch-size")
    if TRL in arguments.rivals and not arguments.rivals_python.exists():
        parser.error(f"no {arguments.rivals_python}; `make .venv-rivals/.installed` builds it")
    return arguments


def make_cases(arguments: argparse.Namespace) -> list[Case]:
    num_steps = arguments.steps + 1
    config = AutoConfig.from_pretrained(arguments.model).get_text_config()
    cases = [
        make_fixed_case(length, count_sequences(length, arguments), num_steps, config.vocab_size)
        for length in arguments.lengths
    ]
    if arguments.mixed:
        cases.append(make_mixed_case(arguments.mixed, num_steps, config.vocab_size, arguments.seed))
    return cases


def count_sequences(length: int, arguments: argparse.Namespace) -> int:
    """As many as have `step_tokens` together, but at least one, and whole batches of the rivals."""
    count = max(1, arguments.step_tokens // length)
    return count if count < arguments.batch_size else count - count % arguments.batch_size


def measure_case(case: Case, arguments: argparse.Namespace, versions: dict[str, str]) -> Result:
    """One line. The systems take turns, in another order each round."""
    systems = choose_systems(case, arguments)
    rounds: list[dict[str, Result]] = []
    draw = random.Random(arguments.seed)
    for _ in range(arguments.rounds):
        order = draw.sample(sorted(systems), len(systems))
        rounds.append({name: add_speeds(systems[name]()) for name in order})
    for result in rounds[0].values():
        versions.update(result.pop("versions", {}))
    rivals = [name for name in systems if name != OURS]
    return {
        "case": case.name,
        "sequences": len(case.steps[0]),
        "mean_length": round(statistics.mean(case.lengths)),
        "longest": max(case.lengths),
        **{name: take_medians([one[name] for one in rounds]) for name in systems},
        "ratios": {name: compare(rounds, [name]) for name in rivals},
        "ratio_to_best": compare(rounds, rivals),
    }


def choose_systems(case: Case, arguments: argparse.Namespace) -> dict[str, Callable[[], Result]]:
    """Packs that hold one sequence each would be no others than the batches."""
    systems = {OURS: lambda: measure_ours(case, arguments)}
    trl_python = str(arguments.rivals_python)
    if HF in arguments.rivals:
        systems[HF] = lambda: measure_rival(HF, sys.executable, make_work(case, arguments))
    if TRL in arguments.rivals:
        systems[TRL] = lambda: measure_rival("trl_sft", trl_python, make_work(case, arguments))
    if TRL in arguments.rivals and case.is_mixed:
        packed = make_work(case, arguments, max(arguments.pack_tokens, *case.lengths))
        systems[TRL_PACKED] = lambda: measure_rival("trl_sft", trl_python, packed)
    return systems


def measure_ours(case: Case, arguments: argparse.Namespace) -> Result:
    """A server of its own."""
    data = [make_data(sequences) for sequences in case.steps]
    seconds: dict[str, float] = defaultdict(float)
    gpu = GpuMemory()
    with running_server(*server_flags(arguments)) as url, connect(url) as client:
        run = client.create_lora_training_client(
            base_model=SERVED, rank=arguments.rank, train_unembed=not arguments.no_unembed, seed=1
        ).result()
        before = list_workers()
        try:
            loss, _ = time_step(run, data[0])
            trainer = find_trainer(before)
            with gpu.watch(trainer):
                for step in data[1:]:
                    for name, taken in time_step(run, step)[1].items():
                        seconds[name] += taken
        except tinker.RequestFailedError as error:
            return {"error": str(error)}
        peak_rss_gib = read_peak_rss_gib(trainer)
    return {
        "num_tokens": sum(len(sequence) for step in case.steps[1:] for sequence in step),
        "seconds": seconds,
        "padding": 0.0,
        "first_loss": loss / sum(len(sequence) - 1 for sequence in case.steps[0]),
        "peak_rss_gib": peak_rss_gib,
        "peak_gpu_gib": gpu.peak_gib,
    }


def time_step(
    run: tinker.TrainingClient, data: list[tinker.Datum]
) -> tuple[float, dict[str, float]]:
    """The loss, and the seconds until each operation's result is at the client."""
    begin = time.perf_counter()
    passed = run.forward(data, "cross_entropy").result()
    forward = time.perf_counter()
    run.forward_backward(data, "cross_entropy").result()
    backward = time.perf_counter()
    run.optim_step(ADAM).result()
    end = time.perf_counter()
    return passed.metrics["loss:sum"], {
        "forward": forward - begin,
        "forward_backward": backward - forward,
        "optim_step": end - backward,
    }


def server_flags(arguments: argparse.Namespace) -> list[str]:
    config = {
        "dtype": arguments.dtype,
        "gradient_checkpointing": arguments.gradient_checkpointing,
        **arguments.backend_config,
    }
    return [
        *("--base-model", str(arguments.model), "--served-model-name", SERVED),
        *("--backend-config", json.dumps(config)),
        # The rivals publish no weights either; what that costs is measured by `benchmarks.sync`.
        *("--adapter-sync", "on_request"),
    ]


def make_work(case: Case, arguments: argparse.Namespace, pack_tokens: int = 0) -> Work:
    return Work(
        model=str(arguments.model),
        steps=case.steps,
        dtype=arguments.dtype,
        lora_rank=arguments.rank,
        lora_alpha=LORA_ALPHA,
        train_unembed=not arguments.no_unembed,
        batch_size=min(arguments.batch_size, len(case.steps[0])),
        pack_tokens=pack_tokens,
        sort=arguments.sort,
        gradient_checkpointing=arguments.gradient_checkpointing,
        learning_rate=LEARNING_RATE,
    )


def measure_rival(module: str, python: str, work: Work) -> Result:
    """A process of its own. What it died of is the result, if it did."""
    gpu = GpuMemory()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "work.json"
        work.write(path)
        process = subprocess.Popen(
            [python, "-m", f"benchmarks.rivals.{module}", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # TRL sends telemetry otherwise.
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        with gpu.watch(process.pid):
            output, errors = process.communicate()
    if process.returncode != 0:
        lines = errors.strip().splitlines() or [""]
        return {"error": f"exit code {process.returncode}: {lines[-1][:300]}"}
    return {**json.loads(output.strip().splitlines()[-1]), "peak_gpu_gib": gpu.peak_gib}


def add_speeds(result: Result) -> Result:
    """Tokens per second in place of the seconds."""
    if "error" in result:
        return result
    seconds = result.pop("seconds")
    num_tokens = result.pop("num_tokens")
    seconds.setdefault("step", seconds.get("forward_backward", 0) + seconds.get("optim_step", 0))
    speeds = {
        f"{name}_tokens_per_s": num_tokens / seconds[name] for name in OPERATIONS if name in seconds
    }
    if "optim_step" in seconds:
        speeds["optim_step_share"] = seconds["optim_step"] / seconds["step"]
    return {**speeds, **result}


def take_medians(results: list[Result]) -> Result:
    errors = [result for result in results if "error" in result]
    if errors:
        return errors[0]
    return {
        name: None if value is None else round(statistics.median(one[name] for one in results), 3)
        for name, value in results[0].items()
        if name != "versions"
    }


def compare(rounds: list[dict[str, Result]], rivals: list[str]) -> dict[str, float]:
    """Ours over the best of the rivals, which may be another one in each measure."""
    ratios: dict[str, float] = {}
    for measure in (
        *(f"{name}_tokens_per_s" for name in OPERATIONS),
        "peak_rss_gib",
        "peak_gpu_gib",
    ):
        is_memory = measure.startswith("peak")
        values: list[float] = []
        for one in rounds:
            theirs = [value for name in rivals if (value := one[name].get(measure))]
            ours = one[OURS].get(measure)
            if ours and theirs:
                values.append(min(theirs) / ours if is_memory else ours / max(theirs))
        if values:
            ratios[measure] = round(statistics.median(values), 3)
    return ratios


def describe(arguments: argparse.Namespace, versions: dict[str, str]) -> Result:
    """The settings, the machine and the versions."""
    settings = {
        name: value
        for name, value in vars(arguments).items()
        if name not in ("model", "rivals_python", "lengths", "runs", "mixed")
    }
    gpu: dict[str, str] = {}
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        gpu["gpus"] = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    machine = {**describe_machine(), **gpu}
    return {"model": arguments.model.name, **settings, **machine, "rivals_versions": versions}


if __name__ == "__main__":
    main()
