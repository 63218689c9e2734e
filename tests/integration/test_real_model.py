"""The official SDK trains the real default model: supervised, and by reinforcement learning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from tests.data import datum, next_token_datum
from tests.harness import RunningServer, running_server

pytestmark = pytest.mark.slow

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
QUESTIONS = ["Name an animal.", "Name a color.", "Name a country."]
ANSWER = "Ask the old clock tower."
GROUP_SIZE = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[tinker.ServiceClient]:
    with server.client() as service_client:
        yield service_client


def encode_question(tokenizer: Any, question: str) -> list[int]:
    chat = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def test_supervised_loss_falls_by_half_and_the_answer_is_learned(
    client: tinker.ServiceClient,
) -> None:
    run = client.create_lora_training_client(base_model=MODEL, rank=16, seed=1).result()
    tokenizer = run.get_tokenizer()
    answer = [*tokenizer.encode(ANSWER, add_special_tokens=False), tokenizer.eos_token_id]
    data = []
    for question in QUESTIONS:
        prompt = encode_question(tokenizer, question)
        weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
        data.append(next_token_datum([*prompt, *answer], weights))
    losses: list[float] = []
    for _ in range(7):
        passed = run.forward_backward(data, "cross_entropy")
        run.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        losses.append(passed.result().metrics["loss:sum"])
    assert losses[-1] < losses[0] / 2

    sampler = run.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(encode_question(tokenizer, QUESTIONS[0]))
    params = types.SamplingParams(max_tokens=16, temperature=0.0)
    sequence = sampler.sample(prompt, 1, params).result().sequences[0]
    assert tokenizer.decode(sequence.tokens, skip_special_tokens=True) == ANSWER
    assert sequence.stop_reason == "stop"

    scored = run.forward(
        [next_token_datum([*prompt.to_ints(), *sequence.tokens])], "cross_entropy"
    ).result()
    from_trainer = scored.loss_fn_outputs[0]["logprobs"].to_numpy()[-len(sequence.tokens) :]
    assert np.mean(np.abs(from_trainer - np.asarray(sequence.logprobs))) < 1e-4


def test_reward_of_a_first_word_rises(client: tinker.ServiceClient) -> None:
    """Reward 1 for an answer that begins with "The", which the model does one time in five."""
    run = client.create_lora_training_client(base_model=MODEL, rank=16, seed=2).result()
    tokenizer = run.get_tokenizer()
    prompts = [encode_question(tokenizer, question) for question in QUESTIONS]
    rewards: list[float] = []
    for step in range(8):
        sampler = run.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=2, seed=step)
        pending = [
            sampler.sample(types.ModelInput.from_ints(prompt), GROUP_SIZE, params)
            for prompt in prompts
        ]
        data: list[tinker.Datum] = []
        step_rewards: list[float] = []
        for prompt, future in zip(prompts, pending, strict=True):
            sequences = future.result().sequences
            group = [
                float(tokenizer.decode(sequence.tokens).startswith("The")) for sequence in sequences
            ]
            step_rewards += group
            for sequence, reward in zip(sequences, group, strict=True):
                data.append(make_policy_datum(prompt, sequence, reward - np.mean(group)))
        rewards.append(float(np.mean(step_rewards)))
        run.forward_backward(data, "importance_sampling")
        run.optim_step(tinker.AdamParams(learning_rate=2e-4)).result()
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.4, rewards


def make_policy_datum(
    prompt: list[int], sequence: types.SampledSequence, advantage: float
) -> tinker.Datum:
    tokens = [*prompt, *sequence.tokens]
    padding = [0.0] * (len(prompt) - 1)
    return datum(
        tokens[:-1],
        target_tokens=np.asarray(tokens[1:], dtype=np.int64),
        logprobs=np.asarray([*padding, *(sequence.logprobs or [])], dtype=np.float32),
        advantages=np.asarray([*padding, *[advantage] * len(sequence.tokens)], dtype=np.float32),
    )
