"""The pytorch backend against plain transformers, PEFT and a loop of its own, on tiny random models.

The reference shares no code with the backend: PEFT's layers read from the saved directory, logits of
every position, one sequence at a time without padding, Adam written out.
"""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from hosted_tinker.backend_configs import PytorchConfig
from hosted_tinker.errors import HostedTinkerError, NotFoundError, UserError, WorkerFailedError
from hosted_tinker.modeling.lora import Segment
from hosted_tinker.training import token_budget
from hosted_tinker.training.pytorch import PytorchBackend
from hosted_tinker.types import AdamParams, Datum, ForwardBackward, LoraConfig

# PEFT warns of the part of adapter_config.json that is ours, and of a tied head; both are meant.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
]

VOCAB = 512
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
MODEL_CONFIGS = {
    "llama-untied": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True),
}
LORA = LoraConfig(lora_rank=4, seed=7)
ADAM = AdamParams(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=0.5)
SMALL_BATCHES = {"micro_batch_tokens": 40, "logits_chunk_tokens": 8}
LOSSES = ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Matrices this small lose more to waiting for a second thread than it computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory):
    directories = {}
    for name, config in MODEL_CONFIGS.items():
        torch.manual_seed(0)
        directories[name] = tmp_path_factory.mktemp(name)
        AutoModelForCausalLM.from_config(config).save_pretrained(directories[name])
    return {name: str(directory) for name, directory in directories.items()}


@pytest.fixture(params=MODEL_CONFIGS)
def any_model_dir(request, model_dirs):
    return model_dirs[request.param]


@pytest.fixture
def model_dir(model_dirs):
    return model_dirs["llama-tied"]


@pytest.fixture
def backend(model_dir):
    return load(model_dir)


def load(model_dir, **config):
    return PytorchBackend.load(model_dir, PytorchConfig(**{**SMALL_BATCHES, **config}), print)


def make_datum(seed, length, num_targets=None, *, policy=False):
    rng = np.random.default_rng(seed)
    shape = (length,) if num_targets is None else (length, num_targets)
    inputs = {"target_tokens": rng.integers(0, VOCAB, shape)}
    names = ("logprobs", "advantages") if policy else ("weights",)
    for name in names:
        inputs[name] = rng.normal(size=shape).astype(np.float32)
    if policy:
        # Near the random model's own, so that ratios fall inside and outside of the thresholds.
        inputs["logprobs"] += np.float32(-math.log(VOCAB))
        inputs["logprobs"][: length // 3] = 0.0
        inputs["advantages"][: length // 3] = 0.0
    return Datum(rng.integers(0, VOCAB, length), inputs)


def make_data(loss_fn, seed=0):
    policy = loss_fn != "cross_entropy"
    return [make_datum(seed + i, n, policy=policy) for i, n in enumerate([5, 31, 12, 60, 1, 17])]


def make_operation(model_id="run", data=None, loss_fn="cross_entropy", **options):
    return ForwardBackward(
        model_id, make_data(loss_fn) if data is None else data, loss_fn, **options
    )


def run_pass(backend, operation):
    (result,) = backend.forward_backward([operation])
    if isinstance(result, HostedTinkerError):
        raise result
    return result


def give_all_to(backend, run):
    """All positions of whatever is computed next."""
    for routing in (backend._lora.routing, backend._lora.head_routing):
        routing.segments = [Segment(run, 0, sys.maxsize)]


def randomise(backend, model_id="run", seed=1):
    """B is zero in a fresh adapter, which hides half of what there is to get wrong."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters_of(backend, model_id).values():
            parameter.normal_(std=0.05, generator=generator)


def parameters_of(backend, model_id="run"):
    return backend._runs[model_id].optimizer.parameters


def weights_of(backend, model_id="run"):
    return {name: p.detach().clone() for name, p in parameters_of(backend, model_id).items()}


def gradients_of(backend, model_id="run"):
    return {name: p.grad for name, p in parameters_of(backend, model_id).items()}


def save(backend, directory, model_id="run", *, with_optimizer=True):
    directory.mkdir()
    backend.capture_state(model_id, "snapshot", with_optimizer=with_optimizer)
    backend.persist_state("snapshot", directory)
    return directory


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


def assert_near(found, wanted, relative=1e-5):
    """All elements within `relative` of the largest one of their tensor."""
    assert found.keys() == wanted.keys()
    for name in wanted:
        tolerance = relative * float(wanted[name].detach().abs().max()) + 1e-12
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=tolerance)


# --- the reference ---


class Reference:
    def __init__(self, model_dir, adapter_dir):
        base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.model = PeftModel.from_pretrained(base, adapter_dir, is_trainable=True).eval()
        self.parameters = {
            name.removeprefix("base_model.model.").replace(".default", ""): parameter
            for name, parameter in self.model.named_parameters()
            if "lora_" in name
        }
        self.mean = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.square = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.steps = 0

    def score(self, datum):
        logits = self.model(input_ids=torch.tensor(datum.tokens)[None]).logits[0]
        targets = torch.tensor(datum.loss_fn_inputs["target_tokens"]).reshape(len(datum.tokens), -1)
        return torch.log_softmax(logits.double(), -1).gather(1, targets)

    def forward_backward(self, data, loss_fn):
        """(loss, log-probabilities of each datum); gradients are left in the parameters."""
        total, logprobs = 0.0, []
        for datum in data:
            scores = self.score(datum)
            inputs = {
                name: torch.tensor(values).reshape(scores.shape).double()
                for name, values in datum.loss_fn_inputs.items()
            }
            loss = reference_loss(loss_fn, scores, inputs)
            loss.backward()
            total += loss.item()
            logprobs.append(
                scores.detach().numpy().reshape(datum.loss_fn_inputs["target_tokens"].shape)
            )
        return total, logprobs

    def step(self, adam):
        """AdamW as its paper has it; returns the gradient's norm."""
        norm = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in self.parameters.values()))
        shrink = min(1.0, adam.grad_clip_norm / norm) if adam.grad_clip_norm else 1.0
        self.steps += 1
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                gradient = parameter.grad * shrink
                self.mean[name] = adam.beta1 * self.mean[name] + (1 - adam.beta1) * gradient
                self.square[name] = adam.beta2 * self.square[name] + (1 - adam.beta2) * gradient**2
                mean = self.mean[name] / (1 - adam.beta1**self.steps)
                square = self.square[name] / (1 - adam.beta2**self.steps)
                decay = adam.weight_decay * parameter
                parameter -= adam.learning_rate * (mean / (square.sqrt() + adam.eps) + decay)
                parameter.grad = None
        return norm


def reference_loss(loss_fn, logprobs, inputs):
    if loss_fn == "cross_entropy":
        return -(logprobs * inputs["weights"]).sum()
    sampled, advantages = inputs["logprobs"], inputs["advantages"]
    ratio = torch.exp(logprobs - sampled)
    match loss_fn:
        case "importance_sampling":
            return -(ratio * advantages).sum()
        case "ppo":
            return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
        case "cispo":
            return -(ratio.detach().clamp(0, 4) * logprobs * advantages).sum()
        case "dro":
            return -(logprobs * advantages - 0.05 / 2 * (logprobs - sampled) ** 2).sum()


# --- against the reference ---


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_losses_logprobs_norms_and_weights_are_those_of_peft(any_model_dir, tmp_path, loss_fn):
    backend = load(any_model_dir)
    backend.create_model("run", LORA)
    randomise(backend)
    reference = Reference(any_model_dir, save(backend, tmp_path / "adapter"))
    for step in range(3):
        data = make_data(loss_fn, seed=10 * step)
        output = run_pass(backend, make_operation(data=data, loss_fn=loss_fn))
        loss, logprobs = reference.forward_backward(data, loss_fn)
        # Terms of both signs nearly cancel, so the sum is known less well than its terms.
        assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4)
        for found, wanted in zip(output.logprobs, logprobs, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5)
        norm = backend.optim_step("run", ADAM).metrics["grad_norm"]
        assert norm == pytest.approx(reference.step(ADAM), rel=1e-5)
        assert norm > ADAM.grad_clip_norm
        assert_near(weights_of(backend), reference.parameters, relative=1e-4)


def test_gradients_are_those_of_peft(any_model_dir, tmp_path):
    backend = load(any_model_dir)
    backend.create_model("run", LORA)
    randomise(backend)
    reference = Reference(any_model_dir, save(backend, tmp_path / "adapter"))
    run_pass(backend, make_operation())
    reference.forward_backward(make_data("cross_entropy"), "cross_entropy")
    wanted = {name: p.grad for name, p in reference.parameters.items()}
    assert {"lm_head.lora_A.weight", "model.layers.1.mlp.down_proj.lora_B.weight"} < wanted.keys()
    assert_near(gradients_of(backend), wanted)


def test_many_targets_for_a_position_are_those_of_peft(model_dir, tmp_path):
    backend = load(model_dir)
    backend.create_model("run", LORA)
    randomise(backend)
    reference = Reference(model_dir, save(backend, tmp_path / "adapter"))
    data = [make_datum(0, 9, 3), make_datum(1, 20), make_datum(2, 11, 1), make_datum(3, 30, 5)]
    output = run_pass(backend, make_operation(data=data))
    loss, logprobs = reference.forward_backward(data, "cross_entropy")
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
    for found, wanted in zip(output.logprobs, logprobs, strict=True):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert_near(gradients_of(backend), {name: p.grad for name, p in reference.parameters.items()})


def test_peft_loads_a_saved_adapter_and_gives_the_same_logits(any_model_dir, tmp_path):
    backend = load(any_model_dir)
    backend.create_model("run", LORA)
    randomise(backend)
    directory = save(backend, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(any_model_dir, dtype=torch.float32)
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        plain = base(input_ids=tokens).logits
        wanted = PeftModel.from_pretrained(base, directory)(input_ids=tokens).logits
        give_all_to(backend, "run")
        found = backend._base.module(input_ids=tokens).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert (plain - wanted).abs().max() > 0.1


# --- against itself ---


def test_a_fresh_adapter_is_an_exact_no_op(any_model_dir):
    backend = load(any_model_dir)
    backend.create_model("run", LORA)
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        give_all_to(backend, "run")
        adapted = backend._base.module(input_ids=tokens).logits
        plain = AutoModelForCausalLM.from_pretrained(any_model_dir, dtype=torch.float32)
        assert torch.equal(adapted, plain(input_ids=tokens).logits)


def test_the_seed_decides_the_first_adapter(backend):
    for model_id, seed in [("a", 1), ("b", 1), ("c", 2)]:
        backend.create_model(model_id, LoraConfig(lora_rank=4, seed=seed))
    a, b, c = (weights_of(backend, model_id) for model_id in "abc")
    assert_same(a, b)
    assert all(not torch.equal(a[name], c[name]) for name in a if "lora_A" in name)


@pytest.mark.parametrize("group", ["attn", "mlp", "unembed"])
def test_only_the_wanted_layers_are_trained(backend, group):
    flags = {f"train_{name}": name == group for name in ("attn", "mlp", "unembed")}
    backend.create_model("run", LoraConfig(lora_rank=4, seed=0, **flags))
    part = {"attn": "self_attn", "mlp": "mlp", "unembed": "lm_head"}[group]
    counts = {"attn": 16, "mlp": 12, "unembed": 2}
    names = parameters_of(backend).keys()
    assert len(names) == counts[group]
    assert all(part in name for name in names)
    run_pass(backend, make_operation())
    assert backend.optim_step("run", ADAM).metrics["grad_norm"] > 0


def test_a_batch_equals_its_data_one_at_a_time(model_dir):
    together, alone = load(model_dir, micro_batch_tokens=4096), load(model_dir)
    for backend in (together, alone):
        backend.create_model("run", LORA)
        randomise(backend)
    output = run_pass(together, make_operation())
    parts = [run_pass(alone, make_operation(data=[datum])) for datum in make_data("cross_entropy")]
    assert output.metrics["loss:sum"] == pytest.approx(
        sum(part.metrics["loss:sum"] for part in parts), rel=1e-5
    )
    for found, part in zip(output.logprobs, parts, strict=True):
        np.testing.assert_allclose(found, part.logprobs[0], rtol=1e-5)
    assert_near(gradients_of(together), gradients_of(alone))


def test_runs_that_take_turns_equal_each_run_alone(backend, model_dir):
    runs = {"a": LORA, "b": LoraConfig(lora_rank=8, seed=3, train_unembed=False)}
    for model_id, lora in runs.items():
        backend.create_model(model_id, lora)
        randomise(backend, model_id)
    for step in range(2):
        for model_id in runs:
            data = make_data("cross_entropy", seed=step)
            run_pass(backend, make_operation(model_id, data))
        for model_id in runs:
            backend.optim_step(model_id, ADAM)
    for model_id, lora in runs.items():
        alone = load(model_dir)
        alone.create_model(model_id, lora)
        randomise(alone, model_id)
        for step in range(2):
            run_pass(alone, make_operation(model_id, make_data("cross_entropy", seed=step)))
            alone.optim_step(model_id, ADAM)
        assert_same(weights_of(backend, model_id), weights_of(alone, model_id))


def test_gradients_add_up_until_the_step_clears_them(backend):
    backend.create_model("run", LORA)
    randomise(backend)
    run_pass(backend, make_operation())
    once = {name: gradient.clone() for name, gradient in gradients_of(backend).items()}
    run_pass(backend, make_operation())
    assert_near(gradients_of(backend), {name: 2 * gradient for name, gradient in once.items()})
    backend.optim_step("run", ADAM)
    assert set(gradients_of(backend).values()) == {None}
    run_pass(backend, make_operation())
    backend.clear_gradients("run")
    assert backend.optim_step("run", ADAM).metrics["grad_norm"] == 0


def test_a_step_without_gradient_decays_weights_only(backend):
    backend.create_model("run", LORA)
    randomise(backend)
    before = weights_of(backend)
    backend.optim_step("run", AdamParams(learning_rate=0.1, weight_decay=0.5))
    assert_near(weights_of(backend), {name: 0.95 * value for name, value in before.items()}, 1e-6)


def test_forward_only_gives_the_same_and_no_gradient(backend):
    backend.create_model("run", LORA)
    randomise(backend)
    forward = run_pass(backend, make_operation(forward_only=True))
    assert set(gradients_of(backend).values()) == {None}
    both = run_pass(backend, make_operation())
    assert forward.metrics == both.metrics
    for found, wanted in zip(forward.logprobs, both.logprobs, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_micro_batches_are_as_large_as_memory_allows(model_dir, monkeypatch):
    """Half of the memory over what saved tensors take; the probe leaves nothing behind."""
    monkeypatch.setattr(token_budget, "find_free_bytes", lambda _: 1_000_000)
    backend = PytorchBackend.load(model_dir, PytorchConfig(), print)
    per_token = 500_000 / backend._max_tokens
    config = backend._base.text_config
    widths = 4 * config.num_hidden_layers * (config.hidden_size + config.intermediate_size)
    assert 2 * widths < per_token < 20 * widths + 8 * VOCAB
    assert not any(layer.pairs for layer in backend._lora.layers.values())
    other = load(model_dir)
    for one in (backend, other):
        one.create_model("run", LORA)
        randomise(one)
    found, wanted = (run_pass(one, make_operation()) for one in (backend, other))
    assert found.metrics == pytest.approx(wanted.metrics, rel=1e-5)
    assert_near(gradients_of(backend), gradients_of(other), relative=1e-4)


@pytest.mark.parametrize("every", [True, 2])
def test_gradient_checkpointing_recomputes_layers_and_changes_no_gradient(model_dir, every):
    plain, recomputed = load(model_dir), load(model_dir, gradient_checkpointing=every)
    calls = {}
    for name, backend in (("plain", plain), ("recomputed", recomputed)):
        backend.create_model("run", LORA)
        randomise(backend)
        for index, layer in enumerate(backend._base.module.model.layers):
            counts = calls.setdefault(name, [0, 0])
            layer.mlp.register_forward_pre_hook(
                lambda *_, counts=counts, index=index: counts.__setitem__(index, counts[index] + 1)
            )
        run_pass(backend, make_operation())
    first, second = calls["plain"]
    assert calls["recomputed"] == [2 * first, second if every == 2 else 2 * second]
    assert_near(gradients_of(recomputed), gradients_of(plain), relative=1e-6)


# --- failures leave a run as it was ---


class FailingDecoder:
    """Fails in the second pass of a call."""

    def __init__(self, decoder, error):
        self.calls = 0
        self.error = error
        decoder.register_forward_pre_hook(self)

    def __call__(self, *_):
        self.calls += 1
        if self.calls == 2:
            raise self.error


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (torch.OutOfMemoryError("out"), UserError, "126 tokens, the longest sequence 60"),
        (RuntimeError("broken"), WorkerFailedError, "RuntimeError: broken"),
    ],
)
def test_a_call_that_fails_midway_leaves_gradients_unharmed(backend, error, raised, message):
    backend.create_model("run", LORA)
    randomise(backend)
    run_pass(backend, make_operation())
    before = {name: gradient.clone() for name, gradient in gradients_of(backend).items()}
    FailingDecoder(backend._base.decoder, error)
    with pytest.raises(raised, match=message):
        run_pass(backend, make_operation())
    assert_same(gradients_of(backend), before)


def test_a_loss_that_is_not_finite_is_refused_and_not_accumulated(backend):
    backend.create_model("run", LORA)
    data = make_data("importance_sampling")
    # The shortest datum's pass comes last, after others have given gradients.
    data[4].loss_fn_inputs["logprobs"][:] = -1000.0
    data[4].loss_fn_inputs["advantages"][:] = 1.0
    with pytest.raises(UserError, match="loss:sum is -inf"):
        run_pass(backend, make_operation(data=data, loss_fn="importance_sampling"))
    assert set(gradients_of(backend).values()) == {None}


def test_a_gradient_that_is_not_finite_is_cleared_without_a_step(backend):
    backend.create_model("run", LORA)
    randomise(backend)
    run_pass(backend, make_operation())
    before = weights_of(backend)
    next(iter(gradients_of(backend).values()))[0, 0] = math.nan
    with pytest.raises(UserError, match="gradient norm is nan: no step was taken"):
        backend.optim_step("run", ADAM)
    assert_same(weights_of(backend), before)
    assert set(gradients_of(backend).values()) == {None}
    assert float(backend._runs["run"].optimizer.state_dict()["step"]) == 0


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoraConfig(lora_rank=0, seed=0), "rank is 0; this server accepts 1 to 16"),
        (LoraConfig(lora_rank=17, seed=0), "rank is 17; this server accepts 1 to 16"),
        (LoraConfig(1, 0, train_attn=False, train_mlp=False, train_unembed=False), "at least one"),
    ],
)
def test_adapters_that_cannot_be_are_refused(model_dir, lora, message):
    backend = load(model_dir, max_lora_rank=16)
    with pytest.raises(UserError, match=message):
        backend.create_model("run", lora)


def test_run_ids_are_taken_once_and_known_until_unloaded(backend):
    backend.create_model("run", LORA)
    with pytest.raises(UserError, match="'run' exists"):
        backend.create_model("run", LORA)
    backend.unload_model("run")
    backend.unload_model("run")
    with pytest.raises(NotFoundError, match="no run 'run'"):
        run_pass(backend, make_operation())
    with pytest.raises(NotFoundError, match="no run 'run'"):
        backend.optim_step("run", ADAM)


# --- checkpoints ---


def train(backend, steps, model_id="run"):
    losses = []
    for step in steps:
        data = make_data("cross_entropy", seed=step)
        losses.append(run_pass(backend, make_operation(model_id, data)).metrics["loss:sum"])
        backend.optim_step(model_id, ADAM)
    return losses


@pytest.mark.parametrize("create", [True, False])
def test_a_restored_run_continues_bit_for_bit(backend, model_dir, tmp_path, create):
    backend.create_model("run", LORA)
    train(backend, range(3))
    directory = save(backend, tmp_path / "checkpoint")
    restored = load(model_dir)
    if not create:
        restored.create_model("run", LoraConfig(lora_rank=4, seed=99))
        train(restored, range(1))
        run_pass(restored, make_operation())
    restored.load_state("run", directory, with_optimizer=True, create=create)
    assert train(restored, range(3, 6)) == train(backend, range(3, 6))
    assert_same(weights_of(restored), weights_of(backend))


def test_a_snapshot_does_not_follow_later_steps(backend, tmp_path):
    backend.create_model("run", LORA)
    train(backend, range(1))
    before = weights_of(backend)
    moments = {k: v.clone() for k, v in backend._runs["run"].optimizer.state_dict().items()}
    backend.capture_state("run", "snapshot", with_optimizer=True)
    train(backend, range(1))
    backend.persist_state("snapshot", tmp_path)
    backend.load_state("run", tmp_path, with_optimizer=True, create=False)
    assert_same(weights_of(backend), before)
    assert_same(backend._runs["run"].optimizer.state_dict(), moments)
    with pytest.raises(NotFoundError, match="no captured state 'snapshot'"):
        backend.persist_state("snapshot", tmp_path)


def test_loading_without_the_optimizer_starts_it_anew(backend, tmp_path):
    backend.create_model("run", LORA)
    train(backend, range(2))
    directory = save(backend, tmp_path / "checkpoint")
    backend.load_state("run", directory, with_optimizer=False, create=False)
    state = backend._runs["run"].optimizer.state_dict()
    assert all(not value.any() for value in state.values())


def test_a_checkpoint_without_optimizer_state_says_so(backend, tmp_path):
    backend.create_model("run", LORA)
    directory = save(backend, tmp_path / "checkpoint", with_optimizer=False)
    assert not (directory / "optimizer.safetensors").exists()
    with pytest.raises(UserError, match="the checkpoint has no optimizer state"):
        backend.load_state("run", directory, with_optimizer=True, create=False)


def test_a_checkpoint_of_another_shape_is_refused_and_nothing_changes(backend, tmp_path):
    backend.create_model("run", LORA)
    backend.create_model("other", LoraConfig(lora_rank=8, seed=0, train_mlp=False))
    directory = save(backend, tmp_path / "checkpoint", "other")
    train(backend, range(1))
    before = weights_of(backend)
    with pytest.raises(
        UserError, match=r"rank 8, .*train_mlp=False.* has rank 4, .*train_mlp=True"
    ):
        backend.load_state("run", directory, with_optimizer=True, create=False)
    assert_same(weights_of(backend), before)
    with pytest.raises(UserError, match="'run' exists"):
        backend.load_state("run", directory, with_optimizer=True, create=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 1}, "has 'model.layers.1.*does not train"),
        ({"num_hidden_layers": 3}, "lacks 'model.layers.2.*"),
        ({"intermediate_size": 96}, "of shape .*192.*needs .*96"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(backend, tmp_path, changes, message):
    backend.create_model("run", LORA)
    directory = save(backend, tmp_path / "checkpoint")
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SHAPE, **changes}))
    model.save_pretrained(tmp_path / "model")
    other = load(str(tmp_path / "model"))
    with pytest.raises(UserError, match=message):
        other.load_state("run", directory, with_optimizer=True, create=True)
    with pytest.raises(NotFoundError):
        other.clear_gradients("run")


def test_experts_that_cannot_be_adapted_are_refused_and_attention_trains(tmp_path):
    config = Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    backend = load(str(tmp_path))
    with pytest.raises(UserError, match="train_mlp=False"):
        backend.create_model("run", LORA)
    backend.create_model("run", LoraConfig(lora_rank=4, seed=7, train_mlp=False))
    assert np.isfinite(run_pass(backend, make_operation()).metrics["loss:sum"])
    assert backend.optim_step("run", ADAM).metrics["grad_norm"] > 0
