"""seq_id on the wire: order, duplicates, gaps. Raw requests, because the SDK sends good ones."""

import itertools
import uuid

import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as sdk_pb

from tests.contract.conftest import MODEL
from tests.harness import RunningServer

PROTOBUF = {"content-type": "application/x-protobuf"}


class RawRun:
    """A run driven request by request."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        session = server.post("create_session", {"sdk_version": "0.38.0"}).json()
        body = {
            "session_id": session["session_id"],
            "model_seq_id": 0,
            "base_model": MODEL,
            "lora_config": {"rank": 4, "seed": 1},
        }
        accepted = server.post("create_model", body).json()
        again = server.post("create_model", body).json()
        assert accepted == again
        self.model_id = server.wait_result(accepted["request_id"]).json()["model_id"]

    def send_pass(
        self, seq_id: int, tokens: range = range(1, 9), *, forward_only: bool = False
    ) -> str:
        message = sdk_pb.ForwardBackwardRequest(
            model_id=self.model_id,
            seq_id=seq_id,
            loss_fn="cross_entropy",
            forward_only=forward_only,
        )
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(tokens[:-1], np.int32).tobytes()
        for name, array, dtype in (
            ("target_tokens", np.array(tokens[1:], np.int64), sdk_pb.DTYPE_INT64),
            ("weights", np.ones(len(tokens) - 1, np.float32), sdk_pb.DTYPE_FLOAT32),
        ):
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = array.tobytes(), dtype
            tensor.shape.extend(array.shape)
        answer = self.server.post(
            "forward_backward", content=message.SerializeToString(), headers=PROTOBUF
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["request_id"]

    def send_step(self, seq_id: int) -> str:
        body = {"model_id": self.model_id, "seq_id": seq_id, "adam_params": {"learning_rate": 0.1}}
        return self.server.post("optim_step", body).json()["request_id"]

    def loss(self, request_id: str) -> float:
        answer = self.server.wait_result(request_id)
        assert answer.headers["content-type"] == "application/x-protobuf", answer.text
        return sdk_pb.ForwardBackwardOutput.FromString(answer.content).metrics["loss:sum"]


@pytest.fixture
def run(server: RunningServer) -> RawRun:
    return RawRun(server)


def test_any_arrival_order_gives_the_losses_of_the_right_order(server: RunningServer) -> None:
    """Two passes, a step, two passes: the losses tell in which order they ran."""
    in_order = RawRun(server)
    ids = [in_order.send_pass(1), in_order.send_pass(2)]
    in_order.send_step(3)
    expected = [in_order.loss(request_id) for request_id in [*ids, in_order.send_pass(4)]]
    assert expected[0] == expected[1] != expected[2]

    shuffled = RawRun(server)
    second = shuffled.send_pass(2)
    first = shuffled.send_pass(1)
    shuffled.send_step(3)
    got = [shuffled.loss(request_id) for request_id in [first, second, shuffled.send_pass(4)]]
    assert got == expected


def test_duplicate_gets_the_first_answer_and_runs_once(run: RawRun) -> None:
    first = run.send_pass(1)
    assert run.send_pass(1) == first
    assert run.loss(first) == run.loss(first)
    step = run.send_step(2)
    assert run.send_step(2) == step
    norm = run.server.wait_result(step).json()["metrics"]["grad_norm"]

    once = RawRun(run.server)
    once.send_pass(1)
    assert run.server.wait_result(once.send_step(2)).json()["metrics"]["grad_norm"] == norm


def test_gap_is_told_to_the_poller_and_closed_by_the_next_step(run: RawRun) -> None:
    waiting = run.send_pass(2)
    answer = run.server.post(
        "retrieve_future",
        {"request_id": waiting},
        headers={"x-stainless-read-timeout": "10.2"},
    )
    assert answer.status_code == 408
    assert answer.json()["type"] == "try_again"
    assert answer.json()["queue_state"] == "active"
    assert "seq_id 1, which has not arrived" in answer.json()["queue_state_reason"]
    run.send_step(3)
    assert run.loss(waiting) > 0
    late = run.server.wait_result(run.send_pass(1)).json()
    assert late["category"] == "user"
    assert "seq_id 1 came after seq_id 3" in late["error"]


def test_permanent_gap_among_passes_ends(run: RawRun) -> None:
    """Waits out the 10 s that a missing request of serial chunks gets."""
    assert run.loss(run.send_pass(5)) > 0


def test_old_client_without_numbers_runs_in_arrival_order(run: RawRun) -> None:
    for _ in range(3):
        body = {"model_id": run.model_id, "adam_params": {}}
        answer = run.server.wait_result(run.server.post("optim_step", body).json()["request_id"])
        assert "grad_norm" in answer.json()["metrics"]


def test_step_sent_with_a_failing_pass_is_not_taken(run: RawRun) -> None:
    """Its gradient would miss a part. What follows works."""
    run.send_pass(1)
    bad = run.send_pass(2, range(10_000, 10_004))
    step = run.send_step(3)
    assert "10000" in run.server.wait_result(bad).json()["error"]
    refused = run.server.wait_result(step).json()
    assert refused["category"] == "user"
    assert "no step was taken" in refused["error"]
    run.send_pass(4)
    norm = run.server.wait_result(run.send_step(5)).json()["metrics"]["grad_norm"]

    clean = RawRun(run.server)
    clean.send_pass(1)
    assert run.server.wait_result(clean.send_step(2)).json()["metrics"]["grad_norm"] == norm


def test_failed_forward_does_not_touch_the_gradient(run: RawRun) -> None:
    run.send_pass(1)
    bad = run.send_pass(2, range(10_000, 10_004), forward_only=True)
    assert "metrics" in run.server.wait_result(run.send_step(3)).json()
    assert run.server.wait_result(bad).json()["category"] == "user"


def test_client_that_saw_the_failure_goes_on(run: RawRun) -> None:
    bad = run.send_pass(1, range(10_000, 10_004))
    assert run.server.wait_result(bad).json()["category"] == "user"
    run.send_pass(2)
    assert "metrics" in run.server.wait_result(run.send_step(3)).json()


def test_ephemeral_save_sent_again_gets_the_first_session(run: RawRun) -> None:
    """The SDK sends a new sampling_session_seq_id with the old seq_id."""
    body = {"model_id": run.model_id, "seq_id": 1, "sampling_session_seq_id": 0, "kind": "snapshot"}
    first = run.server.post("save_weights_for_sampler", body).json()
    again = run.server.post(
        "save_weights_for_sampler", {**body, "sampling_session_seq_id": 1}
    ).json()
    assert first["request_id"] == again["request_id"]
    result = run.server.wait_result(first["request_id"]).json()
    assert result["sampling_session_id"].endswith(":sample:0")


def test_unknown_futures_are_told_apart(server: RunningServer) -> None:
    training = server.post("retrieve_future", {"request_id": uuid.uuid4().hex})
    assert training.status_code == 200
    assert training.json()["category"] == "server"
    sampling = server.post("retrieve_future", {"request_id": f"sample-{uuid.uuid4().hex}"})
    assert sampling.status_code == 410


def test_numbers_of_different_runs_do_not_meet(server: RunningServer) -> None:
    runs = [RawRun(server), RawRun(server)]
    ids = [run.send_pass(seq_id) for run, seq_id in itertools.product(runs, (1, 2))]
    assert len(set(ids)) == 4
