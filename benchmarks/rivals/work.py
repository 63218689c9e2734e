"""What a rival is asked to train on, and what it answers."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Work:
    """One round's work.

    Attributes:
        steps: token ids of the sequences of each optimizer step. The first step warms up.
        batch_size: most sequences of one pass; a step accumulates over several.
        pack_tokens: length of a pack, where sequences are packed; 0 pads them.
        sort: batches hold sequences of like length.
    """

    model: str
    steps: Sequence[Sequence[Sequence[int]]]
    dtype: str
    lora_rank: int
    lora_alpha: int
    train_unembed: bool
    batch_size: int
    pack_tokens: int
    sort: bool
    gradient_checkpointing: bool
    learning_rate: float

    @classmethod
    def read(cls, path: Path) -> Work:
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def read_work() -> Work:
    """What the command line names."""
    return Work.read(Path(sys.argv[1]))


def load_model(work: Work) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        work.model,
        dtype=DTYPES[work.dtype],
        device_map="cuda" if torch.cuda.is_available() else None,
    )


def make_lora_config(module: nn.Module, work: Work, *, train_unembed: bool) -> LoraConfig:
    """On every linear layer; on the output head only if asked."""
    linear = {
        name.rsplit(".", 1)[-1]
        for name, child in module.named_modules()
        if isinstance(child, nn.Linear)
    }
    targets = sorted(linear if train_unembed else linear - {"lm_head"})
    return LoraConfig(
        r=work.lora_rank,
        lora_alpha=work.lora_alpha,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )


def now() -> float:
    """Seconds, once the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def answer(result: dict[str, Any], *packages: str) -> None:
    """Prints the result, with the peak memory of this process, as the last line."""
    status = Path("/proc/self/status").read_text()
    peak_kib = next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]
    versions = {name: importlib.metadata.version(name) for name in ("torch", *packages)}
    print(json.dumps({**result, "peak_rss_gib": int(peak_kib) / 2**20, "versions": versions}))
