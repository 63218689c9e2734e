"""create_app(): routers, middleware, error answers."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from hosted_tinker import __version__
from hosted_tinker.api import (
    futures,
    models,
    openai_generation,
    openai_models,
    rest,
    sampling,
    service,
    training,
    weights,
)
from hosted_tinker.api.authentication import KeyRequired
from hosted_tinker.api.body_limit import BodyLimit
from hosted_tinker.api.error_answers import (
    answer_error,
    answer_http_error,
    answer_invalid,
    answer_unexpected,
)
from hosted_tinker.errors import HostedTinkerError
from hosted_tinker.server import Server

PREFIX = "/api/v1"


def create_app(server: Server) -> FastAPI:
    """The ASGI application that acts on `server`."""
    app = FastAPI(title="hosted-tinker", version=__version__)
    app.state.server = server
    for module in (service, models, training, futures, sampling, weights, rest):
        app.include_router(module.router, prefix=PREFIX)
    app.include_router(openai_models.router, prefix="/v1")
    app.router.routes.extend(openai_generation.make_routes(server))
    app.add_exception_handler(HostedTinkerError, answer_error)
    app.add_exception_handler(RequestValidationError, answer_invalid)
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_exception_handler(Exception, answer_unexpected)
    app.add_middleware(BodyLimit, max_bytes=server.settings.max_request_bytes)
    # Added later, so asked earlier: nothing of a stranger's request is read.
    app.add_middleware(KeyRequired, api_key=server.settings.api_key)
    if server.settings.cors_origins:
        # Browsers ask, without a key, whether they may send one.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=server.settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    return app
