"""Nothing that a child has started outlives it, its guard or the server."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hosted_tinker.replicas.child import ChildSpec, VllmChild

COMMAND = ["sh", "-c", "sleep 600 & echo $$ $! && sleep 600"]
"""A server with a child of its own, which would outlive it. It says both ids."""
WAIT_S = 20.0
PARENT = """
import asyncio, os, sys
from pathlib import Path
from hosted_tinker.replicas.child import ChildSpec, VllmChild

async def main():
    await VllmChild(ChildSpec(sys.argv[2:], dict(os.environ), 1, Path(sys.argv[1]))).start()
    await asyncio.sleep(600)

asyncio.run(main())
"""


def read_pids(log_path: Path) -> list[int]:
    wait_until(lambda: log_path.exists() and log_path.read_text().endswith("\n"))
    return [int(pid) for pid in log_path.read_text().split()]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """A dead process that nobody has waited for does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("killed", ["none", "server", "guard", "guard and server"])
def test_nothing_is_left_of_a_child(tmp_path: Path, killed: str) -> None:
    child = VllmChild(ChildSpec(COMMAND, dict(os.environ), 1, tmp_path / "log"))
    with asyncio.Runner() as runner:
        runner.run(child.start())
        pids = read_pids(tmp_path / "log")
        guard = os.getpgid(pids[0])
        assert all(map(is_alive, [guard, *pids]))
        if "guard" in killed:
            os.kill(guard, signal.SIGKILL)
        if "server" in killed:
            os.kill(pids[0], signal.SIGKILL)
        runner.run(child.stop())
        assert child.has_ended
    wait_until(lambda: not any(map(is_alive, pids)))


def test_a_server_that_dies_takes_its_children_along(tmp_path: Path) -> None:
    child = VllmChild(ChildSpec(COMMAND, dict(os.environ), 1, tmp_path / "log"))
    with asyncio.Runner() as runner:
        runner.run(child.start())
        pids = read_pids(tmp_path / "log")
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, pids)))
        runner.run(child.stop())


def test_nothing_is_left_when_the_parent_is_killed(tmp_path: Path) -> None:
    words = [sys.executable, "-c", PARENT, str(tmp_path / "log"), *COMMAND]
    parent = subprocess.Popen(words)
    pids = read_pids(tmp_path / "log")
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(map(is_alive, pids)))
