"""The most memory that a process has held, seen from outside."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

POLL_S = 0.2


def find_trainer(before: dict[int, float]) -> int:
    """The id of the worker that has computed most since `before`, which `list_workers` gave."""
    after = list_workers()
    return max(after, key=lambda pid: after[pid] - before.get(pid, 0.0))


def list_workers() -> dict[int, float]:
    """Process id -> seconds of CPU time, of the workers of servers that this process started."""
    workers: dict[int, float] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "hosted_tinker.workers.main" in process.cmdline():
                times = process.cpu_times()
                workers[process.pid] = times.user + times.system
    return workers


def read_peak_rss_gib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 2**20


class GpuMemory:
    """The most GPU memory of a process while it is watched; None where it can't be told."""

    def __init__(self) -> None:
        self.peak_gib: float | None = None

    @contextlib.contextmanager
    def watch(self, pid: int) -> Iterator[None]:
        if shutil.which("nvidia-smi") is None:
            yield
            return
        done = threading.Event()
        thread = threading.Thread(target=self._poll, args=(pid, done))
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _poll(self, pid: int, done: threading.Event) -> None:
        while not done.wait(POLL_S):
            used = read_gpu_memory_gib(pid)
            if used is not None:
                self.peak_gib = max(used, self.peak_gib or 0.0)


def read_gpu_memory_gib(pid: int) -> float | None:
    """On all GPUs together, with what CUDA itself takes. None if the driver does not list the
    process, as in containers that have process ids of their own."""
    command = [
        "nvidia-smi",
        "--query-compute-apps=pid,used_memory",
        "--format=csv,noheader,nounits",
    ]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [line.split(",") for line in output.splitlines()]
    used = [int(row[1]) for row in rows if int(row[0]) == pid and row[1].strip().isdigit()]
    return sum(used) / 1024 if used else None
