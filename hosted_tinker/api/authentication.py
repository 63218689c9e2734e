"""Refuses requests without the server's key."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from hosted_tinker.api.error_answers import answer_error
from hosted_tinker.errors import ForbiddenError

OPEN_PATHS = {"/api/v1/healthz"}


class KeyRequired:
    """ASGI middleware: SDKs send the key as X-API-Key, OpenAI clients as a bearer token."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or self._api_key is None
            or scope["path"] in OPEN_PATHS
            or has_key(Headers(scope=scope), self._api_key)
        ):
            await self._app(scope, receive, send)
            return
        error = ForbiddenError(
            "the API key is missing or not accepted; send it as X-API-Key or as "
            "Authorization: Bearer"
        )
        answer = await answer_error(Request(scope), error)
        await answer(scope, receive, send)


def has_key(headers: Headers, api_key: str) -> bool:
    """Whether either header has it: a gateway may fill the other with a key of its own."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    sent = (headers.get("x-api-key", ""), bearer)
    return any(hmac.compare_digest(key.encode(), api_key.encode()) for key in sent)
