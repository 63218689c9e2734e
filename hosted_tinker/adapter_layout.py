"""The files of an adapter's directory, and its two JSON files. Free of torch.

`adapter_config.json` is PEFT's and holds nothing else; what PEFT has no field for stands in
`lora_config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from hosted_tinker.errors import UserError
from hosted_tinker.types import LORA_ALPHA, LoraConfig

WEIGHTS_FILE = "adapter_model.safetensors"
PEFT_CONFIG_FILE = "adapter_config.json"
LORA_CONFIG_FILE = "lora_config.json"
OPTIMIZER_FILE = "optimizer.safetensors"


def write_configs(
    directory: Path, lora: LoraConfig, base_model: str, target_modules: Collection[str]
) -> None:
    """Writes both JSON files. `target_modules` are the last parts of the adapted layers' names."""
    peft_config = {
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
        "target_modules": sorted(target_modules),
    }
    for name, content in ((PEFT_CONFIG_FILE, peft_config), (LORA_CONFIG_FILE, asdict(lora))):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")


def read_lora_config(directory: Path) -> LoraConfig:
    """What `write_configs` was given. Raises UserError if it can't be read."""
    try:
        return LoraConfig(**json.loads((directory / LORA_CONFIG_FILE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"checkpoint in {directory.name!r} has no readable LoRA configuration: {error!r}"
        ) from error
