"""Activation checkpointing: layers whose activations are computed again in the backward pass.

Chen et al. 2016, arXiv:1604.06174.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from hosted_tinker.errors import SettingsError
from hosted_tinker.modeling.base_model import BaseModel


def enable_gradient_checkpointing(base: BaseModel, every: int) -> None:
    """For every n-th decoder layer, from the first on.

    The layers do so in training mode only. It is set on them and not on what is inside them, where
    it would switch on dropout and the routers' jitter of some mixtures of experts.

    Raises:
        SettingsError: the architecture's layers can't be recomputed.
    """
    layers = [
        layer for layer in base.decoder.modules() if isinstance(layer, GradientCheckpointingLayer)
    ]
    if not layers:
        raise SettingsError(
            f"architecture {type(base.module).__name__}: no layers that can be recomputed; set "
            "gradient_checkpointing to false"
        )
    for layer in layers[::every]:
        layer.gradient_checkpointing = True
        # A plain function, which torch.nn.Module's type of attributes leaves out.
        setattr(layer, "_gradient_checkpointing_func", recompute)  # noqa: B010
        layer.training = True


def recompute(layer: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the layer; its activations are not kept. There is no dropout whose state must be."""
    if not torch.is_grad_enabled():
        return layer(*arguments)
    return checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)
