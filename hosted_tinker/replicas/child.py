"""A vLLM server as a child process: its command, its environment, its log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hosted_tinker.backend_configs import PytorchConfig
from hosted_tinker.errors import SettingsError
from hosted_tinker.sampling.request_checks import MAX_TOPK_LOGPROBS
from hosted_tinker.settings import Settings

HOST = "127.0.0.1"
STOP_TIMEOUT_S = 20.0
LOG_TAIL_BYTES = 20_000
PHASE_CHARACTERS = 80
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as --max-lora-rank (its LoRAConfig)."""
LOG_PREFIX = re.compile(r"^(\([^)]*\) )?[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d (\[[^]]*\] )?")
"""What vLLM's logger puts before a message."""

ERROR = re.compile(r"\b\w*Error: ")
"""How Python names what ended a process."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to start a vLLM server."""

    command: Sequence[str]
    environment: Mapping[str, str]
    port: int
    log_path: Path


def make_child_spec(
    settings: Settings, base_model: str, names: Sequence[str], gpus: Sequence[int], port: int
) -> ChildSpec:
    """`gpus` is empty for a vLLM on the CPU. The key in the environment is new for each spec."""
    environment = {**os.environ, **make_environment(gpus)}
    command = make_command(settings, base_model, names, max(1, len(gpus)), port)
    log_path = settings.state_dir.resolve() / f"vllm-{port}.log"
    return ChildSpec(command, environment, port, log_path)


def make_command(
    settings: Settings, base_model: str, names: Sequence[str], tensor_parallel: int, port: int
) -> list[str]:
    """The operator's own arguments come last, so that they win."""
    config = settings.backend_config
    length = config.max_context_length if isinstance(config, PytorchConfig) else None
    dtype = config.dtype if isinstance(config, PytorchConfig) else "auto"
    return [
        *(str(settings.vllm_python or sys.executable), "-m"),
        *("vllm.entrypoints.openai.api_server", "--model", base_model),
        *("--host", HOST, "--port", str(port), "--served-model-name", *names),
        *("--dtype", dtype, "--tensor-parallel-size", str(tensor_parallel)),
        *(("--max-model-len", str(length)) if length else ()),
        *("--enable-lora", "--max-loras", str(settings.vllm_max_loras)),
        *("--max-cpu-loras", str(max(settings.vllm_max_loras, settings.vllm_max_cpu_loras))),
        *("--max-lora-rank", str(round_up_rank(settings.vllm_max_lora_rank))),
        *("--logprobs-mode", "processed_logprobs", "--max-logprobs", str(MAX_TOPK_LOGPROBS)),
        "--disable-uvicorn-access-log",
        *shlex.split(settings.vllm_args),
    ]


def round_up_rank(rank: int) -> int:
    """To one that vLLM takes."""
    return next(accepted for accepted in LORA_RANKS if rank <= accepted)


def make_environment(gpus: Sequence[int]) -> dict[str, str]:
    """The key keeps other users of the machine from sampling and from loading adapters."""
    environment = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_API_KEY": secrets.token_urlsafe(32),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if gpus:
        # In nvidia-smi's order, which the indices are of.
        visible = ",".join(map(str, gpus))
        return environment | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible}
    # Without GPUs trainer and vLLM share the cores: threads are not bound to them, and do not spin.
    defaults = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    return environment | {name: os.environ.get(name, value) for name, value in defaults.items()}


def check_can_start(spec: ChildSpec) -> None:
    """Raises SettingsError if the port is taken, or vLLM is not installed there. Blocks."""
    try:
        socket.create_server((HOST, spec.port)).close()
    except OSError as error:
        raise SettingsError(f"vllm_port {spec.port} can't be used: {error.strerror}") from error
    python = spec.command[0]
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        found = subprocess.run([python, "-c", code], check=False, capture_output=True)
    except OSError as error:
        raise SettingsError(f"vllm_python {python!r} can't be run: {error.strerror}") from error
    if found.returncode != 0:
        raise SettingsError(
            f"vLLM is not installed in the environment of {python!r}; install it there, or set "
            "vllm_python to the Python of an environment that has it"
        )


class VllmChild:
    """One life of the server process."""

    def __init__(self, spec: ChildSpec) -> None:
        self._spec = spec
        self._process: asyncio.subprocess.Process | None = None
        self._pipe: int | None = None
        self._log_begin = 0

    async def start(self) -> None:
        """Starts the process; its log goes on after that of an earlier one."""
        reading, self._pipe = os.pipe()
        try:
            with self._spec.log_path.open("ab") as log:
                self._log_begin = log.tell()
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "hosted_tinker.replicas.guard", str(reading)),
                    *self._spec.command,
                    stdout=log,
                    stderr=log,
                    env=self._spec.environment,
                    pass_fds=[reading],
                    start_new_session=True,
                )
        finally:
            os.close(reading)

    @property
    def has_ended(self) -> bool:
        return self._process is None or self._process.returncode is not None

    async def stop(self) -> None:
        """Ends the process and all that it has started."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
        if self._process is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._process.wait()
        # Whatever is left, if the guard itself was killed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    def read_phase(self) -> str:
        """What the server says last that it is doing."""
        lines = self._read_lines()
        messages = [LOG_PREFIX.sub("", line) for line in lines if LOG_PREFIX.match(line)]
        return messages[-1][:PHASE_CHARACTERS] if messages else "starting"

    def describe_failure(self) -> str:
        """Why it ended, in its own words, and where all of them are."""
        lines = [LOG_PREFIX.sub("", line) for line in self._read_lines()]
        telling = [line for line in lines if ERROR.search(line)] or lines[-1:]
        return f"{telling[-1] if telling else 'no output'} (log: {self._spec.log_path})"

    def _read_lines(self) -> list[str]:
        """Of the end of this life's part of the log."""
        try:
            with self._spec.log_path.open("rb") as log:
                log.seek(max(self._log_begin, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except OSError:
            return []
        return [line.strip() for line in text.splitlines() if line.strip()]
