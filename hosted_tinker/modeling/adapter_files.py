"""Adapters on disk, in PEFT's layout: `adapter_model.safetensors` and `adapter_config.json`.

`PeftModel.from_pretrained` and vLLM read these directories as they are. Only safetensors is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hosted_tinker.errors import UserError
from hosted_tinker.types import LORA_ALPHA, LoraConfig

PEFT_PREFIX = "base_model.model."
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"


def save_adapter(
    directory: Path, state: Mapping[str, Tensor], lora: LoraConfig, base_model: str
) -> None:
    """Writes both files. `state` is named without PEFT's prefix, as `LoraModel` names it."""
    tensors = {f"{PEFT_PREFIX}{name}": tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    layers = sorted({name.removesuffix(".lora_A.weight") for name in state if "lora_A" in name})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.lora_rank,
        "lora_alpha": LORA_ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": sorted({layer.rsplit(".", 1)[-1] for layer in layers}),
        "hosted_tinker": {
            "seed": lora.seed,
            "train_attn": lora.train_attn,
            "train_mlp": lora.train_mlp,
            "train_unembed": lora.train_unembed,
        },
    }
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


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


def load_lora_config(directory: Path) -> LoraConfig:
    """The LoRA shape that `save_adapter` wrote. Raises UserError if it can't be read."""
    try:
        config = json.loads((directory / CONFIG_FILE).read_text())
        own = config["hosted_tinker"]
        return LoraConfig(
            lora_rank=config["r"],
            seed=own["seed"],
            train_attn=own["train_attn"],
            train_mlp=own["train_mlp"],
            train_unembed=own["train_unembed"],
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"checkpoint in {directory.name!r} has no readable LoRA configuration: {error!r}"
        ) from error
