"""Checkpoints, runs and sessions through the real SDK, on the fake backend."""

from pathlib import Path

import httpx
import pytest
import tinker

from tests.contract.conftest import MODEL
from tests.data import next_token_datum
from tests.harness import RunningServer, running_server

DATA = [next_token_datum(range(1, 9))]


def train(run: tinker.TrainingClient, steps: int) -> list[float]:
    losses: list[float] = []
    for _ in range(steps):
        passed = run.forward_backward(DATA, "cross_entropy")
        run.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
        losses.append(passed.result().metrics["loss:sum"])
    return losses


def test_resume_with_optimizer_goes_on_as_if_nothing_was(
    client: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    train(training, 3)
    path = training.save_state("middle").result().path
    rest = train(training, 3)
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    assert train(resumed, 3) == rest
    assert resumed.get_info().lora_rank == 4


def test_resume_without_optimizer_starts_its_moments_anew(
    client: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    train(training, 3)
    path = training.save_state("middle").result().path
    rest = train(training, 3)
    resumed = train(client.create_training_client_from_state(path).result(), 3)
    assert resumed[0] == rest[0]
    assert resumed[2] != rest[2]


def test_load_state_onto_the_same_run(training: tinker.TrainingClient) -> None:
    path = training.save_state("start").result().path
    losses = train(training, 3)
    training.load_state_with_optimizer(path).result()
    assert train(training, 3) == losses


def test_checkpoints_are_listed_described_and_deleted(
    client: tinker.ServiceClient, training: tinker.TrainingClient, server: RunningServer
) -> None:
    rest = client.create_rest_client()
    state = training.save_state("one", ttl_seconds=7200).result().path
    sampler = training.save_weights_for_sampler("one").result().path
    assert state == f"tinker://{training.model_id}/weights/one"
    assert sampler == f"tinker://{training.model_id}/sampler_weights/one"

    listed = rest.list_checkpoints(training.model_id).result().checkpoints
    assert [checkpoint.checkpoint_id for checkpoint in listed] == [
        "sampler_weights/one",
        "weights/one",
    ]
    assert listed[0].expires_at is None
    assert listed[1].expires_at is not None
    assert all(checkpoint.size_bytes for checkpoint in listed)

    info = rest.get_weights_info_by_tinker_path(state).result()
    assert (info.base_model, info.lora_rank) == (MODEL, 4)
    run = rest.get_training_run_by_tinker_path(state).result()
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == state
    assert run.last_sampler_checkpoint is not None

    rest.publish_checkpoint_from_tinker_path(state).result()
    rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
    (shown,) = [
        checkpoint
        for checkpoint in rest.list_checkpoints(training.model_id).result().checkpoints
        if checkpoint.tinker_path == state
    ]
    assert shown.public
    assert shown.expires_at is None

    rest.delete_checkpoint_from_tinker_path(state).result()
    left = rest.list_checkpoints(training.model_id).result().checkpoints
    assert [checkpoint.tinker_path for checkpoint in left] == [sampler]
    assert server.get(f"training_runs/{training.model_id}/checkpoints/weights/one").status_code in {
        404,
        405,
    }


def test_name_that_is_taken_is_refused_and_overwritten_on_demand(
    training: tinker.TrainingClient,
) -> None:
    training.save_state("same").result()
    with pytest.raises(tinker.RequestFailedError, match="same exists"):
        training.save_state("same").result()
    training.save_state("same", overwrite=True).result()


def test_runs_and_sessions_are_listed(
    client: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    rest = client.create_rest_client()
    listed = rest.list_training_runs(limit=5).result()
    assert training.model_id in {run.training_run_id for run in listed.training_runs}
    session_id = training.model_id.split(":")[0]
    assert session_id in rest.list_sessions().result().sessions
    assert rest.get_session(session_id).result().training_run_ids == [training.model_id]


def test_finished_session_frees_its_runs_and_keeps_its_checkpoints(server: RunningServer) -> None:
    with server.client() as client:
        run = client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
        losses = train(run, 2)
        path = run.save_state("kept").result().path
        model_id = run.model_id
    answer = server.post("optim_step", {"model_id": model_id, "adam_params": {}})
    assert answer.status_code == 404
    assert "last checkpoint" in answer.json()["detail"]
    heartbeat = server.post("session_heartbeat", {"session_id": model_id.split(":")[0]})
    assert heartbeat.status_code == 410
    with server.client() as client:
        assert train(client.create_training_client_from_state(path).result(), 1)[0] < losses[1]
    assert server.post("x", None).status_code == 404
    assert httpx.delete(f"{server.url}/api/v1/training_runs/{model_id}").status_code == 204
    assert server.get(f"training_runs/{model_id}").status_code == 404


def test_checkpoints_survive_the_server(tmp_path: Path) -> None:
    flags = ["--backend", "fake", "--base-model", MODEL]
    with running_server(tmp_path, *flags) as server, server.client() as client:
        run = client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
        train(run, 2)
        path = run.save_state("kept").result().path
        sampler_path = run.save_weights_for_sampler("kept").result().path
        rest = train(run, 2)
    with running_server(tmp_path, *flags) as server, server.client() as client:
        assert (
            train(client.create_training_client_from_state_with_optimizer(path).result(), 2) == rest
        )
        sampler = client.create_sampling_client(model_path=sampler_path).result()
        params = tinker.SamplingParams(max_tokens=2, seed=1)
        prompt = tinker.ModelInput.from_ints([1])
        assert sampler.sample(prompt, 1, params).result().sequences


def test_checkpoint_directories_are_complete(
    training: tinker.TrainingClient, server: RunningServer
) -> None:
    training.save_state("complete").result()
    (directory,) = (server.state_dir / "checkpoints" / training.model_id / "weights").iterdir()
    names = {file.name for file in directory.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors"} <= names
    assert list((server.state_dir / "checkpoints" / ".incomplete").iterdir()) == []
