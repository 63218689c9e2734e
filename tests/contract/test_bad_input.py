"""What is wrong with a request is said, and the same client's next request works."""

import re
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tinker
import zstandard
from tinker.proto import tinker_public_pb2 as sdk_pb

from tests.contract.conftest import MODEL
from tests.data import datum, next_token_datum
from tests.harness import RunningServer

PROTOBUF = {"content-type": "application/x-protobuf"}
GOOD = [next_token_datum(range(1, 9))]
TARGETS = np.array([2, 3, 4])
ONES = np.ones(3, np.float32)


def passes(loss_fn: Any, config: dict[str, Any] | None = None, **inputs: Any) -> Callable[..., Any]:
    tokens = inputs.pop("tokens", [1, 2, 3])
    return lambda run: run.forward_backward([datum(tokens, **inputs)], loss_fn, config)


BAD_PASSES = {
    "unknown loss": (passes("nope", target_tokens=TARGETS, weights=ONES), "nope.*cross_entropy"),
    "missing input": (passes("cross_entropy", target_tokens=TARGETS), "weights"),
    "unknown input": (
        passes("cross_entropy", target_tokens=TARGETS, weights=ONES, mask=ONES),
        "mask",
    ),
    "shape": (passes("cross_entropy", target_tokens=TARGETS[:2], weights=ONES[:2]), r"2.*3"),
    "dtype": (passes("cross_entropy", target_tokens=ONES, weights=ONES), "float32.*int64"),
    "token over the vocabulary": (
        passes("cross_entropy", tokens=[1, 5000, 3], target_tokens=TARGETS, weights=ONES),
        "5000.*999",
    ),
    "target over the vocabulary": (
        passes("cross_entropy", target_tokens=TARGETS + 5000, weights=ONES),
        "500[234].*999",
    ),
    "over the context": (
        passes(
            "cross_entropy",
            tokens=[1] * 5000,
            target_tokens=np.ones(5000, np.int64),
            weights=np.ones(5000, np.float32),
        ),
        "5000.*4096",
    ),
    "NaN in weights": (
        passes("cross_entropy", target_tokens=TARGETS, weights=ONES * np.nan),
        "nan",
    ),
    "unknown config key": (
        passes("ppo", {"clip": 0.2}, target_tokens=TARGETS, logprobs=-ONES, advantages=ONES),
        "clip.*clip_low_threshold",
    ),
    "no tokens": (
        passes("cross_entropy", tokens=[], target_tokens=TARGETS[:0], weights=ONES[:0]),
        "empty|no tokens",
    ),
}


@pytest.mark.parametrize("case", BAD_PASSES)
def test_bad_pass_fails_alone(training: tinker.TrainingClient, case: str) -> None:
    call, message = BAD_PASSES[case]
    with pytest.raises(tinker.RequestFailedError, match=f"(?is){message}") as caught:
        call(training).result()
    assert str(caught.value.category).lower().endswith("user")
    training.forward_backward(GOOD, "cross_entropy").result()
    assert training.optim_step(tinker.AdamParams(learning_rate=0.1)).result().metrics


@pytest.mark.parametrize("rank", [0, 100_000])
def test_rank_out_of_range(client: tinker.ServiceClient, rank: int) -> None:
    with pytest.raises(tinker.RequestFailedError, match=rf"{rank}.*512"):
        client.create_lora_training_client(base_model=MODEL, rank=rank).result()
    assert (
        client.create_lora_training_client(base_model=MODEL, rank=4).result().get_info().lora_rank
        == 4
    )


def test_unknown_base_model(client: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.APIStatusError, match=r"no/such.*fake/model.*org/alias"):
        client.create_lora_training_client(base_model="no/such", rank=4).result()
    assert client.create_lora_training_client(base_model=MODEL, rank=4).result()


def test_unknown_run(server: RunningServer) -> None:
    answer = server.post("optim_step", {"model_id": "x:train:0", "seq_id": 1, "adam_params": {}})
    assert answer.status_code == 404
    assert "x:train:0" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (tinker.AdamParams(learning_rate=-1), "learning_rate = -1"),
        (tinker.AdamParams(beta1=1.0), "beta1 = 1"),
    ],
)
def test_bad_adam_params(
    training: tinker.TrainingClient, params: tinker.AdamParams, message: str
) -> None:
    with pytest.raises(tinker.RequestFailedError, match=message):
        training.optim_step(params).result()
    training.forward_backward(GOOD, "cross_entropy").result()
    assert training.optim_step(tinker.AdamParams(learning_rate=0.1)).result().metrics


def sample_with(**changes: Any) -> tuple[tinker.ModelInput, tinker.SamplingParams]:
    prompt = tinker.ModelInput.from_ints(changes.pop("prompt", [1, 2]))
    return prompt, tinker.SamplingParams(**{"max_tokens": 2, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 5000}, r"4096.*prompt of 2 tokens.*5000"),
        ({"prompt": [1] * 4096, "max_tokens": None}, "4096"),
        ({"prompt": [5000]}, "5000.*999"),
        ({"prompt": []}, "no tokens"),
        ({"temperature": -1.0}, "temperature = -1"),
        ({"top_p": 0.0}, "top_p = 0"),
        ({"top_k": 0}, "top_k = 0"),
        ({"max_tokens": 0}, "max_tokens = 0"),
    ],
)
def test_bad_sample_fails_alone(
    client: tinker.ServiceClient, changes: dict[str, Any], message: str
) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result()
    prompt, params = sample_with(**changes)
    with pytest.raises(tinker.RequestFailedError, match=message):
        sampler.sample(prompt, 1, params).result()
    prompt, params = sample_with()
    assert sampler.sample(prompt, 1, params).result().sequences


def test_training_checkpoint_can_not_be_sampled(
    client: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    path = training.save_state("state").result().path
    with pytest.raises(tinker.APIStatusError, match="training checkpoint"):
        client.create_sampling_client(model_path=path).result()


def test_checkpoint_that_is_not_there(client: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.RequestFailedError, match="does not exist"):
        client.create_training_client_from_state("tinker://no-such:train:0/weights/x").result()


@pytest.mark.parametrize("name", ["a/b", "../up", ".hidden", "x" * 300])
def test_checkpoint_name_that_leaves_its_directory(
    training: tinker.TrainingClient, name: str
) -> None:
    with pytest.raises(tinker.RequestFailedError, match="checkpoint name"):
        training.save_state(name).result()
    assert training.save_state("fine").result().path


@pytest.mark.parametrize(
    ("content", "headers", "message"),
    [
        (b"\xff\xff\xff garbage", PROTOBUF, "not a protobuf"),
        (b"", PROTOBUF, "no model_id"),
        (
            zstandard.compress(b"x" * 1000)[:-8],
            {**PROTOBUF, "content-encoding": "zstd"},
            "ends before its frame",
        ),
        (b"not zstd", {**PROTOBUF, "content-encoding": "zstd"}, "zstd"),
        (
            zstandard.compress(b"\0" * 5_000_000),
            {**PROTOBUF, "content-encoding": "zstd"},
            "over the limit",
        ),
        (b"{}", {"content-type": "text/plain"}, "content-type"),
    ],
)
def test_garbage_bodies_are_refused(
    server: RunningServer, content: bytes, headers: dict[str, str], message: str
) -> None:
    answer = server.post("forward_backward", content=content, headers=headers)
    assert 400 <= answer.status_code < 500
    assert re.search(message, answer.json()["detail"])


def test_tensor_bytes_that_do_not_fit_their_shape(
    server: RunningServer, training: tinker.TrainingClient
) -> None:
    message = sdk_pb.ForwardBackwardRequest(
        model_id=training.model_id, seq_id=1, loss_fn="cross_entropy"
    )
    item = message.data.add()
    item.model_input.add().encoded_text.tokens = np.array([1, 2], np.int32).tobytes()
    tensor = item.loss_fn_inputs["target_tokens"]
    tensor.dense, tensor.dtype = b"123", sdk_pb.DTYPE_INT64
    answer = server.post("forward_backward", content=message.SerializeToString(), headers=PROTOBUF)
    result = server.wait_result(answer.json()["request_id"]).json()
    assert result["category"] == "user"
    assert "target_tokens" in result["error"]


def test_csr_indices_that_overflow_are_refused(
    server: RunningServer, training: tinker.TrainingClient
) -> None:
    """Their differences wrap around to small numbers."""
    message = sdk_pb.ForwardBackwardRequest(
        model_id=training.model_id, seq_id=1, loss_fn="cross_entropy"
    )
    item = message.data.add()
    item.model_input.add().encoded_text.tokens = np.array([1, 2, 3], np.int32).tobytes()
    tensor = item.loss_fn_inputs["target_tokens"]
    tensor.dtype = sdk_pb.DTYPE_INT64
    tensor.shape.extend([3, 4])
    tensor.sparse_csr.values = np.array([1, 2], np.int64).tobytes()
    tensor.sparse_csr.crow_indices = np.array([0, 2**63 - 1, -2, 2], np.int64).tobytes()
    tensor.sparse_csr.col_indices = np.array([0, 1], np.int64).tobytes()
    answer = server.post("forward_backward", content=message.SerializeToString(), headers=PROTOBUF)
    result = server.wait_result(answer.json()["request_id"]).json()
    assert "not a valid CSR matrix" in result["error"]
    assert server.get("healthz").json() == {"status": "ok"}


def test_body_of_a_client_that_goes_away_is_not_run(
    server: RunningServer, training: tinker.TrainingClient
) -> None:
    """Its beginning is a message of its own that would take the place of the whole one."""
    message = sdk_pb.ForwardBackwardRequest(model_id=training.model_id, seq_id=1)
    prefix = message.SerializeToString()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /api/v1/forward_backward HTTP/1.1\r\nHost: x\r\n"
            b"Content-Type: application/x-protobuf\r\n"
            + f"Content-Length: {len(prefix) + 100}\r\n\r\n".encode()
            + prefix
        )
    training.forward_backward(GOOD, "cross_entropy").result()


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [2**63]}]}},
        {"target_prompt_logprobs": {"data": [2**63], "dtype": "int64", "shape": [1, 1]}},
    ],
)
def test_numbers_over_64_bits_fail_their_future(
    server: RunningServer, changes: dict[str, Any]
) -> None:
    session = server.post("create_session", {}).json()["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = server.post("create_sampling_session", body).json()["sampling_session_id"]
    request = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt": {"chunks": [{"tokens": [1, 2]}]},
    }
    answer = server.post("asample", {**request, **changes})
    result = server.wait_result(answer.json()["request_id"]).json()
    assert result["category"] == "user"
    assert "can't hold" in result["error"]


def test_fields_that_are_null_count_as_missing(server: RunningServer) -> None:
    session = server.post("create_session", {"user_metadata": None, "tags": None}).json()
    body = {
        "session_id": session["session_id"],
        "sampling_session_seq_id": 0,
        "base_model": MODEL,
        "model_path": None,
    }
    sampler = server.post("create_sampling_session", body).json()["sampling_session_id"]
    request = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt": {"chunks": [{"tokens": [1, 2], "type": None}]},
        "sampling_params": {"max_tokens": 2, "temperature": None, "seed": None},
        "num_samples": None,
        "prompt_logprobs": None,
    }
    answer = server.post("asample", request).json()
    assert len(answer["sample_sequence_ids"]) == 1
    assert server.wait_result(answer["request_id"]).headers["content-type"] == (
        "application/x-protobuf"
    )


def test_too_many_samples_are_refused_at_once(server: RunningServer) -> None:
    answer = server.post(
        "asample", {"prompt": {"chunks": []}, "num_samples": 10**9, "base_model": MODEL}
    )
    assert answer.status_code == 422
    assert "4096" in answer.json()["detail"][0]


@pytest.mark.parametrize("ttl_seconds", [0, 10**12])
def test_ttl_out_of_range(training: tinker.TrainingClient, ttl_seconds: int) -> None:
    with pytest.raises(tinker.RequestFailedError, match=f"ttl_seconds = {ttl_seconds}.*315360000"):
        training.save_state("short", ttl_seconds=ttl_seconds).result()


def test_seed_out_of_range(client: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.RequestFailedError, match=r"seed is .*2\*\*63"):
        client.create_lora_training_client(base_model=MODEL, rank=4, seed=2**64).result()


def test_body_over_the_limit_fails_its_future(training: tinker.TrainingClient) -> None:
    """1 MB is this server's limit. The SDK gets an error of the request and goes on."""
    large = [next_token_datum(list(range(1, 900)) * 100)]
    with pytest.raises(tinker.RequestFailedError, match="over the limit of 1000000 bytes"):
        training.forward_backward(large, "cross_entropy").result()
    training.forward_backward(GOOD, "cross_entropy").result()
    assert training.optim_step(tinker.AdamParams(learning_rate=0.1)).result().metrics


def test_body_of_200_megabytes(server: RunningServer) -> None:
    answer = server.post("create_session", content=b" " * 200_000_000)
    assert answer.status_code == 413
    assert "1000000" in answer.json()["detail"]
    assert server.get("healthz").json() == {"status": "ok"}


def test_json_of_the_wrong_shape_names_the_field(server: RunningServer) -> None:
    answer = server.post("create_session", {"tags": "x"})
    assert answer.status_code == 422
    assert "tags" in answer.json()["detail"][0]
