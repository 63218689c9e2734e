"""What share of the device's measured matrix peak training reaches, and where the rest of the time goes.

    python -m benchmarks.device_share --shapes qwen3-0.6b qwen3-4b qwen3-8b      # on a GPU
    python -m benchmarks.device_share --shapes smollm2-135m --tokens 1024        # on a CPU

For models of these shapes with random weights: `forward`, `forward_backward` and `optim_step` of the
backend in this process, with an adapter on all linear layers. The share is that of the operations that
the step's mathematics asks for (see `count_operations`) in the most that a product of two square
matrices reaches here in the same dtype. Recomputed layers cost time and count nothing.

Then the time of one `forward_backward` by kind of kernel; what is in none of them, the device was idle.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from benchmarks.servers import describe_machine
from hosted_tinker.backend_configs import PytorchConfig
from hosted_tinker.modeling.base_model import BaseModel
from hosted_tinker.modeling.lora import LoraModel
from hosted_tinker.training.pytorch import PytorchBackend
from hosted_tinker.types import AdamParams, Datum, ForwardBackward, LoraConfig
from hosted_tinker.workers.process import ENVIRONMENTS

RUN = "run"
QWEN3: dict[str, Any] = {"vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128}
SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    # As on the hub: Qwen/Qwen3-0.6B, Qwen3-4B, Qwen3-8B, HuggingFaceTB/SmolLM2-135M-Instruct.
    "qwen3-0.6b": lambda: Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
        **QWEN3,
    ),
    "qwen3-4b": lambda: Qwen3Config(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=True,
        **QWEN3,
    ),
    "qwen3-8b": lambda: Qwen3Config(
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=False,
        **QWEN3,
    ),
    "smollm2-135m": lambda: LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    ),
}
KINDS = {
    "attention": re.compile(r"flash|fmha|scaled_dot_product|attention", re.IGNORECASE),
    "matrix products": re.compile(r"gemm|nvjet|cutlass|cublas|aten::(add|b)?mm_?$", re.IGNORECASE),
}


def main() -> None:
    arguments = parse_arguments()
    if arguments.in_process:
        print(json.dumps(measure(arguments.shapes[0], arguments)))
        return
    for name in arguments.shapes:
        # With the memory and the settings of a worker that does nothing else.
        command = [sys.executable, "-m", "benchmarks.device_share", "--in-process", *sys.argv[1:]]
        environment = {**ENVIRONMENTS["shared"], **os.environ}
        output = subprocess.run(
            [*command, "--shapes", name], env=environment, check=True, stdout=subprocess.PIPE
        ).stdout
        print(output.decode().strip().splitlines()[-1], flush=True)
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    del arguments.in_process
    print(json.dumps({**vars(arguments), **describe_machine(), **gpu}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, required=True)
    parser.add_argument("--tokens", type=int, default=8192, help="of a request")
    parser.add_argument("--length", type=int, help="of its sequences; unset: one sequence")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5, help="after one to warm up")
    parser.add_argument("--backend-config", type=json.loads, default={})
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second: the best of some sizes, each the median of some products."""
    sizes = (4096, 8192, 16_384) if device.type == "cuda" else (1024, 2048, 4096)
    return max(measure_product(size, device, dtype) for size in sizes)


def measure_product(size: int, device: torch.device, dtype: torch.dtype) -> float:
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    seconds = measure_median(lambda: torch.mm(left, right, out=out), 10)
    return 2 * size**3 / seconds


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    peak = measure_peak(device, dtype)
    config = SHAPES[name]()
    config.max_position_embeddings = arguments.tokens
    length = arguments.length or arguments.tokens
    backend, adapted = make_backend(config, arguments, device, dtype)
    backward = make_operation(config, arguments.tokens // length, length, forward_only=False)
    forward = make_operation(config, arguments.tokens // length, length, forward_only=True)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = {
        "forward": measure_median(lambda: run(backend, forward), arguments.rounds),
        "forward_backward": measure_median(lambda: run(backend, backward), arguments.rounds),
        "optim_step": measure_median(
            lambda: backend.optim_step(RUN, AdamParams()), arguments.rounds
        ),
    }
    needed = count_operations(config, adapted, arguments.tokens // length, length)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return {
        "shape": name,
        "dtype": str(dtype).removeprefix("torch."),
        "peak_tflops": round(peak / 1e12, 3),
        "tokens": arguments.tokens,
        "length": length,
        "tokens_per_s": {
            operation: round(arguments.tokens / seconds[operation], 1)
            for operation in ("forward", "forward_backward")
        },
        "optim_step_ms": round(1000 * seconds["optim_step"], 2),
        "share_of_peak": {
            operation: round(needed[operation] / seconds[operation] / peak, 3)
            for operation in ("forward", "forward_backward")
        },
        "peak_gpu_gib": memory and round(memory, 2),
        "profile": profile_by_kind(lambda: run(backend, backward), device),
    }


def make_backend(
    config: PretrainedConfig,
    arguments: argparse.Namespace,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[PytorchBackend, list[tuple[int, int]]]:
    """With a run, and the input and output sizes of the layers that it adapts."""
    torch.manual_seed(0)
    with device:
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    module.requires_grad_(False)
    module.eval()
    base = BaseModel(module, arguments.tokens, lambda logits: logits)
    lora = LoraModel(module)
    backend = PytorchBackend("random", base, lora, PytorchConfig(**arguments.backend_config))
    backend.fit_to_memory()
    backend.create_model(RUN, LoraConfig(lora_rank=arguments.rank, seed=0))
    layers = [layer.base for layer in lora.layers.values()]
    return backend, [(arguments.rank, one.in_features + one.out_features) for one in layers]


def make_operation(
    config: PretrainedConfig, count: int, length: int, *, forward_only: bool
) -> ForwardBackward:
    draw = np.random.default_rng(0)
    data: list[Datum] = []
    for _ in range(count):
        tokens = draw.integers(0, config.vocab_size, length)
        inputs = {"target_tokens": tokens, "weights": np.full(length, 1e-3, np.float32)}
        data.append(Datum(tokens, inputs))
    return ForwardBackward(RUN, data, "cross_entropy", forward_only=forward_only)


def run(backend: PytorchBackend, operation: ForwardBackward) -> None:
    (output,) = backend.forward_backward([operation])
    if isinstance(output, Exception):
        raise output


def count_operations(
    config: PretrainedConfig, adapted: list[tuple[int, int]], sequences: int, length: int
) -> dict[str, float]:
    """Additions and multiplications of matrix products and attention.

    As Chowdhery et al. 2022 (arXiv:2204.02311, appendix B) count them, with frozen weights: 2 for each
    weight and token forward, 2 more for the gradient of its input, and for adapters 2 more for their
    own. Attention is causal: half of its scores, 4 operations for each and each of its head's sizes,
    and twice that backward.

    Args:
        adapted: rank, and input and output size together, of each adapted layer.
    """
    heads = config.num_attention_heads * config.head_dim
    groups = config.num_key_value_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * groups + 3 * config.intermediate_size)
    weights = config.num_hidden_layers * layer + config.vocab_size * config.hidden_size
    adapters = sum(rank * sizes for rank, sizes in adapted)
    tokens = sequences * length
    attention = config.num_hidden_layers * sequences * 2 * length**2 * heads
    return {
        "forward": 2 * tokens * (weights + adapters) + attention,
        "forward_backward": tokens * (4 * weights + 6 * adapters) + 3 * attention,
    }


def profile_by_kind(work: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Shares of the time of one call."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        begin = time.perf_counter()
        work()
        total_s = time.perf_counter() - begin
    seconds: dict[str, float] = defaultdict(float)
    for event in recorded.key_averages():
        if device.type == "cuda" and event.device_type == DeviceType.CUDA:
            seconds[find_kind(event.key)] += event.self_device_time_total / 1e6
        elif device.type == "cpu":
            seconds[find_kind(event.key)] += event.self_cpu_time_total / 1e6
    shares = {kind: round(value / total_s, 3) for kind, value in seconds.items()}
    return {**shares, "idle": round(max(0.0, 1 - sum(seconds.values()) / total_s), 3)}


def find_kind(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if pattern.search(name)), "other")


def measure_median(work: Callable[[], object], rounds: int) -> float:
    """Seconds, with the device's work."""
    seconds: list[float] = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
