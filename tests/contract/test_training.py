"""Training through the real SDK, on the fake backend: what comes back, and in which order."""

import concurrent.futures

import numpy as np
import pytest
import tinker

from tests.contract.conftest import MODEL
from tests.data import datum, next_token_datum
from tests.harness import RunningServer, running_server


def logprobs_of(result: tinker.ForwardBackwardOutput) -> list[list[float]]:
    return [output["logprobs"].tolist() for output in result.loss_fn_outputs]


def test_forward_backward_answers_each_datum_in_order(training: tinker.TrainingClient) -> None:
    data = [next_token_datum(range(1, 4)), next_token_datum(range(5, 12))]
    result = training.forward_backward(data, "cross_entropy").result()
    logprobs = logprobs_of(result)
    assert [len(row) for row in logprobs] == [2, 6]
    assert result.metrics["loss:sum"] == pytest.approx(-sum(map(sum, logprobs)), rel=1e-5)


def test_forward_leaves_the_run_as_it_was(training: tinker.TrainingClient) -> None:
    data = [next_token_datum(range(1, 9))]
    before = training.forward(data, "cross_entropy").result()
    training.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
    after = training.forward(data, "cross_entropy").result()
    assert logprobs_of(before) == logprobs_of(after)


def test_steps_change_the_run(training: tinker.TrainingClient) -> None:
    data = [next_token_datum(range(1, 9))]
    losses: list[float] = []
    for _ in range(3):
        passed = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(tinker.AdamParams(learning_rate=0.1))
        losses.append(passed.result().metrics["loss:sum"])
        assert stepped.result().metrics is not None
    assert losses[0] > losses[1] > losses[2]


def test_two_dimensional_targets_differ_in_k(training: tinker.TrainingClient) -> None:
    """The second is mostly zeros, so the SDK sends it sparse."""
    wide = np.zeros((4, 40), dtype=np.int64)
    wide[:, 0] = [3, 4, 5, 6]
    weights = (wide > 0).astype(np.float32)
    data = [
        datum(
            [1, 2], target_tokens=np.array([[2, 3], [4, 5]]), weights=np.ones((2, 2), np.float32)
        ),
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints([1, 2, 3, 4]),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData.from_torch(to_torch(wide)),
                "weights": tinker.TensorData.from_torch(to_torch(weights)),
            },
        ),
    ]
    result = training.forward_backward(data, "cross_entropy").result()
    shapes = [tuple(output["logprobs"].shape or ()) for output in result.loss_fn_outputs]
    assert shapes == [(2, 2), (4, 40)]


def to_torch(array: np.ndarray) -> object:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(array)


def test_custom_loss_gradient_reaches_the_run(training: tinker.TrainingClient) -> None:
    """The loss -sum(logprobs) has the gradient of cross entropy with weight 1."""

    def loss_fn(data: list[tinker.Datum], logprobs: list) -> tuple[object, dict[str, float]]:
        loss = -sum(row.sum() for row in logprobs)
        return loss, {"custom": float(loss)}

    data = [next_token_datum(range(1, 9))]
    result = training.forward_backward_custom(data, loss_fn).result()
    assert result.metrics["custom"] > 0
    norm = training.optim_step(tinker.AdamParams(learning_rate=0.0)).result().metrics
    training.forward_backward(data, "cross_entropy").result()
    plain = training.optim_step(tinker.AdamParams(learning_rate=0.0)).result().metrics
    assert norm
    assert plain
    assert norm == pytest.approx(plain, rel=1e-5)


def test_runs_of_one_session_do_not_mix(client: tinker.ServiceClient) -> None:
    data = [next_token_datum(range(1, 9))]

    def train(run: tinker.TrainingClient, rate: float) -> list[float]:
        losses: list[float] = []
        for _ in range(4):
            passed = run.forward_backward(data, "cross_entropy")
            run.optim_step(tinker.AdamParams(learning_rate=rate)).result()
            losses.append(passed.result().metrics["loss:sum"])
        return losses

    def make() -> list[tinker.TrainingClient]:
        return [
            client.create_lora_training_client(base_model=MODEL, rank=rank, seed=rank).result()
            for rank in (2, 8)
        ]

    alone = [train(run, rate) for run, rate in zip(make(), (0.1, 0.02), strict=True)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        together = list(pool.map(train, make(), (0.1, 0.02)))
    assert together == alone
    assert alone[0] != alone[1]


def test_get_info_names_model_and_rank(training: tinker.TrainingClient) -> None:
    info = training.get_info()
    assert info.model_data.model_name == MODEL
    assert info.lora_rank == 4
    assert info.is_lora


def test_alias_and_suffix_are_accepted(client: tinker.ServiceClient) -> None:
    run = client.create_lora_training_client(base_model="org/alias:tiny", rank=2).result()
    assert run.get_info().model_data.model_name == "org/alias:tiny"


def test_parallel_chunks_with_the_first_sent_last(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Chunks of one datum each, sent 2, 3, 4, 1 by the SDK: answers come in the order of the data."""
    flags = ["--backend", "fake", "--base-model", MODEL, "--parallel-chunks"]
    with (
        running_server(tmp_path_factory.mktemp("p"), *flags, "--max-chunk-bytes", "40") as server,
        server.client() as client,
    ):
        run = client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
        data = [next_token_datum(range(1, n)) for n in (5, 9, 6, 8)]
        passed = run.forward_backward(data, "cross_entropy")
        stepped = run.optim_step(tinker.AdamParams(learning_rate=0.1))
        rows = logprobs_of(passed.result())
        stepped.result()
        assert [len(row) for row in rows] == [3, 7, 4, 6]
        assert server.log.count("ForwardBackward model_id") == 4


def test_custom_session_metadata_reaches_the_run(server: RunningServer) -> None:
    with server.client() as client:
        run = client.create_lora_training_client(
            base_model=MODEL, rank=2, user_metadata={"renderer_name": "role_colon"}
        ).result()
        record = client.create_rest_client().get_training_run(run.model_id).result()
        assert record.user_metadata == {"renderer_name": "role_colon"}
