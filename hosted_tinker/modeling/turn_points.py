"""Places in a long pass where other work on the same device may have its turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hosted_tinker.modeling.base_model import BaseModel

TurnPoint = Callable[[], None]
"""Called between the layers of a pass. It may run passes of its own."""


def never_turn() -> None:
    """The `TurnPoint` of a device that nothing else uses."""


def add_turn_points(base: BaseModel, turn: TurnPoint) -> None:
    """Before each decoder layer, in the forward pass and in the backward pass.

    Raises:
        ValueError: the decoder has no list of layers.
    """

    def on_gradient(_: Tensor) -> None:
        turn()

    def before_layer(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        turn()
        hidden = arguments[0] if arguments else None
        if torch.is_grad_enabled() and isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(on_gradient)

    for layer in find_decoder_layers(base):
        layer.register_forward_pre_hook(before_layer)


def find_decoder_layers(base: BaseModel) -> list[nn.Module]:
    """Raises ValueError if the decoder has no list of layers of that length."""
    num_layers = base.text_config.num_hidden_layers
    for module in base.decoder.children():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return list(module)
    raise ValueError(f"{type(base.decoder).__name__} has no list of {num_layers} layers")
