"""Chooses one token for each row of a batch of logits, and scores it.

The reported log-probability is that of the temperature-scaled distribution over the whole
vocabulary, before top-k and top-p cut it (tinker-cookbook checks it so). At temperature 0, where
that distribution is a point, it is the temperature-1 distribution's.

Shape letters: B rows, V vocabulary, K most likely tokens, C rows and Q uniforms of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hosted_tinker.types import SamplingParams, TopkLogprobs

BLOCK_COLUMNS = 256


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """Per row the token and its log-probability, and the distribution float32 [B, V] of both."""

    tokens: list[int]
    logprobs: list[float]
    logprobs_BV: Tensor


def choose_tokens(
    logits_BV: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> ChosenTokens:
    """Inverts each row's cumulative distribution at its uniform; temperature 0 takes the argmax.

    Args:
        logits_BV: float32.
        uniforms: in [0, 1), one per row, whatever the row's parameters are. A row's choice depends
            on nothing else than its own logits, parameters and uniform.
    """
    device = logits_BV.device
    temperatures = [one.temperature if one.temperature > 0 else 1.0 for one in params]
    temperature_B = torch.tensor(temperatures, dtype=torch.float32, device=device)
    logprobs_BV = torch.log_softmax(logits_BV / temperature_B[:, None], dim=-1)
    uniform_B = torch.tensor(list(uniforms), dtype=torch.float64, device=device)
    greedy = [row for row, one in enumerate(params) if one.temperature == 0]
    cut = [row for row, one in enumerate(params) if one.temperature > 0 and _cuts(one)]
    if len(greedy) == len(params):
        token_B = logits_BV.argmax(dim=-1)
    elif len(cut) == len(params):
        token_B = _draw_cut(logprobs_BV, params, uniform_B)
    else:
        token_B = draw_tokens(logprobs_BV, uniform_B[:, None])[:, 0]
        if greedy:
            token_B[greedy] = logits_BV[greedy].argmax(dim=-1)
        if cut:
            token_B[cut] = _draw_cut(logprobs_BV[cut], [params[row] for row in cut], uniform_B[cut])
    chosen_B = logprobs_BV.gather(1, token_B[:, None])[:, 0]
    return ChosenTokens(token_B.tolist(), chosen_B.tolist(), logprobs_BV)


def draw_tokens(logprobs_CV: Tensor, uniform_CQ: Tensor) -> Tensor:
    """Int64 [C, Q]: for each uniform the first column whose cumulative probability is above it.

    In two levels, since the float64 sums of all columns take longer than all else: first the block
    of columns, then the column in it.
    """
    rows, columns = logprobs_CV.shape
    num_blocks = -(-columns // BLOCK_COLUMNS)
    probability_CNL = torch.nn.functional.pad(
        logprobs_CV.exp(), (0, num_blocks * BLOCK_COLUMNS - columns)
    ).view(rows, num_blocks, BLOCK_COLUMNS)
    cumulative_CN = probability_CNL.sum(dim=-1).double().cumsum(dim=-1)
    threshold_CQ = _bound(uniform_CQ * cumulative_CN[:, -1:], cumulative_CN[:, -1:])
    # What is above every sum is NaN, and must choose some column.
    block_CQ = torch.searchsorted(cumulative_CN, threshold_CQ, right=True).clamp(max=num_blocks - 1)
    before_CQ = torch.where(block_CQ > 0, cumulative_CN.gather(1, (block_CQ - 1).clamp(min=0)), 0.0)
    row_C1 = torch.arange(rows, device=block_CQ.device)[:, None]
    within_CQL = probability_CNL[row_C1, block_CQ].double().cumsum(dim=-1)
    rest_CQ1 = _bound((threshold_CQ - before_CQ)[..., None], within_CQL[..., -1:])
    column_CQ1 = torch.searchsorted(within_CQL, rest_CQ1, right=True)
    return (block_CQ * BLOCK_COLUMNS + column_CQ1[..., 0]).clamp(max=columns - 1)


def _bound(threshold: Tensor, total: Tensor) -> Tensor:
    """Strictly below the total, so that rounding can't choose a column of probability zero."""
    return torch.minimum(threshold, torch.nextafter(total, torch.zeros_like(total)))


def top_logprobs(logprobs_CV: Tensor, count: int) -> TopkLogprobs:
    """The `count` most likely tokens of each row, best first."""
    best = logprobs_CV.topk(count, dim=-1)
    return TopkLogprobs(
        best.indices.to("cpu", torch.int32).numpy(), best.values.to("cpu", torch.float32).numpy()
    )


class UniformStream:
    """Uniforms in [0, 1) of one sequence: the same for the same seed and key, on every machine."""

    def __init__(self, seed: int, key: tuple[int, ...]) -> None:
        """`key` tells apart the streams of one request."""
        sequence = np.random.SeedSequence(seed & 0xFFFF_FFFF_FFFF_FFFF, spawn_key=key)
        self._generator = np.random.Generator(np.random.PCG64(sequence))

    def draw(self) -> float:
        return self._generator.random()

    def draw_matrix(self, rows: int, columns: int) -> NDArray[np.float64]:
        """Float64 [rows, columns]."""
        return self._generator.random((rows, columns))


def _cuts(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1


def _draw_cut(logprobs_BV: Tensor, params: Sequence[SamplingParams], uniform_B: Tensor) -> Tensor:
    """Draws from what top-k and then top-p leave, each time renormalised. Int64 [B].

    Top-p keeps the smallest set of best tokens whose mass reaches it: a token stays while the mass
    of those before it is still below.
    """
    vocab_size = logprobs_BV.shape[1]
    top_ks = [min(one.top_k, vocab_size) if one.top_k > 0 else vocab_size for one in params]
    top_k_B1 = torch.tensor(top_ks, device=logprobs_BV.device)[:, None]
    top_p_B1 = uniform_B.new_tensor([one.top_p for one in params])[:, None]
    sorted_BV, token_BV = logprobs_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(vocab_size, device=logprobs_BV.device)
    mass_BV = sorted_BV.double().exp().masked_fill(rank_V >= top_k_B1, 0.0)
    before_BV = mass_BV.cumsum(dim=-1) - mass_BV
    dropped_BV = (before_BV >= top_p_B1 * mass_BV.sum(dim=-1, keepdim=True)) & (rank_V > 0)
    left_BV = sorted_BV.double().masked_fill((mass_BV == 0) | dropped_BV, float("-inf"))
    rank_B1 = draw_tokens(left_BV, uniform_B[:, None])
    return token_BV.gather(1, rank_B1)[:, 0]
