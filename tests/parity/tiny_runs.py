"""Three runs with adapters of different shapes on a tiny random Llama, and requests for them."""

import numpy as np
import torch
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from hosted_tinker.backend_configs import PytorchConfig
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


def save_tiny_llama(directory):
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
    LlamaForCausalLM(config).save_pretrained(directory)


def load(model_dir, **config):
    small = {"micro_batch_tokens": 40, "logits_chunk_tokens": 16, **config}
    backend = PytorchBackend.load(model_dir, PytorchConfig(**small), print)
    for seed, (run, lora) in enumerate(RUNS.items()):
        backend.create_model(run, lora)
        generator = torch.Generator().manual_seed(seed)
        for parameter in backend._runs[run].optimizer.parameters.values():
            parameter.data.normal_(std=0.1, generator=generator)
    return backend


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
