"""How a vLLM server is started."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from hosted_tinker.backend_configs import PytorchConfig
from hosted_tinker.errors import SettingsError
from hosted_tinker.replicas.child import (
    ChildSpec,
    check_can_start,
    make_child_spec,
    make_environment,
)
from hosted_tinker.settings import Settings


def make(gpus: list[int], **fields: Any) -> ChildSpec:
    config = PytorchConfig(max_context_length=fields.pop("max_context_length", None))
    settings = Settings(backend_config=config, vllm_gpus="0", **fields)
    return make_child_spec(settings, "org/model", ["org/model", "alias"], gpus, 8001)


def flag(spec: ChildSpec, name: str) -> str:
    """The last value that the command gives."""
    last = max(i for i, word in enumerate(spec.command) if word == name)
    return spec.command[last + 1]


def test_the_command_says_all_that_the_settings_say() -> None:
    spec = make(
        [4, 5],
        vllm_python=Path("/opt/vllm/bin/python"),
        vllm_max_lora_rank=40,
        vllm_max_loras=3,
        max_context_length=2048,
        vllm_args="--gpu-memory-utilization 0.5 --max-loras 7",
    )
    assert spec.command[0] == "/opt/vllm/bin/python"
    assert flag(spec, "--model") == "org/model"
    assert flag(spec, "--tensor-parallel-size") == "2"
    assert flag(spec, "--max-lora-rank") == "64"
    assert flag(spec, "--max-model-len") == "2048"
    assert flag(spec, "--logprobs-mode") == "processed_logprobs"
    assert flag(spec, "--host") == "127.0.0.1"
    assert flag(spec, "--max-loras") == "7"
    at = list(spec.command).index("--served-model-name")
    assert list(spec.command[at + 1 : at + 3]) == ["org/model", "alias"]


def test_the_child_sees_its_gpus_and_a_key_of_its_own() -> None:
    one, other = make([4, 5]), make([4, 5])
    assert one.environment["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert one.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert len(one.environment["VLLM_API_KEY"]) > 30
    assert one.environment["VLLM_API_KEY"] != other.environment["VLLM_API_KEY"]


def test_what_the_operator_has_set_for_the_cpu_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_environment([])["VLLM_CPU_KVCACHE_SPACE"] == "1"
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "8")
    assert make_environment([])["VLLM_CPU_KVCACHE_SPACE"] == "8"


def test_a_port_that_is_taken_is_named() -> None:
    spec = make([0], vllm_python=Path(sys.executable))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        busy = ChildSpec(spec.command, spec.environment, port, spec.log_path)
        with pytest.raises(SettingsError, match=f"vllm_port {port} can't be used: Address already"):
            check_can_start(busy)


@pytest.mark.parametrize(
    ("python", "words"),
    [("/no/such/python", "can't be run: No such file"), (sys.executable, "vLLM is not installed")],
)
def test_an_environment_without_vllm_is_named(python: str, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    spec = ChildSpec([python], {}, port, Path("log"))
    with pytest.raises(SettingsError, match=words) as raised:
        check_can_start(spec)
    assert python in str(raised.value)
