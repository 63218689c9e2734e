"""What spinning OpenMP threads cost when trainer and sampler share the cores of one machine.

    python benchmarks/openmp_wait.py

Runs the same matrix products in 1 and in 2 processes at once, each with as many threads as there are
cores, under both policies in turn. Prints one JSON line: the median products per second of a process.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys

import torch

ROUNDS = 3
DURATION_S = 5.0
WORK = f"""
import time, torch
x, w = torch.randn(512, 576), torch.randn(1536, 576)
end, count = time.monotonic() + {DURATION_S}, 0
while time.monotonic() < end:
    torch.nn.functional.linear(x, w).add_(1)
    count += 1
print(count)
"""


def main() -> None:
    rates: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for num_processes in (1, 2):
            for policy in ("default", "PASSIVE"):
                name = f"{policy.lower()}_{num_processes}_processes"
                rates.setdefault(name, []).extend(measure(policy, num_processes))
    medians = {name: round(statistics.median(values)) for name, values in rates.items()}
    ratio = medians["passive_2_processes"] / medians["default_2_processes"]
    print(
        json.dumps(
            {
                "products_per_s": medians,
                "passive_over_default_2_processes": round(ratio, 2),
                "cores": os.cpu_count(),
                "processor": platform.processor() or platform.machine(),
                "torch": torch.__version__,
            }
        )
    )


def measure(policy: str, num_processes: int) -> list[float]:
    """Products per second of each process."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if policy != "default":
        environment["OMP_WAIT_POLICY"] = policy
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORK], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(num_processes)
    ]
    return [int(process.communicate()[0]) / DURATION_S for process in processes]


if __name__ == "__main__":
    main()
