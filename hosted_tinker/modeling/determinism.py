"""Kernels that add in one order."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic_kernels(wanted: bool) -> Generator[None]:
    """On CUDA, until the block ends. Without effect on the CPU, whose kernels are so anyway.

    Raises:
        RuntimeError: within the block, for an operation that has no such kernel.
    """
    if not torch.cuda.is_available():
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted)
    # Filling new tensors would cost time, and is for finding faults only.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
