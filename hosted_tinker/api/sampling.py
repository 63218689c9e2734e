"""create_sampling_session, asample, samplers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter

from hosted_tinker.api.context import ServerDep
from hosted_tinker.errors import UserError
from hosted_tinker.server import Server
from hosted_tinker.store.records import SamplingSession
from hosted_tinker.tinker_path import CheckpointKind, parse_tinker_path
from hosted_tinker.types import AdapterRef, Sample
from hosted_tinker.wire.schemas import CreateSamplingSessionRequest, SampleRequest

router = APIRouter()


@router.post("/create_sampling_session")
async def create_sampling_session(
    body: CreateSamplingSessionRequest, server: ServerDep
) -> dict[str, Any]:
    """With a path and a base model the path decides."""
    server.metadata.get_live_session(body.session_id)
    base_model, adapter = find_weights(server, body.base_model, body.model_path)
    session = SamplingSession(
        make_sampling_session_id(body.session_id, body.sampling_session_seq_id),
        body.session_id,
        base_model,
        body.model_path,
        adapter,
    )
    server.metadata.put_sampling_session(session)
    return {
        "type": "create_sampling_session",
        "sampling_session_id": session.sampling_session_id,
    }


@router.get("/samplers/{sampling_session_id}")
async def get_sampler(sampling_session_id: str, server: ServerDep) -> dict[str, Any]:
    session = server.metadata.get_sampling_session(sampling_session_id)
    answer = {"sampler_id": session.sampling_session_id, "base_model": session.base_model}
    return answer if session.model_path is None else {**answer, "model_path": session.model_path}


@router.post("/asample")
async def asample(body: SampleRequest, server: ServerDep) -> dict[str, Any]:
    """Ids of the sequences are handed out now; the SDK needs one for each sample."""
    if body.sampling_session_id is None:
        _, adapter = find_weights(server, body.base_model, body.model_path)
        key = object()
    else:
        session = server.metadata.get_sampling_session(body.sampling_session_id)
        server.metadata.get_live_session(session.session_id)
        adapter = session.adapter
        # A request of an old client without a number has no other that it could repeat.
        number = object() if body.seq_id is None else body.seq_id
        key = ("sample", body.sampling_session_id, number)
    work = to_sample_or_error(body, adapter and server.files.resolve_adapter(adapter))
    if not server.futures.has(key):
        server.sampling.check_room()
    future, is_new = server.futures.create(key, sample=True)
    if is_new and isinstance(work, UserError):
        server.futures.settle(future, work)
    elif is_new and isinstance(work, Sample):
        server.sampling.submit(future, replace(work, request_id=future.request_id))
    return {
        "request_id": future.request_id,
        "sample_sequence_ids": [
            f"{future.request_id}-{index}" for index in range(body.num_samples)
        ],
    }


def to_sample_or_error(body: SampleRequest, adapter: AdapterRef | None) -> Sample | UserError:
    """The operation, its request id still to be set."""
    try:
        return body.to_operation("", adapter)
    except UserError as error:
        return error


def find_weights(
    server: Server, base_model: str | None, model_path: str | None
) -> tuple[str, AdapterRef | None]:
    """The base model's name as the client knows it, and the adapter that a path names."""
    if model_path is None:
        if base_model is None:
            raise UserError("one of base_model and model_path is needed")
        return server.names.check(base_model), None
    if base_model is not None:
        server.names.check(base_model)
    path = parse_tinker_path(model_path)
    if path.kind is not CheckpointKind.SAMPLER:
        raise UserError(
            f"path {model_path!r} is a training checkpoint; sampling needs one of "
            "save_weights_for_sampler (tinker://MODEL_ID/sampler_weights/NAME)"
        )
    checkpoint = server.metadata.get_checkpoint(path)
    run = server.metadata.get_run(path.model_id)
    return server.names.check(run.base_model), checkpoint.adapter


def make_sampling_session_id(session_id: str, sampling_session_seq_id: int) -> str:
    return f"{session_id}:sample:{sampling_session_seq_id}"
