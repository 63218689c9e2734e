"""Small passes of a backend, by which it is measured how many tokens its memory suffices for."""

from __future__ import annotations

import logging

import numpy as np

from hosted_tinker.errors import UserError
from hosted_tinker.modeling.base_model import BaseModel
from hosted_tinker.modeling.lora import LoraModel
from hosted_tinker.training.joint_pass import JointPass
from hosted_tinker.training.token_budget import find_token_budget
from hosted_tinker.types import Datum, ForwardBackward, LoraConfig

logger = logging.getLogger(__name__)

PROBE = "token budget probe"
TOKENS_ON_CPU = 32
TOKENS_ON_GPU = 256
"""Of the smaller pass. On a GPU what grows must stand out from what kernels take at any size."""


def probe_token_budget(
    base: BaseModel, lora: LoraModel, passes: JointPass, rank: int
) -> int | None:
    """Tokens of a pass for which the free memory suffices, with an adapter of that rank.

    None if it can't be told; then running out of memory will.
    """
    config = LoraConfig(lora_rank=rank, seed=0, train_mlp=not lora.has_experts)
    count = TOKENS_ON_GPU if base.input_device.type == "cuda" else TOKENS_ON_CPU
    try:
        lora.add_fresh_adapter(PROBE, config)
        own = list(lora.named_parameters(PROBE).values())

        def run_pass(num_tokens: int) -> None:
            tokens = np.zeros(num_tokens, np.int64)
            inputs = {"target_tokens": tokens, "weights": np.ones(num_tokens, np.float32)}
            operation = ForwardBackward(PROBE, [Datum(tokens, inputs)], "cross_entropy")
            passes.run([operation], {PROBE: own}, num_tokens)

        constant = [*base.module.parameters(), *own]
        return find_token_budget(run_pass, constant, min(count, base.context_length // 2))
    except (RuntimeError, UserError, OSError) as error:
        logger.warning("not measured how many tokens fit the memory: %s", error)
        return None
    finally:
        lora.remove_adapter(PROBE)
