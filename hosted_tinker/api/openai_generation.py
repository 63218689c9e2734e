"""/v1/completions, /v1/chat/completions and /v1/responses: finds the weights and who answers.

These are plain ASGI endpoints: a proxied stream passes through without being taken apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send

from hosted_tinker.api.disconnect import run_until_disconnect
from hosted_tinker.api.error_answers import answer_error
from hosted_tinker.api.openai_embedded import answer_chat, answer_completion
from hosted_tinker.api.openai_models import find_weights
from hosted_tinker.api.openai_proxy import Forwarding, forward
from hosted_tinker.errors import SamplerDownError, UnservableError, UserError
from hosted_tinker.samplers import FALLBACK_FLAG, VllmSampler
from hosted_tinker.served_weights import ServedWeights
from hosted_tinker.server import Server

logger = logging.getLogger(__name__)

Answer = Callable[[Server, ServedWeights, dict[str, Any]], Awaitable[Response]]


def make_routes(server: Server) -> Sequence[BaseRoute]:
    """The endpoints that generate."""
    answers: dict[str, Answer | None] = {
        "/v1/completions": answer_completion,
        "/v1/chat/completions": answer_chat,
        "/v1/responses": None,
    }
    return [
        Route(path, Generation(server, path, answer), methods=["POST"])
        for path, answer in answers.items()
    ]


@dataclass(frozen=True, slots=True)
class Generation:
    """An endpoint. `answer_embedded` is None where the embedded engine has no such thing."""

    server: Server
    path: str
    answer_embedded: Answer | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_noting(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._answer(scope, receive, send_noting)
        except asyncio.CancelledError:
            if not self.server.is_stopping:
                raise
            logger.info("generation cut off by the server's stop path=%s", self.path)
            if not has_begun:
                error = SamplerDownError("the server stops; send the request again")
                answer = await answer_error(Request(scope), error)
                await answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = parse_body(await request.body())
        with self.server.sampling.take_room(), contextlib.ExitStack() as holding:
            served = await run_until_disconnect(self._hold(body["model"], holding), receive)
            if served is None:
                return
            headers = {**describe_weights(served), "x-request-id": name_request(request)}
            refusal = None
            sampler = self.server.sampler
            if isinstance(sampler, VllmSampler):
                forwarding = Forwarding(self.path, body, served.adapter, headers)
                refusal = await self._forward(sampler, forwarding, receive, send)
                if refusal is None:
                    return
            answering = self._answer_embedded(served, body, refusal)
            response = await run_until_disconnect(answering, receive)
            if response is not None:
                response.headers.update(headers)
                await response(scope, receive, send)

    async def _hold(self, model: str, holding: contextlib.ExitStack) -> ServedWeights:
        served = await find_weights(self.server, model)
        holding.enter_context(self.server.holds.hold(served.adapter))
        return served

    async def _forward(
        self, sampler: VllmSampler, request: Forwarding, receive: Receive, send: Send
    ) -> UnservableError | None:
        """None when it is answered, or why the embedded engine must do it."""
        if sampler.is_refused(request.adapter):
            return UnservableError("vLLM refuses this run's adapter")
        try:
            await forward(sampler.pool, request, receive, send)
        except UnservableError as error:
            if sampler.fallback is None:
                raise UnservableError(f"{error}; or use {FALLBACK_FLAG}") from error
            return error
        return None

    async def _answer_embedded(
        self, served: ServedWeights, body: dict[str, Any], refusal: UnservableError | None
    ) -> Response:
        if self.answer_embedded is None:
            reason = refusal or "this server samples without"
            raise UnservableError(f"{self.path} needs a vLLM sampler: {reason}")
        return await self.answer_embedded(self.server, served, body)


def parse_body(raw: bytes) -> dict[str, Any]:
    """Raises UserError unless it is a JSON object that names a model."""
    try:
        body: object = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise UserError(f"the request body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise UserError("the request body is not a JSON object")
    fields = cast("dict[str, Any]", body)
    if not isinstance(fields.get("model"), str):
        raise UserError(f"model = {fields.get('model')!r}; accepted: the id of a model, a string")
    return fields


def name_request(request: Request) -> str:
    """The client's id of the request, or a new one."""
    return request.headers.get("x-request-id") or f"req_{uuid.uuid4().hex}"


def describe_weights(served: ServedWeights) -> dict[str, str]:
    """Headers that say which weights answered."""
    headers = {"x-hosted-tinker-adapter": served.adapter.name if served.adapter else "base"}
    if served.run is not None:
        headers["x-hosted-tinker-run"] = served.run
    if served.step is not None:
        headers["x-hosted-tinker-step"] = str(served.step)
    return headers
