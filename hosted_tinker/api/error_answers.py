"""Errors as HTTP answers: OpenAI's shape under /v1, the SDK's elsewhere."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from hosted_tinker.errors import HostedTinkerError, UserError, WorkerFailedError
from hosted_tinker.openai_api.errors import make_body, to_openai_error

logger = logging.getLogger(__name__)

OPENAI_PREFIX = "/v1/"
RETRY_AFTER = {429: "1", 503: "5"}
"""Seconds after which OpenAI clients send a request again, by status."""


async def answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HostedTinkerError)
    status, body = error.http_status, {"detail": str(error)}
    if request.url.path.startswith(OPENAI_PREFIX):
        status, body = to_openai_error(error)
    headers = {"retry-after": RETRY_AFTER[status]} if status in RETRY_AFTER else None
    return JSONResponse(body, status_code=status, headers=headers)


async def answer_invalid(request: Request, error: Exception) -> Response:
    """A body of the wrong shape: each wrong field with its value."""
    assert isinstance(error, RequestValidationError)
    details = [describe(item) for item in error.errors()]
    if request.url.path.startswith(OPENAI_PREFIX):
        return await answer_error(request, UserError("; ".join(details)))
    return JSONResponse({"detail": details}, status_code=422)


async def answer_http_error(request: Request, error: Exception) -> Response:
    """No such route, or another method."""
    assert isinstance(error, HTTPException)
    if request.url.path.startswith(OPENAI_PREFIX):
        message = f"{request.method} {request.url.path}: {error.detail}"
        body = make_body(error.status_code, message)
        return JSONResponse(body, error.status_code, error.headers)
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)


def describe(item: dict[str, Any]) -> str:
    place = ".".join(str(part) for part in item["loc"])
    return f"{place} = {item.get('input')!r}: {item['msg']}"[:500]


async def answer_unexpected(request: Request, error: Exception) -> Response:
    """Our own bug: the log has the traceback, the client one line."""
    logger.error("unexpected error path=%s", request.url.path, exc_info=error)
    detail = f"internal error: {type(error).__name__}; the server's log says more"
    if request.url.path.startswith(OPENAI_PREFIX):
        return await answer_error(request, WorkerFailedError(detail))
    return JSONResponse({"detail": detail}, status_code=500)
