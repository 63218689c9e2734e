"""/v1 answered by the embedded engine's side of the server, through the real OpenAI client.

The fake engine's tokens are bytes below 256 and nothing above, so that its text has characters that
span tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import tinker

from tests.contract.conftest import MODEL
from tests.harness import RunningServer, running_server

BYTES = ("--backend", "fake", "--base-model", MODEL, "--backend-config", '{"vocab_size": 256}')
MESSAGES: Any = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server"), *BYTES) as running:
        yield running


@pytest.fixture
def openai_client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with server.openai_client() as client:
        yield client


def test_chat_is_the_text_of_its_tokens(openai_client: openai.OpenAI) -> None:
    answer = openai_client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=12,
        seed=3,
        logprobs=True,
        top_logprobs=2,
        extra_body={"return_token_ids": True},
    )
    (choice,) = answer.choices
    tokens = choice.model_dump()["token_ids"]
    prompt = answer.model_dump()["prompt_token_ids"]
    assert choice.message.role == "assistant"
    assert choice.message.content == bytes(tokens).decode(errors="replace")
    assert bytes(prompt).decode() == "user: Say something.\nassistant: "
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens"}) == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 12,
    }
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 12
    for entry in choice.logprobs.content:
        first, second = entry.top_logprobs
        assert first.logprob >= second.logprob
        assert entry.logprob <= first.logprob


def test_log_probabilities_are_those_of_the_sdk(
    server: RunningServer, openai_client: openai.OpenAI
) -> None:
    answer = openai_client.completions.create(
        model=MODEL,
        prompt=[1, 2, 3],
        max_tokens=6,
        seed=9,
        logprobs=1,
        extra_body={"return_token_ids": True},
    )
    with server.client() as client:
        sampler = client.create_sampling_client(base_model=MODEL).result()
        params = tinker.SamplingParams(max_tokens=6, seed=9)
        sequence = sampler.sample(tinker.ModelInput.from_ints([1, 2, 3]), 1, params).result()
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert choice.model_dump()["token_ids"] == sequence.sequences[0].tokens
    assert choice.logprobs.token_logprobs == pytest.approx(sequence.sequences[0].logprobs)


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_adds_up_to_the_whole_answer(openai_client: openai.OpenAI, n: int) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 40,
        "seed": 5,
        "n": n,
        "logprobs": True,
    }
    whole = openai_client.chat.completions.create(**fields)
    texts, counts, reasons = [""] * n, [0] * n, [""] * n
    usage = None
    for chunk in openai_client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            counts[choice.index] += len((choice.logprobs and choice.logprobs.content) or ())
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == n
    assert counts == [40] * n
    assert reasons == ["length"] * n
    assert usage == whole.usage


def test_streamed_completions_of_several_prompts_add_up(openai_client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": ["one", "two"], "n": 2, "seed": 2}
    whole = openai_client.completions.create(**fields, max_tokens=20)
    texts = [""] * 4
    for chunk in openai_client.completions.create(**fields, max_tokens=20, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_that_span_tokens_are_cut_off(
    openai_client: openai.OpenAI, stream: bool
) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": [7, 8, 9], "max_tokens": 60, "seed": 4}
    text = openai_client.completions.create(**fields).choices[0].text
    start = next(i for i in range(20, 50) if text[i : i + 3].isascii())
    stop = text[start : start + 3]
    expected = text[: text.index(stop)]
    if stream:
        chunks = [*openai_client.completions.create(**fields, stop=[stop], stream=True)]
        stopped = "".join(chunk.choices[0].text for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        choice = openai_client.completions.create(**fields, stop=stop).choices[0]
        stopped, reason = choice.text, choice.finish_reason
    assert stopped == expected
    assert reason == "stop"
    kept = openai_client.completions.create(
        **fields, stop=stop, extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == expected + stop


def test_stop_token_ids_end_a_sequence(openai_client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": [7, 8, 9], "max_tokens": 30, "seed": 4}
    ids = {"return_token_ids": True}
    free = openai_client.completions.create(**fields, extra_body=ids)
    tokens = free.choices[0].model_dump()["token_ids"]
    stopped = openai_client.completions.create(
        **fields, extra_body={**ids, "stop_token_ids": [tokens[10]]}
    )
    end = tokens.index(tokens[10]) + 1
    assert stopped.choices[0].model_dump()["token_ids"] == tokens[:end]
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == bytes(tokens[: end - 1]).decode(errors="replace")


def test_a_choice_ends_in_the_stream_when_its_sequence_does(
    openai_client: openai.OpenAI,
) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": [7, 8, 9], "max_tokens": 30, "seed": 4}
    fields["n"] = 2
    ids = {"return_token_ids": True}
    free = openai_client.completions.create(**fields, extra_body=ids)
    first, second = (choice.model_dump()["token_ids"] for choice in free.choices)
    last = next(token for token in first[:20] if token not in second)
    stream = openai_client.completions.create(
        **fields, stream=True, extra_body={**ids, "stop_token_ids": [last]}
    )
    ends: list[tuple[int, str]] = []
    after = 0
    for choice in (chunk.choices[0] for chunk in stream):
        after += bool(ends)
        if choice.finish_reason:
            ends.append((choice.index, choice.finish_reason))
    assert ends == [(0, "stop"), (1, "length")]
    assert after == 30 - first.index(last)


def test_streams_have_the_token_ids_of_prompt_and_answer(openai_client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 10, "seed": 6}
    fields["extra_body"] = {"return_token_ids": True}
    chat = openai_client.chat.completions.create(**fields, messages=MESSAGES)
    prompts: list[Any] = []
    tokens: list[int] = []
    for chunk in openai_client.chat.completions.create(**fields, messages=MESSAGES, stream=True):
        prompts.append(chunk.model_dump().get("prompt_token_ids"))
        tokens += chunk.choices[0].model_dump().get("token_ids") or []
    assert prompts == [chat.model_dump()["prompt_token_ids"], *[None] * 10]
    assert tokens == chat.choices[0].model_dump()["token_ids"]

    text = openai_client.completions.create(**fields, prompt="ab")
    chunks = [*openai_client.completions.create(**fields, prompt="ab", stream=True)]
    entries = [chunk.choices[0].model_dump() for chunk in chunks]
    assert [entry["prompt_token_ids"] for entry in entries] == [[*b"ab"], *[None] * 9]
    streamed = [token for entry in entries for token in entry["token_ids"]]
    assert streamed == text.choices[0].model_dump()["token_ids"]


def test_log_probabilities_name_tokens_by_text_bytes_or_id(openai_client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 20, "seed": 3, "logprobs": True}
    ids = {"return_token_ids": True}
    by_text = openai_client.chat.completions.create(**fields, messages=MESSAGES, extra_body=ids)
    by_id = openai_client.chat.completions.create(
        **fields, messages=MESSAGES, extra_body={"return_tokens_as_token_ids": True}
    )
    tokens = by_text.choices[0].model_dump()["token_ids"]
    spelled, named = (answer.choices[0].logprobs for answer in (by_text, by_id))
    assert spelled is not None
    assert named is not None
    assert [entry.bytes for entry in spelled.content or ()] == [[token] for token in tokens]
    assert [entry.token for entry in named.content or ()] == [f"token_id:{id}" for id in tokens]
    assert [entry.token for entry in spelled.content or ()] == [
        chr(token) if token < 128 else f"bytes:\\x{token:02x}" for token in tokens
    ]


def test_echo_scores_the_prompt(server: RunningServer, openai_client: openai.OpenAI) -> None:
    prompt = [*b"Some words."]
    answer = openai_client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=0, echo=True, logprobs=1
    )
    (choice,) = answer.choices
    assert choice.text == "Some words."
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [*"Some words."]
    assert choice.logprobs.text_offset == [*range(11)]
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    with server.client() as client:
        sampler = client.create_sampling_client(base_model=MODEL).result()
        scored = sampler.compute_logprobs(tinker.ModelInput.from_ints(prompt)).result()
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(scored[1:])
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_text_parts_become_lines(openai_client: openai.OpenAI) -> None:
    parts: Any = [{"type": "text", "text": "Say"}, {"type": "text", "text": "something."}]
    answers = [
        openai_client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": content}], max_tokens=8, seed=1
        )
        for content in ("Say\nsomething.", parts)
    ]
    assert answers[0].choices[0].message == answers[1].choices[0].message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools .* vLLM"),
        ({"response_format": {"type": "json_object"}}, "response_format .* vLLM"),
        ({"presence_penalty": 0.5}, "presence_penalty = 0.5 needs a vLLM"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"extra_body": {"mirostat": 2}}, "mirostat is not a known parameter"),
        ({"temperature": -1}, "temperature = -1"),
        ({"top_p": 0}, "top_p = 0"),
        ({"max_tokens": 100_000}, "context length is 4096 .* 100000"),
        ({"n": 0}, "n = 0"),
        ({"top_logprobs": 2}, "needs logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    openai_client: openai.OpenAI, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as raised:
        openai_client.chat.completions.create(
            **{"model": MODEL, "messages": MESSAGES, "max_tokens": 4, **fields}
        )
    assert raised.value.type == "invalid_request_error"


def test_what_changes_nothing_is_accepted(openai_client: openai.OpenAI) -> None:
    answer = openai_client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_completion_tokens=4,
        user="someone",
        metadata={"run": "1"},
        presence_penalty=0,
        tools=[],
        response_format={"type": "text"},
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "model = None"),
        (b'{"model": "fake/model"}', "prompt"),
        (b'{"model": "fake/model", "prompt": []}', "prompt is empty"),
        (b'{"model": "fake/model", "prompt": [300]}', "token id 300"),
        (b'{"model": "fake/model", "prompt": [9223372036854775808]}', "token id 92233"),
        (b'{"model": "fake/model", "prompt": "a", "max_tokens": 0}', "max_tokens = 0"),
        (b'{"model": "fake/model", "prompt": "a", "echo": true, "stream": true}', "echo"),
    ],
)
def test_bad_bodies_get_errors_in_openais_shape(
    server: RunningServer, body: bytes, words: str
) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", content=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


def test_unknown_routes_and_the_responses_api_say_so(server: RunningServer) -> None:
    unknown = httpx.post(f"{server.url}/v1/images/generations", json={})
    assert unknown.status_code == 404
    assert "/v1/images/generations" in unknown.json()["error"]["message"]
    responses = httpx.post(f"{server.url}/v1/responses", json={"model": MODEL, "input": "a"})
    assert responses.status_code == 400
    assert "needs a vLLM sampler" in responses.json()["error"]["message"]


def test_many_async_requests_at_once_are_each_their_own(server: RunningServer) -> None:
    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            answers = await asyncio.gather(
                *(
                    client.completions.create(
                        model=MODEL, prompt=[seed % 8, 1], max_tokens=16, seed=seed % 8
                    )
                    for seed in range(64)
                )
            )
        return [answer.choices[0].text for answer in answers]

    texts = asyncio.run(ask_all())
    assert len(set(texts)) == 8
    for seed in range(8):
        assert len(set(texts[seed::8])) == 1


def test_an_async_stream_ends_with_usage(server: RunningServer) -> None:
    async def ask() -> tuple[str, list[Any]]:
        text, usages = "", []
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=MESSAGES,
                max_tokens=10,
                seed=2,
                stream=True,
                stream_options={"include_usage": True},
            )
            async for chunk in stream:
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                usages.append(chunk.usage and chunk.usage.completion_tokens)
        return text, usages

    text, usages = asyncio.run(ask())
    assert text
    assert usages[-1] == 10
    assert set(usages[:-1]) == {None}
