"""Starts the servers that a benchmark measures, and says on what it ran."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from hosted_tinker.default_model import ensure_default_model

START_TIMEOUT_S = 600.0


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Flags that all benchmarks with a vLLM share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="directory; unset: SmolLM2-135M-Instruct")
    parser.add_argument(
        "--vllm-python",
        type=Path,
        default=Path(".venv-vllm/bin/python"),
        help="Python of vLLM's environment; `make vllm` builds one for the CPU",
    )
    parser.add_argument("--vllm-args", default="", help="more arguments for vLLM")
    return parser


@contextlib.contextmanager
def running_vllm(
    python: Path, model: Path, *, max_lora_rank: int = 64, args: str = ""
) -> Iterator[str]:
    """A vLLM server with adapters on. Yields its address."""
    port = free_port()
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "base", "--host", "127.0.0.1", "--port", str(port)),
        *("--enable-lora", "--max-loras", "4", "--max-cpu-loras", "32"),
        *("--max-lora-rank", str(max_lora_rank), "--max-model-len", "2048"),
        *("--logprobs-mode", "processed_logprobs", *shlex.split(args)),
    ]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(os.cpu_count()),
        "OMP_WAIT_POLICY": "PASSIVE",
        **os.environ,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
    }
    url = f"http://127.0.0.1:{port}"
    with running(command, f"{url}/health", environment):
        yield url


@contextlib.contextmanager
def running_server(*flags: str) -> Iterator[str]:
    """A hosted-tinker server. Yields its address."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as state_dir:
        command = [
            *(sys.executable, "-m", "hosted_tinker.api", "--port", str(port)),
            *("--state-dir", state_dir, *flags),
        ]
        with running(command, f"{url}/api/v1/healthz", dict(os.environ)):
            yield url


@contextlib.contextmanager
def running(command: list[str], health_url: str, environment: dict[str, str]) -> Iterator[None]:
    """A process, once its health check answers `ok`; its log is shown if it does not start."""
    # Ends the process as an exception does, so that what it started is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        with open(log.name, "w") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not is_healthy(health_url):
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"{shlex.join(command)} did not start:\n{log.read()[-3000:]}")
                time.sleep(0.5)
            yield
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def is_healthy(url: str) -> bool:
    try:
        answer = httpx.get(url, timeout=5)
    except httpx.TransportError:
        return False
    return answer.status_code == 200 and (not answer.content or answer.json()["status"] == "ok")


def cpu_flags() -> list[str]:
    """For a server in front of a vLLM that has no GPU."""
    return [] if shutil.which("nvidia-smi") else ["--vllm-url-on-cpu"]


def find_model(directory: Path | None) -> Path:
    """The directory, or the default model's, which is converted where it has not been."""
    return directory or ensure_default_model(lambda phase: print(phase, file=sys.stderr))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def describe_machine(vllm_python: Path | None = None) -> dict[str, Any]:
    """Hardware and versions."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    if vllm_python is not None:
        code = "import json, vllm; print(json.dumps(vllm.__version__))"
        output = subprocess.run(
            [str(vllm_python), "-c", code], capture_output=True, text=True, check=True
        ).stdout
        versions["vllm"] = json.loads(output.strip().splitlines()[-1])
    return {
        "cores": os.cpu_count(),
        "processor": read_processor(),
        "python": platform.python_version(),
        **versions,
    }


def read_processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
