"""Log-probabilities and gradients in chunks, against the whole logits in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hosted_tinker.modeling.lora import Routing, Segment
from hosted_tinker.modeling.target_logprobs import (
    Cells,
    LossGradient,
    OutputHead,
    compute_target_logprobs,
)

VOCABULARY, HIDDEN, RANK = 37, 8, 3


@dataclass
class Head:
    """A softcapped output head with an adapter, as `BaseModel` has one; float32 or float64."""

    weight: Tensor
    A: Tensor
    B: Tensor

    def compute_logits(self, hidden_PD: Tensor) -> Tensor:
        logits = hidden_PD @ self.weight.T + hidden_PD @ self.A.T @ self.B.T
        return torch.tanh(logits / 5) * 5

    def double(self) -> Head:
        A, B = (x.detach().double().requires_grad_() for x in (self.A, self.B))
        return Head(self.weight.double(), A, B)


def make_head(generator: torch.Generator) -> Head:
    weight, A, B = (
        torch.randn(shape, generator=generator)
        for shape in ((VOCABULARY, HIDDEN), (RANK, HIDDEN), (VOCABULARY, RANK))
    )
    return Head(weight, A.requires_grad_(), B.requires_grad_())


def make_output_head(
    head: Head, num_positions: int, trained: list[Tensor], chunk_tokens: int
) -> OutputHead:
    segments = [Segment(None, 0, num_positions)]
    return OutputHead(cast(Any, head), Routing(), segments, trained, chunk_tokens)


def score_whole(head: Head, hidden_PD: Tensor, cells: Cells) -> Tensor:
    logprobs_PV = torch.log_softmax(head.compute_logits(hidden_PD), dim=-1)
    return logprobs_PV[cells.position_Q, cells.target_Q]


@given(
    num_targets=st.lists(st.integers(0, 3), min_size=1, max_size=12).filter(any),
    chunk_tokens=st.integers(1, 13),
    loss=st.sampled_from(["linear", "square", "none"]),
    trains_head=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_values_and_gradients_are_those_of_the_whole_logits(
    num_targets: list[int], chunk_tokens: int, loss: str, trains_head: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    head = make_head(generator)
    count = sum(num_targets)
    hidden_PD = torch.randn(len(num_targets), HIDDEN, generator=generator).requires_grad_()
    position_Q = torch.arange(len(num_targets)).repeat_interleave(torch.tensor(num_targets))
    cells = Cells(position_Q, torch.randint(VOCABULARY, (count,), generator=generator))
    weights_Q = torch.randn(count, generator=generator)
    weights_Q *= torch.rand(count, generator=generator) > 0.4
    known = {
        "linear": LossGradient(weights_Q != 0, -weights_Q),
        "square": LossGradient(weights_Q != 0),
        "none": None,
    }[loss]

    def take_loss(logprobs_Q: Tensor) -> Tensor:
        weights = weights_Q.to(logprobs_Q)
        return -(weights * (logprobs_Q if loss == "linear" else logprobs_Q.square())).sum()

    trained = [head.A, head.B] if trains_head else []
    output_head = make_output_head(head, len(num_targets), trained, chunk_tokens)
    logprobs_Q = compute_target_logprobs(output_head, hidden_PD, cells, known)

    exact, exact_hidden = head.double(), hidden_PD.detach().double().requires_grad_()
    expected_Q = score_whole(exact, exact_hidden, cells)
    torch.testing.assert_close(logprobs_Q.double(), expected_Q, rtol=1e-5, atol=1e-5)
    if known is None:
        assert not logprobs_Q.requires_grad
        return
    found = torch.autograd.grad(
        take_loss(logprobs_Q), [hidden_PD, *trained], materialize_grads=True
    )
    wanted = [exact_hidden, *([exact.A, exact.B] if trains_head else [])]
    expected = torch.autograd.grad(take_loss(expected_Q), wanted)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_a_loss_that_is_not_what_was_said_is_noticed() -> None:
    generator = torch.Generator().manual_seed(0)
    head = make_head(generator)
    hidden_PD = torch.randn(2, HIDDEN, generator=generator).requires_grad_()
    cells = Cells(torch.tensor([0, 1]), torch.tensor([3, 4]))
    known = LossGradient(torch.tensor([True, True]), torch.tensor([-1.0, -1.0]))
    logprobs_Q = compute_target_logprobs(make_output_head(head, 2, [], 4), hidden_PD, cells, known)
    with pytest.raises(AssertionError, match="another gradient"):
        (-2 * logprobs_Q).sum().backward()


def test_logits_of_one_chunk_at_a_time_exist() -> None:
    """And of no position whose cells don't count in the loss more than once."""
    asked: list[int] = []

    class Counting(Head):
        def compute_logits(self, hidden_PD: Tensor) -> Tensor:
            asked.append(len(hidden_PD))
            return super().compute_logits(hidden_PD)

    head = make_head(torch.Generator().manual_seed(0))
    counting = Counting(head.weight, head.A, head.B)
    hidden_PD = torch.randn(10, HIDDEN).requires_grad_()
    cells = Cells(torch.arange(10), torch.arange(10))
    weights_Q = torch.tensor([0.0] * 6 + [1.0] * 4)
    known = LossGradient(weights_Q != 0, -weights_Q)
    output_head = make_output_head(counting, 10, [head.A, head.B], 3)
    logprobs_Q = compute_target_logprobs(output_head, hidden_PD, cells, known)
    (-(weights_Q * logprobs_Q).sum()).backward()
    assert max(asked) <= 3
    assert sum(asked) == 10
