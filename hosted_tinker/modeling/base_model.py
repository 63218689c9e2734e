"""Loads a Hugging Face causal language model, and knows its parts.

The server needs a decoder that turns token ids into last hidden states, and an output head that is
one linear layer on them. `load_base_model` checks that on the model itself: logits computed from
the parts must equal the model's own, or the model is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from hosted_tinker.backend_configs import PytorchConfig
from hosted_tinker.errors import SettingsError
from hosted_tinker.types import BaseModelInfo

ModelRole = Literal["trainer", "sampler", "shared"]
"""Who uses a model; `shared` are both, on one device."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A loaded model, in evaluation mode, its own parameters frozen.

    Attributes:
        decoder: token ids -> last hidden states.
        output_head: last hidden states -> logits before `logits_transform`.
        logits_transform: what the architecture does to the head's output.
    """

    module: PreTrainedModel
    context_length: int
    logits_transform: Callable[[Tensor], Tensor]

    @property
    def decoder(self) -> nn.Module:
        return cast(nn.Module, self.module.get_decoder())

    @property
    def output_head(self) -> nn.Module:
        return cast(nn.Module, self.module.get_output_embeddings())

    @property
    def input_device(self) -> torch.device:
        """Where token ids must be."""
        return cast(Tensor, self.module.get_input_embeddings().weight).device

    @property
    def text_config(self) -> Any:
        """The language model's part of the configuration."""
        return read_text_config(self.module.config)

    @property
    def vocab_size(self) -> int:
        return cast(int, self.text_config.vocab_size)

    def compute_logits(self, hidden_PD: Tensor) -> Tensor:
        """Float32 logits [P, V] of last hidden states [P, D]."""
        return self.logits_transform(self.output_head(hidden_PD).float())

    def describe(self) -> BaseModelInfo:
        return BaseModelInfo(
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            num_parameters=sum(parameter.numel() for parameter in self.module.parameters()),
            architecture=type(self.module).__name__,
            device=str(self.input_device),
        )


def load_base_model(base_model: str, config: PytorchConfig, role: ModelRole) -> BaseModel:
    """Loads weights onto the devices that `config` names for `role`.

    Raises:
        SettingsError: the model can't be found, read or served.
    """
    if config.batch_invariant:
        # cuBLAS reads it when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if Path(base_model).is_dir() or not looks_like_path(base_model):
        model_config = read_model_config(base_model)
    else:
        raise SettingsError(f"base_model {base_model!r}: no such directory")
    disable_dropout(model_config)
    attention = config.attn_implementation if role == "trainer" else "auto"
    try:
        module = AutoModelForCausalLM.from_pretrained(
            base_model,
            config=model_config,
            dtype=choose_dtype(config),
            device_map=choose_device_map(config, role),
            attn_implementation="sdpa" if attention == "auto" else attention,
            use_safetensors=True,
        )
    except (OSError, ValueError, ImportError) as error:
        raise SettingsError(f"base_model {base_model!r} cannot be loaded: {error}") from error
    check_weights_are_plain(module, base_model)
    module.requires_grad_(False)
    module.eval()
    own_length = cast(int, read_text_config(model_config).max_position_embeddings)
    base = BaseModel(
        module,
        context_length=min(own_length, config.max_context_length or own_length),
        logits_transform=choose_logits_transform(read_text_config(model_config)),
    )
    check_parts_make_the_model(base, base_model)
    return base


def check_weights_are_plain(module: nn.Module, base_model: str) -> None:
    """Raises SettingsError for weights that an adapter's layer can't multiply with."""
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        if layer.weight.is_meta:
            raise SettingsError(
                f"base_model {base_model!r} does not fit into the memory of the GPUs: layer {name!r} "
                "is left out; give the trainer more of them (train_gpus, device_map)"
            )
        if layer.weight.dtype not in DTYPES.values():
            raise SettingsError(
                f"base_model {base_model!r}: layer {name!r} is {layer.weight.dtype}; accepted: a "
                f"checkpoint that is not quantised, of {', '.join(DTYPES)}"
            )


def read_model_config(base_model: str) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(base_model)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise SettingsError(f"base_model {base_model!r} cannot be found: {first_line}") from error


def looks_like_path(base_model: str) -> bool:
    """Hub ids are `name` or `org/name`; anything else can only be a path."""
    return base_model.startswith((".", "/", "~")) or base_model.count("/") > 1


def read_text_config(config: PretrainedConfig) -> Any:
    """The language model's part of a configuration that may have other parts."""
    return config.get_text_config(decoder=True)


def disable_dropout(config: PretrainedConfig) -> None:
    """Training here is exact: every dropout probability of the architecture becomes 0."""
    for name, value in list(read_text_config(config).to_dict().items()):
        if name.endswith(("dropout", "pdrop")) and isinstance(value, float):
            setattr(read_text_config(config), name, 0.0)


def choose_dtype(config: PytorchConfig) -> torch.dtype | Literal["auto"]:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    return "auto" if torch.cuda.is_available() else torch.float32


def choose_device_map(config: PytorchConfig, role: ModelRole) -> Any:
    """None on the CPU. The worker's CUDA_VISIBLE_DEVICES already holds only its own GPUs."""
    if not torch.cuda.is_available():
        return None
    return "auto" if role == "trainer" and config.device_map == "auto" else {"": 0}


def restrict_visible_gpus(config: PytorchConfig, role: ModelRole) -> None:
    """Hides the GPUs that are not this worker's. Must run before CUDA is first used."""
    gpus = config.train_gpus
    if role != "trainer":
        gpus = str(config.sampler_gpu) if config.sampler_gpu is not None else first_gpu(gpus)
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
        wanted, found = len(gpus.split(",")), torch.cuda.device_count()
        if found < wanted:
            raise SettingsError(f"{role} GPUs {gpus} asked for, but only {found} of them exist")


def first_gpu(gpus: str | None) -> str | None:
    return gpus.split(",")[0] if gpus else None


def choose_logits_transform(config: Any) -> Callable[[Tensor], Tensor]:
    """What known architectures do between the output head and the softmax."""
    attributes = config.to_dict()
    softcap = attributes.get("final_logit_softcapping")
    if softcap:
        return lambda logits: torch.tanh(logits / softcap) * softcap
    if attributes.get("logits_scaling"):
        return lambda logits: logits / attributes["logits_scaling"]
    if attributes.get("logit_scale"):
        return lambda logits: logits * attributes["logit_scale"]
    return lambda logits: logits


@torch.no_grad()
def check_parts_make_the_model(base: BaseModel, base_model: str) -> None:
    """Refuses an architecture whose logits are more than head(decoder(tokens))."""
    tokens_1T = torch.arange(min(8, base.vocab_size), device=base.input_device)[None]
    own_TV = base.module(input_ids=tokens_1T, use_cache=False).logits[0].float()
    hidden_TD = base.decoder(input_ids=tokens_1T, use_cache=False).last_hidden_state[0]
    parts_TV = base.compute_logits(hidden_TD).to(own_TV.device)
    if not torch.allclose(own_TV, parts_TV, rtol=1e-2, atol=1e-2 * float(own_TV.abs().max())):
        raise SettingsError(
            f"base_model {base_model!r}: architecture {type(base.module).__name__} computes its "
            "logits in a way that this server does not know"
        )
