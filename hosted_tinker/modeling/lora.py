"""LoRA layers that hold the adapters of many runs on one base model.

Every adapted `nn.Linear` is replaced by a `LoraLinear` that computes the base layer once and adds,
for each run that takes part in a pass, that run's low-rank product on that run's positions. `Routing`
says which positions are whose, so that one pass can serve many runs, each with its own rank.

PEFT's own layers are not used because they train one active adapter at a time; the layout on disk
is PEFT's (`lora_A.weight` [R, D_in], `lora_B.weight` [D_out, R]), and `adapter_files` writes it.

Shape letters: P positions of a pass, S positions of one adapter, D features, R LoRA rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hosted_tinker.errors import SettingsError
from hosted_tinker.modeling.matmul import multiply, multiply_transposed
from hosted_tinker.modeling.precision import products_with
from hosted_tinker.types import LORA_ALPHA, LoraConfig

ATTENTION_PATTERN = re.compile(r"(^|\.)(self_attn|attn|attention|self_attention)\.")
MLP_PATTERN = re.compile(r"(^|\.)(mlp|feed_forward|ffn)\.")
EXPERT_PATTERN = re.compile(r"\.(experts|block_sparse_moe)\.")


class LoraPair:
    """One adapter's weights at one layer: float32 A [R, D_in] and B [D_out, R]."""

    def __init__(self, A: Tensor, B: Tensor) -> None:
        self.A = nn.Parameter(A)
        self.B = nn.Parameter(B)
        self.scale = LORA_ALPHA / A.shape[0]


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions `start` to `stop` of a pass, all of one adapter; None is the base model."""

    adapter: str | None
    start: int
    stop: int


class Routing:
    """Whose positions a pass computes. Shared by layers, set before each pass.

    Positions are counted over all but the last dimension of a layer's input. `segments` follow one
    another; None gives all positions to the base model.
    """

    def __init__(self) -> None:
        self.segments: Sequence[Segment] | None = None
        self.tile: int | None = None

    @contextmanager
    def during(self, segments: Sequence[Segment], tile: int | None = None) -> Generator[None]:
        """For one pass without gradients. What was set before may be another pass's that is still to
        go on.

        Args:
            tile: rows of each low-rank product, so that none depends on how many positions there are.
                They must divide the pass's.
        """
        before = self.segments, self.tile
        self.segments, self.tile = segments, tile
        try:
            yield
        finally:
            self.segments, self.tile = before


def make_segments(adapters: Iterable[str | None], lengths: Iterable[int]) -> list[Segment]:
    """Of sequences that lie one after another. Neighbours of one adapter share a segment."""
    segments: list[Segment] = []
    stop = 0
    for adapter, group in groupby(zip(adapters, lengths, strict=True), key=itemgetter(0)):
        start, stop = stop, stop + sum(length for _, length in group)
        segments.append(Segment(adapter, start, stop))
    return segments


def cut_segments(segments: Iterable[Segment], start: int, stop: int) -> list[Segment]:
    """What of them lies between two positions, counted from the first of these."""
    return [
        Segment(one.adapter, max(one.start, start) - start, min(one.stop, stop) - start)
        for one in segments
        if one.start < stop and one.stop > start
    ]


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
        slices: list[slice] = []
        scales: list[float] = []
        parameters: list[Tensor] = []
        for segment in self.routing.segments or ():
            if segment.adapter is not None and (pair := self.pairs.get(segment.adapter)):
                slices.append(slice(segment.start, segment.stop))
                scales.append(pair.scale)
                parameters += (pair.A, pair.B)
        weight, bias = self.base.weight, self.base.bias
        # A model over several GPUs has tied weights on the first and the last hidden states elsewhere.
        x_PD = x.flatten(0, -2).to(weight.device)
        if torch.is_grad_enabled():
            out_PD = cast(
                Tensor, AdaptedLinear.apply(x_PD, weight, bias, slices, scales, *parameters)
            )
        elif self.routing.tile is not None:
            tile = self.routing.tile
            out_PD = multiply_in_tiles(x_PD, weight, bias, slices, scales, parameters, tile)
        else:
            out_PD, _ = multiply_adapted(x_PD, weight, bias, slices, scales, parameters)
        return out_PD.view(*x.shape[:-1], out_PD.shape[-1])


def multiply_adapted(
    x_PD: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slices: Sequence[slice],
    scales: Sequence[float],
    parameters: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """The layer's output [P, D_out], and each slice's float32 x A^T [S, R].

    Args:
        parameters: A and B of each slice, one after another.
    """
    out_PD = multiply(x_PD, weight, bias)
    downs: list[Tensor] = []
    pairs = zip(parameters[::2], parameters[1::2], strict=True)
    with products_with(x_PD):
        for where, scale, (A, B) in zip(slices, scales, pairs, strict=True):
            down_SR = x_PD[where].to(A.dtype) @ A.T
            add_product(out_PD[where], down_SR, B.T, scale)
            downs.append(down_SR)
    return out_PD, downs


def multiply_in_tiles(
    x_PD: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slices: Sequence[slice],
    scales: Sequence[float],
    parameters: Sequence[Tensor],
    tile: int,
) -> Tensor:
    """The output of `multiply_adapted`, by low-rank products of `tile` rows: all rows are multiplied
    with every adapter, and those are added that are its own."""
    out_PD = multiply(x_PD, weight, bias)
    pairs = zip(parameters[::2], parameters[1::2], strict=True)
    with products_with(x_PD):
        for where, scale, (A, B) in zip(slices, scales, pairs, strict=True):
            products = [(part.to(A.dtype) @ A.T) @ B.T for part in x_PD.split(tile)]
            out_PD[where] += torch.cat(products)[where].mul_(scale).to(out_PD.dtype)
    return out_PD


class AdaptedLinear(torch.autograd.Function):
    """A linear layer with frozen weights, and low-rank products that are added to its slices.

    One node of the graph for all of it: what a backward pass needs is kept once, and no product is
    held that can be added where it belongs. Low-rank products are float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_PD: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        slices: Sequence[slice],
        scales: Sequence[float],
        *parameters: Tensor,
    ) -> Tensor:
        out_PD, downs = multiply_adapted(x_PD, weight, bias, slices, scales, parameters)
        ctx.slices, ctx.scales = slices, scales
        # The input is kept for the gradient of the adapters only.
        ctx.save_for_backward(weight, *parameters, *downs, *([x_PD] if slices else []))
        return out_PD

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        (g_PD,) = upstream
        weight, *saved = ctx.saved_tensors
        num_pairs = len(ctx.slices)
        parameters, downs, kept = (
            saved[: 2 * num_pairs],
            saved[2 * num_pairs : 3 * num_pairs],
            saved[3 * num_pairs :],
        )
        x_gradient_PD = multiply_transposed(g_PD, weight) if ctx.needs_input_grad[0] else None
        gradients: list[Tensor | None] = []
        with products_with(g_PD):
            for index, (where, scale) in enumerate(zip(ctx.slices, ctx.scales, strict=True)):
                x_PD = kept[0]
                A, B = parameters[2 * index : 2 * index + 2]
                g_SD = g_PD[where].to(B.dtype)
                g_down_SR = g_SD @ B
                if x_gradient_PD is not None:
                    add_product(x_gradient_PD[where], g_down_SR, A, scale)
                gradients.append(scaled_product(g_down_SR.T, x_PD[where].to(A.dtype), scale))
                gradients.append(scaled_product(g_SD.T, downs[index], scale))
        return x_gradient_PD, None, None, None, None, *gradients


def scaled_product(one: Tensor, other: Tensor, scale: float) -> Tensor:
    """`scale` times the product, by one operation."""
    return torch.addmm(one.new_empty(()), one, other, beta=0, alpha=scale)


def add_product(out: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """out += scale * left @ right, in place; the product is computed in the factors' dtype."""
    if out.dtype == left.dtype:
        out.addmm_(left, right, alpha=scale)
    else:
        out.add_(scaled_product(left, right, scale))


class LoraModel:
    """The adaptable layers of a base model, in the module's order.

    Attributes:
        routing: of the layers in the decoder.
        head_routing: of the output head, which computes other positions than the decoder does.
        has_experts: the model is a mixture of experts. They compute the positions that are routed to
            them, stacked in parameters of three dimensions or each in layers of its own, and no adapter
            of this server can go on them.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        """Replaces every adaptable layer of `module` in place.

        Raises:
            SettingsError: the architecture has no layer that an adapter could go on.
        """
        self.routing = Routing()
        self.head_routing = Routing()
        self.layers: dict[str, LoraLinear] = {}
        self.group_of: dict[str, str] = {}
        self.has_experts = any(
            EXPERT_PATTERN.search(name) or (parameter.dim() == 3 and MLP_PATTERN.search(name))
            for name, parameter in module.get_decoder().named_parameters()
        )
        head = module.get_output_embeddings()
        in_decoder = set(module.get_decoder().modules())
        for name, linear in find_linear_layers(module):
            if linear is not head and linear not in in_decoder:
                continue
            group = "unembed" if linear is head else classify_layer(name)
            if group is not None:
                routing = self.head_routing if linear is head else self.routing
                self.layers[name] = LoraLinear(linear, routing)
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
    if EXPERT_PATTERN.search(name):
        return None
    if ATTENTION_PATTERN.search(name):
        return "attn"
    return "mlp" if MLP_PATTERN.search(name) else None


def clone_to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Detached copies in host memory."""
    return {
        name: cast(Tensor, tensor.detach()).to("cpu", copy=True) for name, tensor in tensors.items()
    }
