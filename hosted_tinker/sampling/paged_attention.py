"""Attention of a pass over keys and values in pages.

A span is what a pass computes of one sequence: one position of a sequence that decodes, or a chunk
of a prompt. It sees everything of its sequence before it, and itself causally.

Where torch's FlashAttention takes pages (`PagedSpans`), one kernel does all. Elsewhere
(`GatheredSpans`) the pages of sequences of similar length are gathered and padded, a batch at a
time; on CPUs that is faster than one call for each sequence on memory as it lies. What several
sequences have in common, as samples have their prompt, is gathered once and multiplied with all of
their queries. What a query got from its parts is joined by the sums of its softmaxes (as
FlashDecoding does: https://pytorch.org/blog/flash-decoding). Where results must not depend on what
shares the pass, `TiledSpans` gathers for each sequence alone.

Shape letters: P positions of a pass, H query heads, G key and value heads, E head size, B sequences
of a batch, M queries that see the same keys, T keys that a query sees, X queries of all parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad

from hosted_tinker.modeling.packed_attention import can_use_varlen
from hosted_tinker.sampling.kv_cache import KvCache, StoredSequence

MIN_SHARED = 512
"""Keys that sharing must save in each layer; below, one more call and the join cost more."""
MIN_FILL = 0.75
"""How much of a batch's padded keys must be real. Batches with less are cut."""
QUERY_TILE = 16
"""Queries that are computed together where results must not depend on what else is."""


@dataclass(frozen=True, slots=True)
class Span:
    """`count` positions of a sequence, `offset` after those that it has."""

    stored: StoredSequence
    count: int
    offset: int = 0

    @property
    def start(self) -> int:
        return self.stored.length + self.offset

    @property
    def stop(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Piece:
    """What queries of the pass see of their sequences: the first `length` positions of pages."""

    rows: list[int]
    pages: tuple[int, ...]
    length: int


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
        count, padding = len(self._slots_P), query_HPE.shape[1] - len(self._slots_P)
        query_HPE, key_GPE, value_GPE = (x[:, :count] for x in (query_HPE, key_GPE, value_GPE))
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        slots_P = self._slots_P.to(keys.device)
        keys.index_copy_(0, slots_P, key_GPE.transpose(0, 1))
        values.index_copy_(0, slots_P, value_GPE.transpose(0, 1))
        scale = query_HPE.shape[-1] ** -0.5 if scaling is None else scaling
        page_size = self._cache.page_size
        if can_use_varlen(query_HPE):
            self._paged = self._paged or PagedSpans(self._spans, page_size, self._invariant)
            out_PHE = self._paged.attend(query_HPE, keys, values, scale)
        elif self._invariant:
            self._tiled = self._tiled or TiledSpans(self._spans, page_size)
            out_PHE = self._tiled.attend(query_HPE, keys, values, scale)
        else:
            self._gathered = self._gathered or GatheredSpans(self._spans, page_size)
            out_PHE = self._gathered.attend(query_HPE, key_GPE, value_GPE, (keys, values), scale)
        return pad(out_PHE, (0, 0, 0, 0, 0, padding)) if padding else out_PHE


class PagedSpans:
    """Through torch's FlashAttention with a table of pages."""

    def __init__(self, spans: Sequence[Span], page_size: int, invariant: bool) -> None:
        """`invariant` forbids to split a sequence's keys, which depends on how many sequences there
        are."""
        self._num_splits = 1 if invariant else None
        self._page_size = page_size
        self._lengths = [span.stop for span in spans]
        self._counts = [span.count for span in spans]
        self._pages = [span.stored.pages for span in spans]
        self._on_device: tuple[Tensor, Tensor, Tensor] | None = None

    def attend(self, query_HPE: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Returns [P, H, E]."""
        if self._on_device is None or self._on_device[0].device != query_HPE.device:
            self._on_device = self._make_tables(query_HPE.device)
        bounds, lengths, table = self._on_device
        pages = (-1, self._page_size)
        out_PHE = varlen_attn(
            query_HPE.transpose(0, 1).contiguous(),
            keys.unflatten(0, pages),
            values.unflatten(0, pages),
            bounds,
            None,
            max(self._counts),
            max(self._lengths),
            scale=scale,
            window_size=(-1, 0),
            enable_gqa=query_HPE.shape[0] != keys.shape[1],
            seqused_k=lengths,
            block_table=table,
            num_splits=self._num_splits,
        )
        assert isinstance(out_PHE, Tensor)
        return out_PHE

    def _make_tables(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        widest = max(map(len, self._pages))
        rows = [pages + [0] * (widest - len(pages)) for pages in self._pages]
        bounds = [0, *accumulate(self._counts)]
        bounds, lengths, table = (
            torch.tensor(numbers, dtype=torch.int32).to(device, non_blocking=True)
            for numbers in (bounds, self._lengths, rows)
        )
        return bounds, lengths, table


class GatheredSpans:
    """Through one call for each batch of similar lengths."""

    def __init__(self, spans: Sequence[Span], page_size: int) -> None:
        bounds = [0, *accumulate(span.count for span in spans)]
        self._num_positions = bounds[-1]
        holders = Counter(page for span in spans for page in span.stored.pages)
        pieces: dict[tuple[int, ...], Piece] = {}
        self._chunks: list[slice] = []
        for span, (start, stop) in zip(spans, pairwise(bounds), strict=True):
            # A decoding position is among its own keys; a chunk sees itself apart, causally.
            visible = span.start + (1 if span.count == 1 else 0)
            for pages, length in cut_pages(span.stored.pages, visible, page_size, holders):
                piece = pieces.setdefault(pages, Piece([], pages, length))
                piece.rows.extend(range(start, stop))
            if span.count > 1:
                self._chunks.append(slice(start, stop))
        self._batches = [Batch(members, page_size) for members in plan_batches(pieces.values())]
        everything = [row for batch in self._batches for row in batch.rows]
        everything += [row for chunk in self._chunks for row in range(chunk.start, chunk.stop)]
        self._row_X = torch.tensor(everything, dtype=torch.int64)
        self._is_joined = len(everything) > self._num_positions

    def attend(
        self,
        query_HPE: Tensor,
        key_GPE: Tensor,
        value_GPE: Tensor,
        stored: tuple[Tensor, Tensor],
        scale: float,
    ) -> Tensor:
        """Returns [P, H, E]. `stored` are the layer's keys and values."""
        parts = [batch.attend(query_HPE, *stored, scale) for batch in self._batches]
        parts += [
            attend_causally(query_HPE[:, rows], key_GPE[:, rows], value_GPE[:, rows], scale)
            for rows in self._chunks
        ]
        out_XHE = torch.cat([out for out, _ in parts]) if len(parts) > 1 else parts[0][0]
        row_X = self._row_X.to(out_XHE.device)
        if not self._is_joined:
            return torch.empty_like(out_XHE).index_copy_(0, row_X, out_XHE)
        lse_XH = torch.cat([lse for _, lse in parts])
        return join(out_XHE, lse_XH, row_X, self._num_positions)


def cut_pages(
    pages: Sequence[int], length: int, page_size: int, holders: Counter[int]
) -> Iterator[tuple[tuple[int, ...], int]]:
    """The first `length` positions, as parts that are worth sharing and the rest: pages, positions.

    Spans that share pages share those before them too, so that fewer and fewer hold what follows.
    """
    own: list[int] = []
    own_length = 0
    num_pages = -(-length // page_size)
    for num_holders, group in groupby(range(num_pages), key=lambda index: holders[pages[index]]):
        indices = list(group)
        part = [pages[index] for index in indices]
        part_length = min(length - indices[0] * page_size, len(part) * page_size)
        if (num_holders - 1) * part_length >= MIN_SHARED:
            yield tuple(part), part_length
        else:
            own += part
            own_length += part_length
    if own:
        yield tuple(own), own_length


def plan_batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces that many queries see go alone; the others together, the longest first."""
    batch: list[Piece] = []
    filled = 0
    for piece in sorted(pieces, key=lambda piece: -piece.length):
        if len(piece.rows) > 1:
            yield [piece]
            continue
        padded = (len(batch) + 1) * (batch or [piece])[0].length
        if filled + piece.length < MIN_FILL * padded:
            yield batch
            batch, filled = [], 0
        batch.append(piece)
        filled += piece.length
    if batch:
        yield batch


class Batch:
    """Pieces whose keys and values are gathered together; one, or each seen by one query."""

    def __init__(self, pieces: Sequence[Piece], page_size: int) -> None:
        self.rows = [row for piece in pieces for row in piece.rows]
        self._size = len(pieces)
        longest = max(piece.length for piece in pieces)
        widest = -(-longest // page_size)
        table = np.zeros((len(pieces), widest), np.int64)
        for number, piece in enumerate(pieces):
            table[number, : len(piece.pages)] = piece.pages
        slots = (table[:, :, None] * page_size + np.arange(page_size)).reshape(len(pieces), -1)
        lengths = np.array([piece.length for piece in pieces])
        is_real_BT = np.arange(longest) < lengths[:, None]
        # Padding points at the page that stays empty: what others left behind may be NaN.
        slots_BT = np.where(is_real_BT, slots[:, :longest], 0)
        self._row_B = torch.tensor(self.rows, dtype=torch.int64)
        self._slots = torch.from_numpy(slots_BT.reshape(-1))
        self._mask: Tensor | None = None
        if not is_real_BT.all():
            self._mask = torch.zeros(is_real_BT.shape).masked_fill_(
                torch.from_numpy(~is_real_BT), float("-inf")
            )[:, None, None]

    def attend(
        self, query_HPE: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Returns [X, H, E], and the logarithms of the softmaxes' sums [X, H].

        Every query of a piece sees all of it, so that the query heads of a key head are as good as
        more queries of it.
        """
        heads, _, size = query_HPE.shape
        groups, device = keys.shape[1], keys.device
        slots = self._slots.to(device)
        key, value = (
            buffer.index_select(0, slots).unflatten(0, (self._size, -1)).transpose(1, 2)
            for buffer in (keys, values)
        )
        query_XHE = query_HPE.transpose(0, 1).index_select(0, self._row_B.to(device))
        # [B, M, G, H / G, E], where either B or M is 1.
        query = query_XHE.view(self._size, -1, groups, heads // groups, size)
        query = query.transpose(1, 2).reshape(self._size, groups, -1, size)
        mask = None if self._mask is None else self._mask.to(device, query.dtype)
        out, lse = attend(query, key, value, scale, mask=mask)
        out = (
            out.unflatten(2, (-1, heads // groups))
            .transpose(1, 2)
            .reshape(-1, heads, out.shape[-1])
        )
        lse = lse.unflatten(2, (-1, heads // groups)).transpose(1, 2).reshape(-1, heads)
        return out, lse


class TiledSpans:
    """Through calls whose shape depends on where a position is in its sequence, and on nothing else.

    A sequence's queries are cut at multiples of `QUERY_TILE`, whichever of a tile's a pass has, and
    see keys up to a length that the tile's place alone decides.
    """

    def __init__(self, spans: Sequence[Span], page_size: int) -> None:
        self._num_positions = sum(span.count for span in spans)
        tiles: dict[int, list[Tile]] = {}
        row = 0
        for span in spans:
            for first in range(span.start - span.start % QUERY_TILE, span.stop, QUERY_TILE):
                start, stop = max(span.start, first), min(span.stop, first + QUERY_TILE)
                tile = Tile(span.stored.pages, first, start, row + start - span.start, stop - start)
                tiles.setdefault(round_keys(first + QUERY_TILE), []).append(tile)
            row += span.count
        self._batches = [TileBatch(batch, keys, page_size) for keys, batch in tiles.items()]

    def attend(self, query_HPE: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Returns [P, H, E]."""
        out_PHE = query_HPE.new_empty(self._num_positions, query_HPE.shape[0], values.shape[-1])
        for batch in self._batches:
            batch.attend(query_HPE, keys, values, scale, out_PHE)
        return out_PHE


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries at the positions `start` to `start + count` of a sequence, which are rows of the pass
    from `row` on. The tile begins at position `first`."""

    pages: Sequence[int]
    first: int
    start: int
    row: int
    count: int


class TileBatch:
    """Tiles that see the same number of keys."""

    def __init__(self, tiles: Sequence[Tile], num_keys: int, page_size: int) -> None:
        self._size = len(tiles)
        slots = np.zeros((len(tiles), num_keys), np.int64)
        for number, tile in enumerate(tiles):
            # Beyond what is there, keys are those of the page that stays empty.
            position_T = np.arange(min(tile.start + tile.count, num_keys))
            pages = np.array(tile.pages, np.int64)
            slots[number, : len(position_T)] = (
                pages[position_T // page_size] * page_size + position_T % page_size
            )
        first_B = np.array([tile.first for tile in tiles])
        query_BM = first_B[:, None] + np.arange(QUERY_TILE)
        is_hidden_BMT = np.arange(num_keys) > query_BM[:, :, None]
        self._slots = torch.from_numpy(slots.reshape(-1))
        self._is_hidden_BMT = torch.from_numpy(is_hidden_BMT)
        places = [
            (number * QUERY_TILE + tile.start - tile.first + index, tile.row + index)
            for number, tile in enumerate(tiles)
            for index in range(tile.count)
        ]
        self._place_P, self._row_P = torch.tensor(places).unbind(1)

    def attend(
        self, query_HPE: Tensor, keys: Tensor, values: Tensor, scale: float, out_PHE: Tensor
    ) -> None:
        """Writes its rows of `out_PHE`."""
        heads, _, size = query_HPE.shape
        groups, device = keys.shape[1], keys.device
        slots, place_P, row_P = (x.to(device) for x in (self._slots, self._place_P, self._row_P))
        key, value = (
            buffer.index_select(0, slots).unflatten(0, (self._size, -1)).transpose(1, 2)
            for buffer in (keys, values)
        )
        query = query_HPE.new_zeros(self._size * QUERY_TILE, heads, size)
        query[place_P] = query_HPE.transpose(0, 1)[row_P]
        # [B, M, G, H / G, E] to [B, G, H / G * M, E]
        query = query.view(self._size, QUERY_TILE, groups, heads // groups, size)
        query = query.permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = torch.zeros(self._is_hidden_BMT.shape, dtype=query.dtype, device=device)
        mask = mask.masked_fill_(self._is_hidden_BMT.to(device), float("-inf"))
        mask = mask.repeat(1, heads // groups, 1)[:, None]
        parts = [
            attend(query[part], key[part], value[part], scale, mask=mask[part])[0]
            for part in self._parts(device)
        ]
        out = torch.cat(parts).unflatten(2, (-1, QUERY_TILE)).permute(0, 3, 1, 2, 4)
        out_PHE[row_P] = out.flatten(2, 3).flatten(0, 1)[place_P]

    def _parts(self, device: torch.device) -> list[slice]:
        """All together on the CPU, whose kernel works on each alone; else one after another."""
        if device.type == "cpu":
            return [slice(None)]
        return [slice(index, index + 1) for index in range(self._size)]


def round_keys(count: int) -> int:
    """Few different numbers of keys, so that many tiles have the same."""
    step = 64 if count <= 512 else 256
    return -(-count // step) * step


def attend_causally(
    query_HME: Tensor, key_GME: Tensor, value_GME: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """A chunk on itself. Returns [M, H, E], and the logarithms of the softmaxes' sums [M, H]."""
    repeats = query_HME.shape[0] // key_GME.shape[0]
    key, value = (x.repeat_interleave(repeats, 0)[None] for x in (key_GME, value_GME))
    out, lse = attend(query_HME[None], key, value, scale, is_causal=True)
    return out[0].transpose(0, 1), lse[0].T


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


def join(out_XHE: Tensor, lse_XH: Tensor, row_X: Tensor, num_positions: int) -> Tensor:
    """Results of one query on several parts to its result on all: [P, H, E]."""
    row_XH = row_X[:, None].expand_as(lse_XH)
    largest_PH = lse_XH.new_full((num_positions, lse_XH.shape[1]), float("-inf"))
    largest_PH.scatter_reduce_(0, row_XH, lse_XH, "amax")
    weight_XH = (lse_XH - largest_PH[row_X]).exp_()
    total_PH = torch.zeros_like(largest_PH).index_add_(0, row_X, weight_XH)
    sums_PHE = out_XHE.new_zeros((num_positions, *out_XHE.shape[1:]), dtype=torch.float32)
    sums_PHE.index_add_(0, row_X, out_XHE.float() * weight_XH[..., None])
    return (sums_PHE / total_PH[..., None]).to(out_XHE.dtype)
