"""What fits the memory, by a measurement."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hosted_tinker.training import token_budget
from hosted_tinker.training.token_budget import (
    find_token_budget,
    read_available_bytes,
    read_cgroup_room,
)

WIDTH = 1000
CPU = torch.device("cpu")


def keep_one_tensor(num_tokens: int) -> None:
    """exp keeps its result: 4 bytes of each element; the addition keeps nothing."""
    x = torch.zeros(num_tokens, WIDTH, requires_grad=True)
    (x + 1).exp().sum().backward()


@pytest.mark.parametrize("probe_tokens", [1, 8])
def test_the_budget_is_half_of_the_free_memory_over_what_a_token_keeps(
    monkeypatch: pytest.MonkeyPatch, probe_tokens: int
) -> None:
    monkeypatch.setattr(token_budget, "find_free_bytes", lambda _: 40 * WIDTH * 100)
    assert find_token_budget(keep_one_tensor, [CPU], probe_tokens) == 500


def test_the_budget_is_never_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_budget, "find_free_bytes", lambda _: 0)
    assert find_token_budget(keep_one_tensor, [CPU], 4) == 1


def test_a_containers_limit_is_read(tmp_path: Path) -> None:
    assert read_cgroup_room(tmp_path) is None
    old = tmp_path / "memory"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("1000\n")
    (old / "memory.usage_in_bytes").write_text("300\n")
    assert read_cgroup_room(tmp_path) == 700
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("300\n")
    assert read_cgroup_room(tmp_path) is None
    (tmp_path / "memory.max").write_text("200\n")
    assert read_cgroup_room(tmp_path) == 0


def test_the_machines_memory_is_read(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  16 kB\nMemAvailable:  7 kB\nHugePages: 0\n")
    assert read_available_bytes(tmp_path / "meminfo") == 7 * 1024
