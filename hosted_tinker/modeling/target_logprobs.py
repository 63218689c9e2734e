"""Log-probabilities of target tokens from last hidden states, without a batch's logits.

The logits of one chunk of positions exist at a time, and are computed again in the backward pass
(Chen et al. 2016, arXiv:1604.06174, applied to the output head).

Shape letters: P positions, D hidden size, V vocabulary, Q queries (a position and a token to score
there; a position may have none or many), C positions of a chunk.
"""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hosted_tinker.modeling.base_model import BaseModel


def compute_target_logprobs(
    base: BaseModel,
    hidden_PD: Tensor,
    position_Q: Tensor,
    target_Q: Tensor,
    *,
    chunk_tokens: int,
) -> Tensor:
    """log p(target_Q[q]) at position_Q[q], float32 [Q], differentiable.

    Args:
        hidden_PD: last hidden states.
        position_Q: int64 row of `hidden_PD`, ascending.
        target_Q: int64 token id.
        chunk_tokens: positions whose logits exist at once.
    """
    num_positions = hidden_PD.shape[0]
    starts = torch.arange(0, num_positions + chunk_tokens, chunk_tokens)
    bounds = torch.searchsorted(position_Q.cpu(), starts).tolist()
    chunks: list[Tensor] = []
    for index, (low, high) in enumerate(pairwise(bounds)):
        start = index * chunk_tokens
        if low == high:
            continue
        chunks.append(
            cast(
                Tensor,
                checkpoint(
                    _score_chunk,
                    base,
                    hidden_PD[start : start + chunk_tokens],
                    position_Q[low:high] - start,
                    target_Q[low:high],
                    use_reentrant=False,
                ),
            )
        )
    return torch.cat(chunks)


def _score_chunk(
    base: BaseModel, hidden_CD: Tensor, position_Q: Tensor, target_Q: Tensor
) -> Tensor:
    logits_CV = base.compute_logits(hidden_CD)
    # A tied head is on the first device of a pipeline, the hidden states on the last.
    position_Q, target_Q = position_Q.to(logits_CV.device), target_Q.to(logits_CV.device)
    normalizer_C = torch.logsumexp(logits_CV, dim=-1)
    return logits_CV[position_Q, target_Q] - normalizer_C[position_Q]
