"""Attention with the logarithms of the softmaxes' sums, which join results of parts of the keys.

Shape letters: B sequences, H heads, M queries, T keys, E head size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    is_causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """[B, H, M, E] with [B, H, T, E] keys. Returns that, and float32 [B, H, M]."""
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
        )
    return attend_plainly(query, key, value, scale, is_causal=is_causal, mask=mask)


def attend_plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    is_causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same as `attend`, by operations that every device has."""
    scores = (query.float() @ key.float().transpose(-1, -2)) * scale
    if is_causal:
        mask = torch.full_like(scores[0, 0], float("-inf")).triu(1)
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ value.float()).to(query.dtype), lse
