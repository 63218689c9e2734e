"""Hands a request under /v1 to a vLLM replica, and its answer back as it comes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from starlette.types import Receive, Send

from hosted_tinker.api.disconnect import run_until_disconnect
from hosted_tinker.errors import SamplerDownError
from hosted_tinker.openai_api.errors import to_openai_error
from hosted_tinker.replicas.engine_client import ReplicaGoneError
from hosted_tinker.replicas.pool import ReplicaPool
from hosted_tinker.replicas.replica import Replica
from hosted_tinker.types import AdapterRef

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""A request whose replica died before the first byte of an answer is sent again."""
PASSED_HEADERS = ("content-type", "retry-after", "x-request-id")


@dataclass(frozen=True, slots=True)
class Forwarding:
    """A request on its way to a replica.

    Attributes:
        body: as the client sent it.
        headers: to add to the answer.
    """

    path: str
    body: dict[str, Any]
    adapter: AdapterRef | None
    headers: Mapping[str, str]

    @property
    def prefix(self) -> bytes:
        """What requests that share work with this one begin with too."""
        content = next(
            (self.body[name] for name in ("messages", "prompt", "input") if name in self.body), ""
        )
        return content.encode() if isinstance(content, str) else orjson.dumps(content)

    @property
    def scores_prompt(self) -> bool:
        """Whether it asks for log-probabilities of its prompt."""
        echoes = bool(self.body.get("echo")) and self.body.get("logprobs") not in (None, False)
        return echoes or self.body.get("prompt_logprobs") is not None


async def forward(pool: ReplicaPool, request: Forwarding, receive: Receive, send: Send) -> None:
    """Answers from a replica; ends the generation there when the client goes away.

    Raises:
        UnservableError: vLLM can't load the adapter. Nothing was sent.
        SamplerDownError: no replica answers. Nothing was sent.
    """
    await run_until_disconnect(answer(pool, request, send), receive)


async def answer(pool: ReplicaPool, request: Forwarding, send: Send) -> None:
    for _ in range(ATTEMPTS):
        async with pool.lease(
            request.adapter, request.prefix, scores_prompt=request.scores_prompt
        ) as replica:
            if await answer_from(replica, request, send):
                return
    raise SamplerDownError(
        f"the sampler died {ATTEMPTS} times while it answered this request; send it again later"
    )


async def answer_from(replica: Replica, request: Forwarding, send: Send) -> bool:
    """Whether an answer was sent. False: the replica is gone, or has lost the adapter."""
    model = replica.model_name(request.adapter)
    payload = orjson.dumps({**request.body, "model": model})
    async with contextlib.AsyncExitStack() as stack:
        try:
            upstream = await stack.enter_async_context(replica.client.open(request.path, payload))
            if not await is_answer(replica, request, upstream.status):
                return False
        except (aiohttp.ClientError, OSError, ReplicaGoneError) as error:
            replica.report_failure(error)
            return False
        await send(make_start(upstream, request.headers))
        try:
            async for chunk in upstream.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except (aiohttp.ClientError, OSError) as error:
            replica.report_failure(error)
            await send_broken_off(upstream, send)
            return True
        await send({"type": "http.response.body", "body": b""})
        replica.note_success()
    return True


async def is_answer(replica: Replica, request: Forwarding, status: int) -> bool:
    """False for an error that comes of the replica's death or new life, not of the request."""
    if status == 404:
        return not await replica.has_lost(request.adapter)
    return status < 500 or await replica.is_alive()


def make_start(upstream: aiohttp.ClientResponse, headers: Mapping[str, str]) -> dict[str, Any]:
    passed = {name: upstream.headers[name] for name in PASSED_HEADERS if name in upstream.headers}
    return {
        "type": "http.response.start",
        "status": upstream.status,
        "headers": [
            (name.encode(), value.encode("latin-1", "replace"))
            for name, value in {**passed, **headers}.items()
        ],
    }


async def send_broken_off(upstream: aiohttp.ClientResponse, send: Send) -> None:
    """Ends a stream with an error that clients know. Anything else is cut: it can't be whole."""
    error = SamplerDownError("the sampler died while it answered; send the request again")
    if not upstream.content_type.startswith("text/event-stream"):
        raise error
    _, body = to_openai_error(error)
    event = b"data: " + orjson.dumps(body) + b"\n\n"
    await send({"type": "http.response.body", "body": event})
