"""One pass of the decoder over sequences of any lengths.

Where the architecture allows it they are packed: every layer but attention works on real tokens
only. If not, they are padded at their end, which needs no mask: a causal decoder's real positions
never see what comes after them, and what it makes of pads is never read.

Shape letters: P positions of all sequences, B sequences, T the longest of them, D hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from hosted_tinker.modeling.base_model import BaseModel
from hosted_tinker.modeling.lora import Routing, make_segments
from hosted_tinker.modeling.packed_attention import PACKED, AttentionLayout, PackedSequences

logger = logging.getLogger(__name__)


class DecoderPass:
    """Token ids of many sequences to last hidden states."""

    def __init__(self, base: BaseModel, routing: Routing, *, pack: bool) -> None:
        """With `pack`, the model's attention is replaced if that gives the same numbers."""
        self._base = base
        self._routing = routing
        self.packs = pack and try_packing(base)

    def run(
        self, tokens_P: Tensor, lengths: Sequence[int], adapters: Sequence[str | None]
    ) -> Tensor:
        """[P, D] on the device of the decoder's last layer.

        The routing stays as this sets it: a backward pass that recomputes needs it.

        Args:
            tokens_P: int64, one sequence after another.
            lengths: of the sequences.
            adapters: of the sequences; None is the base model.
        """
        tokens_P = tokens_P.to(self._base.input_device)
        if self.packs:
            self._routing.segments = make_segments(adapters, lengths)
            return run_packed(self._base, tokens_P, lengths)
        self._routing.segments = make_segments(adapters, [max(lengths)] * len(lengths))
        return run_padded(self._base, tokens_P, lengths)


def run_packed(base: BaseModel, tokens_P: Tensor, lengths: Sequence[int]) -> Tensor:
    position_P = torch.cat([torch.arange(length) for length in lengths]).to(tokens_P.device)
    return run_with_layout(base, tokens_P, position_P, PackedSequences(lengths))


def run_with_layout(
    base: BaseModel, tokens_P: Tensor, position_P: Tensor, layout: AttentionLayout
) -> Tensor:
    """[P, D]. The model's attention must be `PACKED`."""
    output = base.decoder(
        input_ids=tokens_P[None],
        position_ids=position_P[None],
        use_cache=False,
        attention_layout=layout,
    )
    return cast(Tensor, output.last_hidden_state)[0]


def run_padded(base: BaseModel, tokens_P: Tensor, lengths: Sequence[int]) -> Tensor:
    is_real_BT = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    is_real_BT = is_real_BT.to(tokens_P.device)
    tokens_BT = tokens_P.new_zeros(is_real_BT.shape)
    tokens_BT[is_real_BT] = tokens_P
    hidden_BTD = base.decoder(input_ids=tokens_BT, use_cache=False).last_hidden_state
    return cast(Tensor, hidden_BTD)[is_real_BT.to(hidden_BTD.device)]


@torch.no_grad()
def try_packing(base: BaseModel) -> bool:
    """Whether sequences get the hidden states in a pack that they get alone. If not, the model is
    left as it was."""
    attention = cast(str, base.module.config._attn_implementation)
    lengths = (5, 5, 3, 8)
    tokens_P = torch.arange(sum(lengths), device=base.input_device) % base.vocab_size
    alone = [run_padded(base, part, [len(part)]) for part in tokens_P.split(list(lengths))]
    expected_PD = torch.cat(alone)
    base.module.set_attn_implementation(PACKED)
    try:
        found_PD = run_packed(base, tokens_P, lengths)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (RuntimeError, TypeError) as error:
        reason = str(error)
    else:
        tolerance = 0.05 * float(expected_PD.abs().max())
        if torch.allclose(found_PD, expected_PD, rtol=0, atol=tolerance):
            return True
        reason = "packed sequences see one another"
    logger.warning("sequences are padded, not packed: %s", reason)
    base.module.set_attn_implementation(attention)
    return False
