"""Answers under /v1 from the embedded engine: requests to samples, chunks to server-sent events."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
import orjson
from starlette.responses import Response, StreamingResponse

from hosted_tinker.errors import HostedTinkerError, UserError
from hosted_tinker.openai_api.chat import Chat
from hosted_tinker.openai_api.completions import Completions
from hosted_tinker.openai_api.errors import to_openai_error
from hosted_tinker.openai_api.requests import (
    CompletionRequest,
    GenerationRequest,
    parse_chat,
    parse_completion,
)
from hosted_tinker.openai_api.text import TextModel
from hosted_tinker.samplers import EmbeddedSampler
from hosted_tinker.sampling.request_checks import check_sample
from hosted_tinker.served_weights import ServedWeights
from hosted_tinker.server import Server
from hosted_tinker.types import BaseModelInfo, Int64Array, Sample

JSON = "application/json"
Chunks = AsyncGenerator[dict[str, Any]]


async def answer_chat(server: Server, served: ServedWeights, body: dict[str, Any]) -> Response:
    """`/v1/chat/completions`."""
    engine = get_engine(server)
    request = parse_chat(body)
    base = await engine.wait_ready()
    messages = [message.to_template() for message in request.messages]
    prompt = await engine.render_chat(messages, request.template_kwargs)
    max_tokens = request.max_completion_tokens or request.max_tokens
    top = (request.top_logprobs or 0) if request.logprobs else 0
    sample = make_sample(served, prompt, request, base, max_tokens=max_tokens, topk=top)
    chat = Chat(request, served, await engine.get_text_model(), prompt)
    if request.stream:
        return await start_stream(chat.stream(engine, sample))
    return to_response(await chat.answer(engine, sample))


async def answer_completion(
    server: Server, served: ServedWeights, body: dict[str, Any]
) -> Response:
    """`/v1/completions`."""
    engine = get_engine(server)
    request = parse_completion(body)
    base = await engine.wait_ready()
    text_model = await engine.get_text_model()
    prompts = await asyncio.to_thread(encode_prompts, request, text_model)
    samples = [make_completion_sample(served, prompt, request, base) for prompt in prompts]
    completions = Completions(request, served, text_model, prompts)
    if request.stream:
        return await start_stream(completions.stream(engine, samples))
    return to_response(await completions.answer(engine, samples))


def get_engine(server: Server) -> EmbeddedSampler:
    assert server.embedded is not None, "a route chose the embedded engine, and there is none"
    return server.embedded


def encode_prompts(request: CompletionRequest, text_model: TextModel) -> list[list[int]]:
    return [
        text_model.encode(prompt, add_special_tokens=request.add_special_tokens)
        if isinstance(prompt, str)
        else prompt
        for prompt in request.prompts
    ]


def make_completion_sample(
    served: ServedWeights, prompt: Sequence[int], request: CompletionRequest, base: BaseModelInfo
) -> Sample:
    """Echo with log-probabilities scores the prompt; the engine draws a token at least."""
    scores_prompt = bool(request.echo) and request.logprobs is not None
    return make_sample(
        served,
        prompt,
        request,
        base,
        max_tokens=request.max_tokens or (1 if request.max_tokens == 0 else None),
        topk=request.logprobs or 0,
        scores_prompt=scores_prompt,
    )


def make_sample(
    served: ServedWeights,
    prompt: Sequence[int],
    request: GenerationRequest,
    base: BaseModelInfo,
    *,
    max_tokens: int | None,
    topk: int,
    scores_prompt: bool = False,
) -> Sample:
    """Raises UserError for what the engine can't run."""
    sample = Sample(
        request_id=f"v1-{uuid.uuid4().hex}",
        adapter=served.adapter,
        prompt=to_token_array(prompt, base),
        params=request.to_params(max_tokens),
        num_samples=request.n or 1,
        prompt_logprobs=scores_prompt,
        topk_prompt_logprobs=topk if scores_prompt else 0,
        topk_sample_logprobs=topk,
        stream=bool(request.stream),
    )
    check_sample(sample, base)
    return sample


def to_token_array(prompt: Sequence[int], base: BaseModelInfo) -> Int64Array:
    """Raises UserError for a number that no token id can have; `check_sample` does the rest."""
    try:
        return np.asarray(prompt, dtype=np.int64)
    except OverflowError as error:
        raise UserError(
            f"prompt has token id {max(prompt, key=abs)}; accepted: 0 to {base.vocab_size - 1}"
        ) from error


def to_response(answer: dict[str, Any]) -> Response:
    return Response(orjson.dumps(answer), media_type=JSON)


async def start_stream(chunks: Chunks) -> Response:
    """Waits for the first chunk, so that what fails at once is an HTTP error."""
    first = await anext(chunks)
    return StreamingResponse(write_events(first, chunks), media_type="text/event-stream")


async def write_events(first: dict[str, Any], chunks: Chunks) -> AsyncGenerator[bytes]:
    """Server-sent events. A stream that is closed ends the generation."""
    try:
        yield to_event(first)
        async for chunk in chunks:
            yield to_event(chunk)
    except HostedTinkerError as error:
        _, body = to_openai_error(error)
        yield to_event(body)
    finally:
        await chunks.aclose()
    yield b"data: [DONE]\n\n"


def to_event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"
