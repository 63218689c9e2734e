"""/v1/completions, /v1/chat/completions and /v1/responses: finds the weights and who answers.

These are plain ASGI endpoints: a proxied stream passes through without being taken apart.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from hosted_tinker.api.disconnect import run_until_disconnect
from hosted_tinker.api.openai_embedded import answer_chat, answer_completion
from hosted_tinker.api.openai_models import find_weights
from hosted_tinker.api.openai_proxy import Forwarding, forward
from hosted_tinker.errors import UnservableError, UserError
from hosted_tinker.samplers import FALLBACK_FLAG, VllmSampler
from hosted_tinker.served_weights import ServedWeights
from hosted_tinker.server import Server

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
        body = parse_body(await Request(scope, receive).body())
        served = await find_weights(self.server, body["model"])
        with self.server.holds.hold(served.adapter), self.server.sampling.take_room():
            headers = describe_weights(served)
            sampler = self.server.sampler
            if isinstance(sampler, VllmSampler) and not sampler.is_refused(served.adapter):
                request = Forwarding(self.path, body, served.adapter, headers)
                try:
                    await forward(sampler.pool, request, receive, send)
                except UnservableError as error:
                    if sampler.fallback is None:
                        raise UnservableError(f"{error}; or use {FALLBACK_FLAG}") from error
                else:
                    return
            response = await run_until_disconnect(self._answer_embedded(served, body), receive)
            if response is not None:
                response.headers.update(headers)
                await response(scope, receive, send)

    async def _answer_embedded(self, served: ServedWeights, body: dict[str, Any]) -> Response:
        if self.answer_embedded is None:
            raise UnservableError(f"{self.path} needs a vLLM sampler; this server samples without")
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


def describe_weights(served: ServedWeights) -> dict[str, str]:
    """Headers that say which weights answered."""
    headers = {"x-hosted-tinker-adapter": served.adapter.name if served.adapter else "base"}
    if served.run is not None:
        headers["x-hosted-tinker-run"] = served.run
    if served.step is not None:
        headers["x-hosted-tinker-step"] = str(served.step)
    return headers
