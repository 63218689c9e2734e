"""Forward passes of the embedded engine: a prompt at a time, then a batch of rows token by token.

Rows of different adapters share a batch; `Routing` says which rows are whose.

Shape letters: P prompt tokens, B running rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache

from hosted_tinker.modeling.base_model import BaseModel
from hosted_tinker.modeling.lora import Routing, row_indices
from hosted_tinker.sampling.kv_cache import LayerStates, SlotCache
from hosted_tinker.types import Int64Array


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt's last hidden states [P, D], and its keys and values."""

    hidden_PD: Tensor
    layers: LayerStates


class DecoderPasses:
    """Runs the model. Owns the rows' keys and values, and sets the routing before each pass."""

    def __init__(self, base: BaseModel, routing: Routing, max_rows: int) -> None:
        self.base = base
        self._routing = routing
        self._slots = SlotCache(max_rows, base.context_length)

    def prefill(self, prompt: Int64Array, adapter: str | None) -> Prefill:
        """Computes a prompt int64 [P]. Leaves the routing on `adapter`, for the output head."""
        self._routing.use_one(adapter)
        # Without the model's configuration a DynamicCache keeps every position of every layer.
        cache = DynamicCache()
        tokens_1P = torch.from_numpy(prompt).to(self.base.input_device)[None]
        output = self.base.decoder(input_ids=tokens_1P, past_key_values=cache, use_cache=True)
        layers = [(layer.keys, layer.values) for layer in cast(Any, cache.layers)]
        return Prefill(output.last_hidden_state[0], layers)

    def use_adapter(self, adapter: str | None) -> None:
        """Sets whose output head computes the logits of a prefilled prompt."""
        self._routing.use_one(adapter)

    def add_rows(self, prefill: Prefill, count: int) -> None:
        """Appends rows that continue a prompt."""
        if count:
            self._slots.add_rows(prefill.layers, count)

    def remove_row(self, row: int) -> None:
        """Ends a row; the last row takes its index."""
        self._slots.remove_row(row)

    def decode(self, tokens: Sequence[int], adapters: Sequence[str | None]) -> Tensor:
        """Appends one token to every row. Returns float32 logits [B, V] of the tokens after."""
        device = self.base.input_device
        self._route(adapters, device)
        position_B1, mask_B11T = self._slots.begin_step(device)
        tokens_B1 = torch.tensor(tokens, dtype=torch.int64, device=device)[:, None]
        output = self.base.decoder(
            input_ids=tokens_B1,
            position_ids=position_B1,
            attention_mask=mask_B11T,
            past_key_values=self._slots,
            use_cache=True,
        )
        self._slots.end_step()
        return self.base.compute_logits(output.last_hidden_state[:, 0])

    def _route(self, adapters: Sequence[str | None], device: torch.device) -> None:
        rows: dict[str | None, list[int]] = {}
        for row, adapter in enumerate(adapters):
            rows.setdefault(adapter, []).append(row)
        if len(rows) == 1:
            self._routing.use_one(adapters[0])
        else:
            self._routing.rows_by_adapter = {
                adapter: row_indices(indices, device)
                for adapter, indices in rows.items()
                if adapter is not None
            }
