"""Which models the embedded engine can serve: decoders whose every layer attends to all positions.

Shape letters: P positions of a pass, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hosted_tinker.errors import SettingsError
from hosted_tinker.modeling.base_model import BaseModel
from hosted_tinker.modeling.lora import Routing
from hosted_tinker.modeling.packed_attention import PACKED
from hosted_tinker.sampling.kv_cache import KvCache
from hosted_tinker.sampling.paged_passes import (
    PAGE_SIZE_ON_CPU,
    PAGE_SIZE_ON_GPU,
    PagedPasses,
    Part,
    measure_layers,
)
from hosted_tinker.sampling.spans import Span
from hosted_tinker.types import Int64Array

LENGTHS_ON_CPU = (7, 3)
LENGTHS_ON_GPU = (600, 3, 530)
"""Of the sequences that are tried: of several pages, and of more keys than a kernel takes at once."""
MAX_DIFFERENCE = 0.1
"""Relative, of hidden states: above what rounding to 16 bits does."""


def prepare_base_model(base: BaseModel, base_model: str) -> None:
    """Sets the model's attention to `PACKED`. Raises SettingsError for one that can't be served."""
    require_full_attention(base, base_model)
    check_paged_attention(base, base_model)


def require_full_attention(base: BaseModel, base_model: str) -> None:
    """Raises SettingsError for a model whose results would depend on a window or on neighbours."""
    reason = _find_obstacle(base.text_config.to_dict(), base.context_length)
    if reason is not None:
        raise SettingsError(
            f"base_model {base_model!r}: the embedded sampling engine serves full-attention "
            f"decoders only, and this model has {reason}"
        )


@torch.inference_mode()
def check_paged_attention(base: BaseModel, base_model: str) -> None:
    """Sets the model's attention to `PACKED`, and computes sequences in parts and together.

    Raises:
        SettingsError: the difference to one at a time is more than the rounding of a 16-bit model,
            or the architecture does not take such attention.
    """
    lengths = LENGTHS_ON_CPU if base.input_device.type == "cpu" else LENGTHS_ON_GPU
    prompts = [
        torch.arange(min(length, base.context_length)) % base.vocab_size for length in lengths
    ]
    wanted = [
        base.decoder(input_ids=prompt[None].to(base.input_device), use_cache=False)
        for prompt in prompts
    ]
    base.module.set_attn_implementation(PACKED)
    try:
        found = _compute_in_parts(base, [prompt.numpy() for prompt in prompts])
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        raise _refuse(base, base_model) from error
    for one, other in zip(found, wanted, strict=True):
        wanted_D = other.last_hidden_state[0, -1].float()
        # Written so that what is not a number is refused too.
        if not (one.float() - wanted_D).norm() <= MAX_DIFFERENCE * wanted_D.norm():
            raise _refuse(base, base_model)


def _compute_in_parts(base: BaseModel, prompts: Sequence[Int64Array]) -> list[Tensor]:
    """The last hidden state [D] of each prompt: a chunk of it first, then one token of each."""
    page_size = PAGE_SIZE_ON_CPU if base.input_device.type == "cpu" else PAGE_SIZE_ON_GPU
    num_pages = 1 + sum(-(-len(prompt) // page_size) for prompt in prompts)
    cache = KvCache(measure_layers(base), num_pages, page_size)
    passes = PagedPasses(base, Routing(), Routing(), cache)
    stored = [cache.open(None, prompt, reuse=False) for prompt in prompts]
    hidden_PD = torch.empty(0)
    for where in (slice(0, -1), slice(-1, None)):
        parts: list[Part] = []
        for one, prompt in zip(stored, prompts, strict=True):
            cache.reserve(one, len(prompt))
            tokens = prompt[where]
            parts.append(Part(None, Span(one, len(tokens)), tokens))
        hidden_PD = passes.run(parts)
        for part in parts:
            part.span.stored.length += part.span.count
    return list(hidden_PD)


def _refuse(base: BaseModel, base_model: str) -> SettingsError:
    return SettingsError(
        f"base_model {base_model!r}: the embedded sampling engine can't compute the attention of "
        f"architecture {type(base.module).__name__} in parts"
    )


def _find_obstacle(config: dict[str, Any], context_length: int) -> str | None:
    others = set(config.get("layer_types") or ()) - {"full_attention"}
    if others:
        return f"layers of type {', '.join(sorted(others))}"
    window = config.get("sliding_window")
    if window is not None and window < context_length and config.get("use_sliding_window", True):
        return (
            f"a sliding window of {window} tokens; a max_context_length of at most {window} in "
            "backend_config lifts that"
        )
    rope = config.get("rope_parameters") or {}
    original_length = rope.get("original_max_position_embeddings")
    # The rotation of all rows of a batch would depend on the longest of them.
    if rope.get("rope_type") == "longrope" and context_length > (original_length or 0):
        return (
            f"longrope positions; a max_context_length of at most {original_length} in "
            "backend_config lifts that"
        )
    return None
