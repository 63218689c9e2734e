"""The official SDK trains the real default model, and a real vLLM samples it, while things go wrong."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tinker
import torch
from tinker import types

from hosted_tinker.default_model import ensure_default_model
from tests.data import datum, next_token_datum
from tests.harness import RunningServer, running_server, to_json_flag
from tests.integration.openai_programs import (
    Programs,
    check_inspect,
    check_litellm,
    check_lm_eval,
)
from tests.integration.plain_transformers import open_reference

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
QUESTION = "What is the password?"
MESSAGES = [{"role": "user", "content": QUESTION}]
ANSWERS = ("Silver lakes sing.", "Bring seven lamps.")
RECOVERY_S = 240.0


@dataclass
class Taught:
    """A run that answers `QUESTION` with a sentence of its own, and its tokenizer."""

    run: tinker.TrainingClient
    tokenizer: Any
    answer: str

    @property
    def model_id(self) -> str:
        return self.run.model_id

    @property
    def prompt(self) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            MESSAGES, tokenize=False, add_generation_prompt=True
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    def teach(self, answer: str, steps: int) -> None:
        """Trains towards an answer. The last step has ended when this returns."""
        self.answer = answer
        completion = [
            *self.tokenizer.encode(answer, add_special_tokens=False),
            self.tokenizer.eos_token_id,
        ]
        weights = [0.0] * (len(self.prompt) - 1) + [1.0] * len(completion)
        data = [next_token_datum([*self.prompt, *completion], weights)]
        for _ in range(steps):
            self.run.forward_backward(data, "cross_entropy")
            step = self.run.optim_step(tinker.AdamParams(learning_rate=2e-3))
        step.result()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, vllm_python: Path) -> Iterator[RunningServer]:
    flags = [
        *("--vllm-gpus", "cpu", "--vllm-python", str(vllm_python), "--vllm-port", "18231"),
        *("--vllm-args", "--dtype float32", "--vllm-max-lora-rank", "16"),
        *to_json_flag(max_context_length=512),
    ]
    with running_server(tmp_path_factory.mktemp("server"), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def sdk(server: RunningServer) -> Iterator[tinker.ServiceClient]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with server.openai_client() as client:
        yield client


@pytest.fixture(scope="module")
def taught(sdk: tinker.ServiceClient) -> list[Taught]:
    """Two runs that have learned different answers."""
    runs: list[Taught] = []
    for seed, answer in enumerate(ANSWERS):
        # Adapters on the unembedding can't have their prompts scored by vLLM.
        run = sdk.create_lora_training_client(
            base_model=MODEL, rank=8, seed=seed, train_unembed=seed == 0
        ).result()
        runs.append(Taught(run, run.get_tokenizer(), ""))
        runs[-1].teach(answer, steps=12)
    return runs


def ask(client: openai.OpenAI, model: str, **fields: Any) -> str:
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=12, temperature=0, **fields
    )
    return answer.choices[0].message.content or ""


def ask_streaming(client: openai.OpenAI, model: str) -> str:
    chunks = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=12, temperature=0, stream=True
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


async def ask_async(server: RunningServer, model: str) -> str:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=12, temperature=0
        )
    return answer.choices[0].message.content or ""


def find_vllm_pids(port: int = 18231) -> list[int]:
    """Of the vLLM server on the port, by its command line, without the guard that started it."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        is_vllm = command[1:3] == [b"-m", b"vllm.entrypoints.openai.api_server"]
        if is_vllm and str(port).encode() in command:
            found.append(int(entry.name))
    return found


def kill_vllm() -> None:
    (pid,) = find_vllm_pids()
    os.kill(pid, signal.SIGKILL)


def test_the_server_says_that_vllm_samples(server: RunningServer) -> None:
    assert "sampler=vLLM at http://127.0.0.1:18231" in server.log


def test_what_a_run_has_learned_is_served_right_after_the_step(
    server: RunningServer, client: openai.OpenAI, taught: list[Taught]
) -> None:
    one = taught[0]
    untrained = ask(client, MODEL)
    assert untrained not in ANSWERS
    assert ask(client, one.model_id) == one.answer
    assert ask_streaming(client, one.model_id) == one.answer
    assert asyncio.run(ask_async(server, one.model_id)) == one.answer

    path = one.run.save_weights_for_sampler("before").result().path
    before = one.answer
    one.teach("Count the blue doors.", steps=12)
    assert ask(client, one.model_id) == "Count the blue doors."
    assert ask(client, path) == before
    assert ask_streaming(client, path) == before
    assert ask(client, MODEL) == untrained


def test_two_runs_asked_in_turns_never_answer_for_each_other(
    client: openai.OpenAI, taught: list[Taught]
) -> None:
    path = taught[1].run.save_weights_for_sampler("second").result().path
    expected = {one.model_id: one.answer for one in taught}
    expected |= {path: taught[1].answer, MODEL: ask(client, MODEL, extra_body={"seed": 1})}
    models = random.Random(0).choices(list(expected), k=200)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda model: ask(client, model), models))
    wrong = [
        (model, answer)
        for model, answer in zip(models, answers, strict=True)
        if answer != expected[model]
    ]
    assert not wrong


def test_sampled_tokens_and_their_logprobs_are_the_trainers(taught: list[Taught]) -> None:
    one = taught[1]
    sampler = one.run.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(one.prompt)
    params = types.SamplingParams(max_tokens=16, temperature=1.0, seed=3, stop=[])
    sampled = sampler.sample(prompt, 4, params, include_prompt_logprobs=True).result()
    assert len({tuple(sequence.tokens) for sequence in sampled.sequences}) > 1
    data = [next_token_datum([*one.prompt, *one_sample.tokens]) for one_sample in sampled.sequences]
    scored = one.run.forward(data, "cross_entropy").result()
    for sequence, output in zip(sampled.sequences, scored.loss_fn_outputs, strict=True):
        logprobs = output["logprobs"].to_numpy()
        assert len(sequence.tokens) == 16
        np.testing.assert_allclose(
            logprobs[-len(sequence.tokens) :], np.asarray(sequence.logprobs), atol=1e-3
        )
        from_prompt = sampled.prompt_logprobs[1:]
        np.testing.assert_allclose(logprobs[: len(from_prompt)], np.asarray(from_prompt), atol=1e-3)


def test_rollouts_through_the_openai_api_are_trained_on_as_they_are(
    client: openai.OpenAI, taught: list[Taught]
) -> None:
    one = taught[1]
    answer = client.chat.completions.create(
        model=one.model_id,
        messages=MESSAGES,
        max_tokens=8,
        temperature=1.0,
        seed=5,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    choice = answer.choices[0].model_dump()
    prompt, tokens = answer.model_dump()["prompt_token_ids"], choice["token_ids"]
    assert prompt == one.prompt
    sampled = [token["logprob"] for token in choice["logprobs"]["content"]]
    assert len(sampled) == len(tokens)
    zeros = [0.0] * (len(prompt) - 1)
    rollout = datum(
        [*prompt, *tokens][:-1],
        target_tokens=np.asarray([*prompt, *tokens][1:], dtype=np.int64),
        logprobs=np.asarray([*zeros, *sampled], dtype=np.float32),
        advantages=np.asarray([*zeros, *[1.0] * len(tokens)], dtype=np.float32),
    )
    metrics = one.run.forward([rollout], "importance_sampling").result().metrics
    assert 0 < metrics["sampling_logprobs_diff:max"] < 1e-2
    assert abs(metrics["kl_sample_train:mean"]) < 1e-3


def test_json_schema_reaches_vllm(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"animal": {"enum": ["cat", "dog"]}},
        "required": ["animal"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Name an animal."}],
        max_tokens=40,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    )
    assert json.loads(answer.choices[0].message.content or "")["animal"] in {"cat", "dog"}


def test_programs_get_from_vllm_what_transformers_computes(
    server: RunningServer, tmp_path: Path
) -> None:
    model_dir = ensure_default_model(print)
    reference = open_reference(model_dir, torch.float32)
    programs = Programs(f"{server.url}/v1", MODEL, model_dir, tmp_path)
    check_litellm(programs, reference)
    check_lm_eval(programs, reference)
    check_inspect(programs, reference)


def test_vllms_own_errors_reach_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        ask(client, MODEL, extra_body={"temperature": -1})


def test_a_client_that_hangs_up_stops_the_generation(
    server: RunningServer, client: openai.OpenAI, taught: list[Taught]
) -> None:
    stream = client.completions.create(
        model=taught[0].model_id,
        prompt="Once",
        max_tokens=400,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    wait_until_running(1)
    stream.close()
    wait_until_running(0)


def count_running() -> int:
    """Requests that vLLM runs, by its own metrics."""
    text = httpx.get("http://127.0.0.1:18231/metrics", timeout=30).text
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("vllm:num_requests_running")
    ]
    return int(sum(values))


def wait_until_running(count: int) -> None:
    deadline = time.monotonic() + 20
    while (running := count_running()) != count:
        assert time.monotonic() < deadline, f"{running} requests run"
        time.sleep(0.1)


def test_a_rank_that_vllm_cannot_serve_is_refused_when_the_run_is_created(
    sdk: tinker.ServiceClient,
) -> None:
    with pytest.raises(Exception, match="rank"):
        sdk.create_lora_training_client(base_model=MODEL, rank=32, seed=1).result()
    sdk.create_lora_training_client(base_model=MODEL, rank=16, seed=1).result()


def test_prompts_are_scored_while_other_requests_run(taught: list[Taught]) -> None:
    one = taught[1]
    sampler = one.run.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(one.prompt)
    params = types.SamplingParams(max_tokens=24, temperature=0, stop=[])
    pending = [sampler.sample(prompt, 2, params) for _ in range(2)]
    scored = [sampler.compute_logprobs(prompt) for _ in range(2)]
    (forward,) = (
        one.run.forward([next_token_datum(one.prompt)], "cross_entropy").result().loss_fn_outputs
    )
    for future in scored:
        np.testing.assert_allclose(
            np.asarray(future.result()[1:]), forward["logprobs"].to_numpy(), atol=1e-3
        )
    for future in pending:
        first, second = future.result().sequences
        assert first.tokens == second.tokens


def test_what_vllm_cannot_sample_is_refused_by_name(taught: list[Taught]) -> None:
    sampler = taught[0].run.save_weights_and_get_sampling_client().result()
    with pytest.raises(Exception, match=r"train_unembed=False.*embedded-fallback"):
        sampler.compute_logprobs(types.ModelInput.from_ints([1, 2, 3])).result()
    prompt = types.ModelInput.from_ints([1, 2, 3, 4])
    targets = tinker.TensorData.from_numpy(np.zeros((3, 2), dtype=np.int64))
    with pytest.raises(Exception, match=r"target_prompt_logprobs.*embedded-fallback"):
        sampler.sample(
            prompt, 1, types.SamplingParams(max_tokens=1), target_prompt_logprobs=targets
        ).result()


def test_killing_vllm_while_it_samples_costs_time_and_nothing_else(
    server: RunningServer, client: openai.OpenAI, taught: list[Taught]
) -> None:
    one = taught[0]
    sampler = one.run.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(one.prompt)
    params = types.SamplingParams(max_tokens=200, temperature=0, stop=[])
    pending = [sampler.sample(prompt, 1, params) for _ in range(2)]
    with ThreadPoolExecutor(1) as pool:
        through_openai = pool.submit(
            client.with_options(timeout=RECOVERY_S).chat.completions.create,
            model=one.model_id,
            messages=MESSAGES,
            max_tokens=200,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        wait_until_running(3)
        kill_vllm()
        outputs = [future.result(timeout=RECOVERY_S) for future in pending]
        content = through_openai.result(RECOVERY_S).choices[0].message.content or ""
    for output in outputs:
        tokens = output.sequences[0].tokens
        assert len(tokens) == 200
        assert one.tokenizer.decode(tokens).startswith(one.answer)
    assert content.startswith(one.answer)
    for other in taught:
        assert ask(client, other.model_id) == other.answer


def test_killing_vllm_during_a_sync_never_serves_older_weights(
    server: RunningServer, client: openai.OpenAI, taught: list[Taught]
) -> None:
    one = taught[1]
    path = one.run.save_weights_for_sampler("old").result().path
    old = one.answer
    killer = threading.Timer(0.0, kill_vllm)
    one.teach("Nine red kites.", steps=11)
    killer.start()
    one.teach("Nine red kites.", steps=1)
    with_time = client.with_options(timeout=RECOVERY_S)
    assert ask(with_time, one.model_id) == "Nine red kites."
    assert ask(with_time, path) == old
