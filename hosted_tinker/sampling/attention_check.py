"""Which models the embedded engine can serve: decoders whose every layer attends to all positions.

Shape letters: V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hosted_tinker.errors import SettingsError
from hosted_tinker.modeling.base_model import BaseModel, text_config
from hosted_tinker.modeling.lora import Routing
from hosted_tinker.sampling.decoder_passes import DecoderPasses


def require_full_attention(base: BaseModel, base_model: str) -> None:
    """Raises SettingsError for a model whose results would depend on a window or on neighbours."""
    reason = _find_obstacle(text_config(base.module.config).to_dict(), base.context_length)
    if reason is not None:
        raise SettingsError(
            f"base_model {base_model!r}: the embedded sampling engine serves full-attention "
            f"decoders only, and this model has {reason}"
        )


@torch.inference_mode()
def check_batched_decoding(base: BaseModel, base_model: str) -> None:
    """Refuses a model that computes other logits with cached rows of unequal length than without.

    Raises:
        SettingsError: the difference is more than the rounding of a 16-bit model.
    """
    prompts = [np.arange(length, dtype=np.int64) % base.vocab_size for length in (7, 3)]
    passes = DecoderPasses(base, Routing(), max_rows=len(prompts))
    for prompt in prompts:
        passes.add_rows(passes.prefill(prompt[:-1], None), 1)
    cached_BV = passes.decode([int(prompt[-1]) for prompt in prompts], [None, None])
    for prompt, cached_V in zip(prompts, cached_BV, strict=True):
        fresh_V = base.compute_logits(passes.prefill(prompt, None).hidden_PD[-1:])[0]
        if not torch.allclose(fresh_V, cached_V, rtol=0, atol=0.05 * float(fresh_V.abs().max())):
            raise SettingsError(
                f"base_model {base_model!r}: the embedded sampling engine can't decode "
                f"architecture {type(base.module).__name__} in batches"
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
