"""Settings of the training backends: the section `backend_config`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

BackendName = Literal["pytorch", "fake"]


class PytorchConfig(BaseModel):
    """`--backend-config` of `--backend pytorch`: one process, Hugging Face model, LoRA adapters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train_gpus: Annotated[
        str | None,
        Field(
            description="Comma-separated indices of the GPUs to train on. Unset: all that are "
            "visible, or the CPU where there is none.",
            pattern=r"^\d+(,\d+)*$",
        ),
    ] = None
    device_map: Annotated[
        Literal["auto", "single"],
        Field(
            description="auto: spread the layers over the training GPUs as a pipeline. single: "
            "the first of them holds the whole model."
        ),
    ] = "auto"
    sampler_gpu: Annotated[
        int | None,
        Field(
            description="Index of the GPU of the embedded sampling engine. Unset: the first "
            "training GPU, or the CPU where there is none.",
            ge=0,
        ),
    ] = None
    share_base_model: Annotated[
        bool | None,
        Field(
            description="Train and sample in one process, which holds the base model once and takes "
            "turns. Unset: where the embedded engine samples on the one device that trains. Off: a "
            "process and a model for each; a crash of one leaves the other alone."
        ),
    ] = None
    sampling_share: Annotated[
        float,
        Field(
            description="Of the device's time, what the embedded engine gets while training could use "
            "all of it, with share_base_model. What one does not use, the other has.",
            gt=0,
            lt=1,
        ),
    ] = 0.5
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Field(
            description="Of the base model's weights. auto: as stored on a GPU, float32 on the "
            "CPU. Adapters and optimizer state are float32 always."
        ),
    ] = "auto"
    attn_implementation: Annotated[
        Literal["auto", "sdpa", "eager", "flash_attention_2"],
        Field(
            description="Attention of the training passes. auto: sequences lie packed behind one "
            "another where the architecture allows it. The others are Hugging Face's, on "
            "sequences that are padded."
        ),
    ] = "auto"
    batch_invariant: Annotated[
        bool,
        Field(
            description="Numbers of a datum, and of a sample of the embedded engine, do not depend on "
            "what else is computed, bit for bit: training passes hold one sequence each, passes of the "
            "engine have a few fixed shapes. Off: they depend on it within rounding. vLLM has a mode of "
            "its own."
        ),
    ] = False
    micro_batch_tokens: Annotated[
        int | None,
        Field(
            description="Most tokens of one forward and backward pass, padding included where "
            "there is some. A longer sequence goes alone. Halved where the device runs out of "
            "memory. Unset: what the free memory allows, by a measurement at the start, and at "
            "most 1024 on the CPU, 8192 on a GPU.",
            ge=1,
        ),
    ] = None
    logits_chunk_tokens: Annotated[
        int,
        Field(
            description="Positions whose logits exist at once.",
            ge=1,
        ),
    ] = 1024
    gradient_checkpointing: Annotated[
        bool | Annotated[int, Field(ge=1)] | None,
        Field(
            description="Recompute layers in the backward pass, for less memory: true for each layer, "
            "a number n for every n-th. Unset: each on a GPU, none on the CPU."
        ),
    ] = None
    vllm_sync_url: Annotated[
        str | None,
        Field(
            description="The same as vllm_url, for configurations that keep it with the backend."
        ),
    ] = None
    max_context_length: Annotated[
        int | None,
        Field(description="Cap on the context length. Unset: the model's own.", ge=2),
    ] = None
    max_lora_rank: Annotated[int, Field(description="Highest LoRA rank accepted.", ge=1)] = 512
    max_sampling_sequences: Annotated[
        int,
        Field(description="Sequences that the embedded engine generates at once.", ge=1),
    ] = 64
    prefill_chunk_tokens: Annotated[
        int | None,
        Field(
            description="Tokens that the embedded engine computes in one step: the next ones of "
            "running sequences, and chunks of prompts beside them. More take longer, so that "
            "running sequences wait for a long prompt. Unset: 256 on the CPU, 4096 on a GPU.",
            ge=1,
        ),
    ] = None
    sampling_cache_gib: Annotated[
        float | None,
        Field(
            description="Memory for the keys and values of the embedded engine, GiB. Unset: an "
            "eighth of the host's memory on the CPU, half of what is free on a GPU; never more than "
            "could be of use.",
            gt=0,
        ),
    ] = None
    max_sampling_adapters: Annotated[
        int,
        Field(
            description="Adapters that the embedded engine keeps in memory; the least recently "
            "used leaves first and is read again when asked for.",
            ge=1,
        ),
    ] = 16


class FakeConfig(BaseModel):
    """`--backend-config` of `--backend fake`: a deterministic stand-in without a model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab_size: Annotated[int, Field(description="Token ids are below this.", ge=8)] = 1000
    context_length: Annotated[int, Field(description="Most tokens of a sequence.", ge=2)] = 4096
    max_lora_rank: Annotated[int, Field(description="Highest LoRA rank accepted.", ge=1)] = 512
    load_s: Annotated[float, Field(description="Seconds that loading the model takes.", ge=0)] = 0.0
    forward_backward_s: Annotated[
        float, Field(description="Seconds that each forward_backward takes.", ge=0)
    ] = 0.0


BackendConfig = PytorchConfig | FakeConfig
BACKEND_CONFIGS: dict[BackendName, type[BackendConfig]] = {
    "pytorch": PytorchConfig,
    "fake": FakeConfig,
}
