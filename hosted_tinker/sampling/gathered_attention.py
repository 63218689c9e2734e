"""Attention over pages by gathering them: for devices without a kernel that takes pages.

The pages of sequences of similar length are gathered and padded, a batch at a time; on CPUs that is
faster than one call for each sequence on memory as it lies. What several sequences have in common, as
samples have their prompt, is gathered once and multiplied with all of their queries. What a query got
from its parts is joined by the sums of its softmaxes (as FlashDecoding does:
https://pytorch.org/blog/flash-decoding).

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

from hosted_tinker.sampling.attention_kernels import attend
from hosted_tinker.sampling.spans import Span

MIN_SHARED = 512
"""Keys that sharing must save in each layer; below, one more call and the join cost more."""
MIN_FILL = 0.75
"""How much of a batch's padded keys must be real. Batches with less are cut."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What queries of the pass see of their sequences: the first `length` positions of pages."""

    rows: list[int]
    pages: tuple[int, ...]
    length: int


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


def attend_causally(
    query_HME: Tensor, key_GME: Tensor, value_GME: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """A chunk on itself. Returns [M, H, E], and the logarithms of the softmaxes' sums [M, H]."""
    repeats = query_HME.shape[0] // key_GME.shape[0]
    key, value = (x.repeat_interleave(repeats, 0)[None] for x in (key_GME, value_GME))
    out, lse = attend(query_HME[None], key, value, scale, is_causal=True)
    return out[0].transpose(0, 1), lse[0].T


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
