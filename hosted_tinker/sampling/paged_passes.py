"""Forward passes of the embedded engine: positions of many sequences, whatever their adapters.

Shape letters: P positions of a pass, R rows of logits, D hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hosted_tinker.backend_configs import PytorchConfig
from hosted_tinker.modeling.base_model import BaseModel
from hosted_tinker.modeling.decoder_pass import run_with_layout
from hosted_tinker.modeling.lora import Routing, Segment, make_segments
from hosted_tinker.modeling.packed_attention import PackedSequences
from hosted_tinker.sampling.adapters import find_key
from hosted_tinker.sampling.kv_cache import KvCache, LayerShape
from hosted_tinker.sampling.paged_attention import lay_out
from hosted_tinker.sampling.spans import Span
from hosted_tinker.types import Int64Array

logger = logging.getLogger(__name__)

PAGE_SIZE_ON_CPU = 64
PAGE_SIZE_ON_GPU = 256
"""What FlashAttention's kernels for pages take."""
SHARE_OF_HOST_MEMORY = 0.125
SHARE_OF_FREE_GPU_MEMORY = 0.5
"""A trainer may use the same device."""
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Part:
    """What a pass computes of one sequence."""

    adapter: str | None
    span: Span
    tokens: Int64Array


class PagedPasses:
    """Runs the model, with the routings set for each pass."""

    def __init__(
        self, base: BaseModel, routing: Routing, head_routing: Routing, cache: KvCache
    ) -> None:
        """The model's attention must be `PACKED`."""
        self._base = base
        self._routing = routing
        self._head_routing = head_routing
        self._cache = cache

    def run(
        self, parts: Sequence[Part], num_rows: int | None = None, tile: int | None = None
    ) -> Tensor:
        """Last hidden states [P, D], by part. Parts of one adapter should stand together.

        Keys and values are written; the caller counts them with `KvCache.advance`.

        Args:
            num_rows: pads the pass to so many, and has attention and, by `tile` rows, low-rank products
                computed so that they do not depend on what shares the pass. Returns the pads too.
        """
        starts = [part.span.start for part in parts]
        counts = [part.span.count for part in parts]
        position_P = np.concatenate(
            [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        )
        tokens_P = np.concatenate([part.tokens for part in parts])
        if num_rows is not None:
            padding = (0, num_rows - len(tokens_P))
            position_P, tokens_P = np.pad(position_P, padding), np.pad(tokens_P, padding)
        device = self._base.input_device
        with self._routing.during(route([part.adapter for part in parts], counts), tile):
            return run_with_layout(
                self._base,
                torch.from_numpy(tokens_P).to(device),
                torch.from_numpy(position_P).to(device),
                lay_out(self._cache, [part.span for part in parts], invariant=num_rows is not None),
            )

    def compute_logits(
        self, hidden_RD: Tensor, adapters: Sequence[str | None], tile: int | None = None
    ) -> Tensor:
        """Float32 [R, V]. `adapters` are those of the rows, as far as these are wanted."""
        with self._head_routing.during(route(adapters, [1] * len(adapters)), tile):
            return self._base.compute_logits(hidden_RD)


def route(adapters: Sequence[str | None], lengths: Sequence[int]) -> list[Segment]:
    keys = (None if adapter is None else find_key(adapter) for adapter in adapters)
    return make_segments(keys, lengths)


class MeasuredLayers:
    """An attention layout that notes what keys and values each layer has."""

    def __init__(self, length: int) -> None:
        self._attention = PackedSequences([length])
        self.by_index: dict[int, LayerShape] = {}

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
        key, value = ((x.shape[0], x.shape[2]) for x in (key_GPE, value_GPE))
        self.by_index[layer] = LayerShape(key, value, key_GPE.dtype, key_GPE.device)
        return self._attention.attend(layer, query_HPE, key_GPE, value_GPE, scaling, window)


@torch.inference_mode()
def measure_layers(base: BaseModel) -> list[LayerShape]:
    """By one pass. Raises ValueError if the layers are not counted from 0 on."""
    layout = MeasuredLayers(length=2)
    tokens_P = torch.zeros(2, dtype=torch.int64, device=base.input_device)
    run_with_layout(base, tokens_P, torch.arange(2, device=base.input_device), layout)
    if sorted(layout.by_index) != list(range(len(layout.by_index))) or not layout.by_index:
        raise ValueError(f"layers with attention are {sorted(layout.by_index)}")
    return [layout.by_index[index] for index in range(len(layout.by_index))]


def allocate_cache(base: BaseModel, layers: Sequence[LayerShape], config: PytorchConfig) -> KvCache:
    """As large as the settings or the device say, but no larger than could ever be of use."""
    device = base.input_device
    page_size = PAGE_SIZE_ON_CPU if device.type == "cpu" else PAGE_SIZE_ON_GPU
    page_bytes = page_size * sum(layer.num_bytes for layer in layers)
    if config.sampling_cache_gib is not None:
        num_bytes = config.sampling_cache_gib * GIB
    elif device.type == "cpu":
        num_bytes = SHARE_OF_HOST_MEMORY * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        num_bytes = SHARE_OF_FREE_GPU_MEMORY * torch.cuda.mem_get_info(device)[0]
    pages_of_a_context = -(-base.context_length // page_size) + 1
    most = 2 * config.max_sampling_sequences * pages_of_a_context
    # Page 0 is for padding, and the least that can serve is a sequence beside its prompt's copy.
    num_pages = max(3, min(most, int(num_bytes / page_bytes))) + 1
    logger.info(
        "kv cache positions=%d gib=%.2f", num_pages * page_size, num_pages * page_bytes / GIB
    )
    return KvCache(layers, num_pages, page_size)
