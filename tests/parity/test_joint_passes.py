"""Requests of many runs in shared passes, against each of them alone on a model of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from hosted_tinker.backend_configs import PytorchConfig
from hosted_tinker.errors import NotFoundError, UserError
from hosted_tinker.training.pytorch import PytorchBackend
from hosted_tinker.types import Datum, ForwardBackward, LoraConfig

VOCAB = 61
RUNS = {
    "a": LoraConfig(lora_rank=4, seed=1),
    "b": LoraConfig(lora_rank=1, seed=2, train_unembed=False),
    "c": LoraConfig(lora_rank=7, seed=3, train_mlp=False),
}
LOSSES = ("cross_entropy", "importance_sampling", "dro")
REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(sorted(RUNS)),
        st.sampled_from(LOSSES),
        st.lists(st.integers(1, 24), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=5,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    directory = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(directory)
    return str(directory)


def load(model_dir, **config):
    small = {"micro_batch_tokens": 40, "logits_chunk_tokens": 16, **config}
    backend = PytorchBackend.load(model_dir, PytorchConfig(**small), print)
    for seed, (run, lora) in enumerate(RUNS.items()):
        backend.create_model(run, lora)
        generator = torch.Generator().manual_seed(seed)
        for parameter in backend._runs[run].optimizer.parameters.values():
            parameter.data.normal_(std=0.1, generator=generator)
    return backend


@pytest.fixture(scope="module")
def backends(model_dir):
    return load(model_dir), load(model_dir)


def make_request(run, loss_fn, lengths, seed=0, **options):
    rng = np.random.default_rng(seed)
    names = ("weights",) if loss_fn == "cross_entropy" else ("logprobs", "advantages")
    data = []
    for length in lengths:
        inputs = {"target_tokens": rng.integers(0, VOCAB, length)}
        inputs |= {name: rng.normal(size=length).astype(np.float32) for name in names}
        if "logprobs" in inputs:
            inputs["logprobs"] -= np.float32(np.log(VOCAB))
        data.append(Datum(rng.integers(0, VOCAB, length), inputs))
    return ForwardBackward(run, data, loss_fn, **options)


def take_gradients(backend):
    gradients = {}
    for run in RUNS:
        for name, parameter in backend._runs[run].optimizer.parameters.items():
            gradients[run, name] = parameter.grad
        backend.clear_gradients(run)
    return gradients


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
