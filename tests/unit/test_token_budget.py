"""What fits the memory, by a measurement."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hosted_tinker.training import token_budget
from hosted_tinker.training.token_budget import (
    find_free_bytes,
    find_token_budget,
    read_available_bytes,
    read_cgroup_room,
)

WIDTH = 1000


def keep_one_tensor(num_tokens: int) -> None:
    """exp keeps its result: 4 bytes of each element; the addition keeps nothing."""
    x = torch.zeros(num_tokens, WIDTH, requires_grad=True)
    (x + 1).exp().sum().backward()


@pytest.mark.parametrize("probe_tokens", [1, 8])
def test_the_budget_is_half_of_the_free_memory_over_what_a_token_keeps(
    monkeypatch: pytest.MonkeyPatch, probe_tokens: int
) -> None:
    monkeypatch.setattr(token_budget, "find_free_bytes", lambda _: 40 * WIDTH * 100)
    assert find_token_budget(keep_one_tensor, [torch.zeros(1)], probe_tokens) == 500


def test_weights_that_are_there_at_any_size_are_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The product keeps its input of 4 bytes each, and the weights for their gradient."""
    weights = torch.zeros(WIDTH, 5, requires_grad=True)

    def multiply(num_tokens: int) -> None:
        (torch.zeros(num_tokens, WIDTH, requires_grad=True) @ weights).sum().backward()

    monkeypatch.setattr(token_budget, "find_free_bytes", lambda _: 40 * WIDTH * 100)
    assert find_token_budget(multiply, [weights], 8) == 500


def test_what_takes_no_more_with_more_tokens_gives_no_budget() -> None:
    assert find_token_budget(lambda _: keep_one_tensor(3), [torch.zeros(1)], 4) is None


def test_the_budget_is_never_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_budget, "find_free_bytes", lambda _: 0)
    assert find_token_budget(keep_one_tensor, [torch.zeros(1)], 4) == 1


def test_a_containers_limit_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_cgroup_room(tmp_path) is None
    old = tmp_path / "memory"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("1000\n")
    (old / "memory.usage_in_bytes").write_text("300\n")
    (old / "memory.stat").write_text("cache 90\ntotal_inactive_file 50\n")
    assert read_cgroup_room(tmp_path) == 750
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.stat").write_text("inactive_file 10\n")
    assert read_cgroup_room(tmp_path) is None
    (tmp_path / "memory.max").write_text("200\n")
    assert read_cgroup_room(tmp_path) == 0
    monkeypatch.setattr(token_budget, "read_cgroup_room", lambda: 0)
    assert find_free_bytes(torch.device("cpu")) == 0


def test_the_machines_memory_is_read(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  16 kB\nMemAvailable:  7 kB\nHugePages: 0\n")
    assert read_available_bytes(tmp_path / "meminfo") == 7 * 1024
