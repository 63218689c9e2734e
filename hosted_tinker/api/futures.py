"""retrieve_future, cancel_future."""

from __future__ import annotations

from typing import Annotated

import orjson
from fastapi import APIRouter, Header, Response

from hosted_tinker.api.context import ServerDep
from hosted_tinker.errors import HostedTinkerError
from hosted_tinker.futures import Future, is_sample
from hosted_tinker.wire.responses import JSON, encode_result
from hosted_tinker.wire.schemas import RetrieveFutureRequest

router = APIRouter()

CLIENT_MARGIN_S = 10.0
"""A poll is answered this long before the client stops waiting for it."""


@router.post("/retrieve_future")
async def retrieve_future(
    body: RetrieveFutureRequest,
    server: ServerDep,
    x_stainless_read_timeout: Annotated[float | None, Header()] = None,
) -> Response:
    """Holds the poll until the result is there, or answers 408, on which the SDK polls again."""
    future = server.futures.get(body.request_id)
    if future is None:
        return answer_unknown(body.request_id)
    hold_s = server.settings.poll_hold_s
    if x_stainless_read_timeout is not None:
        hold_s = min(hold_s, max(0.0, x_stainless_read_timeout - CLIENT_MARGIN_S))
    if not await server.futures.wait(future, hold_s):
        return answer_try_again(future)
    server.futures.mark_delivered(future)
    return answer_result(future)


@router.post("/cancel_future", status_code=204)
async def cancel_future(body: RetrieveFutureRequest, server: ServerDep) -> None:
    """Stops a sampling request. Training requests take effect all the same."""
    await server.sampling.cancel(body.request_id)


def answer_result(future: Future) -> Response:
    assert future.result is not None
    if isinstance(future.result, HostedTinkerError):
        error = {"error": str(future.result), "category": future.result.category}
        return Response(orjson.dumps(error), media_type=JSON)
    content, media_type = encode_result(future.result)
    return Response(content, media_type=media_type)


def answer_try_again(future: Future) -> Response:
    waiting = future.describe()
    body = {
        "type": "try_again",
        "request_id": future.request_id,
        "queue_state": waiting.queue_state,
        "queue_state_reason": waiting.reason,
    }
    return Response(orjson.dumps(body), status_code=408, media_type=JSON)


def answer_unknown(request_id: str) -> Response:
    """410 makes the SDK send a sampling request again; a training request can't be repeated."""
    text = (
        f"request {request_id!r} is not known: its result has expired or the server was restarted"
    )
    if is_sample(request_id):
        return Response(orjson.dumps({"detail": text}), status_code=410, media_type=JSON)
    body = {"error": f"{text}; continue from the last checkpoint", "category": "server"}
    return Response(orjson.dumps(body), media_type=JSON)
