"""A tiny random Llama with adapters, and an engine on it whose results are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from hosted_tinker.backend_configs import PytorchConfig
from hosted_tinker.modeling.adapter_files import save_adapter
from hosted_tinker.sampling.transformers_engine import TransformersEngine
from hosted_tinker.types import (
    AdapterRef,
    LoraConfig,
    NewToken,
    Sample,
    SampleOutput,
    SamplingParams,
)
from hosted_tinker.workers.messages import Failure

EOS = 0
CORPUS = ["the quick brown fox jumps over the lazy dog", "a stop string STOP may span tokens"] * 20
DIMENSIONS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": EOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}
PROMPT = [5, 17, 99, 230, 41, 8, 77]
PARAMS = set(SamplingParams.__dataclass_fields__)


def save_tokenizer(directory: Path) -> int:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(
        directory
    )
    return tokenizer.get_vocab_size()


def save_random_adapter(model: torch.nn.Module, directory: Path, seed: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, torch.Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            A = torch.randn(rank, layer.in_features, generator=generator) * 0.1
            B = torch.randn(layer.out_features, rank, generator=generator) * 0.1
            state |= {f"{name}.lora_A.weight": A, f"{name}.lora_B.weight": B}
    directory.mkdir()
    save_adapter(directory, state, LoraConfig(lora_rank=rank, seed=seed), "tiny")


def save_model(directory: Path) -> None:
    """A random Llama with a tokenizer, and adapters `a0` to `a3` of ranks 4 to 7 beside it."""
    vocab_size = save_tokenizer(directory)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **DIMENSIONS))
    model.save_pretrained(directory)
    for index in range(4):
        save_random_adapter(model, directory / f"a{index}", index, rank=4 + index)


class Harness:
    """An engine and what it finished."""

    def __init__(self, model_dir: Path, **config: Any) -> None:
        self.model_dir = model_dir
        self.results: dict[str, SampleOutput | Failure] = {}
        self.reported: dict[str, list[NewToken]] = {}
        self.engine = TransformersEngine.load(
            str(model_dir), PytorchConfig(**config), lambda _: None, self._finish, self._report
        )

    def _finish(self, request_id: str, result: SampleOutput | Failure) -> None:
        assert request_id not in self.results
        self.results[request_id] = result

    def _report(self, request_id: str, token: NewToken) -> None:
        self.reported.setdefault(request_id, []).append(token)

    def adapter(self, name: str | None) -> AdapterRef | None:
        return None if name is None else AdapterRef(name, self.model_dir / name)

    def add(
        self, request_id: str, prompt: Any, *, adapter: str | None = None, **fields: Any
    ) -> None:
        params = {key: fields.pop(key) for key in list(fields) if key in PARAMS}
        tokens = np.array(prompt, dtype=np.int64)
        self.engine.add(
            Sample(request_id, self.adapter(adapter), tokens, SamplingParams(**params), **fields)
        )

    def drain(self) -> None:
        for _ in range(2000):
            if not self.engine.has_work:
                return
            self.engine.step()
        raise AssertionError("the engine does not end")

    def output(self, request_id: str) -> SampleOutput:
        result = self.results[request_id]
        assert isinstance(result, SampleOutput), result
        return result

    def sample(self, prompt: Any, **fields: Any) -> SampleOutput:
        self.results.pop("one", None)
        self.add("one", prompt, **fields)
        self.drain()
        return self.output("one")


def count_passes(engine: TransformersEngine) -> list[tuple[int, int]]:
    """A list that the shape [B, T] of every decoder pass is appended to."""
    shapes: list[tuple[int, int]] = []
    engine._base.decoder.register_forward_pre_hook(
        lambda _module, _args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    return shapes


def greedy_tokens(harness: Harness, count: int) -> list[int]:
    (sequence,) = harness.sample(PROMPT, max_tokens=count, temperature=0.0, stop=()).sequences
    return sequence.tokens.tolist()
