"""Bounds request bodies. What is over the limit is read and dropped, so that the client gets an
answer and not a broken connection (which the SDK would retry for minutes)."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hosted_tinker.api.error_answers import answer_error
from hosted_tinker.errors import TooLargeError
from hosted_tinker.wire.proto_requests import PREFIX_BYTES

CUT_KEY = "hosted_tinker.body_cut"
CUT_BODIES_GO_TO = "/api/v1/forward_backward"
"""This route answers for itself: it must fail a future and not the HTTP request."""


def is_cut(scope: MutableMapping[str, Any]) -> bool:
    """Whether the route got only the body's beginning."""
    return bool(scope.get(CUT_KEY))


class BodyLimit:
    """ASGI middleware: hands on whole bodies up to `max_bytes`."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in {"GET", "HEAD"}:
            await self._app(scope, receive, send)
            return
        read = await self._read(receive)
        if read is None:
            return
        body, cut = read
        if cut and scope["path"] != CUT_BODIES_GO_TO:
            error = TooLargeError(
                f"request body is over the limit of {self._max_bytes} bytes (max_request_bytes)"
            )
            answer = await answer_error(Request(scope), error)
            await answer(scope, receive, send)
            return
        scope[CUT_KEY] = cut
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> tuple[bytes, bool] | None:
        """The body, or its beginning and True where it is over the limit.

        None if the client went away in its middle: a part of a protobuf message may well parse.
        """
        parts: list[bytes] = []
        size = 0
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part: bytes = message.get("body", b"")
            size += len(part)
            if size <= self._max_bytes:
                parts.append(part)
            elif len(parts) > 1:
                parts = [b"".join(parts)[:PREFIX_BYTES]]
            more = message.get("more_body", False)
        body = b"".join(parts)
        return (body[:PREFIX_BYTES], True) if size > self._max_bytes else (body, False)
