"""Runs a real server process for a test, and talks to it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import tinker

API_KEY = "tml-test"
START_TIMEOUT_S = 180.0


@dataclass
class RunningServer:
    """A server process that answers on `url`."""

    url: str
    process: subprocess.Popen[bytes]
    log_path: Path
    state_dir: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def client(self) -> tinker.ServiceClient:
        """The official SDK, pointed at this server."""
        return tinker.ServiceClient(base_url=self.url, api_key=API_KEY)

    def openai_client(self, api_key: str = "none") -> openai.OpenAI:
        """The official OpenAI client, pointed at this server. It does not try again."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        """A raw request, for what the SDK would not send."""
        if body is not None:
            kwargs["json"] = body
        return httpx.post(f"{self.url}/api/v1/{path}", timeout=60, **kwargs)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}/api/v1/{path}", timeout=60)

    def wait_result(self, request_id: str) -> httpx.Response:
        """Polls as the SDK does, until the future is settled."""
        while True:
            answer = self.post("retrieve_future", {"request_id": request_id})
            if answer.status_code != 408:
                return answer


@contextlib.contextmanager
def running_server(
    tmp_path: Path, *flags: str, wait: bool = True, env: dict[str, str] | None = None
) -> Iterator[RunningServer]:
    """Starts `python -m hosted_tinker.api` with the flags, and stops it."""
    port = free_port()
    state_dir = tmp_path / "state"
    log_path = tmp_path / "server.log"
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "hosted_tinker.api"),
                *("--port", str(port), "--state-dir", str(state_dir)),
                *flags,
            ],
            stdout=log,
            stderr=log,
            env={**os.environ, **(env or {})},
        )
    server = RunningServer(f"http://127.0.0.1:{port}", process, log_path, state_dir)
    try:
        if wait:
            wait_healthy(server)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def wait_healthy(server: RunningServer, status: str = "ok") -> None:
    """Waits until healthz says `status`."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise AssertionError(f"server ended:\n{server.log}")
        with contextlib.suppress(httpx.TransportError):
            if server.get("healthz").json()["status"] == status:
                return
        time.sleep(0.05)
    raise AssertionError(f"server not healthy in {START_TIMEOUT_S} s:\n{server.log}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def to_json_flag(**config: Any) -> list[str]:
    """`--backend-config` with these keys."""
    return ["--backend-config", json.dumps(config)]
