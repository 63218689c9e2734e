"""Checks of an adapter's configuration that every backend makes."""

from __future__ import annotations

from dataclasses import replace

from hosted_tinker.errors import UserError
from hosted_tinker.types import LoraConfig


def check_lora(lora: LoraConfig, max_lora_rank: int) -> None:
    """Raises UserError, naming the value and the range."""
    if not 1 <= lora.lora_rank <= max_lora_rank:
        raise UserError(f"LoRA rank is {lora.lora_rank}; this server accepts 1 to {max_lora_rank}")
    if not 0 <= lora.seed < 2**63:
        raise UserError(f"LoRA seed is {lora.seed}; accepted: 0 to 2**63 - 1")
    if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
        raise UserError(
            "train_attn, train_mlp and train_unembed are all false; at least one must be true"
        )


def check_same_shape(checkpoint: LoraConfig, run: LoraConfig) -> None:
    """Raises UserError, naming both, unless they differ at most in the seed."""
    if replace(checkpoint, seed=run.seed) != run:
        raise UserError(
            f"the checkpoint's adapter has {describe(checkpoint)}; the run's has {describe(run)}"
        )


def describe(lora: LoraConfig) -> str:
    return (
        f"rank {lora.lora_rank}, train_attn={lora.train_attn}, train_mlp={lora.train_mlp}, "
        f"train_unembed={lora.train_unembed}"
    )
