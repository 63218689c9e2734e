"""The fake backend is a model whose gradients, batches and checkpoints are exact."""

from __future__ import annotations

import numpy as np
import pytest

from hosted_tinker.backend_configs import FakeConfig
from hosted_tinker.errors import NotFoundError, UserError
from hosted_tinker.training.fake import FakeBackend
from hosted_tinker.types import AdamParams, Datum, ForwardBackward, LoraConfig

LORA = LoraConfig(lora_rank=4, seed=1)
ADAM = AdamParams(learning_rate=0.1, weight_decay=0.01, grad_clip_norm=1.0)


@pytest.fixture
def backend():
    backend = FakeBackend.load(FakeConfig())
    backend.create_model("run", LORA)
    return backend


def make_operation(loss_fn="cross_entropy", **options):
    rng = np.random.default_rng(0)
    names = ["weights"] if loss_fn == "cross_entropy" else ["logprobs", "advantages"]
    data = []
    for length in (3, 7):
        inputs = {name: rng.uniform(0.1, 1, length).astype(np.float32) for name in names}
        data.append(
            Datum(
                rng.integers(0, 99, length),
                {"target_tokens": rng.integers(0, 99, length), **inputs},
            )
        )
    return ForwardBackward("run", data, loss_fn, **options)


def run_pass(backend, operation):
    (result,) = backend.forward_backward([operation])
    return result


def compute_loss(backend, loss_fn):
    output = run_pass(backend, make_operation(loss_fn, forward_only=True))
    return output.metrics["loss:sum"]


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling", "ppo", "dro"])
def test_gradient_is_the_slope_of_the_loss(backend, loss_fn):
    run = backend.runs["run"]
    run.B[:] = [0.3, -0.2, 0.5, 0.1]
    run_pass(backend, make_operation(loss_fn))
    for index in range(4):
        run.B[index] += 1e-6
        above = compute_loss(backend, loss_fn)
        run.B[index] -= 2e-6
        below = compute_loss(backend, loss_fn)
        run.B[index] += 1e-6
        assert run.gradient[index] == pytest.approx((above - below) / 2e-6, rel=1e-5, abs=1e-8)


def test_training_lowers_the_loss(backend):
    first = compute_loss(backend, "cross_entropy")
    for _ in range(20):
        run_pass(backend, make_operation())
        assert backend.optim_step("run", ADAM).metrics["grad_norm"] > 0
    assert compute_loss(backend, "cross_entropy") < 0.8 * first


def test_a_restored_run_continues_exactly(backend, tmp_path):
    for _ in range(2):
        run_pass(backend, make_operation())
        backend.optim_step("run", ADAM)
    backend.capture_state("run", "snapshot", with_optimizer=True)
    backend.persist_state("snapshot", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "adapter_model.safetensors",
        "adapter_config.json",
        "lora_config.json",
        "optimizer.safetensors",
    }
    restored = FakeBackend.load(FakeConfig())
    restored.load_state("run", tmp_path, with_optimizer=True, create=True)
    for each in (backend, restored):
        run_pass(each, make_operation())
        each.optim_step("run", ADAM)
    np.testing.assert_array_equal(restored.runs["run"].B, backend.runs["run"].B)


def test_requests_that_cannot_be_are_refused(backend, tmp_path):
    with pytest.raises(UserError, match="exists"):
        backend.create_model("run", LORA)
    with pytest.raises(UserError, match="rank is 513"):
        backend.create_model("other", LoraConfig(lora_rank=513, seed=0))
    with pytest.raises(NotFoundError, match="no run 'other'"):
        backend.optim_step("other", ADAM)
    backend.capture_state("run", "snapshot", with_optimizer=False)
    backend.persist_state("snapshot", tmp_path)
    with pytest.raises(UserError, match="no optimizer state"):
        backend.load_state("run", tmp_path, with_optimizer=True, create=False)
