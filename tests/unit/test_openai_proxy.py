"""What the proxy makes of a vLLM that fails in the middle of things, as the real one does by chance.

The server here answers as vLLM does, in bytes that a test chooses; all else is the real thing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from hosted_tinker.api.openai_proxy import Forwarding, forward
from hosted_tinker.errors import SamplerDownError
from hosted_tinker.replicas.held_adapters import EngineDir
from hosted_tinker.replicas.launch import open_http_session
from hosted_tinker.replicas.pool import ReplicaPool
from hosted_tinker.replicas.replica import Replica
from hosted_tinker.replicas.vllm import VllmClient
from hosted_tinker.settings import Settings
from hosted_tinker.types import AdapterRef

PATH = "/v1/completions"
EVENT = b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"text":"","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
ERROR = b'data: {"error":{"message":"EngineDeadError"}}\n\ndata: [DONE]\n\n'
ABORT = b'data: {"choices":[{"text":"","finish_reason":"abort"}]}\n\n'
CUT = object()
"""In an answer: the connection breaks here."""
DEATH = object()
"""In an answer: the engine is found dead from here on, until the next health check."""
Answer = Sequence[Any]


class ScriptedVllm:
    """Gives the answers in turn."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = [*answers]
        self._sick = 0

    def make_app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post(PATH, self._complete)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        self._sick -= 1
        return web.Response(status=503 if self._sick >= 0 else 200)

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": "base", "root": "base", "parent": None, "max_model_len": 100}
        return web.json_response({"data": [card]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "stream" not in body:
            choice = {"text": "", "finish_reason": "length", "logprobs": {"token_logprobs": [0.0]}}
            return web.json_response({"choices": [choice]})
        answer = web.StreamResponse()
        answer.content_type = "text/event-stream" if body["stream"] else "application/json"
        await answer.prepare(request)
        for part in self._answers.pop(0):
            if part is CUT:
                assert request.transport is not None
                request.transport.close()
                break
            if part is DEATH:
                self._sick = 1
                continue
            await answer.write(part)
            await asyncio.sleep(0.02)
        return answer


@contextlib.asynccontextmanager
async def running_pool(vllm: ScriptedVllm, state_dir: Path) -> AsyncGenerator[ReplicaPool]:
    runner = web.AppRunner(vllm.make_app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    settings = Settings(base_model="base", vllm_url=(url,), state_dir=state_dir)

    async def make_base_adapter() -> AdapterRef:
        raise NotImplementedError

    async with open_http_session() as http:
        client = VllmClient(url, None, http)
        engine_dir = EngineDir(state_dir, state_dir)
        pool = ReplicaPool(30.0)
        pool.start([Replica(client, engine_dir, settings, ["base"], None, make_base_adapter)])
        try:
            yield pool
        finally:
            await pool.stop()
            await runner.cleanup()


async def never() -> Any:
    await asyncio.Event().wait()


def ask(tmp_path: Path, *answers: Answer, stream: bool = True) -> tuple[int, bytes]:
    """Status and body of the answer that a client gets."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        async with running_pool(ScriptedVllm(*answers), tmp_path) as pool:
            body = {"model": "m", "prompt": "a", "stream": stream}
            await forward(pool, Forwarding(PATH, body, None, {}), never, send)

    asyncio.run(run())
    assert not sent[-1].get("more_body", False)
    return sent[0]["status"], b"".join(message["body"] for message in sent[1:])


def test_a_stream_passes_as_it_is(tmp_path: Path) -> None:
    halves = (EVENT[:10], EVENT[10:] + EVENT, LAST)
    assert ask(tmp_path, halves) == (200, EVENT + EVENT + LAST)


@pytest.mark.parametrize("broken", [(CUT,), (EVENT[:9], CUT), (ABORT,), (DEATH, ERROR)])
def test_what_fails_before_the_first_event_is_sent_again(tmp_path: Path, broken: Answer) -> None:
    assert ask(tmp_path, broken, (EVENT, LAST)) == (200, EVENT + LAST)


@pytest.mark.parametrize("broken", [(EVENT[:9], CUT), (ABORT,)])
def test_a_stream_that_breaks_off_ends_with_an_error_after_its_last_whole_event(
    tmp_path: Path, broken: Answer
) -> None:
    _, body = ask(tmp_path, (EVENT, *broken))
    assert body.startswith(EVENT)
    assert body.endswith(b"\n\n")
    error = orjson.loads(body.removeprefix(EVENT).removeprefix(b"data: "))["error"]
    assert error["type"] == "server_error"
    assert "send the request again" in error["message"]


def test_an_error_that_vllm_sends_in_a_stream_passes(tmp_path: Path) -> None:
    assert ask(tmp_path, (EVENT, ERROR)) == (200, EVENT + ERROR)


@pytest.mark.parametrize("broken", [(b'{"choices":[', CUT), (ABORT.removeprefix(b"data: "),)])
def test_a_whole_answer_is_passed_on_when_it_is_whole(tmp_path: Path, broken: Answer) -> None:
    whole = b'{"choices":[{"text":"a","finish_reason":"stop"}]}'
    assert ask(tmp_path, broken, (whole,), stream=False) == (200, whole)


def test_an_answer_that_breaks_each_time_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(SamplerDownError, match="send it again later"):
        ask(tmp_path, (CUT,), (CUT,), (CUT,))


@pytest.mark.parametrize(
    ("fields", "scores"),
    [
        ({"prompt": "a", "echo": True, "logprobs": 0}, True),
        ({"prompt": "a", "echo": True, "logprobs": 2}, True),
        ({"prompt": "a", "echo": True}, False),
        ({"prompt": "a", "logprobs": 2}, False),
        ({"prompt": "a", "prompt_logprobs": 0}, True),
        ({"messages": [], "echo": True}, True),
        ({"messages": [], "logprobs": True}, False),
    ],
)
def test_requests_that_score_their_prompt_are_known(fields: Any, scores: bool) -> None:
    assert Forwarding(PATH, fields, None, {}).scores_prompt is scores
