"""Which weights answer under /v1, through the real SDK and the real OpenAI client, on the fake backend.

The fake engine's tokens depend on the adapter's name, so other weights mean other tokens.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import tinker

from tests.contract.conftest import MODEL
from tests.data import next_token_datum
from tests.harness import API_KEY, RunningServer, running_server

DATA = [next_token_datum(range(1, 9))]
ADAM = tinker.AdamParams(learning_rate=0.1)
FLAGS = ("--backend", "fake", "--base-model", MODEL)


@pytest.fixture
def openai_client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with server.openai_client() as client:
        yield client


def step(run: tinker.TrainingClient) -> None:
    run.forward_backward(DATA, "cross_entropy")
    run.optim_step(ADAM).result()


def ask(client: openai.OpenAI, model: str) -> tuple[list[int], dict[str, str]]:
    """The greedy tokens, and the headers that say which weights gave them."""
    raw = client.completions.with_raw_response.create(
        model=model,
        prompt=[1, 2, 3],
        max_tokens=8,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    headers = {
        name.removeprefix("x-hosted-tinker-"): value
        for name, value in raw.headers.items()
        if name.startswith("x-hosted-tinker-")
    }
    return raw.parse().choices[0].model_dump()["token_ids"], headers


def test_a_runs_id_answers_from_its_newest_step(
    openai_client: openai.OpenAI, training: tinker.TrainingClient
) -> None:
    answers: list[list[int]] = []
    for number in range(4):
        answer, headers = ask(openai_client, training.model_id)
        assert headers["step"] == str(number)
        assert headers["run"] == training.model_id
        assert headers["adapter"].startswith(f"{training.model_id}@")
        answers.append(answer)
        step(training)
    assert len({tuple(answer) for answer in answers}) == 4
    assert ask(openai_client, MODEL)[1] == {"adapter": "base"}


def test_steps_that_come_faster_than_they_are_published_are_skipped_and_the_last_is_not(
    server: RunningServer, openai_client: openai.OpenAI, training: tinker.TrainingClient
) -> None:
    pending = [training.optim_step(ADAM) for _ in range(40)]
    for future in pending:
        future.result()
    assert ask(openai_client, training.model_id)[1]["step"] == "40"
    published = [
        int(number)
        for number in re.findall(
            rf"published adapter={training.model_id}@\w+ step=(\d+)", server.log
        )
    ]
    assert published == sorted(set(published))
    assert published[-1] == 40


def test_checkpoints_keep_answering_with_their_own_weights(
    client: tinker.ServiceClient, openai_client: openai.OpenAI, training: tinker.TrainingClient
) -> None:
    step(training)
    path = training.save_weights_for_sampler("first").result().path
    before, headers = ask(openai_client, path)
    assert (headers["run"], headers["step"]) == (training.model_id, "1")
    step(training)
    assert ask(openai_client, path) == (before, headers)
    assert ask(openai_client, training.model_id)[0] != before
    assert ask(openai_client, headers["adapter"])[0] == before

    sampler = client.create_sampling_client(model_path=path).result()
    params = tinker.SamplingParams(max_tokens=8, temperature=0)
    sequence = sampler.sample(tinker.ModelInput.from_ints([1, 2, 3]), 1, params).result()
    assert before == sequence.sequences[0].tokens


def test_a_resumed_run_goes_on_counting_steps(
    client: tinker.ServiceClient, openai_client: openai.OpenAI, training: tinker.TrainingClient
) -> None:
    step(training)
    step(training)
    path = training.save_state("two").result().path
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    assert ask(openai_client, resumed.model_id)[1]["step"] == "2"
    step(resumed)
    assert ask(openai_client, resumed.model_id)[1]["step"] == "3"
    resumed.load_state(path).result()
    assert ask(openai_client, resumed.model_id)[1]["step"] == "2"


def test_two_runs_that_are_asked_in_turns_never_answer_for_each_other(
    client: tinker.ServiceClient, openai_client: openai.OpenAI
) -> None:
    runs = [
        client.create_lora_training_client(base_model=MODEL, rank=4, seed=seed).result()
        for seed in (1, 2)
    ]
    for run in runs:
        step(run)
    wrong: list[str] = []

    def ask_often(run: tinker.TrainingClient) -> None:
        for _ in range(20):
            _, headers = ask(openai_client, run.model_id)
            if headers["run"] != run.model_id or int(headers["step"]) < 1:
                wrong.append(str(headers))

    threads = [threading.Thread(target=ask_often, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for _ in range(5):
        for run in runs:
            step(run)
    for thread in threads:
        thread.join()
    assert not wrong


def test_models_are_listed_with_run_step_and_adapter(
    openai_client: openai.OpenAI, training: tinker.TrainingClient
) -> None:
    step(training)
    path = training.save_weights_for_sampler("listed").result().path
    _, headers = ask(openai_client, training.model_id)
    models: dict[str, Any] = {model.id: model.model_dump() for model in openai_client.models.list()}
    assert models[MODEL]["object"] == "model"
    assert models["org/alias"]["owned_by"] == "hosted-tinker"
    run = models[training.model_id]
    assert (run["step"], run["adapter"]) == (1, headers["adapter"])
    assert (models[path]["run"], models[path]["step"]) == (training.model_id, 1)
    assert models[path]["parent"] == MODEL
    assert openai_client.models.retrieve(path).id == path


@pytest.mark.parametrize(
    "model", ["nobody", "tinker://nobody/sampler_weights/x", "nobody@0123456789ab"]
)
def test_unknown_models_are_refused_by_name(openai_client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError, match=re.escape(model.split("@")[0])) as raised:
        ask(openai_client, model)
    assert raised.value.type == "not_found_error" or raised.value.code == "model_not_found"


def test_training_checkpoints_are_not_sampled(
    openai_client: openai.OpenAI, training: tinker.TrainingClient
) -> None:
    path = training.save_state("for-training").result().path
    with pytest.raises(openai.BadRequestError, match="save_weights_for_sampler"):
        ask(openai_client, path)


def test_a_run_that_has_ended_is_served_until_its_weights_expire(tmp_path: Path) -> None:
    with running_server(tmp_path, *FLAGS) as server, server.openai_client() as openai_client:
        with server.client() as client:
            run = client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
            step(run)
            client_session = run.model_id.split(":")[0]
        server.post(f"sessions/{client_session}/finish", {"reason": {"type": "completed"}})
        _, headers = ask(openai_client, run.model_id)
        assert headers["step"] == "1"
    with running_server(tmp_path, *FLAGS) as server, server.openai_client() as openai_client:
        assert ask(openai_client, run.model_id)[1] == headers
    with (
        running_server(tmp_path, *FLAGS, "--ended-run-ttl-s", "0.1") as server,
        server.openai_client() as openai_client,
        pytest.raises(openai.NotFoundError, match="has ended"),
    ):
        ask(openai_client, run.model_id)


def test_weights_wait_for_a_request_where_the_operator_says_so(tmp_path: Path) -> None:
    flags = (*FLAGS, "--adapter-sync", "on_request")
    with (
        running_server(tmp_path, *flags) as server,
        server.openai_client() as openai_client,
        server.client() as client,
    ):
        run = client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
        step(run)
        step(run)
        assert "weights published" not in server.log
        assert ask(openai_client, run.model_id)[1]["step"] == "2"
        assert server.log.count("weights published") == 1


def test_the_base_models_name_stands_for_the_newest_run(tmp_path: Path) -> None:
    with (
        running_server(tmp_path, *FLAGS, "--serve-latest") as server,
        server.openai_client() as openai_client,
        server.client() as client,
    ):
        assert ask(openai_client, MODEL)[1] == {"adapter": "base"}
        older = client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
        newer = client.create_lora_training_client(base_model=MODEL, rank=4, seed=2).result()
        step(newer)
        step(older)
        _, headers = ask(openai_client, MODEL)
        assert (headers["run"], headers["step"]) == (newer.model_id, "1")


def test_bearer_tokens_open_the_server(tmp_path: Path) -> None:
    env = {"HOSTED_TINKER_API_KEY": API_KEY}
    with running_server(tmp_path, *FLAGS, env=env) as server:
        with server.openai_client(API_KEY) as client:
            assert ask(client, MODEL)[0]
        with server.openai_client("tml-other") as client, pytest.raises(openai.AuthenticationError):
            ask(client, MODEL)


def test_older_weights_never_pass_for_the_newest_after_a_crash(tmp_path: Path) -> None:
    """What was newer was in the trainer's memory only, so that the run's id stands for nothing."""
    flags = (*FLAGS, "--adapter-sync", "on_request")
    with running_server(tmp_path, *flags) as server, server.openai_client() as client:
        sdk = server.client()
        kept, behind = (
            sdk.create_lora_training_client(base_model=MODEL, rank=2, seed=seed).result()
            for seed in (1, 2)
        )
        for run in (kept, behind):
            step(run)
        answers = {run.model_id: ask(client, run.model_id) for run in (kept, behind)}
        path = behind.save_weights_for_sampler("kept").result().path
        answers[path] = ask(client, path)
        step(behind)
        server.process.kill()
        server.process.wait()
    with running_server(tmp_path, *flags) as server, server.openai_client() as client:
        assert ask(client, kept.model_id) == answers[kept.model_id]
        with pytest.raises(openai.NotFoundError, match="its weights are gone"):
            ask(client, behind.model_id)
        assert ask(client, path) == answers[path]
        assert behind.model_id not in [model.id for model in client.models.list()]
