"""create_app(): routers, middleware, error answers."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from hosted_tinker import __version__
from hosted_tinker.api import futures, models, rest, sampling, service, training, weights
from hosted_tinker.api.body_limit import BodyLimit
from hosted_tinker.errors import HostedTinkerError
from hosted_tinker.server import Server

logger = logging.getLogger(__name__)

PREFIX = "/api/v1"
OPEN_PATHS = {f"{PREFIX}/healthz"}


def create_app(server: Server) -> FastAPI:
    """The ASGI application that acts on `server`."""
    app = FastAPI(title="hosted-tinker", version=__version__)
    app.state.server = server
    for module in (service, models, training, futures, sampling, weights, rest):
        app.include_router(module.router, prefix=PREFIX)
    app.add_exception_handler(HostedTinkerError, answer_error)
    app.add_exception_handler(RequestValidationError, answer_invalid)
    app.add_exception_handler(Exception, answer_unexpected)
    app.middleware("http")(require_key)
    app.add_middleware(BodyLimit, max_bytes=server.settings.max_request_bytes)
    return app


async def require_key(
    request: Request, call_next: Callable[[Request], Awaitable[Response]]
) -> Response:
    """Refuses requests without the server's key, if it has one."""
    expected = request.app.state.server.settings.api_key
    given = request.headers.get("x-api-key", "")
    if (
        expected is None
        or request.url.path in OPEN_PATHS
        or hmac.compare_digest(given.encode(), expected.encode())
    ):
        return await call_next(request)
    return JSONResponse({"detail": "X-API-Key is missing or not accepted"}, status_code=401)


async def answer_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HostedTinkerError)
    return JSONResponse({"detail": str(error)}, status_code=error.http_status)


async def answer_invalid(_request: Request, error: Exception) -> Response:
    """A body of the wrong shape: each wrong field with its value."""
    assert isinstance(error, RequestValidationError)
    return JSONResponse({"detail": [describe(item) for item in error.errors()]}, status_code=422)


def describe(item: dict[str, Any]) -> str:
    place = ".".join(str(part) for part in item["loc"])
    return f"{place} = {item.get('input')!r}: {item['msg']}"[:500]


async def answer_unexpected(request: Request, error: Exception) -> Response:
    """Our own bug: the log has the traceback, the client one line."""
    logger.error("unexpected error path=%s", request.url.path, exc_info=error)
    detail = f"internal error: {type(error).__name__}; the server's log says more"
    return JSONResponse({"detail": detail}, status_code=500)
