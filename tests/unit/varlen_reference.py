"""What torch's variable-length attention computes, in plain operations, for machines without a GPU.

It refuses what FlashAttention 2 refuses on one, and what is known to go wrong there.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def attend_varlen_plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Has the arguments and the result of `torch.nn.attention.varlen.varlen_attn`."""
    assert cu_seq_k is not None, "FlashAttention 2 wants both bounds or none"
    assert cu_seq_k.shape == cu_seq_q.shape
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert window_size[1] == 0, "causal"
    assert enable_gqa or query.shape[1] == key.shape[-2]
    if block_table is not None:
        assert seqused_k is not None
        assert seqused_k.dtype == block_table.dtype == torch.int32
        assert num_splits == 1, "the parts of several sequences are joined wrongly"
    outputs: list[Tensor] = []
    for number, (start, stop) in enumerate(pairwise(cu_seq_q.tolist())):
        if block_table is None or seqused_k is None:
            rows = slice(*cu_seq_k[number : number + 2].tolist())
            keys, values = key[rows], value[rows]
        else:
            length = int(seqused_k[number])
            keys, values = (x[block_table[number]].flatten(0, 1)[:length] for x in (key, value))
        assert stop - start <= max_q
        assert len(keys) <= max_k
        outputs.append(attend_one(query[start:stop], keys, values, scale, window_size[0]))
    return torch.cat(outputs)


def attend_one(query: Tensor, key: Tensor, value: Tensor, scale: float | None, left: int) -> Tensor:
    """[M, H, E] of one sequence, whose last M positions are the queries."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    scores = torch.einsum("mhe,the->hmt", query, key) * (scale or query.shape[-1] ** -0.5)
    position_M = torch.arange(len(key) - len(query), len(key))[:, None]
    position_T = torch.arange(len(key))
    hidden = position_T > position_M
    if left >= 0:
        hidden = hidden | (position_T < position_M - left)
    return torch.einsum("hmt,the->mhe", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)
