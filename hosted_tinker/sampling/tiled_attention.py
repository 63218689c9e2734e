"""Attention over pages whose numbers do not depend on what shares the pass, bit for bit.

Shape letters: P positions of a pass, H query heads, G key and value heads, E head size, B tiles, M
queries of a tile, T keys that they see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hosted_tinker.sampling.attention_kernels import attend
from hosted_tinker.sampling.spans import Span

QUERY_TILE = 16
"""Queries that are computed together."""


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
            for part in self._parts(query)
        ]
        out = torch.cat(parts).unflatten(2, (-1, QUERY_TILE)).permute(0, 3, 1, 2, 4)
        out_PHE[row_P] = out.flatten(2, 3).flatten(0, 1)[place_P]

    def _parts(self, query: Tensor) -> list[slice]:
        """All together where the kernel works on each alone, as the CPU's does in float32. In 16 bits
        it packs its operands or not by how many there are."""
        if query.device.type == "cpu" and query.dtype == torch.float32:
            return [slice(None)]
        return [slice(index, index + 1) for index in range(self._size)]


def round_keys(count: int) -> int:
    """Few different numbers of keys, so that many tiles have the same."""
    step = 64 if count <= 512 else 256
    return -(-count // step) * step
