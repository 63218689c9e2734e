"""The micro-batches of one or many `forward_backward` requests, on one base model.

Data of all requests share passes, whatever run, adapter and loss they are of. Each run's gradient
comes from its own data only: attention never leaves a sequence, and an adapter multiplies its own
positions only.

Shape letters: P positions of a micro-batch, D hidden size, Q cells (a position and a target).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hosted_tinker.errors import UserError
from hosted_tinker.loss_specs import resolve_config
from hosted_tinker.modeling.base_model import BaseModel
from hosted_tinker.modeling.decoder_pass import DecoderPass
from hosted_tinker.modeling.lora import LoraModel, make_segments
from hosted_tinker.modeling.target_logprobs import (
    Cells,
    LossGradient,
    OutputHead,
    compute_target_logprobs,
)
from hosted_tinker.modeling.turn_points import TurnPoint
from hosted_tinker.training.batch import (
    DatumIndex,
    MicroBatch,
    collate,
    plan_micro_batches,
    split_by_shape,
)
from hosted_tinker.training.losses import LOSSES, describe_gradient
from hosted_tinker.training.mismatch import SamplingMismatch
from hosted_tinker.types import Float32Array, ForwardBackward, ForwardBackwardOutput

Gradients = dict[str, list[Tensor]]
"""Run -> gradient of each of its parameters, in their order."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One request's cells of one micro-batch, after its pass."""

    data: Sequence[int]
    shapes: Sequence[tuple[int, ...]]
    logprobs_Q: Tensor
    inputs: Mapping[str, Tensor]
    loss: Tensor


class JointPass:
    """Runs requests that compute the same way: all with a gradient, or all without."""

    def __init__(
        self,
        base: BaseModel,
        decoder: DecoderPass,
        lora: LoraModel,
        *,
        logits_chunk_tokens: int,
        one_by_one: bool,
        turn: TurnPoint,
    ) -> None:
        """`one_by_one` gives each sequence a pass, in the order of the data, so that its numbers do not
        depend on what shares the pass."""
        self._base = base
        self._decoder = decoder
        self._lora = lora
        self._logits_chunk_tokens = logits_chunk_tokens
        self._one_by_one = one_by_one
        self._turn = turn

    def run(
        self,
        operations: Sequence[ForwardBackward],
        parameters: Mapping[str, Sequence[nn.Parameter]],
        max_tokens: int,
    ) -> tuple[list[ForwardBackwardOutput], Gradients]:
        """The outputs, and the gradients that the caller adds once all of them are there.

        Args:
            parameters: of the operations' runs.
            max_tokens: of a micro-batch.

        Raises:
            UserError: a loss is not finite. The gradients of others may be spoilt then.
        """
        wants_gradient = not operations[0].forward_only
        assert all(one.forward_only != wants_gradient for one in operations)
        scored: list[list[Scored]] = [[] for _ in operations]
        gradients: Gradients = {}
        members: list[DatumIndex] = [
            (request, index)
            for request, operation in enumerate(operations)
            for index in range(len(operation.data))
        ]
        lengths = [len(operations[request].data[index].tokens) for request, index in members]
        if self._one_by_one:
            plan = [[index] for index in range(len(members))]
        else:
            plan = plan_micro_batches(lengths, max_tokens, padded=not self._decoder.packs)
        for group in plan:
            batch = collate([one.data for one in operations], [members[i] for i in group])
            with torch.set_grad_enabled(wants_gradient):
                new = self._score(operations, batch)
            if wants_gradient:
                runs = list(dict.fromkeys(operations[request].model_id for request in new))
                loss = torch.stack([one.loss for one in new.values()]).sum()
                add_gradients(gradients, loss, {run: parameters[run] for run in runs})
            for request, one in new.items():
                scored[request].append(one)
        return [make_output(parts) for parts in scored], gradients

    def _score(self, operations: Sequence[ForwardBackward], batch: MicroBatch) -> dict[int, Scored]:
        """By request."""
        runs = [operations[request].model_id for request in batch.requests]
        hidden_PD = self._decoder.run(batch.tokens_P, batch.lengths, runs)
        device = hidden_PD.device
        inputs = [
            {name: values.to(device) for name, values in part.inputs.items()}
            for part in batch.parts
        ]
        logprobs_Q = compute_target_logprobs(
            self._make_head(runs, batch.lengths),
            hidden_PD,
            Cells(batch.position_Q.to(device), batch.target_Q.to(device)),
            join_gradients(
                [
                    describe_gradient(operations[part.request].loss_fn, values)
                    for part, values in zip(batch.parts, inputs, strict=True)
                ]
            )
            if torch.is_grad_enabled()
            else None,
        )
        scored: dict[int, Scored] = {}
        for part, values in zip(batch.parts, inputs, strict=True):
            operation = operations[part.request]
            config = resolve_config(operation.loss_fn, operation.loss_fn_config)
            own_Q = logprobs_Q[part.cells]
            loss = LOSSES[operation.loss_fn](own_Q, values, config)
            scored[part.request] = Scored(part.data, part.shapes, own_Q.detach(), values, loss)
        return scored

    def _make_head(self, runs: Sequence[str], lengths: Sequence[int]) -> OutputHead:
        trained = [
            parameter
            for run in dict.fromkeys(runs)
            for parameter in self._lora.get_head_parameters(run)
        ]
        segments = make_segments(runs, lengths)
        return OutputHead(
            self._base,
            self._lora.head_routing,
            segments,
            trained,
            self._logits_chunk_tokens,
            self._turn,
        )


def join_gradients(parts: Sequence[LossGradient]) -> LossGradient:
    """Of requests whose cells follow one another."""
    values = [part.values_Q for part in parts if part.values_Q is not None]
    return LossGradient(
        torch.cat([part.counts_Q for part in parts]),
        torch.cat(values) if len(values) == len(parts) else None,
    )


def add_gradients(
    totals: Gradients, loss: Tensor, parameters: Mapping[str, Sequence[nn.Parameter]]
) -> None:
    """Adds a micro-batch's in place; the first ones become the totals."""
    flat = [parameter for own in parameters.values() for parameter in own]
    if loss.requires_grad:
        new = iter(torch.autograd.grad(loss, flat, materialize_grads=True))
    else:
        # Only the head is trained, and no cell counts.
        new = iter([torch.zeros_like(parameter) for parameter in flat])
    for run, own in parameters.items():
        gradients = [next(new) for _ in own]
        if run not in totals:
            totals[run] = gradients
            continue
        for total, gradient in zip(totals[run], gradients, strict=True):
            total.add_(gradient)


def make_output(parts: Sequence[Scored]) -> ForwardBackwardOutput:
    """One request's, of all its micro-batches. Raises UserError for a loss that is not finite."""
    loss = sum(float(part.loss.detach()) for part in parts)
    if not math.isfinite(loss):
        raise UserError(
            f"loss:sum is {loss}: nothing was accumulated. Either weights, advantages or importance "
            "ratios of the data are too large, or the run has diverged"
        )
    logprobs: dict[int, Float32Array] = {}
    mismatch = SamplingMismatch()
    for part in parts:
        mismatch.add(part.logprobs_Q, part.inputs)
        values_Q = part.logprobs_Q.cpu().numpy()
        logprobs.update(zip(part.data, split_by_shape(values_Q, part.shapes), strict=True))
    return ForwardBackwardOutput(
        [logprobs[index] for index in range(len(logprobs))], {"loss:sum": loss, **mismatch.metrics}
    )
