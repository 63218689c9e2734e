"""Places in a long pass where other work on the same device may have its turn."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hosted_tinker.modeling.base_model import BaseModel

logger = logging.getLogger(__name__)

TurnPoint = Callable[[], None]
"""Called between the layers of a pass. It may run passes of its own."""


def never_turn() -> None:
    """The `TurnPoint` of a device that nothing else uses."""


def add_turn_points(base: BaseModel, turn: TurnPoint) -> None:
    """Before each decoder layer, in the forward pass and in the backward pass."""

    def on_gradient(_: Tensor) -> None:
        turn()

    def before_layer(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        turn()
        hidden = arguments[0] if arguments else None
        if torch.is_grad_enabled() and isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(on_gradient)

    layers = find_decoder_layers(base)
    if not layers:
        logger.warning(
            "samples wait for whole passes of training: %s has no list of layers; "
            "share_base_model false lifts that",
            type(base.decoder).__name__,
        )
    for layer in layers:
        layer.register_forward_pre_hook(before_layer)


def find_decoder_layers(base: BaseModel) -> list[nn.Module]:
    """Empty for a decoder that has no list of them."""
    num_layers = base.text_config.num_hidden_layers
    for module in base.decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) >= num_layers:
            return list(module)
    return []
