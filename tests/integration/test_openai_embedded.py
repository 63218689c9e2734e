"""/v1 from the embedded engine, against transformers' own templates, decoding and logits."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import tinker
import torch
from openai.types.chat import ChatCompletionChunk
from peft import PeftModel

from hosted_tinker.default_model import DEFAULT_MODEL_NAME, ensure_default_model
from tests.data import next_token_datum
from tests.harness import RunningServer, running_server
from tests.integration.plain_transformers import Reference, open_reference

pytestmark = [pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")]

MODEL = "org/tiny"
MESSAGES: Any = [
    {"role": "system", "content": "Answer in a word."},
    {"role": "user", "content": "Où est 北京? 🦊"},
    {"role": "assistant", "content": "There."},
    {"role": "user", "content": "the quick brown fox"},
]


@pytest.fixture(scope="module")
def server(
    chat_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    flags = ["--base-model", str(chat_model_dir), "--served-model-name", MODEL]
    with running_server(tmp_path_factory.mktemp("server"), *flags) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with server.openai_client() as openai_client:
        yield openai_client


def test_chat_is_what_transformers_renders_generates_and_decodes(
    client: openai.OpenAI, reference: Reference
) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=30,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        extra_body={"return_token_ids": True},
    )
    prompt = reference.render(MESSAGES)
    tokens = reference.generate(prompt, 30)
    (choice,) = answer.choices
    assert answer.model_dump()["prompt_token_ids"] == prompt
    assert choice.model_dump()["token_ids"] == tokens
    assert choice.message.content == reference.decode(tokens)
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    scores = reference.score([*prompt, *tokens])[len(prompt) - 1 :]
    best = scores.topk(3)
    for row, entry in enumerate(choice.logprobs.content):
        assert entry.logprob == pytest.approx(scores[row, tokens[row]].item(), abs=1e-4)
        likely = [one.logprob for one in entry.top_logprobs]
        assert likely == pytest.approx(best.values[row].tolist(), abs=1e-4)
        spelled = [bytes(one.bytes or ()).decode(errors="replace") for one in entry.top_logprobs]
        assert spelled == [reference.tokenizer.decode([i]) for i in best.indices[row]]


def test_text_prompts_are_encoded_and_scored_as_transformers_does(
    client: openai.OpenAI, reference: Reference
) -> None:
    text = "the quick 🦊 jumps over 北京"
    answer = client.completions.create(
        model=MODEL, prompt=text, max_tokens=0, echo=True, logprobs=2
    )
    (choice,) = answer.choices
    tokens = reference.tokenizer.encode(text)
    scores = reference.score(tokens)
    assert choice.text == text
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.top_logprobs is not None
    expected = [scores[row, token].item() for row, token in enumerate(tokens[1:])]
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    for row, likely in enumerate(choice.logprobs.top_logprobs[1:]):
        assert max(likely.values()) == pytest.approx(scores[row].max().item(), abs=1e-4)
    offsets = choice.logprobs.text_offset
    assert offsets is not None
    for token, offset in zip(choice.logprobs.tokens or [], offsets, strict=True):
        if not token.startswith("bytes:"):
            assert text[offset:].startswith(token)


def test_streamed_text_is_the_whole_text(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 60, "n": 4}
    fields |= {"seed": 11, "logprobs": True, "extra_body": {"return_token_ids": True}}
    whole = client.chat.completions.create(**fields)
    texts, tokens = [""] * 4, [[] for _ in range(4)]
    for chunk in client.chat.completions.create(**fields, stream=True):
        assert isinstance(chunk, ChatCompletionChunk)
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += choice.model_dump().get("token_ids") or []
    assert texts == [choice.message.content for choice in whole.choices]
    assert tokens == [choice.model_dump()["token_ids"] for choice in whole.choices]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_text_and_generation(client: openai.OpenAI, stream: bool) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": "a stop", "temperature": 0}
    text = client.completions.create(**fields, max_tokens=40).choices[0].text
    stop = text[25:28]
    expected = text[: text.index(stop)]
    fields |= {"max_tokens": 400, "stop": [stop]}
    if stream:
        chunks = [chunk.choices[0] for chunk in client.completions.create(**fields, stream=True)]
    else:
        chunks = [client.completions.create(**fields).choices[0]]
    assert "".join(chunk.text for chunk in chunks) == expected
    assert chunks[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"chat_template_kwargs": {"name": "fox"}}, {"name": "fox"}),
    ],
)
def test_the_template_gets_its_variables(
    client: openai.OpenAI, reference: Reference, fields: Any, kwargs: Any
) -> None:
    extra = {"return_token_ids": True, **fields}
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=1, extra_body=extra
    )
    assert answer.model_dump()["prompt_token_ids"] == reference.render(MESSAGES, **kwargs)


def test_a_message_can_be_continued(client: openai.OpenAI, reference: Reference) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "It jumps over"}]
    kwargs = {"add_generation_prompt": False, "continue_final_message": True}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=1,
        extra_body={"return_token_ids": True, **kwargs},
    )
    prompt = answer.model_dump()["prompt_token_ids"]
    assert prompt == reference.render(messages, **kwargs)
    assert reference.tokenizer.decode(prompt).endswith("[assistant] It jumps over")


def test_arguments_of_earlier_tool_calls_are_objects_in_the_template(
    client: openai.OpenAI, reference: Reference
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "B"}'}}
    messages: Any = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Rain."},
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=1, extra_body={"return_token_ids": True}
    )
    prompt = reference.tokenizer.decode(answer.model_dump()["prompt_token_ids"])
    assert prompt == "[user] Weather?\n[assistant]  B\n[tool] Rain.\n[assistant] "


@pytest.mark.parametrize(
    ("messages", "extra", "words"),
    [
        ([{"role": "wizard", "content": "a"}], {}, "no role is called wizard"),
        (MESSAGES, {"continue_final_message": True}, "continue_final_message"),
        (MESSAGES, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "'chat_template'"),
        (MESSAGES, {"chat_template": "{{ 1 }}"}, "chat_template is not a known parameter"),
    ],
)
def test_what_the_template_refuses_is_the_clients_error(
    client: openai.OpenAI, messages: Any, extra: Any, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.chat.completions.create(model=MODEL, messages=messages, extra_body=extra)


def test_a_run_answers_with_its_newest_weights(
    server: RunningServer, client: openai.OpenAI, chat_model_dir: Path
) -> None:
    """The reference is PEFT on the adapter that the server saved."""
    with server.client() as service:
        run = service.create_lora_training_client(base_model=MODEL, rank=8, seed=5).result()
        for _ in range(3):
            run.forward_backward([next_token_datum([*range(40, 70)])], "cross_entropy").result()
            run.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        answer = client.chat.completions.create(
            model=run.model_id,
            messages=MESSAGES,
            max_tokens=20,
            temperature=0,
            extra_body={"return_token_ids": True},
        )
        path = run.save_weights_for_sampler("check").result().path
    model_id, kind, name = path.removeprefix("tinker://").split("/")
    (adapter,) = (server.state_dir / "checkpoints" / model_id / kind).glob(f"{name}-*")
    reference = open_reference(chat_model_dir, torch.float32)
    prompt = reference.render(MESSAGES)
    tokens = answer.choices[0].model_dump()["token_ids"]
    assert tokens != reference.generate(prompt, 20)
    reference.model = PeftModel.from_pretrained(reference.model, adapter).eval()
    assert tokens == reference.generate(prompt, 20)


def test_usage_says_what_of_the_prompt_was_cached(client: openai.OpenAI) -> None:
    """Whole pages of 64 tokens, of which at least one token is left to compute."""
    prompts = ["one two three four " * 15, "five six seven eight " * 15]
    fields: Any = {"model": MODEL, "prompt": prompts, "max_tokens": 2}
    first, again = (client.completions.create(**fields).usage for _ in range(2))
    assert first is not None
    assert first.prompt_tokens_details is not None
    assert first.prompt_tokens_details.cached_tokens == 0
    for chunk in client.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    ):
        streamed = chunk.usage
    assert again is not None
    assert again.prompt_tokens_details is not None
    assert again.prompt_tokens_details.cached_tokens > again.prompt_tokens - 2 * 65
    assert streamed == again


def test_a_stream_whose_engine_dies_ends_with_an_error(
    server: RunningServer, client: openai.OpenAI
) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="a", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    os.kill(newest_child(server), signal.SIGKILL)
    with pytest.raises(openai.APIError, match=r"training and sampling process .* died"):
        list(stream)
    again = client.completions.create(model=MODEL, prompt="a", max_tokens=2, timeout=120)
    assert again.usage is not None
    assert again.usage.completion_tokens == 2


def newest_child(server: RunningServer) -> int:
    pid = server.process.pid
    return max(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


@pytest.mark.slow
def test_the_default_model_writes_what_transformers_writes(tmp_path: Path) -> None:
    reference = open_reference(ensure_default_model(print), torch.bfloat16)
    messages: Any = [{"role": "user", "content": "Name three animals."}]
    prompt = reference.render(messages)
    tokens = reference.generate(prompt, 40)
    emoji = "😀 🦊 北京 😀 🦊 北京 😀 🦊 北京 😀"
    with running_server(tmp_path) as server, server.openai_client() as client:
        fields: dict[str, Any] = {"model": DEFAULT_MODEL_NAME, "temperature": 0}
        answer = client.chat.completions.create(
            **fields, messages=messages, max_tokens=40, extra_body={"return_token_ids": True}
        )
        stream = client.completions.create(**fields, prompt=emoji, max_tokens=24, stream=True)
        pieces = [chunk.choices[0].text for chunk in stream]
    assert answer.model_dump()["prompt_token_ids"] == prompt
    assert answer.choices[0].model_dump()["token_ids"] == tokens
    assert answer.choices[0].message.content == reference.decode(tokens)
    continued = reference.generate(reference.tokenizer.encode(emoji), 24)
    assert "".join(pieces[:-1]) in reference.tokenizer.decode(continued)
    assert "🦊" in "".join(pieces)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces[:-1])
