"""How many tokens a pass may have, by what a token takes of the device's memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

logger = logging.getLogger(__name__)

SHARE_OF_FREE_MEMORY = 0.5
"""Of what is free. The rest is for optimizers of new runs, and for what the probe does not see."""
CPU = torch.device("cpu")
CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
"""Of cgroup v2 and v1: limit, use, and how much of the use is files that can be dropped."""

Bytes = dict[torch.device, int]


def find_token_budget(
    run_pass: Callable[[int], None], parameters: Sequence[Tensor], probe_tokens: int
) -> int | None:
    """Tokens of a forward and backward pass for which the free memory suffices. At least 1.

    Two passes are measured, of `probe_tokens` and of twice as many: constant parts cancel out. One
    before them makes what is made once.

    Args:
        run_pass: runs one of so many tokens.
        parameters: what is there at any size, on all devices of the model.

    Returns:
        None if the larger pass took no more.
    """
    devices = sorted({parameter.device for parameter in parameters}, key=str)
    run_pass(probe_tokens)
    measured: list[Bytes] = []
    for count in (probe_tokens, 2 * probe_tokens):
        with measure_memory(parameters, devices) as peak:
            run_pass(count)
        measured.append(peak)
    few, many = measured
    budgets = [
        SHARE_OF_FREE_MEMORY * find_free_bytes(device) * probe_tokens / (many[device] - few[device])
        for device in devices
        if many[device] > few[device]
    ]
    if not budgets:
        return None
    budget = max(1, int(min(budgets)))
    logger.info("memory suffices for passes of %d tokens", budget)
    return budget


@contextmanager
def measure_memory(
    parameters: Sequence[Tensor], devices: Sequence[torch.device]
) -> Generator[Bytes]:
    """What a pass takes beyond what is there: on a GPU the peak, on the CPU what backward keeps.

    On the CPU the activations of a layer that is recomputed are not seen. The dictionary is filled
    when the block ends.
    """
    peak: Bytes = dict.fromkeys(devices, 0)
    gpus = [device for device in devices if device.type == "cuda"]
    before = {gpu: torch.cuda.memory_allocated(gpu) for gpu in gpus}
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    constant = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.device.type == "cpu" and storage.data_ptr() not in constant:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with saved_tensors_hooks(note, lambda tensor: tensor):
        yield peak
    for gpu in gpus:
        peak[gpu] = torch.cuda.max_memory_allocated(gpu) - before[gpu]
    if CPU in peak:
        peak[CPU] = sum(kept.values())


def find_free_bytes(device: torch.device) -> int:
    """Memory that can still be had, what torch's allocator keeps for itself included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    room = read_cgroup_room()
    available = read_available_bytes()
    return available if room is None else min(available, room)


def read_available_bytes(path: Path = Path("/proc/meminfo")) -> int:
    """Of the machine, what can be had without swapping."""
    return int(read_fields(path.read_text().replace(":", " "))["MemAvailable"]) * 1024


def read_cgroup_room(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container's limit leaves, cached files dropped; None where there is no limit."""
    for limit_file, used_file, stat_file, droppable in CGROUP_FILES:
        try:
            limit = (root / limit_file).read_text().strip()
            used = int((root / used_file).read_text())
            files = int(read_fields((root / stat_file).read_text()).get(droppable, 0))
        except OSError:
            continue
        return None if limit == "max" else max(0, int(limit) - used + files)
    return None


def read_fields(text: str) -> Mapping[str, str]:
    """Of lines such as `name 123 kB`."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: row[1] for row in rows if len(row) > 1}
