"""Hands a request under /v1 to a vLLM replica, and its answer back as it comes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
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
"""A request whose replica died before it had begun to answer is sent again."""
PASSED_HEADERS = ("content-type", "retry-after")
END_OF_EVENT = b"\n\n"
ERROR_EVENT = b'data: {"error"'
"""How an error begins that vLLM sends in a stream, under status 200."""
ABORTED = b'"finish_reason":"abort"'
"""What stands in an answer that vLLM has dropped. Text can't hold it: its quotes are escaped."""


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
        if self.body.get("prompt_logprobs") is not None:
            return True
        logprobs = self.body.get("logprobs")
        # With echo vLLM scores the prompts of chats always, and those of texts if logprobs is 0 too.
        wanted = "messages" in self.body or (logprobs is not None and logprobs is not False)
        return bool(self.body.get("echo")) and wanted


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
            # vLLM sends the headers of a stream before it has begun with the request.
            parts = read_parts(upstream)
            first = await anext(parts, b"")
            if ABORTED in first or (ERROR_EVENT in first and not await replica.is_alive()):
                return False
        except (aiohttp.ClientError, OSError, ReplicaGoneError) as error:
            replica.report_failure(error)
            return False
        await send(make_start(upstream, request.headers))
        await send({"type": "http.response.body", "body": first, "more_body": True})
        well = upstream.status == 200 and ERROR_EVENT not in first
        try:
            async for part in parts:
                if ABORTED in part:
                    raise ReplicaGoneError("it dropped a request")
                well = well and ERROR_EVENT not in part
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except (aiohttp.ClientError, OSError, ReplicaGoneError) as error:
            replica.report_failure(error)
            await send({"type": "http.response.body", "body": make_broken_off()})
            return True
        await send({"type": "http.response.body", "body": b""})
        if well:
            replica.note_success()
        else:
            await replica.is_alive()
    return True


async def read_parts(upstream: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
    """The events of a stream, whole ones, as they come; of anything else the whole body."""
    if not upstream.content_type.startswith("text/event-stream"):
        yield await upstream.read()
        return
    rest = b""
    async for chunk in upstream.content.iter_any():
        events, mark, rest = (rest + chunk).rpartition(END_OF_EVENT)
        if mark:
            yield events + mark
    if rest:
        yield rest


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


def make_broken_off() -> bytes:
    """The end of a stream: an error that clients know."""
    error = SamplerDownError("the sampler died while it answered; send the request again")
    _, body = to_openai_error(error)
    return b"data: " + orjson.dumps(body) + END_OF_EVENT
