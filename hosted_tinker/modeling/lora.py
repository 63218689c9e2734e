"""LoRA layers that hold the adapters of many runs on one base model.

Every adapted `nn.Linear` is replaced by a `LoraLinear` that computes the base layer once and adds,
for each run that takes part in a pass, that run's low-rank product on that run's rows. `Routing`
says which rows are whose, so that one pass can serve many runs, each with its own rank.

PEFT's own layers are not used because they train one active adapter at a time; the layout on disk
is PEFT's (`lora_A.weight` [R, D_in], `lora_B.weight` [D_out, R]), and `adapter_files` writes it.

Shape letters: B rows of a batch, T tokens, D hidden size, R LoRA rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hosted_tinker.errors import SettingsError
from hosted_tinker.types import LORA_ALPHA, LoraConfig

ATTENTION_PATTERN = re.compile(r"(^|\.)(self_attn|attn|attention|self_attention)\.")
MLP_PATTERN = re.compile(r"(^|\.)(mlp|feed_forward|ffn)\.")


class LoraPair(nn.Module):
    """One adapter's weights at one layer: float32 A [R, D_in] and B [D_out, R]."""

    def __init__(self, A: Tensor, B: Tensor) -> None:
        super().__init__()
        self.A = nn.Parameter(A)
        self.B = nn.Parameter(B)
        self.scale = LORA_ALPHA / A.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """The low-rank product in float32, whatever the dtype and device of `x` are."""
        down = nn.functional.linear(x.to(self.A), self.A)
        return nn.functional.linear(down, self.B) * self.scale


@dataclass(slots=True)
class Routing:
    """Whose rows a pass computes. Shared by all layers of a model, set before each pass.

    Attributes:
        rows_by_adapter: adapter -> row indices int64 [*], or None for all rows. Rows of no
            adapter are the base model's.
    """

    rows_by_adapter: Mapping[str, Tensor | None] = field(default_factory=dict[str, Tensor | None])

    def use_one(self, adapter: str | None) -> None:
        """Gives all rows to one adapter, or to the base model."""
        self.rows_by_adapter = {} if adapter is None else {adapter: None}


class LoraLinear(nn.Module):
    """A frozen linear layer plus the adapters of any number of runs."""

    def __init__(self, base: nn.Linear, routing: Routing) -> None:
        super().__init__()
        self.base = base
        self.routing = routing
        self.pairs: dict[str, LoraPair] = {}

    @property
    def weight(self) -> Tensor:
        """The base layer's weight, which architectures with tied embeddings look at."""
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        for adapter, rows in self.routing.rows_by_adapter.items():
            pair = self.pairs.get(adapter)
            if pair is None:
                continue
            if rows is None:
                out = out + pair(x).to(out.dtype)
            else:
                out = out.index_add(0, rows, pair(x[rows]).to(out.dtype))
        return out


class LoraModel:
    """The adaptable layers of a base model, in the module's order.

    `has_fused_experts`: the model is a mixture of experts whose experts are stacked in parameters
    of three dimensions, on which no adapter of this server can go.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        """Replaces every adaptable layer of `module` in place.

        Raises:
            SettingsError: the architecture has no layer that an adapter could go on.
        """
        self.routing = Routing()
        self.layers: dict[str, LoraLinear] = {}
        self.group_of: dict[str, str] = {}
        self.has_fused_experts = any(
            parameter.dim() == 3 and MLP_PATTERN.search(name)
            for name, parameter in module.get_decoder().named_parameters()
        )
        head = module.get_output_embeddings()
        in_decoder = set(module.get_decoder().modules())
        for name, linear in find_linear_layers(module):
            if linear is not head and linear not in in_decoder:
                continue
            group = "unembed" if linear is head else classify_layer(name)
            if group is not None:
                self.layers[name] = LoraLinear(linear, self.routing)
                self.group_of[name] = group
                module.set_submodule(name, self.layers[name])
        if "attn" not in self.group_of.values():
            raise SettingsError(
                f"architecture {type(module).__name__}: found no attention layers to adapt"
            )

    def select_layers(self, lora: LoraConfig) -> list[str]:
        """Names of the layers that a run with this configuration trains."""
        wanted = {
            "attn": lora.train_attn,
            "mlp": lora.train_mlp,
            "unembed": lora.train_unembed,
        }
        return [name for name, group in self.group_of.items() if wanted[group]]

    def add_fresh_adapter(self, adapter: str, lora: LoraConfig) -> None:
        """A is Kaiming-uniform with a = sqrt(5) (PEFT's default), drawn by `lora.seed`; B is zero.

        Numbers are drawn on the CPU in the layers' order, so that they do not depend on devices.
        """
        generator = torch.Generator().manual_seed(lora.seed)
        state: dict[str, Tensor] = {}
        for name in self.select_layers(lora):
            linear = self.layers[name].base
            A = torch.empty(lora.lora_rank, linear.in_features)
            bound = math.sqrt(6 / ((1 + 5) * linear.in_features))
            A.uniform_(-bound, bound, generator=generator)
            state[f"{name}.lora_A.weight"] = A
            state[f"{name}.lora_B.weight"] = torch.zeros(linear.out_features, lora.lora_rank)
        self.set_adapter(adapter, state)

    def set_adapter(self, adapter: str, state: Mapping[str, Tensor]) -> None:
        """Adds or replaces an adapter from float32 tensors named as `adapter_state` names them."""
        self.remove_adapter(adapter)
        for key, A in state.items():
            if key.endswith(".lora_A.weight"):
                name = key.removesuffix(".lora_A.weight")
                device = self.layers[name].base.weight.device
                B = state[f"{name}.lora_B.weight"]
                self.layers[name].pairs[adapter] = LoraPair(
                    A.to(device, torch.float32, copy=True), B.to(device, torch.float32, copy=True)
                )

    def remove_adapter(self, adapter: str) -> None:
        """Unknown adapters are ignored."""
        for layer in self.layers.values():
            layer.pairs.pop(adapter, None)

    def get_head_parameters(self, adapter: str) -> list[nn.Parameter]:
        """The adapter's parameters on the output head, if it has any."""
        heads = [self.layers[name] for name, group in self.group_of.items() if group == "unembed"]
        pairs = [head.pairs[adapter] for head in heads if adapter in head.pairs]
        return [parameter for pair in pairs for parameter in (pair.A, pair.B)]

    def named_parameters(self, adapter: str) -> dict[str, nn.Parameter]:
        """The adapter's live parameters, under `{layer}.lora_A.weight` and `.lora_B.weight`."""
        parameters: dict[str, nn.Parameter] = {}
        for name, layer in self.layers.items():
            if pair := layer.pairs.get(adapter):
                parameters[f"{name}.lora_A.weight"] = pair.A
                parameters[f"{name}.lora_B.weight"] = pair.B
        return parameters


def find_linear_layers(module: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(name, child) for name, child in module.named_modules() if isinstance(child, nn.Linear)]


def classify_layer(name: str) -> str | None:
    """`attn`, `mlp` or None, by the names that Hugging Face architectures give their layers."""
    if ATTENTION_PATTERN.search(name):
        return "attn"
    return "mlp" if MLP_PATTERN.search(name) else None


def row_indices(rows: Iterable[int], device: torch.device) -> Tensor:
    """For `Routing.rows_by_adapter`."""
    return torch.tensor(list(rows), dtype=torch.int64, device=device)


def clone_to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Detached copies in host memory."""
    return {
        name: cast(Tensor, tensor.detach()).to("cpu", copy=True) for name, tensor in tensors.items()
    }
