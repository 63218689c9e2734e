"""A tiny random Llama with adapters, and replicas of a real vLLM that serve it.

Adapters `a0` to `a3` are on every linear layer; `b0` to `b3` are on all but the unembedding, so that
vLLM can score prompts with them; `nothing` changes nothing.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from transformers import LlamaForCausalLM

from hosted_tinker.backend_configs import PytorchConfig
from hosted_tinker.modeling.adapter_files import save_adapter
from hosted_tinker.replicas.child import HOST, ChildSpec, make_child_spec
from hosted_tinker.replicas.held_adapters import EngineDir
from hosted_tinker.replicas.launch import open_http_session
from hosted_tinker.replicas.pool import ReplicaPool
from hosted_tinker.replicas.replica import Replica
from hosted_tinker.replicas.vllm import VllmClient
from hosted_tinker.settings import Settings
from hosted_tinker.types import AdapterRef, LoraConfig, Sample, SampleOutput, SamplingParams
from tests.integration.tiny_engine import EOS, PARAMS, save_model

Result = TypeVar("Result")
RESULT_TIMEOUT_S = 300.0
CONTEXT_LENGTH = 128
MAX_HELD = 3
MAX_RANK = 8
TOO_HIGH_RANK = 16


class BackgroundLoop:
    """An event loop in a thread of its own, which outlives a test."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return self.submit(coroutine).result(RESULT_TIMEOUT_S)


@dataclass(frozen=True)
class TinyModel:
    """The model in a state directory of its own."""

    state_dir: Path

    @property
    def model_dir(self) -> Path:
        return self.state_dir / "model"

    def adapter(self, name: str) -> AdapterRef:
        return AdapterRef(name, self.model_dir / name)

    def copy_adapter(self, name: str, copied_name: str) -> AdapterRef:
        """The same weights under another name, in a directory that can be removed."""
        directory = self.state_dir / copied_name
        shutil.copytree(self.model_dir / name, directory)
        return AdapterRef(copied_name, directory)

    async def make_base_adapter(self) -> AdapterRef:
        return self.adapter("nothing")


def save_tiny_model(state_dir: Path) -> TinyModel:
    tiny = TinyModel(state_dir)
    state_dir.mkdir(parents=True, exist_ok=True)
    save_model(tiny.model_dir)
    model = LlamaForCausalLM.from_pretrained(tiny.model_dir)
    for index in range(4):
        save_body_adapter(model, tiny.model_dir / f"b{index}", 10 + index, rank=4)
    save_body_adapter(model, tiny.model_dir / "too-high", 20, rank=TOO_HIGH_RANK)
    save_body_adapter(model, tiny.model_dir / "nothing", 21, rank=1, scale=0.0)
    save_ending_adapter(model.lm_head, tiny.model_dir / "ending")
    return tiny


def save_ending_adapter(head: torch.nn.Linear, directory: Path) -> None:
    """Makes the end-of-sequence token the most likely one at about every second position."""
    A = torch.randn(1, head.in_features, generator=torch.Generator().manual_seed(30))
    B = torch.zeros(head.out_features, 1)
    B[EOS] = 10.0
    directory.mkdir()
    lora = LoraConfig(lora_rank=1, seed=0, train_attn=False, train_mlp=False)
    state = {"lm_head.lora_A.weight": A, "lm_head.lora_B.weight": B}
    save_adapter(directory, state, lora, "tiny")


def save_body_adapter(
    model: torch.nn.Module, directory: Path, seed: int, rank: int, scale: float = 0.1
) -> None:
    """Random, on every linear layer but the unembedding. Scale 0 changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, torch.Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            A = torch.randn(rank, layer.in_features, generator=generator) * 0.1
            B = torch.randn(layer.out_features, rank, generator=generator) * scale
            state |= {f"{name}.lora_A.weight": A, f"{name}.lora_B.weight": B}
    directory.mkdir()
    lora = LoraConfig(lora_rank=rank, seed=seed, train_unembed=False)
    save_adapter(directory, state, lora, "tiny")


class Reference:
    """The same model by plain transformers and PEFT, in float32."""

    def __init__(self, tiny: TinyModel) -> None:
        self._tiny = tiny
        self._models: dict[str | None, torch.nn.Module] = {}

    def compute_logprobs(
        self, adapter: str | None, tokens: Sequence[int], temperature: float = 1.0
    ) -> NDArray[np.float32]:
        """[tokens, vocabulary]; row i is what follows token i."""
        if adapter not in self._models:
            model: Any = LlamaForCausalLM.from_pretrained(self._tiny.model_dir, dtype=torch.float32)
            if adapter is not None:
                model = PeftModel.from_pretrained(model, self._tiny.model_dir / adapter)
            self._models[adapter] = model.eval()
        with torch.no_grad():
            logits = self._models[adapter](input_ids=torch.tensor([list(tokens)])).logits[0]
        return torch.log_softmax(logits / temperature, dim=-1).numpy()

    def continue_greedily(
        self, adapter: str | None, prompt: Sequence[int], count: int
    ) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.compute_logprobs(adapter, tokens)[-1].argmax()))
        return tokens[len(prompt) :]


def make_settings(tiny: TinyModel, **fields: Any) -> Settings:
    return Settings(
        state_dir=tiny.state_dir,
        backend_config=PytorchConfig(dtype="float32", max_context_length=CONTEXT_LENGTH),
        vllm_max_loras=2,
        vllm_max_cpu_loras=MAX_HELD,
        vllm_max_lora_rank=MAX_RANK,
        **fields,
    )


def make_spec(tiny: TinyModel, vllm_python: Path, port: int, arguments: str = "") -> ChildSpec:
    settings = make_settings(
        tiny, vllm_gpus="cpu", vllm_python=vllm_python, vllm_args=arguments, vllm_port=port
    )
    return make_child_spec(settings, str(tiny.model_dir), ["tiny"], [], port)


class Serving:
    """A pool of replicas, used from outside of its event loop."""

    def __init__(self, loop: BackgroundLoop, tiny: TinyModel) -> None:
        self.loop = loop
        self.tiny = tiny
        self.pool = ReplicaPool(recovery_timeout_s=RESULT_TIMEOUT_S)
        self.replicas: Sequence[Replica] = ()
        self.http = loop.run(open_session())
        self._num_requests = 0

    def add_child(self, spec: ChildSpec) -> Replica:
        settings = make_settings(self.tiny, vllm_gpus="cpu")
        return self._make_replica(
            f"http://{HOST}:{spec.port}", spec.environment["VLLM_API_KEY"], settings, spec
        )

    def add_external(self, url: str, api_key: str) -> Replica:
        settings = make_settings(self.tiny, vllm_url=url, vllm_url_on_cpu=True)
        return self._make_replica(url, api_key, settings, None)

    def start(self, replicas: Sequence[Replica]) -> None:
        self.replicas = replicas

        async def start() -> None:
            self.pool.start(replicas)

        self.loop.run(start())

    def stop(self) -> None:
        self.loop.run(self.pool.stop())
        self.loop.run(self.http.close())

    def make_sample(
        self, prompt: Sequence[int], adapter: AdapterRef | str | None = None, **fields: Any
    ) -> Sample:
        self._num_requests += 1
        params = {key: fields.pop(key) for key in list(fields) if key in PARAMS}
        named = self.tiny.adapter(adapter) if isinstance(adapter, str) else adapter
        tokens = np.array(prompt, dtype=np.int64)
        return Sample(
            f"request-{self._num_requests}", named, tokens, SamplingParams(**params), **fields
        )

    def sample(self, *args: Any, **fields: Any) -> SampleOutput:
        return self.loop.run(self.pool.sample(self.make_sample(*args, **fields)))

    def sample_all(self, samples: Sequence[Sample]) -> list[SampleOutput]:
        """At once."""

        async def gather() -> list[SampleOutput]:
            return await asyncio.gather(*(self.pool.sample(sample) for sample in samples))

        return self.loop.run(gather())

    def _make_replica(
        self, url: str, api_key: str, settings: Settings, spec: ChildSpec | None
    ) -> Replica:
        client = VllmClient(url, api_key, self.http)
        engine_dir = EngineDir(self.tiny.state_dir, self.tiny.state_dir)
        return Replica(client, engine_dir, settings, ["tiny"], spec, self.tiny.make_base_adapter)


async def open_session() -> Any:
    return open_http_session()


def count_running(serving: Serving) -> int:
    """Sequences that the first vLLM runs, by its own metrics."""

    async def read() -> str:
        async with serving.http.get(f"{serving.pool.urls[0]}/metrics") as answer:
            return await answer.text()

    lines = re.findall(r"^vllm:num_requests_running\S* (\S+)$", serving.loop.run(read()), re.M)
    return int(sum(map(float, lines)))


def find_server(port: int) -> int:
    """The process of the vLLM server on the port."""
    for pid in list_pids():
        command = read_command(pid)
        is_server = b"vllm.entrypoints.openai.api_server" in command
        is_guard = b"hosted_tinker.replicas.guard" in command
        if is_server and not is_guard and str(port).encode() in command:
            return pid
    raise AssertionError(f"no vLLM server on port {port}")


def find_engine(port: int) -> int:
    """The process of the server's engine."""
    group = list_group(os.getpgid(find_server(port)))
    (engine,) = [pid for pid in group if b"EngineCore" in read_command(pid)[0]]
    return engine


def list_group(group: int) -> list[int]:
    """Processes of the group; dead ones that nobody has waited for are not counted."""
    return [pid for pid in list_pids() if read_group(pid) == group]


def list_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def read_command(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return [b""]


def read_group(pid: int) -> int | None:
    try:
        state, _, group = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:3]
    except OSError:
        return None
    return None if state == "Z" else int(group)
