"""Attention of a pass over keys and values in pages.

A span sees everything of its sequence before it, and itself causally. Where torch's FlashAttention
takes pages (`PagedSpans`), one kernel does all; elsewhere `gathered_attention` does it, and
`tiled_attention` where results must not depend on what shares the pass.

Shape letters: P positions of a pass, H query heads, G key and value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad

from hosted_tinker.modeling.packed_attention import can_use_varlen
from hosted_tinker.sampling.gathered_attention import GatheredSpans
from hosted_tinker.sampling.kv_cache import KvCache
from hosted_tinker.sampling.spans import Span
from hosted_tinker.sampling.tiled_attention import TiledSpans


def lay_out(cache: KvCache, spans: Sequence[Span], *, invariant: bool = False) -> SpanLayout:
    """How the spans of a pass attend, in their order. Room for them must be reserved.

    Args:
        invariant: what a position gets depends on its sequence only, bit for bit. There may be more
            positions than those of the spans; they get zeros.
    """
    slots = [cache.find_slots(one.stored, one.start, one.stop) for one in spans]
    return SpanLayout(cache, torch.from_numpy(np.concatenate(slots)), spans, invariant)


class SpanLayout:
    """Writes new keys and values where they belong, and attends. Plans each way of it once."""

    def __init__(
        self, cache: KvCache, slots_P: Tensor, spans: Sequence[Span], invariant: bool
    ) -> None:
        self._cache = cache
        self._slots_P = slots_P
        self._num_positions = len(slots_P)
        self._spans = spans
        self._invariant = invariant
        self._paged: PagedSpans | None = None
        self._gathered: GatheredSpans | None = None
        self._tiled: TiledSpans | None = None

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
        if window is not None and window < max(span.stop for span in self._spans):
            raise NotImplementedError("attention with a window over pages")
        count, padding = self._num_positions, query_HPE.shape[1] - self._num_positions
        query_HPE, key_GPE, value_GPE = (x[:, :count] for x in (query_HPE, key_GPE, value_GPE))
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        # Kept there: copying would hold up the device once in every layer.
        self._slots_P = self._slots_P.to(keys.device)
        keys.index_copy_(0, self._slots_P, key_GPE.transpose(0, 1))
        values.index_copy_(0, self._slots_P, value_GPE.transpose(0, 1))
        scale = query_HPE.shape[-1] ** -0.5 if scaling is None else scaling
        page_size = self._cache.page_size
        if can_use_varlen(query_HPE, value_GPE):
            self._paged = self._paged or PagedSpans(self._spans, page_size)
            out_PHE = self._paged.attend(query_HPE, keys, values, scale)
        elif self._invariant:
            self._tiled = self._tiled or TiledSpans(self._spans, page_size)
            out_PHE = self._tiled.attend(query_HPE, keys, values, scale)
        else:
            self._gathered = self._gathered or GatheredSpans(self._spans, page_size)
            out_PHE = self._gathered.attend(query_HPE, key_GPE, value_GPE, (keys, values), scale)
        return pad(out_PHE, (0, 0, 0, 0, 0, padding)) if padding else out_PHE


class PagedSpans:
    """Through torch's FlashAttention with a table of pages.

    A sequence's keys are never split over blocks of threads. How they were would depend on how many
    sequences there are, and torch 2.13 joins the parts of several sequences wrongly:
    https://github.com/pytorch/pytorch/issues/194167
    """

    def __init__(self, spans: Sequence[Span], page_size: int) -> None:
        self._page_size = page_size
        self._lengths = [span.stop for span in spans]
        self._counts = [span.count for span in spans]
        self._pages = [span.stored.pages for span in spans]
        self._on_device: tuple[Tensor, ...] | None = None

    def attend(self, query_HPE: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Returns [P, H, E]."""
        if self._on_device is None or self._on_device[0].device != query_HPE.device:
            self._on_device = self._make_tables(query_HPE.device)
        bounds, key_bounds, lengths, table = self._on_device
        pages = (-1, self._page_size)
        out_PHE = varlen_attn(
            query_HPE.transpose(0, 1).contiguous(),
            keys.unflatten(0, pages),
            values.unflatten(0, pages),
            bounds,
            key_bounds,
            max(self._counts),
            max(self._lengths),
            scale=scale,
            window_size=(-1, 0),
            enable_gqa=query_HPE.shape[0] != keys.shape[1],
            seqused_k=lengths,
            block_table=table,
            num_splits=1,
        )
        assert isinstance(out_PHE, Tensor)
        return out_PHE

    def _make_tables(self, device: torch.device) -> tuple[Tensor, ...]:
        """Bounds of the queries; bounds of the keys, which FlashAttention 2 asks for and does not read
        where it has a table; lengths of the sequences; table of their pages."""
        widest = max(map(len, self._pages))
        rows = [pages + [0] * (widest - len(pages)) for pages in self._pages]
        bounds, key_bounds = ([0, *accumulate(counts)] for counts in (self._counts, self._lengths))
        return tuple(
            torch.tensor(numbers, dtype=torch.int32).to(device, non_blocking=True)
            for numbers in (bounds, key_bounds, self._lengths, rows)
        )
