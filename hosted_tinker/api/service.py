"""Health, client configuration, capabilities, sessions, telemetry."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Response

from hosted_tinker.api.context import ServerDep
from hosted_tinker.errors import UserError
from hosted_tinker.wire.schemas import (
    CreateSessionRequest,
    FinishSessionRequest,
    SessionHeartbeatRequest,
)

router = APIRouter()


@router.get("/healthz")
async def healthz(server: ServerDep) -> dict[str, str]:
    if server.status == "ok":
        return {"status": "ok"}
    return {"status": server.status, "phase": server.describe_loading()}


@router.post("/client/config")
async def client_config(server: ServerDep) -> dict[str, Any]:
    """Flags of the SDK; what each means is in its `ClientConfigResponse`."""
    settings = server.settings
    return {
        "parallel_fwdbwd_chunks": settings.parallel_chunks,
        "fwdbwd_max_chunk_bytes_count": settings.max_chunk_bytes,
        "fwdbwd_dispatch_bytes_semaphore_size": 2 * settings.max_chunk_bytes,
        "proto_write_fwdbwd": True,
        "fwd_via_fwdbwd": True,
        "proto_compress_fwdbwd": False,
        "create_model_via_load_weights": True,
        "custom_loss_server_side": False,
        "sample_use_retrieve_futures": False,
        "sample_join_sampling_session": False,
        "use_pyqwest_transport": False,
    }


@router.post("/client/dynamic_config")
async def client_dynamic_config() -> dict[str, Any]:
    return {"sample_cancel_enabled": True}


@router.get("/get_server_capabilities")
async def get_server_capabilities(server: ServerDep) -> dict[str, Any]:
    base_model = server.trainer.base_model
    context_length = base_model and base_model.context_length
    return {
        "supported_models": [
            {
                "model_name": name,
                "max_context_length": context_length,
                "trainable": True,
                "sampleable": True,
            }
            for name in server.names.names
        ]
    }


@router.post("/create_session")
async def create_session(body: CreateSessionRequest, server: ServerDep) -> dict[str, Any]:
    session_id = str(uuid.uuid4())
    server.metadata.add_session(
        session_id,
        user_metadata=body.user_metadata,
        tags=body.tags or [],
        display_name=body.display_name,
        sdk_version=body.sdk_version,
    )
    answer: dict[str, Any] = {"type": "create_session", "session_id": session_id}
    if server.status == "loading":
        answer["info_message"] = f"The base model loads: {server.describe_loading()}"
    return answer


@router.post("/session_heartbeat")
async def session_heartbeat(body: SessionHeartbeatRequest, server: ServerDep) -> Response:
    """410 tells the client that its session has ended."""
    try:
        server.metadata.get_live_session(body.session_id)
    except UserError as error:
        return Response(str(error), status_code=410 if error.http_status == 400 else 404)
    server.metadata.touch_session(body.session_id)
    return Response("{}", media_type="application/json")


@router.post("/sessions/{session_id}/finish", status_code=204)
async def finish_session(session_id: str, body: FinishSessionRequest, server: ServerDep) -> None:
    server.metadata.get_session(session_id)
    server.finish_session(session_id, body.reason.type)


@router.post("/telemetry")
async def telemetry() -> dict[str, str]:
    """Dropped unread: the SDK puts tracebacks and credentials into it."""
    return {"status": "accepted"}
