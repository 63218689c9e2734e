"""The official SDK against a real server process with a tiny random model."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM

from tests.data import datum, next_token_datum
from tests.harness import RunningServer, running_server
from tests.integration.tiny_engine import PROMPT, save_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
]

SEQUENCES = [[5, 17, 99, 230, 41, 8, 77, 3], [9, 9, 120, 64, 200], [33, 150, 7, 7, 7, 81]]
DATA = [next_token_datum(tokens) for tokens in SEQUENCES]
ADAM = tinker.AdamParams(
    learning_rate=1e-3, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=5.0
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_model(directory)
    return directory


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serve(model_dir, tmp_path_factory.mktemp("server")) as running:
        yield running


def serve(
    model_dir: Path, state_dir: Path, **config: object
) -> contextlib.AbstractContextManager[RunningServer]:
    flags = ["--base-model", str(model_dir), "--served-model-name", "org/tiny"]
    return running_server(state_dir, *flags, "--backend-config", json.dumps(config))


@pytest.fixture
def client(server: RunningServer) -> Iterator[tinker.ServiceClient]:
    with server.client() as service_client:
        yield service_client


def make_run(
    client: tinker.ServiceClient, rank: int = 8, seed: int = 3, **options: bool
) -> tinker.TrainingClient:
    return client.create_lora_training_client(
        base_model="org/tiny", rank=rank, seed=seed, **options
    ).result()


def train(run: tinker.TrainingClient, steps: int) -> list[float]:
    losses: list[float] = []
    for _ in range(steps):
        passed = run.forward_backward(DATA, "cross_entropy")
        stepped = run.optim_step(ADAM)
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return losses


def sample_tokens(sampler: tinker.SamplingClient, seed: int, max_tokens: int = 24) -> list[int]:
    params = types.SamplingParams(max_tokens=max_tokens, seed=seed, stop=[])
    prompt = types.ModelInput.from_ints(PROMPT)
    return list(sampler.sample(prompt, 1, params).result().sequences[0].tokens)


def checkpoint_dir(server: RunningServer, path: str) -> Path:
    model_id, segment, name = path.removeprefix("tinker://").split("/")
    (directory,) = (server.state_dir / "checkpoints" / model_id / segment).glob(f"{name}-*")
    return directory


def test_losses_and_norms_are_those_of_a_plain_peft_loop(
    client: tinker.ServiceClient, server: RunningServer, model_dir: Path
) -> None:
    """The reference starts from the adapter that the server saved, and shares no code with it."""
    run = make_run(client)
    start = checkpoint_dir(server, run.save_state("start").result().path)
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        start,
        is_trainable=True,
    ).eval()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for _ in range(4):
        passed = run.forward_backward(DATA, "cross_entropy")
        metrics = run.optim_step(ADAM).result().metrics
        loss = sum(
            torch.nn.functional.cross_entropy(
                model(torch.tensor([tokens[:-1]])).logits[0],
                torch.tensor(tokens[1:]),
                reduction="sum",
            )
            for tokens in SEQUENCES
        )
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 5.0)
        optimizer.step()
        assert metrics is not None
        assert passed.result().metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def policy_loss(loss_fn: str, p: np.ndarray, q: np.ndarray, a: np.ndarray) -> float:
    """The documented objectives in float64, with thresholds 0.7 and 1.3, and beta 0.1."""
    ratio = np.exp(p - q)
    clipped = np.clip(ratio, 0.7, 1.3)
    objective = {
        "importance_sampling": ratio * a,
        "ppo": np.minimum(ratio * a, clipped * a),
        "cispo": clipped * p * a,
        "dro": p * a - 0.05 * (p - q) ** 2,
    }[loss_fn]
    return -float(objective.sum())


@pytest.mark.parametrize(
    ("loss_fn", "config"),
    [
        ("importance_sampling", None),
        ("ppo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}),
        ("cispo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}),
        ("dro", {"beta": 0.1}),
    ],
)
def test_policy_losses_are_those_of_their_formulas(
    client: tinker.ServiceClient, loss_fn: types.LossFnType, config: dict[str, float] | None
) -> None:
    """Log-probabilities come from `forward`, checked against PEFT elsewhere in this file."""
    run = make_run(client)
    train(run, 3)
    rows = run.forward(DATA, "cross_entropy").result().loss_fn_outputs
    own = [row["logprobs"].to_numpy().astype(np.float64) for row in rows]
    rng = np.random.default_rng(0)
    sampling = [(p + rng.normal(size=len(p)) * 0.4).astype(np.float32) for p in own]
    advantages = [rng.normal(size=len(p)).astype(np.float32) for p in own]
    data = [
        datum(
            tokens[:-1],
            target_tokens=np.asarray(tokens[1:], dtype=np.int64),
            logprobs=q,
            advantages=a,
        )
        for tokens, q, a in zip(SEQUENCES, sampling, advantages, strict=True)
    ]
    result = run.forward_backward(data, loss_fn, config).result()
    expected = sum(
        policy_loss(loss_fn, p, q.astype(np.float64), a.astype(np.float64))
        for p, q, a in zip(own, sampling, advantages, strict=True)
    )
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4, abs=1e-4)
    step = run.optim_step(ADAM).result().metrics
    assert step is not None
    assert step["grad_norm"] > 0


def test_sampler_and_trainer_agree_on_a_trained_adapter(client: tinker.ServiceClient) -> None:
    run = make_run(client)
    train(run, 5)
    sampler = run.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=32, seed=11, stop=[])
    result = sampler.sample(types.ModelInput.from_ints(PROMPT), 4, params).result()
    data = [next_token_datum([*PROMPT, *sequence.tokens]) for sequence in result.sequences]
    scored = run.forward(data, "cross_entropy").result()
    differences = [
        np.abs(output["logprobs"].to_numpy()[-32:] - np.asarray(sequence.logprobs))
        for output, sequence in zip(scored.loss_fn_outputs, result.sequences, strict=True)
    ]
    assert np.mean(differences) < 1e-4


def test_prompt_logprobs_are_those_of_forward(client: tinker.ServiceClient) -> None:
    run = make_run(client)
    train(run, 3)
    sampler = run.save_weights_and_get_sampling_client().result()
    tokens = SEQUENCES[0]
    from_sampler = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    from_trainer = run.forward([next_token_datum(tokens)], "cross_entropy").result()
    expected = from_trainer.loss_fn_outputs[0]["logprobs"].tolist()
    assert from_sampler[1:] == pytest.approx(expected, abs=1e-4)


def test_fresh_run_samples_like_the_base_model(client: tinker.ServiceClient) -> None:
    base = client.create_sampling_client(base_model="org/tiny").result()
    fresh = make_run(client).save_weights_and_get_sampling_client().result()
    assert sample_tokens(fresh, seed=5) == sample_tokens(base, seed=5)


def test_resume_with_optimizer_repeats_the_losses_bit_for_bit(
    client: tinker.ServiceClient,
) -> None:
    run = make_run(client)
    train(run, 3)
    path = run.save_state("middle").result().path
    rest = train(run, 4)
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    assert train(resumed, 4) == rest


def test_runs_at_once_equal_each_run_alone(client: tinker.ServiceClient) -> None:
    shapes = [(4, 1), (16, 2), (7, 3)]
    alone = [train(make_run(client, rank, seed), 4) for rank, seed in shapes]
    runs = [make_run(client, rank, seed) for rank, seed in shapes]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        together = list(pool.map(lambda run: train(run, 4), runs))
    assert together == alone


def test_adapters_and_base_at_once_give_what_each_gives_alone(
    client: tinker.ServiceClient,
) -> None:
    samplers = [client.create_sampling_client(base_model="org/tiny").result()]
    for seed in (1, 2):
        run = make_run(client, rank=4 * seed, seed=seed)
        train(run, 3 * seed)
        samplers.append(run.save_weights_and_get_sampling_client().result())
    work = [(sampler, seed) for seed in range(6) for sampler in samplers]
    alone = [sample_tokens(sampler, seed) for sampler, seed in work]
    with concurrent.futures.ThreadPoolExecutor(len(work)) as pool:
        together = list(pool.map(lambda item: sample_tokens(*item), work))
    assert together == alone
    assert len({tuple(tokens) for tokens in alone[:3]}) == 3


def test_older_snapshot_keeps_its_weights_after_more_steps(client: tinker.ServiceClient) -> None:
    run = make_run(client)
    train(run, 2)
    older = run.save_weights_and_get_sampling_client().result()
    before = sample_tokens(older, seed=1)
    train(run, 5)
    newer = run.save_weights_and_get_sampling_client().result()
    assert sample_tokens(older, seed=1) == before
    assert sample_tokens(newer, seed=1) != before


def test_sampling_goes_on_while_training_does(client: tinker.ServiceClient) -> None:
    run = make_run(client)
    sampler = run.save_weights_and_get_sampling_client().result()
    expected = sample_tokens(sampler, seed=2)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        training = pool.submit(train, run, 10)
        sampled = [sample_tokens(sampler, seed=2) for _ in range(5)]
    assert sampled == [expected] * 5
    assert len(training.result()) == 10


@pytest.mark.parametrize("recompute", [False, True])
def test_samples_come_in_the_midst_of_a_pass_and_change_nothing_of_it(
    model_dir: Path, tmp_path: Path, recompute: bool
) -> None:
    """One process, one base model: the tokens of a sample that begins after a batch was sent are
    there before the batch is."""
    batch = DATA * 400
    with serve(model_dir, tmp_path, gradient_checkpointing=recompute) as server:
        assert len(list_children(server)) == 1
        with server.client() as client, server.openai_client() as openai:
            run = make_run(client)
            sampler = run.save_weights_and_get_sampling_client().result()
            undisturbed = run.forward_backward(batch, "cross_entropy").result()
            norm = run.optim_step(ADAM).result().metrics
            expected = sample_tokens(sampler, seed=2)

            again = make_run(client)
            passed = again.forward_backward(batch, "cross_entropy")
            with concurrent.futures.ThreadPoolExecutor() as pool:
                passing = pool.submit(passed.result)
                stream = openai.completions.create(
                    model="org/tiny", prompt="a", max_tokens=30, stream=True
                )
                early = sum(1 for _ in stream if not passing.done())
                assert sample_tokens(sampler, seed=2) == expected
            assert early > 1
            assert passing.result().metrics == undisturbed.metrics
            assert again.optim_step(ADAM).result().metrics == norm


def test_saved_sampler_weights_load_into_peft_as_they_are(
    client: tinker.ServiceClient, server: RunningServer, model_dir: Path
) -> None:
    run = make_run(client)
    train(run, 3)
    directory = checkpoint_dir(server, run.save_weights_for_sampler("final").result().path)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, directory).eval()
    tokens = SEQUENCES[0]
    with torch.no_grad():
        logits = model(torch.tensor([tokens[:-1]])).logits[0]
    expected = torch.log_softmax(logits, -1)[range(len(tokens) - 1), tokens[1:]]
    got = run.forward([next_token_datum(tokens)], "cross_entropy").result()
    assert got.loss_fn_outputs[0]["logprobs"].tolist() == pytest.approx(expected.tolist(), rel=1e-4)


def test_custom_loss_trains_like_the_builtin_one(client: tinker.ServiceClient) -> None:
    """A DPO-like loss over two sequences, against the same loss by hand on forward's logprobs."""

    def preference(
        _data: list[tinker.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        margin = logprobs[0].sum() - logprobs[1].sum()
        loss = -torch.nn.functional.logsigmoid(0.1 * margin)
        return loss, {"margin": float(margin.detach())}

    run = make_run(client)
    margins: list[float] = []
    for _ in range(5):
        result = run.forward_backward_custom(DATA[:2], preference).result()
        run.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        margins.append(result.metrics["margin"])
    assert margins[-1] > margins[0] + 1


@pytest.mark.parametrize("shared", [True, False])
def test_killed_engine_comes_back_and_its_requests_end_right(
    model_dir: Path, tmp_path: Path, shared: bool
) -> None:
    """A process of its own takes no run with it; the shared one does, and says so."""
    with serve(model_dir, tmp_path, share_base_model=shared) as server, server.client() as client:
        run = make_run(client)
        train(run, 3)
        sampler = run.save_weights_and_get_sampling_client().result()
        expected = sample_tokens(sampler, seed=4, max_tokens=400)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            pending = [pool.submit(sample_tokens, sampler, 4, 400) for _ in range(3)]
            # The sampler is started after the trainer.
            os.kill(max(list_children(server)), signal.SIGKILL)
            assert [future.result() for future in pending] == [expected] * 3
        if shared:
            with pytest.raises(tinker.RequestFailedError, match="unsaved state is lost"):
                train(run, 1)
            run = make_run(client)
        assert train(run, 1)


def list_children(server: RunningServer) -> list[int]:
    pid = server.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
