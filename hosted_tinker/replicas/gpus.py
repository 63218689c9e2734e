"""Which GPUs train and which sample: checked before anything loads."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hosted_tinker.backend_configs import BackendConfig, PytorchConfig
from hosted_tinker.errors import SettingsError
from hosted_tinker.settings import Settings

MIB = 1024**2
QUERY = (
    "nvidia-smi",
    "--query-gpu=index,name,memory.total,memory.free",
    "--format=csv,noheader,nounits",
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine; memory in bytes."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int


def list_gpus() -> list[Gpu] | None:
    """None where the driver's tool is missing, or fails: nothing is known then. Blocks."""
    try:
        output = subprocess.run(QUERY, check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_gpus(output.stdout)


def parse_gpus(output: str) -> list[Gpu]:
    """Rows such as `0, NVIDIA H200, 143771, 143166`, in MiB. Rows without memory (MIG) are left out."""
    gpus: list[Gpu] = []
    for line in output.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and fields[0].isdigit() and fields[2].isdigit() and fields[3].isdigit():
            total, free = int(fields[2]) * MIB, int(fields[3]) * MIB
            gpus.append(Gpu(int(fields[0]), fields[1], total, free))
    return gpus


def split_gpus(settings: Settings) -> list[list[int]]:
    """The GPUs of each vLLM server; one server with none on the CPU."""
    if settings.vllm_gpus == "cpu":
        return [[]]
    indices = parse_indices(settings.vllm_gpus)
    size = settings.vllm_tp or len(indices)
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def place_on_gpus(
    settings: Settings, gpus: Sequence[Gpu] | None, model_bytes: int | None
) -> BackendConfig:
    """The backend's configuration, with GPUs that vLLM does not take where none are named.

    Args:
        gpus: those of the machine; None if not known, and then only overlaps are checked.
        model_bytes: of the base model's weights; None if not known.

    Raises:
        SettingsError: GPUs are named that do not exist, or twice, or are too small.
    """
    config = settings.backend_config
    if not isinstance(config, PytorchConfig):
        return config
    sampling = [] if settings.vllm_gpus in (None, "cpu") else parse_indices(settings.vllm_gpus)
    if settings.vllm_tp is not None and sampling and len(sampling) % settings.vllm_tp:
        raise SettingsError(
            f"vllm_gpus names {len(sampling)} GPUs, which vllm_tp = {settings.vllm_tp} does not divide"
        )
    if sampling and config.train_gpus is None:
        if gpus is None:
            raise SettingsError("vllm_gpus is set, nvidia-smi can't be run: set train_gpus too")
        rest = [gpu.index for gpu in gpus if gpu.index not in sampling]
        if not rest:
            raise SettingsError(
                f"vllm_gpus = {settings.vllm_gpus!r} leaves none of {len(gpus)} GPUs for training"
            )
        config = config.model_copy(update={"train_gpus": ",".join(map(str, rest))})
    training = parse_indices(config.train_gpus)
    own = [*training, *([config.sampler_gpu] if config.sampler_gpu is not None else [])]
    if shared := sorted(set(sampling) & set(own)):
        raise SettingsError(
            f"GPU {shared[0]} is to train or sample for the backend and is in vllm_gpus too; "
            "give each its own"
        )
    if gpus is None:
        return config
    check_exist({"train_gpus": training, "vllm_gpus": sampling, "sampler_gpu": own}, gpus)
    if model_bytes is not None:
        check_memory(gpus, training, model_bytes, "train_gpus")
        for group in split_gpus(settings) if sampling else []:
            check_memory(gpus, group, model_bytes, "vllm_gpus")
    return config


def shares_device(settings: Settings, gpus: Sequence[Gpu] | None) -> bool:
    """Whether one process trains and runs the embedded engine, on one base model.

    Args:
        gpus: those of the machine; None if not known.

    Raises:
        SettingsError: `share_base_model` is asked for, and can't be.
    """
    config = settings.backend_config
    if not isinstance(config, PytorchConfig) or not settings.uses_embedded_engine:
        return False
    if config.share_base_model is False:
        return False
    obstacle = find_sharing_obstacle(settings, config, gpus)
    if obstacle and config.share_base_model:
        raise SettingsError(f"share_base_model is true, but {obstacle}")
    return obstacle is None


def find_sharing_obstacle(
    settings: Settings, config: PytorchConfig, gpus: Sequence[Gpu] | None
) -> str | None:
    if config.attn_implementation != "auto":
        return f"attn_implementation is {config.attn_implementation!r}; accepted with it: 'auto'"
    if gpus is None and Path("/dev/nvidia0").exists():
        return "nvidia-smi, which tells how many GPUs there are, can't be run"
    if not gpus:
        return None
    placed = place_on_gpus(settings, gpus, model_bytes=None)
    assert isinstance(placed, PytorchConfig)
    training = parse_indices(placed.train_gpus) or list_visible(gpus)
    if len(training) > 1 and placed.device_map == "auto":
        return f"training takes the GPUs {training}; name one in train_gpus"
    if placed.sampler_gpu not in (None, training[0]):
        return f"sampler_gpu is {placed.sampler_gpu} and training takes GPU {training[0]}"
    return None


def list_visible(gpus: Sequence[Gpu]) -> list[int]:
    """Indices of the GPUs that CUDA_VISIBLE_DEVICES leaves, if it names them by index."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if re.fullmatch(r"\d+(,\d+)*", named):
        return parse_indices(named)
    return [gpu.index for gpu in gpus]


def parse_indices(indices: str | None) -> list[int]:
    return [int(index) for index in indices.split(",")] if indices else []


def check_exist(named: dict[str, list[int]], gpus: Sequence[Gpu]) -> None:
    existing = {gpu.index for gpu in gpus}
    for setting, indices in named.items():
        for index in indices:
            if index not in existing:
                found = ", ".join(map(str, sorted(existing))) or "none"
                raise SettingsError(f"{setting} names GPU {index}; this machine has: {found}")
        if setting != "sampler_gpu" and len(set(indices)) < len(indices):
            raise SettingsError(f"{setting} names a GPU twice: {indices}")


def check_memory(
    gpus: Sequence[Gpu], indices: Sequence[int], model_bytes: int, setting: str
) -> None:
    """The weights alone must fit into what is free; activations and caches need more."""
    free = sum(gpu.free_bytes for gpu in gpus if gpu.index in indices)
    if indices and free < model_bytes:
        raise SettingsError(
            f"{setting} = {','.join(map(str, indices))} has {free / 1e9:.1f} GB of memory free; the "
            f"base model's weights alone take {model_bytes / 1e9:.1f} GB"
        )


def measure_weights(base_model: str) -> int | None:
    """Bytes of the safetensors files of a local model, or of one in the hub's cache.

    None for a model that is still to be fetched.
    """
    directory = Path(base_model)
    if not directory.is_dir():
        directory = find_in_hub_cache(base_model)
    return sum(file.stat().st_size for file in directory.glob("*.safetensors")) or None


def find_in_hub_cache(model_id: str) -> Path:
    """Where huggingface_hub keeps the model's newest revision; the directory may not exist."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    model_dir = cache / f"models--{model_id.replace('/', '--')}"
    revision = model_dir / "refs" / "main"
    return model_dir / "snapshots" / (revision.read_text() if revision.is_file() else "none")
