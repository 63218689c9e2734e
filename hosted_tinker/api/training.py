"""forward_backward (forward is the same with `forward_only`) and optim_step."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from hosted_tinker.api.body_limit import is_cut
from hosted_tinker.api.context import ServerDep, accepted, check_run_in_memory, seq_id_or_next
from hosted_tinker.errors import TooLargeError, UserError
from hosted_tinker.run_queue import Job
from hosted_tinker.server import Server
from hosted_tinker.types import (
    ForwardBackward,
    FutureResult,
    OptimStep,
    TrainingOperation,
)
from hosted_tinker.wire.proto_requests import (
    Envelope,
    decode_forward_backward,
    decompress,
    read_envelope,
    read_envelope_of_prefix,
)
from hosted_tinker.wire.responses import PROTOBUF
from hosted_tinker.wire.schemas import AdamParamsJson, OptimStepRequest

router = APIRouter()


@router.post("/forward_backward")
async def forward_backward(request: Request, server: ServerDep) -> dict[str, Any]:
    content_type = request.headers.get("content-type", "")
    if PROTOBUF not in content_type:
        raise UserError(f"content-type {content_type!r} is not supported; accepted: {PROTOBUF}")
    body = await request.body()
    if is_cut(request.scope):
        return refuse_too_large(server, body)
    if request.headers.get("content-encoding") == "zstd":
        body = decompress(body, max_bytes=server.settings.max_request_bytes)
    envelope = read_envelope(body)
    return submit_forward_backward(server, envelope)


def submit_forward_backward(
    server: Server, envelope: Envelope, error: UserError | None = None
) -> dict[str, Any]:
    """Content that can't be read fails the future: a refused request would wedge the SDK."""
    check_run_in_memory(server, envelope.model_id)
    work = error or decode_or_error(envelope)
    future, is_new = server.futures.create(("train", envelope.model_id, envelope.seq_id))
    if is_new:
        server.metadata.touch_run(envelope.model_id)
        server.training.submit(
            Job(
                envelope.model_id,
                envelope.seq_id,
                work,
                future,
                pass_on,
                may_follow_later_ids=True,
                computes_gradient=not envelope.message.forward_only,
            )
        )
    return accepted(future, envelope.model_id)


def decode_or_error(envelope: Envelope) -> ForwardBackward | UserError:
    try:
        return decode_forward_backward(envelope)
    except UserError as error:
        return error


def refuse_too_large(server: Server, prefix: bytes) -> dict[str, Any]:
    """Fails the request's future, if its beginning says whose it is."""
    error = TooLargeError(
        f"request body is over the limit of {server.settings.max_request_bytes} bytes "
        "(max_request_bytes); send fewer or shorter data"
    )
    envelope = read_envelope_of_prefix(prefix)
    if envelope is None:
        raise error
    return submit_forward_backward(server, envelope, error)


async def pass_on(output: FutureResult) -> FutureResult:
    """The trainer's output is the result."""
    return output


@router.post("/optim_step")
async def optim_step(body: OptimStepRequest, server: ServerDep) -> dict[str, Any]:
    check_run_in_memory(server, body.model_id)
    seq_id = seq_id_or_next(server, body.model_id, body.seq_id)
    future, is_new = server.futures.create(("train", body.model_id, seq_id))
    if is_new:
        server.metadata.touch_run(body.model_id)
        server.training.submit(Job(body.model_id, seq_id, to_optim_step(body), future, pass_on))
    return accepted(future, body.model_id)


def to_optim_step(body: OptimStepRequest) -> TrainingOperation | UserError:
    if body.optimizer_params is not None:
        family = body.optimizer_params.get("type")
        return UserError(f"optimizer {family!r} is not supported; accepted: adamw (adam_params)")
    try:
        return OptimStep(body.model_id, (body.adam_params or AdamParamsJson()).to_adam_params())
    except UserError as error:
        return error
