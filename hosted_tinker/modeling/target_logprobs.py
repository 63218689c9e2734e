"""Log-probabilities of target tokens from last hidden states, without a batch's logits.

The logits of one chunk of positions exist at a time. Where the gradient is wanted, there are three
ways, the cheapest that is exact is taken:

- the loss is linear, so that its gradient is known before: a chunk's part of the gradient is taken
  while its logits are there;
- each position scores one token, and the output head trains nothing: the gradient of each
  log-probability is taken while the logits are there, and scaled in the backward pass;
- otherwise the logits are computed again in the backward pass (Chen et al. 2016, arXiv:1604.06174).

The first two are what Liger's fused linear cross entropy does (Hsu et al. 2024, arXiv:2410.10989), for
any loss of the log-probabilities. Positions of which no cell counts in the loss have no gradient.

Shape letters: P positions, D hidden size, V vocabulary, Q cells (a position and a token to score
there; a position may have none or many), R positions that have cells, C positions of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hosted_tinker.modeling.base_model import BaseModel
from hosted_tinker.modeling.lora import Routing, Segment, cut_segments, make_segments
from hosted_tinker.modeling.turn_points import TurnPoint, never_turn

BLOCK_ELEMENTS_ON_CPU = 2**21
BLOCK_ELEMENTS_ON_GPU = 2**26
"""Of the logits that are worked on at once: what of them a cache holds, or enough for a kernel."""


@dataclass(frozen=True, slots=True)
class Cells:
    """What is scored.

    Attributes:
        position_Q: int64 row of the hidden states, ascending.
        target_Q: int64 token id.
    """

    position_Q: Tensor
    target_Q: Tensor

    def select(self, mask_Q: Tensor) -> Cells:
        return Cells(self.position_Q[mask_Q], self.target_Q[mask_Q])

    def __len__(self) -> int:
        return len(self.position_Q)


@dataclass(frozen=True, slots=True)
class LossGradient:
    """What is known of a loss before it is computed.

    Attributes:
        counts_Q: bool, false where its gradient is 0 for certain.
        values_Q: float32, its gradient; None if it depends on the log-probabilities.
    """

    counts_Q: Tensor
    values_Q: Tensor | None = None


@dataclass(frozen=True, slots=True)
class OutputHead:
    """Hidden states to logits.

    Attributes:
        routing: of the adapters on the head; set for each chunk.
        segments: whose positions the hidden states are, without a gap.
        trained: the parameters of the head that get a gradient.
        chunk_tokens: positions whose logits exist at once.
        turn: called before each chunk.
    """

    base: BaseModel
    routing: Routing
    segments: Sequence[Segment]
    trained: Sequence[Tensor]
    chunk_tokens: int
    turn: TurnPoint = never_turn

    def score(self, hidden_CD: Tensor, start: int, cells: Cells) -> Tensor:
        """Float32 [Q] of the chunk that begins at position `start`, from where cells count."""
        self.turn()
        self.routing.segments = cut_segments(self.segments, start, start + len(hidden_CD))
        logits_CV = self.base.compute_logits(hidden_CD)
        # A tied head is on the first device of a pipeline, the hidden states on the last.
        position_Q, target_Q = (x.to(logits_CV.device) for x in (cells.position_Q, cells.target_Q))
        logprobs_Q = cast(Tensor, TargetLogprobs.apply(logits_CV, position_Q, target_Q))
        return logprobs_Q.to(hidden_CD.device)

    def split(self, num_positions: int, cells: Cells) -> Iterator[tuple[slice, slice, Cells]]:
        """Of each chunk with cells: its positions, its cells' place, and the cells within it."""
        starts = torch.arange(0, num_positions + self.chunk_tokens, self.chunk_tokens)
        bounds = torch.searchsorted(cells.position_Q.cpu(), starts).tolist()
        for index, (low, high) in enumerate(pairwise(bounds)):
            start = index * self.chunk_tokens
            if low < high:
                within = Cells(cells.position_Q[low:high] - start, cells.target_Q[low:high])
                yield slice(start, start + self.chunk_tokens), slice(low, high), within

    def keep_positions(self, rows_R: Tensor) -> OutputHead:
        """The head for those positions, int64 and ascending, alone."""
        bounds = torch.tensor([0, *(segment.stop for segment in self.segments)])
        counts = torch.searchsorted(rows_R.cpu(), bounds).diff().tolist()
        adapters = [segment.adapter for segment in self.segments]
        return replace(self, segments=make_segments(adapters, counts))


def compute_target_logprobs(
    head: OutputHead, hidden_PD: Tensor, cells: Cells, gradient: LossGradient | None
) -> Tensor:
    """log p(target_Q[q]) at position_Q[q], float32 [Q] on the device of the hidden states.

    Args:
        hidden_PD: last hidden states.
        gradient: of the loss that will be taken of the result. None: no gradient is wanted.
    """
    if gradient is None:
        return score_without_gradient(head, hidden_PD, cells)
    counts_Q = gradient.counts_Q
    if not counts_Q.any():
        # A gradient of zeros, so that the loss can be taken like any other.
        return score_without_gradient(head, hidden_PD, cells) + hidden_PD[:0].sum()
    values_Q = None if gradient.values_Q is None else gradient.values_Q[counts_Q]
    counting_Q = score_with_gradient(head, hidden_PD, cells.select(counts_Q), values_Q)
    if counts_Q.all():
        return counting_Q
    logprobs_Q = torch.zeros(len(cells), device=hidden_PD.device)
    logprobs_Q[~counts_Q] = score_without_gradient(head, hidden_PD, cells.select(~counts_Q))
    return logprobs_Q.index_put((counts_Q,), counting_Q)


@torch.no_grad()
def score_without_gradient(head: OutputHead, hidden_PD: Tensor, cells: Cells) -> Tensor:
    logprobs_Q = torch.empty(len(cells), device=hidden_PD.device)
    head, hidden_RD, cells = drop_idle_positions(head, hidden_PD, cells)
    for positions, place, within in head.split(len(hidden_RD), cells):
        logprobs_Q[place] = head.score(hidden_RD[positions], positions.start, within)
    return logprobs_Q


def score_with_gradient(
    head: OutputHead, hidden_PD: Tensor, cells: Cells, gradient_Q: Tensor | None
) -> Tensor:
    """`gradient_Q` is the gradient of the loss to come, where it is known."""
    head, hidden_RD, cells = drop_idle_positions(head, hidden_PD, cells)
    if gradient_Q is not None or (len(hidden_RD) == len(cells) and not head.trained):
        return cast(
            Tensor, ScoreAndDifferentiate.apply(head, cells, gradient_Q, hidden_RD, *head.trained)
        )
    chunks: list[Tensor] = []
    for positions, _, within in head.split(len(hidden_RD), cells):
        arguments = (hidden_RD[positions], positions.start, within)
        chunks.append(cast(Tensor, checkpoint(head.score, *arguments, use_reentrant=False)))
    return torch.cat(chunks)


def drop_idle_positions(
    head: OutputHead, hidden_PD: Tensor, cells: Cells
) -> tuple[OutputHead, Tensor, Cells]:
    """The hidden states [R, D] of positions with cells, the cells in it, and the head for it."""
    rows_R, index_Q = torch.unique_consecutive(cells.position_Q, return_inverse=True)
    if len(rows_R) == len(hidden_PD):
        return head, hidden_PD, cells
    return head.keep_positions(rows_R), hidden_PD[rows_R], Cells(index_Q, cells.target_Q)


class TargetLogprobs(torch.autograd.Function):
    """Log-softmax at the targets, with no second tensor of the logits' size.

    The gradient u_q (onehot(target_q) - softmax) is written where the logits are, which nothing else
    may read afterwards. It can be taken once.
    """

    @staticmethod
    def forward(ctx: Any, logits_CV: Tensor, position_Q: Tensor, target_Q: Tensor) -> Tensor:
        rows = count_block_rows(logits_CV)
        normalizer_C = torch.cat([part.logsumexp(dim=-1) for part in logits_CV.split(rows)])
        ctx.save_for_backward(logits_CV, normalizer_C, position_Q, target_Q)
        return logits_CV[position_Q, target_Q] - normalizer_C[position_Q]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (upstream_Q,) = upstream
        logits_CV, normalizer_C, position_Q, target_Q = ctx.saved_tensors
        rows = count_block_rows(logits_CV)
        total_C = torch.zeros_like(normalizer_C).index_add_(0, position_Q, upstream_Q)
        for part, normalizer, total in zip(
            logits_CV.split(rows), normalizer_C.split(rows), total_C.split(rows), strict=True
        ):
            part.sub_(normalizer[:, None]).exp_().mul_(-total[:, None])
        logits_CV.index_put_((position_Q, target_Q), upstream_Q, accumulate=True)
        return logits_CV, None, None


def count_block_rows(logits_CV: Tensor) -> int:
    elements = BLOCK_ELEMENTS_ON_GPU if logits_CV.is_cuda else BLOCK_ELEMENTS_ON_CPU
    return max(1, elements // logits_CV.shape[1])


class ScoreAndDifferentiate(torch.autograd.Function):
    """Takes the gradient in the forward pass, while the logits are there.

    With a known gradient of the loss, the hidden states' and the trained parameters' are complete
    then. Without, each row's is that of its one log-probability, which the backward pass scales.
    """

    @staticmethod
    def forward(
        ctx: Any,
        head: OutputHead,
        cells: Cells,
        gradient_Q: Tensor | None,
        hidden_RD: Tensor,
        *trained: Tensor,
    ) -> Tensor:
        logprobs_Q = torch.empty(len(cells), device=hidden_RD.device)
        hidden_gradient_RD = torch.zeros_like(hidden_RD)
        trained_gradients = [torch.zeros_like(parameter) for parameter in trained]
        upstream_Q = torch.ones_like(logprobs_Q) if gradient_Q is None else gradient_Q
        for positions, place, within in head.split(len(hidden_RD), cells):
            with torch.enable_grad():
                leaf_CD = hidden_RD[positions].detach().requires_grad_()
                scored_Q = head.score(leaf_CD, positions.start, within)
            logprobs_Q[place] = scored_Q.detach()
            new = torch.autograd.grad(
                scored_Q, [leaf_CD, *trained], upstream_Q[place], materialize_grads=True
            )
            hidden_gradient_RD[positions] = new[0]
            for total, part in zip(trained_gradients, new[1:], strict=True):
                total.add_(part)
        ctx.save_for_backward(cells.position_Q, hidden_gradient_RD, *trained_gradients)
        ctx.gradient_Q = gradient_Q
        return logprobs_Q

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (upstream_Q,) = upstream
        position_Q, hidden_gradient_RD, *trained_gradients = ctx.saved_tensors
        if ctx.gradient_Q is None:
            scale_R = upstream_Q.new_empty(len(hidden_gradient_RD))
            scale_R[position_Q] = upstream_Q
            scaled_RD = hidden_gradient_RD * scale_R[:, None]
            hidden_gradient_RD = scaled_RD.to(hidden_gradient_RD.dtype)
        else:
            assert torch.equal(upstream_Q, ctx.gradient_Q), (
                "the loss has another gradient than said"
            )
        return None, None, None, hidden_gradient_RD, *trained_gradients
