"""Two real vLLM servers behind one server, with a tiny random model: who answers, and from which weights."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import tinker
import torch
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM

from tests.harness import RunningServer, free_port, running_server, to_json_flag
from tests.integration.tiny_engine import save_model

MODEL = "tiny"
PROMPT = [5, 17, 99, 230, 41, 8, 77]
START_TIMEOUT_S = 180.0


@dataclass
class Vllm:
    """A vLLM server that runs already, as an operator would start it."""

    python: Path
    model_dir: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        log = (self.model_dir.parent / f"vllm-{self.port}.log").open("ab")
        self.process = subprocess.Popen(
            [
                *(str(self.python), "-m", "vllm.entrypoints.openai.api_server"),
                *("--model", str(self.model_dir), "--served-model-name", "other-name"),
                *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"),
                *("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "2"),
                *("--max-lora-rank", "8", "--logprobs-mode", "processed_logprobs"),
            ],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={
                **os.environ,
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            },
        )

    def wait_healthy(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.3)
        raise AssertionError("vLLM does not start")

    def kill(self) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def list_adapters(self) -> set[str]:
        cards = httpx.get(f"{self.url}/v1/models", timeout=10).json()["data"]
        return {card["id"] for card in cards if card.get("parent")}

    def count_requests(self) -> int:
        """Completions answered since the start, by vLLM's own metrics."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        return int(
            sum(
                float(line.rsplit(" ", 1)[1])
                for line in text.splitlines()
                if line.startswith("vllm:request_success_total")
            )
        )


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    save_model(directory)
    return directory


@pytest.fixture(scope="module")
def engines(vllm_python: Path, model_dir: Path) -> Iterator[list[Vllm]]:
    started = [Vllm(vllm_python, model_dir, free_port()) for _ in range(2)]
    for engine in started:
        engine.start()
    for engine in started:
        engine.wait_healthy()
    yield started
    for engine in started:
        engine.kill()


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, engines: list[Vllm], model_dir: Path
) -> Iterator[RunningServer]:
    flags = [
        *("--base-model", str(model_dir), "--served-model-name", MODEL),
        *("--vllm-url", *(engine.url for engine in engines), "--vllm-url-on-cpu"),
        *("--vllm-max-cpu-loras", "2", "--embedded-fallback"),
        *to_json_flag(dtype="float32"),
    ]
    with running_server(tmp_path_factory.mktemp("server"), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def sdk(server: RunningServer) -> Iterator[tinker.ServiceClient]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with server.openai_client() as client:
        yield client


def make_run(sdk: tinker.ServiceClient, seed: int) -> tinker.TrainingClient:
    """A run whose weights are far from the base model's."""
    run = sdk.create_lora_training_client(
        base_model=MODEL, rank=4, seed=seed, train_unembed=False
    ).result()
    data = tinker.Datum(
        model_input=types.ModelInput.from_ints(PROMPT),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.full(len(PROMPT), 10 + seed)),
            "weights": types.TensorData.from_numpy(np.ones(len(PROMPT), dtype=np.float32)),
        },
    )
    for _ in range(3):
        run.forward_backward([data], "cross_entropy")
        run.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
    return run


def greedy(client: openai.OpenAI, model: str, prompt: list[int]) -> list[int]:
    answer = client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=6,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    return answer.choices[0].model_dump()["token_ids"]


def compute_greedy(model_dir: Path, adapter_dir: Path | None, prompt: list[int]) -> list[int]:
    """By transformers and PEFT."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    if adapter_dir is not None:
        model = PeftModel.from_pretrained(model, adapter_dir)
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(6):
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def find_adapter_dir(server: RunningServer, path: str) -> Path:
    """Of a checkpoint of save_weights_for_sampler."""
    model_id, _, name = path.removeprefix("tinker://").split("/")
    (directory,) = (server.state_dir / "checkpoints" / model_id).glob(f"sampler_weights/{name}-*")
    return directory


def test_more_adapters_than_fit_answer_each_for_itself(
    server: RunningServer,
    sdk: tinker.ServiceClient,
    client: openai.OpenAI,
    model_dir: Path,
) -> None:
    """Five sets of weights take turns on engines that hold two, one of which is the base model's."""
    paths = [make_run(sdk, seed).save_weights_for_sampler("x").result().path for seed in range(4)]
    expected = {
        path: compute_greedy(model_dir, find_adapter_dir(server, path), PROMPT) for path in paths
    }
    expected[MODEL] = compute_greedy(model_dir, None, PROMPT)
    assert len({tuple(tokens) for tokens in expected.values()}) == 5
    for _ in range(2):
        for model, tokens in expected.items():
            assert greedy(client, model, PROMPT) == tokens


def test_both_replicas_get_new_weights_and_lose_old_ones(
    sdk: tinker.ServiceClient, client: openai.OpenAI, engines: list[Vllm]
) -> None:
    """The engines hold two adapters each, and weights of runs of other tests may still arrive and
    take their places: then the next step is looked at."""
    run = make_run(sdk, seed=5)
    old: set[str] = set()
    deadline = time.monotonic() + 60
    for _ in range(2):
        while not (newest := find_shared(engines, run.model_id) - old):
            assert time.monotonic() < deadline
            run.optim_step(tinker.AdamParams(learning_rate=0.01)).result()
            greedy(client, run.model_id, PROMPT)
            time.sleep(0.5)
        old = newest


def find_shared(engines: list[Vllm], model_id: str) -> set[str]:
    """The one adapter of the run that all engines hold, and nothing if they hold others too."""
    held = [
        {name for name in engine.list_adapters() if name.startswith(model_id)} for engine in engines
    ]
    is_shared = len(held[0]) == 1 and all(names == held[0] for names in held)
    return held[0] if is_shared else set()


def test_requests_that_begin_alike_go_to_one_replica(
    client: openai.OpenAI, engines: list[Vllm]
) -> None:
    before = [engine.count_requests() for engine in engines]
    shared = [(7 * position) % 200 + 20 for position in range(120)]
    for turn in range(6):
        greedy(client, MODEL, [*shared, *range(20, 21 + turn)])
    after = [engine.count_requests() for engine in engines]
    assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0, 6]


def test_what_vllm_lacks_comes_from_the_embedded_engine(sdk: tinker.ServiceClient) -> None:
    run = make_run(sdk, seed=6)
    sampler = run.save_weights_and_get_sampling_client().result()
    tokens = [5, 6, 7, 8]
    targets = np.asarray([[6, 9], [7, 9], [8, 9]])
    result = sampler.sample(
        types.ModelInput.from_ints(tokens),
        1,
        types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        target_prompt_logprobs=types.TensorData.from_numpy(targets),
    ).result()
    scored = result.target_prompt_logprobs
    assert scored is not None
    from_vllm = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    np.testing.assert_allclose(
        np.asarray(scored.to_numpy())[:, 0], np.asarray(from_vllm[1:]), atol=1e-4
    )


def test_a_rank_that_vllm_refuses_is_served_by_the_embedded_engine(
    sdk: tinker.ServiceClient, server: RunningServer, client: openai.OpenAI, model_dir: Path
) -> None:
    run = sdk.create_lora_training_client(base_model=MODEL, rank=16, seed=9).result()
    run.optim_step(tinker.AdamParams(learning_rate=0.01)).result()
    path = run.save_weights_for_sampler("wide").result().path
    expected = compute_greedy(model_dir, find_adapter_dir(server, path), PROMPT)
    for model in (path, run.model_id):
        assert greedy(client, model, PROMPT) == expected
    assert "vLLM refused an adapter, the embedded engine serves it" in server.log
