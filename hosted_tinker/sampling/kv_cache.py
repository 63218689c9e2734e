"""Keys and values of the sequences that run, one row each, in the form that attention layers ask for.

A batch of sequences of different lengths decodes together: a layer's `update` writes each row's new
position where that row ends and returns all rows up to the longest. Rows are compact: a row that
ends is replaced by the last one.

Shape letters: B running rows, H key and value heads, T positions, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

FIRST_LENGTH = 256
"""Positions of the first allocation: short completions never reallocate."""


LayerStates = Sequence[tuple[Tensor, Tensor]]
"""Keys and values [1, H, T, E] of one sequence, per layer."""


@dataclass(slots=True)
class _LayerSlots:
    """Buffers [rows, H, length, E]; keys and values may differ in H and E."""

    keys: Tensor
    values: Tensor


class SlotCache(Cache):
    """Row i holds `lengths[i]` positions. Buffers grow by doubling and go when the last row ends."""

    def __init__(self, max_rows: int, max_length: int) -> None:
        super().__init__(layers=[])
        self.max_rows = max_rows
        self.max_length = max_length
        self.lengths: list[int] = []
        self._slots: list[_LayerSlots] = []
        self._rows: Tensor = torch.empty(0, dtype=torch.int64)
        self._positions: Tensor = torch.empty(0, dtype=torch.int64)

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def allocated_shape(self) -> tuple[int, int]:
        """Rows and positions that the buffers have room for."""
        if not self._slots:
            return 0, 0
        rows, _, length, _ = self._slots[0].keys.shape
        return rows, length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths, default=0)

    def add_rows(self, prompt: LayerStates, count: int) -> None:
        """Appends `count` rows that each begin with the prompt's keys and values."""
        length = prompt[0][0].shape[2]
        first = self.num_rows
        if not self._slots:
            self._slots = [
                _LayerSlots(keys[:0, :, :0], values[:0, :, :0]) for keys, values in prompt
            ]
        self._reserve(first + count, length + 1)
        for slots, (keys, values) in zip(self._slots, prompt, strict=True):
            slots.keys[first : first + count, :, :length] = keys
            slots.values[first : first + count, :, :length] = values
        self.lengths.extend([length] * count)

    def remove_row(self, row: int) -> None:
        """Ends a row. The last row takes its index: the caller must move it likewise."""
        last = self.num_rows - 1
        length = self.lengths[last]
        if row != last:
            for slots in self._slots:
                slots.keys[row, :, :length] = slots.keys[last, :, :length]
                slots.values[row, :, :length] = slots.values[last, :, :length]
            self.lengths[row] = length
        del self.lengths[last]
        if not self.lengths:
            self._slots = []

    def begin_step(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Makes room for one position in every row.

        Returns:
            int64 [B, 1] the position that each row computes, and a bool attention mask
            [B, 1, 1, T], true where a row may look.
        """
        longest = self.get_seq_length() + 1
        self._reserve(self.num_rows, longest)
        self._rows = torch.arange(self.num_rows, device=device)
        self._positions = torch.tensor(self.lengths, dtype=torch.int64, device=device)
        columns_T = torch.arange(longest, device=device)
        mask_BT = columns_T <= self._positions[:, None]
        return self._positions[:, None], mask_BT[:, None, None]

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Called by attention layers with [B, H, 1, E]. Returns [B, H, T, E]."""
        slots = self._slots[layer_idx]
        slots.keys[self._rows, :, self._positions] = key_states[:, :, 0]
        slots.values[self._rows, :, self._positions] = value_states[:, :, 0]
        longest = self.get_seq_length() + 1
        rows = slice(0, self.num_rows)
        return slots.keys[rows, :, :longest], slots.values[rows, :, :longest]

    def end_step(self) -> None:
        """Counts the position that `begin_step` made room for."""
        self.lengths = [length + 1 for length in self.lengths]

    def _reserve(self, rows: int, length: int) -> None:
        assert rows <= self.max_rows
        assert length <= self.max_length
        held_rows, held_length = self.allocated_shape
        if rows <= held_rows and length <= held_length:
            return
        if rows > held_rows:
            held_rows = min(self.max_rows, max(rows, 2 * held_rows))
        if length > held_length:
            held_length = min(self.max_length, max(length, 2 * held_length, FIRST_LENGTH))
        for slots in self._slots:
            slots.keys = _enlarge(slots.keys, held_rows, held_length, self.lengths)
            slots.values = _enlarge(slots.values, held_rows, held_length, self.lengths)


def _enlarge(buffer: Tensor, rows: int, length: int, lengths: Sequence[int]) -> Tensor:
    """A zeroed buffer of the new shape with the old one's running rows.

    Zeros, because attention multiplies masked positions by 0, and 0 times garbage may be NaN.
    """
    larger = buffer.new_zeros((rows, buffer.shape[1], length, buffer.shape[3]))
    used = max(lengths, default=0)
    larger[: len(lengths), :, :used] = buffer[: len(lengths), :, :used]
    return larger
