"""Adapters on disk, in PEFT's layout.

`PeftModel.from_pretrained` and vLLM read these directories as they are. Only safetensors is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hosted_tinker.adapter_layout import WEIGHTS_FILE, write_configs
from hosted_tinker.errors import UserError
from hosted_tinker.types import LoraConfig

PEFT_PREFIX = "base_model.model."


def save_adapter(
    directory: Path, state: Mapping[str, Tensor], lora: LoraConfig, base_model: str
) -> None:
    """Writes weights and configuration. `state` is named without PEFT's prefix, as `LoraModel` names it."""
    tensors = {f"{PEFT_PREFIX}{name}": tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    layers = {name.removesuffix(".lora_A.weight") for name in state if "lora_A" in name}
    target_modules = {layer.rsplit(".", 1)[-1] for layer in layers}
    write_configs(directory, lora, base_model, target_modules)


def load_adapter_weights(directory: Path) -> dict[str, Tensor]:
    """Float32 tensors on the CPU, named as `LoraModel` names them. Raises UserError if broken."""
    try:
        tensors = load_file(directory / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"checkpoint weights in {directory.name!r} cannot be read: {error}"
        ) from error
    return {
        name.removeprefix(PEFT_PREFIX): tensor.to(torch.float32) for name, tensor in tensors.items()
    }
