"""The tokenizer of the sampled model, and what ends a sequence of it."""

from __future__ import annotations

import logging
from typing import cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hosted_tinker.modeling.base_model import BaseModel
from hosted_tinker.sampling.stopping import Decode

logger = logging.getLogger(__name__)


def load_tokenizer(base_model: str) -> PreTrainedTokenizerBase | None:
    """None if the model comes without one; stop strings are refused then."""
    try:
        return AutoTokenizer.from_pretrained(base_model)
    except (OSError, ValueError, ImportError) as error:
        logger.warning(
            "no tokenizer, stop strings are refused base_model=%s: %s", base_model, error
        )
        return None


def make_decode(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Text as the tokens spell it, for stop strings."""

    def decode(tokens: list[int]) -> str:
        return cast(
            str,
            tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        )

    return decode


def find_eos_ids(base: BaseModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """What ends a sequence by default: the generation configuration's ids and the tokenizer's."""
    generation_config = base.module.generation_config
    configured = None if generation_config is None else generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    own = None if tokenizer is None else tokenizer.eos_token_id
    return frozenset(token for token in [*ids, own] if token is not None)
