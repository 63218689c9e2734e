"""Sampling through the real SDK, on the fake engine: the form of requests and answers."""

import concurrent.futures
import math

import numpy as np
import pytest
import tinker
from tinker import types

from tests.contract.conftest import MODEL
from tests.harness import RunningServer


def prompt_of(*tokens: int) -> types.ModelInput:
    return types.ModelInput.from_ints(list(tokens))


@pytest.fixture
def base(client: tinker.ServiceClient) -> tinker.SamplingClient:
    return client.create_sampling_client(base_model=MODEL).result()


def test_samples_have_tokens_logprobs_and_an_id(base: tinker.SamplingClient) -> None:
    params = types.SamplingParams(max_tokens=5, seed=1, stop=[])
    result = base.sample(prompt_of(1, 2, 3), num_samples=3, sampling_params=params).result()
    assert len(result.sequences) == 3
    for sequence in result.sequences:
        assert len(sequence.tokens) == len(sequence.logprobs or []) == 5
        assert sequence.stop_reason == "length"
    ids = {sequence.sequence_id for sequence in result.sequences}
    assert len(ids) == 3


def test_same_seed_same_tokens(base: tinker.SamplingClient) -> None:
    params = types.SamplingParams(max_tokens=8, seed=7, stop=[])
    first, second = (
        base.sample(prompt_of(1, 2), num_samples=1, sampling_params=params).result()
        for _ in range(2)
    )
    assert first.sequences[0].tokens == second.sequences[0].tokens


def test_prompt_is_scored(base: tinker.SamplingClient) -> None:
    logprobs = base.compute_logprobs(prompt_of(4, 5, 6, 7)).result()
    assert logprobs[0] is None
    assert all(value is not None and value < 0 for value in logprobs[1:])


def test_topk_and_targets_of_the_prompt(base: tinker.SamplingClient) -> None:
    targets = types.TensorData.from_numpy(np.array([[5, -1], [6, 9], [-1, -1]]))
    result = base.sample(
        prompt_of(4, 5, 6, 7),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=2, seed=1, stop=[]),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
        target_prompt_logprobs=targets,
    ).result()
    topk = result.topk_prompt_logprobs
    assert topk is not None
    assert topk[0] is None
    for row in topk[1:]:
        values = [logprob for _, logprob in row or []]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
    sampled = result.sequences[0].topk_logprobs
    assert sampled is not None
    assert [len(row or []) for row in sampled] == [2, 2]
    scored = result.target_prompt_logprobs
    assert scored is not None
    table = scored.to_numpy().reshape(3, 2)
    assert result.prompt_logprobs is not None
    assert table[0, 0] == pytest.approx(result.prompt_logprobs[1], abs=1e-5)
    assert table[1, 0] == pytest.approx(result.prompt_logprobs[2], abs=1e-5)
    assert table[0, 1] == table[2, 0] == table[2, 1] == 0


def test_sparse_targets_come_back_sparse(base: tinker.SamplingClient) -> None:
    targets = types.TensorData(
        data=[6],
        dtype="int64",
        shape=[3, 40],
        sparse_crow_indices=[0, 0, 1, 1],
        sparse_col_indices=[2],
    )
    result = base.sample(
        prompt_of(4, 5, 6, 7),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        target_prompt_logprobs=targets,
    ).result()
    scored = result.target_prompt_logprobs
    assert scored is not None
    assert scored.sparse_crow_indices == [0, 0, 1, 1]
    assert scored.sparse_col_indices == [2]
    assert result.prompt_logprobs is not None
    assert list(scored.data) == pytest.approx([result.prompt_logprobs[2]], abs=1e-5)


def test_last_n_leaves_the_rest_unscored(base: tinker.SamplingClient) -> None:
    result = base.sample(
        prompt_of(4, 5, 6, 7),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        prompt_logprobs_last_n=2,
    ).result()
    assert result.prompt_logprobs is not None
    assert [value is None for value in result.prompt_logprobs] == [True, True, False, False]


def test_alternative_tokens_of_the_prompt(base: tinker.SamplingClient) -> None:
    result = base.sample(
        prompt_of(4, 5, 6, 7),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=1),
        prompt_alt_tokens_k=2,
    ).result()
    alternatives = result.prompt_alt_tokens
    assert alternatives is not None
    assert alternatives.tokens.shape == [3, 2]
    assert all(math.isfinite(value) for value in alternatives.logprobs.data)


def test_snapshot_does_not_change_with_later_steps(training: tinker.TrainingClient) -> None:
    data = [
        types.Datum(
            model_input=prompt_of(1, 2, 3),
            loss_fn_inputs={
                "target_tokens": types.TensorData.from_numpy(np.array([2, 3, 4])),
                "weights": types.TensorData.from_numpy(np.ones(3, np.float32)),
            },
        )
    ]
    params = types.SamplingParams(max_tokens=6, seed=3, stop=[])

    def step() -> None:
        training.forward_backward(data, "cross_entropy").result()
        training.optim_step(tinker.AdamParams(learning_rate=0.1)).result()

    def tokens_of(sampler: tinker.SamplingClient) -> list[int]:
        result = sampler.sample(prompt_of(1, 2), num_samples=1, sampling_params=params).result()
        return list(result.sequences[0].tokens)

    step()
    snapshot = training.save_weights_and_get_sampling_client().result()
    before = tokens_of(snapshot)
    step()
    newer = training.save_weights_and_get_sampling_client().result()
    assert tokens_of(snapshot) == before
    assert tokens_of(newer) != before


def test_path_decides_over_base_model(
    client: tinker.ServiceClient, training: tinker.TrainingClient, server: RunningServer
) -> None:
    path = training.save_weights_for_sampler("first").result().path
    params = types.SamplingParams(max_tokens=6, seed=3, stop=[])

    def tokens_of(sampler: tinker.SamplingClient) -> list[int]:
        result = sampler.sample(prompt_of(1, 2), num_samples=1, sampling_params=params).result()
        return list(result.sequences[0].tokens)

    by_path = client.create_sampling_client(model_path=path).result()
    by_both = client.create_sampling_client(model_path=path, base_model=MODEL).result()
    assert tokens_of(by_path) == tokens_of(by_both)
    assert by_path.get_base_model() == MODEL


def test_two_hundred_requests_at_once(base: tinker.SamplingClient) -> None:
    params = types.SamplingParams(max_tokens=4, stop=[], seed=5)
    futures = [
        base.sample(prompt_of(1 + index % 7), num_samples=1, sampling_params=params)
        for index in range(200)
    ]
    results = [future.result().sequences[0].tokens for future in futures]
    for index, tokens in enumerate(results):
        assert tokens == results[index % 7]


def test_duplicate_sample_runs_once(server: RunningServer) -> None:
    session = server.post("create_session", {}).json()["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = server.post("create_sampling_session", body).json()["sampling_session_id"]
    request = {
        "sampling_session_id": sampler,
        "seq_id": 10**17,
        "num_samples": 2,
        "prompt": {"chunks": [{"tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 3},
    }
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda _: server.post("asample", request).json(), range(4)))
    assert all(answer == answers[0] for answer in answers)
    assert len(answers[0]["sample_sequence_ids"]) == 2
