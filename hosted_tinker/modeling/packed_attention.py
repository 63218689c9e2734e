"""Attention over sequences that lie one after another in one row, with no padding between them.

`PACKED` is the name of an attention function of this server in transformers' table. Which positions
belong together, and where keys and values lie, is said by an `AttentionLayout` that travels through
the decoder as the keyword `attention_layout`; a call without it is plain causal attention.

Shape letters: H query heads, G key and value heads, P positions of all sequences, E head size, N
sequences of one length, L that length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

PACKED = "hosted_tinker_packed"
UNKNOWN = ("softcap", "s_aux", "position_bias")
"""Arguments of attention functions that change the result, and that this one does not compute."""


class AttentionLayout(Protocol):
    """How the positions of a pass attend to one another, and to those of passes before."""

    def attend(
        self,
        layer: int,
        query_HPE: Tensor,
        key_GPE: Tensor,
        value_GPE: Tensor,
        scaling: float | None,
        window: int | None,
    ) -> Tensor:
        """Returns [P, H, E].

        Args:
            layer: index of the decoder layer.
            window: how many positions, itself included, a position sees at most.
        """
        ...


def packed_attention(
    module: nn.Module,
    query_1HPE: Tensor,
    key_1GPE: Tensor,
    value_1GPE: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_layout: AttentionLayout | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Returns [1, P, H, E], and no weights.

    Raises:
        NotImplementedError: the architecture asks for more than a layout computes.
    """
    unknown = [name for name in UNKNOWN if kwargs.get(name) is not None]
    if unknown:
        raise NotImplementedError(f"attention with {', '.join(unknown)}")
    if attention_layout is None:
        return sdpa_attention_forward(
            module, query_1HPE, key_1GPE, value_1GPE, attention_mask, scaling=scaling, **kwargs
        )
    layer: Any = getattr(module, "layer_idx", None)
    out_PHE = attention_layout.attend(
        layer, query_1HPE[0], key_1GPE[0], value_1GPE[0], scaling, kwargs.get("sliding_window")
    )
    return out_PHE[None], None


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Each sequence sees itself, causally. `lengths` are in the order of the row."""

    lengths: Sequence[int]

    def attend(
        self,
        layer: int,
        query_HPE: Tensor,
        key_GPE: Tensor,
        value_GPE: Tensor,
        scaling: float | None,
        window: int | None,
    ) -> Tensor:
        """Implements `AttentionLayout`."""
        if window is not None and window >= max(self.lengths):
            window = None
        attend = attend_varlen if can_use_varlen(query_HPE, value_GPE) else attend_by_length
        return attend(query_HPE, key_GPE, value_GPE, self.lengths, scaling, window)


def can_use_varlen(query_HPE: Tensor, value_GPE: Tensor) -> bool:
    """Whether torch's FlashAttention takes them: 16 bits, heads of one size that is a multiple of 8 and
    at most 256, Ampere or newer."""
    head_size = query_HPE.shape[-1]
    return (
        query_HPE.is_cuda
        and query_HPE.dtype in (torch.bfloat16, torch.float16)
        and head_size == value_GPE.shape[-1]
        and head_size % 8 == 0
        and head_size <= 256
        and torch.cuda.get_device_capability(query_HPE.device) >= (8, 0)
    )


def attend_varlen(
    query_HPE: Tensor,
    key_GPE: Tensor,
    value_GPE: Tensor,
    lengths: Sequence[int],
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """One kernel for all sequences. Returns [P, H, E]."""
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    bounds = bounds.to(query_HPE.device, non_blocking=True)
    out = varlen_attn(
        query_HPE.transpose(0, 1),
        key_GPE.transpose(0, 1),
        value_GPE.transpose(0, 1),
        bounds,
        bounds,
        max(lengths),
        max(lengths),
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query_HPE.shape[0] != key_GPE.shape[0],
    )
    assert isinstance(out, Tensor)
    return out


def attend_by_length(
    query_HPE: Tensor,
    key_GPE: Tensor,
    value_GPE: Tensor,
    lengths: Sequence[int],
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """One kernel for each run of sequences of one length. Returns [P, H, E]."""
    if query_HPE.is_cuda:
        # In float32 torch's kernels there take one key head for each query head only, and what they
        # do not take is computed with all scores in memory.
        repeats = query_HPE.shape[0] // key_GPE.shape[0]
        if repeats > 1:
            key_GPE, value_GPE = (x.repeat_interleave(repeats, 0) for x in (key_GPE, value_GPE))
    parts: list[Tensor] = []
    for start, count, length in find_groups(lengths):
        query, key, value = (
            part[:, start : start + count * length].unflatten(1, (count, length)).transpose(0, 1)
            for part in (query_HPE, key_GPE, value_GPE)
        )
        is_banded = window is not None and window < length
        out_NHLE = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=make_band(length, window, query.device) if is_banded else None,
            scale=scaling,
            is_causal=not is_banded,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        parts.append(out_NHLE.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)


def find_groups(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first position, number of sequences, their length) of each run of equal lengths."""
    start = 0
    for length, group in groupby(lengths):
        count = len(list(group))
        yield start, count, length
        start += count * length


def make_band(length: int, window: int | None, device: torch.device) -> Tensor:
    """Bool [L, L], true where a position may look: at itself and the `window - 1` before it."""
    assert window is not None
    everything = torch.ones(length, length, dtype=torch.bool, device=device)
    return everything.tril().triu(1 - window)


AttentionInterface.register(PACKED, packed_attention)
