"""Requests of many runs in shared passes, against each of them alone on a model of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hosted_tinker.errors import NotFoundError, UserError
from hosted_tinker.types import LoraConfig
from tests.parity.tiny_runs import (
    REQUESTS,
    RUNS,
    load,
    make_request,
    save_tiny_llama,
    take_gradients,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_tiny_llama(directory)
    return str(directory)


@pytest.fixture(scope="module")
def backends(model_dir):
    return load(model_dir), load(model_dir)


def assert_same_results(found, wanted):
    assert found.metrics == pytest.approx(wanted.metrics, rel=1e-3, abs=1e-3)
    for one, other in zip(found.logprobs, wanted.logprobs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def assert_same_gradients(found, wanted):
    """Up to rounding at the size of the largest."""
    largest = max((float(one.abs().max()) for one in wanted.values() if one is not None), default=0)
    for key, gradient in wanted.items():
        if gradient is None:
            assert found[key] is None, key
        else:
            torch.testing.assert_close(found[key], gradient, rtol=1e-3, atol=1e-4 * largest)


@given(shapes=REQUESTS, seed=st.integers(0, 99))
def test_together_equals_apart(backends, shapes, seed):
    joint, apart = backends
    requests = [make_request(*shape, seed=seed + i) for i, shape in enumerate(shapes)]
    found = joint.forward_backward(requests)
    wanted = [apart.forward_backward([request])[0] for request in requests]
    for one, other in zip(found, wanted, strict=True):
        assert_same_results(one, other)
    assert_same_gradients(take_gradients(joint), take_gradients(apart))


def test_padded_models_share_passes_too(model_dir, backends):
    padded, apart = load(model_dir, attn_implementation="sdpa"), backends[1]
    requests = [make_request(run, "cross_entropy", [9, 3, 14], seed=4) for run in RUNS]
    found = padded.forward_backward(requests)
    for one, request in zip(found, requests, strict=True):
        assert_same_results(one, apart.forward_backward([request])[0])
    assert_same_gradients(take_gradients(padded), take_gradients(apart))


def test_recomputed_layers_multiply_the_right_adapters(model_dir, backends):
    recomputing, apart = load(model_dir, gradient_checkpointing=True), backends[1]
    requests = [make_request(run, "cross_entropy", [9, 3], seed=5) for run in RUNS]
    recomputing.forward_backward(requests)
    for request in requests:
        apart.forward_backward([request])
    assert_same_gradients(take_gradients(recomputing), take_gradients(apart))


def test_a_request_that_fails_fails_for_itself_only(backends):
    joint, apart = backends
    good = [make_request(run, "importance_sampling", [5, 9], seed=6) for run in ("a", "b")]
    bad = make_request("a", "importance_sampling", [7], seed=7)
    bad.data[0].loss_fn_inputs["logprobs"][:] = -1000.0
    unknown = make_request("nobody", "cross_entropy", [3])
    found = joint.forward_backward([good[0], bad, unknown, good[1]])
    assert isinstance(found[1], UserError)
    assert "nothing was accumulated" in str(found[1])
    assert isinstance(found[2], NotFoundError)
    wanted = [apart.forward_backward([request])[0] for request in good]
    assert_same_results(found[0], wanted[0])
    assert_same_results(found[3], wanted[1])
    assert_same_gradients(take_gradients(joint), take_gradients(apart))


def test_requests_with_and_without_gradient_come_back_in_their_order(backends):
    joint, apart = backends
    requests = [
        make_request("a", "cross_entropy", [5], seed=8, forward_only=True),
        make_request("b", "cross_entropy", [6], seed=9),
        make_request("b", "dro", [4], seed=10, forward_only=True),
    ]
    found = joint.forward_backward(requests)
    for one, request in zip(found, requests, strict=True):
        assert_same_results(one, apart.forward_backward([request])[0])
    assert_same_gradients(take_gradients(joint), take_gradients(apart))


def test_the_budget_halves_until_a_pass_fits(model_dir, backends, monkeypatch, caplog):
    joint, apart = load(model_dir, micro_batch_tokens=64), backends[1]
    sizes = []
    run = joint._passes._decoder.run

    def run_small(tokens_P, *rest):
        sizes.append(len(tokens_P))
        if len(tokens_P) > 20:
            raise torch.OutOfMemoryError("no")
        return run(tokens_P, *rest)

    monkeypatch.setattr(joint._passes._decoder, "run", run_small)
    request = make_request("a", "cross_entropy", [12, 8, 8, 8, 4, 4, 4, 4, 4], seed=11)
    (found,) = joint.forward_backward([request])
    assert_same_results(found, apart.forward_backward([request])[0])
    assert_same_gradients(take_gradients(joint), take_gradients(apart))
    assert sizes[0] > sizes[1] > 20 >= max(sizes[2:])
    assert "micro-batches of 16 tokens" in caplog.text
    too_long = make_request("a", "cross_entropy", [30])
    short = make_request("b", "cross_entropy", [3])
    failed, passed = joint.forward_backward([too_long, short])
    assert "longest sequence 30; nothing was accumulated" in str(failed)
    assert_same_results(passed, apart.forward_backward([short])[0])


def test_a_head_alone_whose_cells_do_not_count_has_a_gradient_of_zeros(model_dir):
    backend = load(model_dir)
    lora = LoraConfig(lora_rank=2, seed=0, train_attn=False, train_mlp=False)
    backend.create_model("head", lora)
    request = make_request("head", "cross_entropy", [5], seed=1)
    request.data[0].loss_fn_inputs["weights"][:] = 0.0
    (found,) = backend.forward_backward([request])
    assert found.metrics["loss:sum"] == 0.0
    gradients = [one.grad for one in backend._runs["head"].optimizer.parameters.values()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)
