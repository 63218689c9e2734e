"""The plan of GPUs: checked before anything loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hosted_tinker.backend_configs import PytorchConfig
from hosted_tinker.errors import SettingsError
from hosted_tinker.replicas.gpus import (
    Gpu,
    measure_weights,
    parse_gpus,
    place_on_gpus,
    shares_device,
    split_gpus,
)
from hosted_tinker.settings import Settings

GB = 10**9
GPUS = [Gpu(index, "H100", 80 * GB, 79 * GB) for index in range(8)]


def settings(config: dict[str, Any] | None = None, **fields: Any) -> Settings:
    return Settings(backend_config=PytorchConfig(**(config or {})), **fields)


def place(config: dict[str, Any] | None = None, **fields: Any) -> PytorchConfig:
    placed = place_on_gpus(settings(config, **fields), GPUS, 16 * GB)
    assert isinstance(placed, PytorchConfig)
    return placed


def test_nvidia_smi_is_read() -> None:
    output = "0, NVIDIA H200, 143771, 143166\n1, NVIDIA H200, 143771, 20\n2, broken, [N/A], [N/A]\n"
    assert parse_gpus(output) == [
        Gpu(0, "NVIDIA H200", 143771 * 1024**2, 143166 * 1024**2),
        Gpu(1, "NVIDIA H200", 143771 * 1024**2, 20 * 1024**2),
    ]


def test_training_takes_what_vllm_leaves() -> None:
    assert place(vllm_gpus="4,5,6,7").train_gpus == "0,1,2,3"
    assert place({"train_gpus": "0,1"}, vllm_gpus="4,5,6,7").train_gpus == "0,1"
    assert place().train_gpus is None


@pytest.mark.parametrize(
    ("tensor_parallel", "groups"), [(None, [[4, 5, 6, 7]]), (2, [[4, 5], [6, 7]])]
)
def test_vllm_gpus_are_split_into_servers(
    tensor_parallel: int | None, groups: list[list[int]]
) -> None:
    assert split_gpus(settings(vllm_gpus="4,5,6,7", vllm_tp=tensor_parallel)) == groups


def test_vllm_on_the_cpu_is_one_server_without_gpus() -> None:
    assert split_gpus(settings(vllm_gpus="cpu")) == [[]]
    assert place({"train_gpus": "0"}, vllm_gpus="cpu").train_gpus == "0"


@pytest.mark.parametrize(
    ("config", "fields", "words"),
    [
        ({"train_gpus": "0,4"}, {"vllm_gpus": "4,5"}, "GPU 4 .* vllm_gpus"),
        ({"sampler_gpu": 5}, {"vllm_gpus": "4,5"}, "GPU 5 .* vllm_gpus"),
        ({}, {"vllm_gpus": "7,8"}, "vllm_gpus names GPU 8; this machine has: 0, 1"),
        ({"train_gpus": "9"}, {"vllm_gpus": "1"}, "train_gpus names GPU 9"),
        ({}, {"vllm_gpus": "4,4"}, "vllm_gpus names a GPU twice"),
        ({}, {"vllm_gpus": "4,5,6", "vllm_tp": 2}, "3 GPUs, which vllm_tp = 2 does not divide"),
        ({}, {"vllm_gpus": "0,1,2,3,4,5,6,7"}, "leaves none of 8 GPUs for training"),
    ],
)
def test_impossible_plans_are_refused(
    config: dict[str, Any], fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        place(config, **fields)


def test_weights_that_do_not_fit_are_refused() -> None:
    plan = settings({"train_gpus": "0,1"}, vllm_gpus="4,5,6,7", vllm_tp=2)
    assert place_on_gpus(plan, GPUS, 158 * GB)
    with pytest.raises(SettingsError, match=r"train_gpus = 0,1 has 158\.0 GB .* take 159\.0 GB"):
        place_on_gpus(plan, GPUS, 159 * GB)
    full = [*GPUS[:5], Gpu(5, "H100", 80 * GB, 1 * GB), *GPUS[6:]]
    with pytest.raises(SettingsError, match=r"vllm_gpus = 4,5 has 80\.0 GB"):
        place_on_gpus(plan, full, 100 * GB)


def test_without_nvidia_smi_only_what_is_asked_for_is_compared() -> None:
    assert place_on_gpus(settings({"train_gpus": "0"}, vllm_gpus="1"), None, 900 * GB)
    with pytest.raises(SettingsError, match="set train_gpus too"):
        place_on_gpus(settings(vllm_gpus="1"), None, None)
    with pytest.raises(SettingsError, match="give each its own"):
        place_on_gpus(settings({"train_gpus": "1"}, vllm_gpus="1"), None, None)


def test_weights_are_measured_where_the_model_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert measure_weights("org/model") is None
    model_dir = tmp_path / "models--org--model"
    for revision, size in (("old", 7), ("new", 500)):
        snapshot = model_dir / "snapshots" / revision
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").write_bytes(b"0" * size)
    (model_dir / "refs").mkdir()
    (model_dir / "refs" / "main").write_text("new")
    assert measure_weights("org/model") == 500
    assert measure_weights(str(model_dir / "snapshots" / "old")) == 7


@pytest.mark.parametrize(
    ("num_gpus", "config", "fields", "shared"),
    [
        (0, {}, {}, True),
        (1, {}, {}, True),
        (8, {}, {}, False),
        (8, {"train_gpus": "3"}, {}, True),
        (8, {"train_gpus": "3", "sampler_gpu": 3}, {}, True),
        (8, {"train_gpus": "3", "sampler_gpu": 4}, {}, False),
        (8, {"device_map": "single"}, {}, True),
        (1, {"share_base_model": False}, {}, False),
        (1, {"attn_implementation": "eager"}, {}, False),
        (0, {}, {"vllm_gpus": "cpu"}, False),
        (0, {}, {"vllm_gpus": "cpu", "embedded_fallback": True}, True),
        (2, {}, {"vllm_gpus": "1", "embedded_fallback": True}, True),
    ],
)
def test_one_device_is_shared(
    num_gpus: int, config: dict[str, Any], fields: dict[str, Any], shared: bool
) -> None:
    assert shares_device(settings(config, **fields), GPUS[:num_gpus]) == shared


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"training takes the GPUs \[0, 1, 2, 3, 4, 5, 6, 7\]"),
        ({"train_gpus": "1", "sampler_gpu": 0}, "sampler_gpu is 0 and training takes GPU 1"),
        ({"attn_implementation": "sdpa"}, "attn_implementation is 'sdpa'"),
    ],
)
def test_sharing_that_is_asked_for_and_impossible_is_refused(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        shares_device(settings({"share_base_model": True, **config}), GPUS)
