"""Training runs, checkpoints and sessions: list, read, publish, expire, delete."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query

from hosted_tinker.api.context import ServerDep
from hosted_tinker.api.weights import check_ttl
from hosted_tinker.errors import UserError
from hosted_tinker.server import Server
from hosted_tinker.store.records import Checkpoint, RunRecord
from hosted_tinker.tinker_path import CheckpointKind, TinkerPath, parse_tinker_path
from hosted_tinker.wire.schemas import TtlRequest

router = APIRouter()

Limit = Annotated[int, Query(ge=1, le=10_000)]
Offset = Annotated[int, Query(ge=0)]

OWNER = "local"
"""Owner of every run: the server has no accounts."""


@router.get("/training_runs")
async def list_training_runs(
    server: ServerDep, limit: Limit = 20, offset: Offset = 0
) -> dict[str, Any]:
    runs, total = server.metadata.list_runs(limit=limit, offset=offset)
    return {
        "training_runs": [encode_run(server, run) for run in runs],
        "cursor": {"offset": offset, "limit": limit, "total_count": total},
    }


@router.get("/training_runs/{model_id}")
async def get_training_run(model_id: str, server: ServerDep) -> dict[str, Any]:
    return encode_run(server, server.metadata.get_run(model_id))


@router.delete("/training_runs/{model_id}", status_code=204)
async def delete_training_run(model_id: str, server: ServerDep) -> None:
    """Deletes a run that is not in memory, with all its checkpoints. Not part of the SDK."""
    server.metadata.get_run(model_id)
    if server.training.has_run(model_id):
        raise UserError(f"training run {model_id!r} is in use; finish its session first")
    server.metadata.delete_run(model_id)


@router.get("/training_runs/{model_id}/checkpoints")
async def list_checkpoints(model_id: str, server: ServerDep) -> dict[str, Any]:
    server.metadata.get_run(model_id)
    checkpoints, _ = server.metadata.list_checkpoints(model_id=model_id)
    return {"checkpoints": [encode_checkpoint(checkpoint) for checkpoint in checkpoints]}


@router.get("/checkpoints")
async def list_user_checkpoints(
    server: ServerDep, limit: Limit = 100, offset: Offset = 0
) -> dict[str, Any]:
    checkpoints, total = server.metadata.list_checkpoints(limit=limit, offset=offset)
    return {
        "checkpoints": [encode_checkpoint(checkpoint) for checkpoint in checkpoints],
        "cursor": {"offset": offset, "limit": limit, "total_count": total},
    }


@router.delete("/training_runs/{model_id}/checkpoints/{segment}/{name}", status_code=204)
async def delete_checkpoint(model_id: str, segment: str, name: str, server: ServerDep) -> None:
    server.metadata.delete_checkpoint(to_path(model_id, segment, name))


@router.post("/training_runs/{model_id}/checkpoints/{segment}/{name}/publish", status_code=204)
async def publish_checkpoint(model_id: str, segment: str, name: str, server: ServerDep) -> None:
    set_public(server, to_path(model_id, segment, name), public=True)


@router.delete("/training_runs/{model_id}/checkpoints/{segment}/{name}/publish", status_code=204)
async def unpublish_checkpoint(model_id: str, segment: str, name: str, server: ServerDep) -> None:
    set_public(server, to_path(model_id, segment, name), public=False)


@router.put("/training_runs/{model_id}/checkpoints/{segment}/{name}/ttl", status_code=204)
async def set_checkpoint_ttl(
    model_id: str, segment: str, name: str, body: TtlRequest, server: ServerDep
) -> None:
    path = to_path(model_id, segment, name)
    server.metadata.get_checkpoint(path)
    check_ttl(body.ttl_seconds)
    expires_at = None if body.ttl_seconds is None else time.time() + body.ttl_seconds
    server.metadata.set_checkpoint_expiry(path, expires_at)


@router.get("/sessions")
async def list_sessions(server: ServerDep, limit: Limit = 20, offset: Offset = 0) -> dict[str, Any]:
    return {"sessions": server.metadata.list_session_ids(limit=limit, offset=offset)}


@router.get("/sessions/{session_id}")
async def get_session(session_id: str, server: ServerDep) -> dict[str, Any]:
    session = server.metadata.get_session(session_id)
    return {
        "training_run_ids": server.metadata.list_run_ids_of_session(session_id),
        "sampler_ids": server.metadata.list_sampler_ids_of_session(session_id),
        "user_metadata": session.user_metadata,
        "display_name": session.display_name,
    }


def to_path(model_id: str, segment: str, name: str) -> TinkerPath:
    return parse_tinker_path(f"tinker://{model_id}/{segment}/{name}")


def set_public(server: Server, path: TinkerPath, *, public: bool) -> None:
    server.metadata.get_checkpoint(path)
    server.metadata.set_checkpoint_public(path, public)


def encode_run(server: Server, run: RunRecord) -> dict[str, Any]:
    checkpoints, _ = server.metadata.list_checkpoints(model_id=run.model_id)
    return {
        "training_run_id": run.model_id,
        "base_model": run.base_model,
        "model_owner": OWNER,
        "is_lora": True,
        "lora_rank": run.lora_rank,
        "last_request_time": to_datetime(run.last_request_at),
        "last_checkpoint": newest(checkpoints, CheckpointKind.TRAINING),
        "last_sampler_checkpoint": newest(checkpoints, CheckpointKind.SAMPLER),
        "user_metadata": run.user_metadata,
    }


def newest(checkpoints: list[Checkpoint], kind: CheckpointKind) -> dict[str, Any] | None:
    """Of a list that is newest first."""
    return next(
        (
            encode_checkpoint(checkpoint)
            for checkpoint in checkpoints
            if checkpoint.path.kind is kind
        ),
        None,
    )


def encode_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    expires_at = checkpoint.expires_at
    return {
        "checkpoint_id": checkpoint.path.checkpoint_id,
        "checkpoint_type": checkpoint.path.kind.value,
        "time": to_datetime(checkpoint.created_at),
        "tinker_path": str(checkpoint.path),
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.public,
        "user_metadata": checkpoint.user_metadata or None,
        "expires_at": None if expires_at is None else to_datetime(expires_at),
    }


def to_datetime(seconds: float) -> datetime:
    """With its timezone, which the SDK's command line needs."""
    return datetime.fromtimestamp(seconds, UTC)
